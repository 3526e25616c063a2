"""`verify`: checks that a checkpoint is complete and unchanged, or that it equals another one."""

import time
from dataclasses import replace

from streamshard.checks.problems import Difference, Findings, Verification
from streamshard.checks.scan import scan
from streamshard.compare.comparison import compare, open_alike
from streamshard.compare.matching import pair_up
from streamshard.compare.tensor_content import TensorUnits
from streamshard.engine.run import memory_limits, resident_memory
from streamshard.engine.run.memory_limits import Limits
from streamshard.engine.run.phases import Count, Progress, Silent
from streamshard.errors import (
    IntegrityError,
    Option,
    SourceError,
    SourceNotFoundError,
    UnsupportedError,
    UsageError,
)
from streamshard.io.object_path import as_path
from streamshard.layout.memory_plan import COMPARING_BYTES
from streamshard.options import takes
from streamshard.registry import GRAFT_PAIRED, load
from streamshard.source.source import Request, requests
from streamshard.source.structure import check_structure, require_same_repeats
from streamshard.source.suspicion import suspicions
from streamshard.source.unfinished import require_finished
from streamshard.transfer.report import Watched
from streamshard.verb_options import VerifyOptions


class _Verify(VerifyOptions, Watched):
    """What `verify` takes."""


@takes(_Verify)
def verify(options: _Verify) -> Verification:
    """Check a checkpoint, or compare it with another one; changes nothing.

    The result lists every problem, not only the first. An error is raised only if there is no
    checkpoint at `path`, or if the checkpoint `against` cannot be read.

    With `against`, the content of both checkpoints is compared, and nothing else is checked.
    """
    floor_bytes = resident_memory.resident_bytes()
    resident_memory.restart_peak()
    if options.health and options.against is not None:
        message = "not computed of tensors that are compared; leave one out"
        raise UsageError(f"{Option('health')}: {message}")
    path, against = options.path, options.against
    paths = [path] if against is None else [path, against]
    for one in paths:
        require_finished(as_path(one))
    request, *against_requests = requests(options, *paths)
    limit_bytes = memory_limits.limit_or_default(options.memory_limit, floor_bytes)
    limits = Limits(floor_bytes, limit_bytes, options.workers)
    run = _Run(limits, options.progress or Silent())
    began = time.monotonic()
    if against_requests:
        run.compare(request, *against_requests)
    else:
        run.check(request, health=options.health)
    return Verification(
        path=str(path),
        against=None if against is None else str(against),
        kind=run.kind,
        tag=run.tag,
        files=run.findings.files,
        checked=run.findings.checked,
        tensors=run.findings.tensors,
        bytes_read=run.bytes_read,
        problems=tuple(run.findings.problems),
        differences=tuple(run.differences),
        digests=run.findings.digests,
        health=run.findings.health,
        notes=tuple(dict.fromkeys(run.findings.notes)),
        floor_bytes=floor_bytes,
        limit_bytes=limit_bytes,
        projected_bytes=run.projected_bytes,
        peak_bytes=resident_memory.peak_bytes(),
        seconds=time.monotonic() - began,
    )


class _Run:
    """One run of the verb, and its results."""

    def __init__(self, limits: Limits, progress: Progress) -> None:
        self.kind = ""
        self.tag: str | None = None
        self.findings = Findings()
        self.differences: list[Difference] = []
        self.bytes_read = 0
        self.projected_bytes = limits.floor_bytes
        self._limits = limits
        self._progress = progress

    def check(self, request: Request, *, health: bool) -> None:
        """Check the structure, then read everything that has a checksum."""
        checked = check_structure(request, self.findings)
        self.kind, self.tag = checked.kind.name, checked.tag
        if checked.source is not None:
            checked.source.require_use_of_like()
        plan = self._limits.fit(checked.codec_bytes, checked.files)
        self.projected_bytes = plan.projected_bytes
        source = checked.source
        if health and checked.kind.is_store and not self.findings.problems:
            source = request.open()
        units = TensorUnits(source, self.findings) if health and source is not None else None
        total, read = checked.nbytes + (units.nbytes if units else 0), Count(self._progress.advance)
        self._progress.start(total)
        checked.read(plan, read.add)
        if source is not None and units is not None:
            scan(units, source.files, plan, read.add)
        self.bytes_read = read.value
        if source is not None:
            try:
                require_same_repeats(source)
            except (SourceError, IntegrityError) as error:
                self.findings.add_error(error, source.path)
        if health and source is not None:
            self.findings.notes += suspicions(source.checkpoint, self.findings.health)

    def compare(self, request: Request, against_request: Request) -> None:
        """Compare the content of two checkpoints."""
        right = replace(against_request, takes_bare=True).open()
        try:
            left = request.open()
        except (SourceNotFoundError, UnsupportedError):
            raise
        except (SourceError, IntegrityError) as error:
            self.findings.add_error(error, as_path(request.path))
            self.projected_bytes = self._limits.fit(COMPARING_BYTES).projected_bytes
            return
        left, right = open_alike(request, against_request, left, right)
        self.kind, self.tag = left.kind.name, left.checkpoint.tag
        left.require_use_of_like(needed=right.needs_like)
        grafted = None
        if left.checkpoint.graft_record is not None:
            grafted = load(GRAFT_PAIRED)(left, right)
        left, right, pairing = grafted or (left, right, pair_up(left, right))
        self.findings.files = len(left.files) + len(right.files)
        self.findings.notes += pairing.notes
        self.differences += pairing.differences
        compared = compare(left, right, pairing.pairs, self._limits, self._progress)
        self.findings.problems += compared.findings.problems
        self.findings.tensors = compared.findings.tensors
        self.differences += compared.differences
        self.bytes_read = compared.bytes_read
        self.projected_bytes = compared.memory.projected_bytes
