"""Reads units that have a checksum, in small pieces, and judges the results of each unit."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from streamshard.engine.jobs.executor import Job, ReadingTools, run_ordered
from streamshard.engine.scan.probe import Probe
from streamshard.errors import StreamshardError
from streamshard.layout.memory_plan import MemoryPlan
from streamshard.model import SourceFile

_JOB_BYTES: Final = 8 << 20
"""A worker gets small pieces together, up to this size."""

Result = Any
"""The value that a piece computes from the bytes, or the `StreamshardError` that stopped it."""


_Bundle = tuple[list[Result], Mapping[int, str]]
"""The results of pieces, and the SHA-256 of files that are complete by then."""


@dataclass(frozen=True, slots=True)
class ScanPiece:
    """A range of bytes that one worker reads."""

    nbytes: int
    read: Callable[[Probe], Result]


@dataclass(frozen=True, slots=True)
class Unit:
    """The pieces that belong to one checksum."""

    pieces: Sequence[ScanPiece]
    judge: Callable[[Sequence[Result]], None]
    """Takes the results of all pieces, in order."""
    failed: Callable[[StreamshardError], None] | None = None
    """Takes the first piece's error in their place; if there is none, errors are among them."""


def scan(
    units: Iterable[Unit],
    files: Sequence[SourceFile],
    memory: MemoryPlan,
    progress: Callable[[int], None],
    hashed: Callable[[int, str], None] | None = None,
) -> None:
    """Read all units from their files, in order, a bounded number of pieces at a time.

    `hashed`: takes the number and the SHA-256 of each file that one worker read from its first byte
    to its last. Large files that several workers read are left out.
    """
    waiting: deque[Unit] = deque()
    results: deque[Result] = deque()
    probe = partial(Probe, files, memory.window_bytes, hashed is not None)
    tools = ReadingTools(files, probe)
    jobs = run_ordered(
        _jobs(units, waiting),
        tools,
        workers=memory.workers,
        progress=progress,
        needed_bytes=memory.process_bytes,
    )
    for bundle_results, hashes in jobs:
        for number, sha256 in hashes.items():
            if hashed is not None:
                hashed(number, sha256)
        results.extend(bundle_results)
        while waiting and len(results) >= len(waiting[0].pieces):
            unit = waiting.popleft()
            own = [results.popleft() for _ in unit.pieces]
            error = next((one for one in own if isinstance(one, StreamshardError)), None)
            if error is None or unit.failed is None:
                unit.judge(own)
            else:
                unit.failed(error)


def _jobs(units: Iterable[Unit], waiting: deque[Unit]) -> Iterator[Job[Probe, _Bundle]]:
    """Yield bundles of pieces, and add their units to `waiting`."""
    bundle: list[ScanPiece] = []
    bundle_bytes = 0
    for unit in units:
        waiting.append(unit)
        for piece in unit.pieces:
            bundle.append(piece)
            bundle_bytes += piece.nbytes
            if bundle_bytes >= _JOB_BYTES:
                yield partial(_read, bundle)
                bundle, bundle_bytes = [], 0
    # Even an empty bundle: units without pieces may wait to be judged.
    yield partial(_read, bundle)


def _read(bundle: Sequence[ScanPiece], probe: Probe) -> _Bundle:
    results = [_result(piece, probe) for piece in bundle]
    return results, {} if probe.hashes is None else probe.hashes.take()


def _result(piece: ScanPiece, probe: Probe) -> Result:
    try:
        return piece.read(probe)
    except StreamshardError as error:
        return error
