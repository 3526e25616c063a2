"""Reads the matching tensors of two checkpoints, window by window, and reports differences."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

from streamshard.engine.jobs.executor import Job
from streamshard.engine.run.phases import READING, Count
from streamshard.engine.scan.region_pair import Comparator, Mismatch, RegionPair
from streamshard.errors import SourceError, StreamshardError
from streamshard.layout.memory_plan import COMPARING_BYTES, MemoryPlan
from streamshard.model import ITEMSIZE
from streamshard.operations.checks.problems import Difference, Findings
from streamshard.operations.compare.matched_runs import RunPart, Runs
from streamshard.operations.compare.pairing import Pair
from streamshard.operations.source.source import Source
from streamshard.operations.transfer.execution import Limits
from streamshard.operations.transfer.report import Progress

_Result = list[Mismatch] | StreamshardError


@dataclass(frozen=True, slots=True)
class Compared:
    """What two opened checkpoints were found to hold."""

    differences: Sequence[Difference]
    findings: Findings
    """What could not be read."""
    memory: MemoryPlan
    nbytes: int
    """Bytes that were compared on each side."""
    bytes_read: int

    @property
    def wrong(self) -> list[str]:
        """What is wrong, in words: problems first."""
        problems = [problem.message for problem in self.findings.problems]
        return [*problems, *(difference.message for difference in self.differences)]

    def require_read(self) -> Self:
        """Refuse what could not be read."""
        if self.findings.problems:
            raise SourceError(self.findings.problems[0].message)
        return self


def compare(
    left: Source,
    right: Source,
    pairs: Sequence[Pair],
    memory: MemoryPlan | Limits,
    progress: Progress,
    *,
    phase: str = READING,
    exactly: bool = False,
) -> Compared:
    """Read pairs of tensors of two opened checkpoints, and find the elements that differ.

    As a phase of a longer run it counts each pair of bytes once, else all that it reads. `exactly`
    compares the bits of a NaN too where one side is a cast.
    """
    runs = Runs(left, right, pairs)
    plan = memory if isinstance(memory, MemoryPlan) else fit_sides(memory, left, right)
    findings = Findings()
    read = Count(progress.advance if phase == READING else _HalvedProgress(progress.advance).add)
    progress.start(runs.nbytes * (2 if phase == READING else 1), phase)
    try:
        differences = _differences(runs, plan, findings, read.add, exactly=exactly)
    finally:
        if phase == READING:
            progress.stop()
    findings.tensors += len(pairs)
    return Compared(differences, findings, plan, runs.nbytes, read.value)


def fit_sides(limits: Limits, left: Source, right: Source, *, copies_bytes: int = 0) -> MemoryPlan:
    """Fit the reading of two opened checkpoints into the memory limit."""
    codec_bytes = left.codec_bytes + right.codec_bytes + COMPARING_BYTES
    return limits.fit(codec_bytes, (*left.files, *right.files), copies_bytes)


class _HalvedProgress:
    """Counts the bytes read on both sides of a comparison, and reports each pair of bytes once."""

    def __init__(self, progress: Callable[[int], None]) -> None:
        self._progress = progress
        self._read = 0
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        """Count bytes of one side."""
        with self._lock:
            before, self._read = self._read, self._read + nbytes
        self._progress((before + nbytes) // 2 - before // 2)


def _differences(
    runs: Runs,
    memory: MemoryPlan,
    findings: Findings,
    progress: Callable[[int], None],
    *,
    exactly: bool,
) -> list[Difference]:
    counts: dict[int, tuple[int, int]] = {}
    job = partial(_job, runs, exactly=exactly)
    for parts, result in runs.work(Comparator, job, memory, progress):
        if isinstance(result, StreamshardError):
            findings.add_error(result, runs.sides[0].path)
            continue
        for mismatch in result:
            part = parts[mismatch.part]
            _count(counts, runs.pairs[part.number], part, mismatch)
    return [_difference(runs.pairs[number], *found) for number, found in sorted(counts.items())]


def _job(runs: Runs, run: Sequence[RunPart], *, exactly: bool) -> Job[Comparator, _Result]:
    try:
        return partial(_compare, runs.regions(run, exactly=exactly))
    except StreamshardError as error:
        return partial(_return, error)


def _compare(pair: RegionPair, comparator: Comparator) -> _Result:
    try:
        return comparator.compare(pair)
    except StreamshardError as error:
        return error


def _return(error: StreamshardError, comparator: Comparator) -> _Result:
    return error


def _count(counts: dict[int, tuple[int, int]], pair: Pair, part: RunPart, found: Mismatch) -> None:
    """Count the mismatches in a part of a pair."""
    at = part.start * ITEMSIZE[pair.dtype] // pair.itemsize + found.first
    first, count = counts.get(part.number, (at, 0))
    counts[part.number] = min(first, at), count + found.count


def _difference(pair: Pair, first: int, count: int) -> Difference:
    numel = pair.nbytes // pair.itemsize
    message = f"{pair.name}: {count:,} of {numel:,} elements differ, the first at index {first:,}"
    if pair.left.dtype != pair.right.dtype:
        message += " (one side keeps no module weights: cast from its master weights)"
    return Difference("elements", pair.name, message, first, count, numel)
