"""The one plan of all verbs that write: estimate, stage, run, read back, commit, report."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from streamshard.engine.run import memory_limits, resident_memory
from streamshard.engine.run.phases import COMMITTING, WRITING, Progress, Silent
from streamshard.engine.run.runner import Engine
from streamshard.engine.run.span_writer import Resources
from streamshard.errors import IntegrityError, SourceError, UsageError
from streamshard.io.entries import request_bytes
from streamshard.io.files import require_all_unchanged, target_errors
from streamshard.io.object_path import as_path, is_packed_name
from streamshard.io.page_cache import drop_cached
from streamshard.io.place import place_of
from streamshard.io.writable import LEAST_BYTES
from streamshard.layout.memory_plan import BUFFER_BYTES, COMPARING_BYTES, MemoryPlan
from streamshard.model import SourceFile, Template
from streamshard.options import TransferOptions, WritingOptions
from streamshard.registry import EXISTING_TARGET, load
from streamshard.sizes import some_of
from streamshard.source.source import Source, open_source
from streamshard.transfer.file_layout import Divider
from streamshard.transfer.report import Report, nothing_done
from streamshard.transfer.run_identity import RunIdentity
from streamshard.transfer.target import (
    place_to_make,
    require_named,
    require_other,
    require_separate,
    require_space,
)
from streamshard.transfer.target_state import TargetState, transaction_of
from streamshard.transfer.target_writer import Output
from streamshard.transfer.transaction import Transaction

if TYPE_CHECKING:
    from streamshard.transfer.estimate import Estimate


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """A run that fits memory and disk, ready to be carried out."""

    options: WritingOptions
    output: Output
    target: Path
    identity: RunIdentity
    memory: MemoryPlan
    report: Report
    """What the run will do."""

    @property
    def source(self) -> Source:
        return self.output.source

    def found(self, progress: Progress | None = None) -> Report | None:
        """Return the report of a run that has nothing to do; None if there is something to do."""
        if self.output.is_reusable:
            is_tag = self.source.kind.is_tag
            place = str(self.source.path) if is_tag else self.report.source
            return nothing_done(self.report, "source", place)
        found: Report | None = load(EXISTING_TARGET)(self, progress)
        return found

    def run(self, progress: Progress | None = None) -> Report:
        options, progress = self.options, progress or Silent()
        if options.is_lenient and (found := self.found(progress)) is not None:
            return found
        check = self.output.check
        noted = () if check is None else check(self.memory, progress) or ()
        with transaction_of(self.target)(
            self.target,
            self.identity,
            nbytes=self.report.bytes_written,
            sizes=self.sizes,
            verify=options.verify,
            template=self.output.template,
        ) as transaction:
            divider, began = Divider(self.source), time.monotonic()
            progress.start(self.report.bytes_written, WRITING)
            if transaction.is_written:
                progress.keep(transaction.kept_bytes)
                progress.advance(transaction.kept_bytes)
            unchecked = self._write(divider, transaction, progress)
            done = replace(
                self.report,
                kept_bytes=transaction.kept_bytes,
                peak_bytes=resident_memory.peak_bytes(),
                seconds=time.monotonic() - began,
                unchecked=tuple(str(file.path) for file in unchecked),
                notes=(*self.report.notes, *noted, *transaction.notes),
            )
            return self.output.writer.finish(done, divider.overflowed)

    def _write(
        self, divider: Divider, target: Transaction, progress: Progress
    ) -> Sequence[SourceFile]:
        """Write all files, read them back if that is wanted, and rename them into place.

        Returns the files of the source that were not checked whole.
        """
        writer, latest = self.output.writer, self.output.latest
        # If a file changed during the run, the bytes read before and after do not belong together.
        read = () if target.is_written else self.source.files
        unchanged = partial(require_all_unchanged, read)
        unchecked: Sequence[SourceFile] = ()
        if not target.is_written:
            resources = Resources(
                self.memory.workers,
                self.memory.window_bytes,
                BUFFER_BYTES,
                _is_large(self.source),
                self.memory.process_bytes,
            )
            engine = Engine(self.source.files, resources, progress, target.files)
            try:
                for layouts in writer.passes():
                    engine.run(layout.divided(divider) for layout in layouts())
                unchecked = engine.check_sources()
            except IntegrityError:
                unchanged()  # a job that is still saving is another error than damage
                raise
        if latest is not None and not target.is_written:
            progress.advance(len(latest.encode()))  # the commit writes it
        if self.options.verify and not target.is_done:
            unchanged()
            self._read_back(target.complete(), progress)
        progress.enter(COMMITTING)
        target.commit(unchanged, latest=latest)
        return unchecked

    def _read_back(self, place: Path, progress: Progress) -> None:
        """Require that the written files, which are synced to the disk, are what the source holds.

        The system's page cache of them is dropped first.
        """
        with target_errors(place):
            drop_cached(place)
        try:
            wrong = self.output.writer.differences(place, self.memory, progress)
        except SourceError as error:
            wrong = [str(error)]
        if wrong:
            raise IntegrityError(
                f"{place}: read back, it is not what {self.source.path} holds. "
                f"{some_of(wrong, 1)}. It was not put into its place"
            )

    def sizes(self) -> Mapping[str, int]:
        return self.output.writer.byte_counts().sizes

    def estimate(self) -> "Estimate":
        # Not at the top: a dry run alone shows it.
        from streamshard.transfer.estimate import estimate_run

        return estimate_run(
            self.source,
            self.output.writer.byte_counts(),
            self.memory,
            self.report,
            self.target,
            changes=self.output.changes,
            is_upper_bound=self.output.encode is not None,
        )


def plan_transfer(
    options: TransferOptions,
    prepare: Callable[[Source], Output],
    *,
    template: Template | None = None,
    takes_model: bool = False,
) -> TransferPlan:
    """Open the source, and plan to write what `prepare` makes from it; writes nothing."""
    opened = partial(open_source, options.source, options, takes_model=takes_model)
    return plan_opened(options, opened, prepare, template=template)


def plan_opened(
    options: WritingOptions,
    open_all: Callable[[], Source],
    prepare: Callable[[Source], Output],
    *,
    template: Template | None = None,
) -> TransferPlan:
    """Plan to write what `prepare` makes from what `open_all` opens; writes nothing."""
    floor_bytes = resident_memory.resident_bytes()
    resident_memory.restart_peak()
    target = place_to_make(template.directory if template else as_path(options.target))
    for source in options.sources:
        require_other(source, target)
    if options.is_lenient:
        require_named(target)  # its content is compared after planning
    else:
        TargetState.of(target, template).require_free(overwrite=options.overwrite)
    opened = open_all()
    require_separate(opened.path, target, opened.directories)
    return plan_output(options, prepare(opened), target, floor_bytes)


def plan_output(
    options: WritingOptions, output: Output, target: Path, floor_bytes: int
) -> TransferPlan:
    """Fit an output into memory and on the disk."""
    if is_packed_name(target) and not output.packs:
        message = "only convert writes a store in one file, .zarr.zip; choose another name"
        raise UsageError(f"{target}: {message}")
    source, byte_counts = output.source, output.writer.byte_counts()
    count, bytes_written = len(byte_counts.sizes), sum(byte_counts.sizes.values())
    copies_bytes = byte_counts.copies_bytes()
    waiting_bytes, shared_bytes = byte_counts.waiting_bytes, byte_counts.shared_bytes
    writing_bytes = place_of(target).writing_bytes(max(byte_counts.sizes.values(), default=0))
    del byte_counts  # it is large for a large store
    identity = RunIdentity.of(source, output.options, replaces=options.overwrite)
    limit_bytes = memory_limits.limit_or_default(options.memory_limit, floor_bytes)
    compares = options.verify or output.check is not None
    encodes = output.encode is not None
    memory = memory_limits.fit_memory(
        floor_bytes=floor_bytes,
        codec_bytes=source.codec_bytes + output.codec_bytes + COMPARING_BYTES * compares,
        workers=options.workers,
        limit_bytes=limit_bytes,
        copies_bytes=copies_bytes,
        reopened=output.reopened * options.verify,
        copies=not (encodes or source.codec_bytes) and bytes_written > count * LEAST_BYTES,
        encodes=encodes,
        requests_bytes=request_bytes(file.path for file in source.files)
        + (0 if output.packs else writing_bytes),
        waiting_bytes=waiting_bytes,
        shared_bytes=shared_bytes + (writing_bytes if output.packs else 0),
        uploads=writing_bytes > 0,
    )
    if not options.is_lenient:
        require_space(target, bytes_written)
    named = output.named or str(target)
    stage = output.zero_stage
    if stage is None and not (source.checkpoint.foreign and output.world_size):
        stage = source.checkpoint.layout.stage
    report = Report(
        verb=output.options["verb"],
        source=", ".join(map(str, options.sources)),
        target=named,
        tag=source.checkpoint.tag,
        zero_stage=stage,
        source_world_size=output.source_world_size,
        world_size=output.world_size,
        files=count,
        bytes_written=bytes_written,
        floor_bytes=floor_bytes,
        limit_bytes=limit_bytes,
        projected_bytes=memory.projected_bytes,
        block=source.checkpoint.largest_block,
        is_verified=options.verify,
        path=named,
        tensors=output.tensors,
        dtype=output.dtype,
        notes=output.notes,
    )
    return TransferPlan(options, output, target, identity, memory, report)


def _is_large(source: Source) -> bool:
    """Tell whether a run's files would push other programs' files out of the page cache."""
    read_bytes = sum(file.nbytes for file in source.files)
    return 2 * read_bytes > resident_memory.available_bytes() // 2
