"""Reads the matching tensors of two checkpoints, window by window, and reports differences."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Final

import numpy as np

from streamshard.engine.jobs.executor import Job, run_ordered
from streamshard.engine.scan.equality import Comparator, Comparison, Mismatch
from streamshard.engine.scan.region_pair import PairTools
from streamshard.errors import StreamshardError
from streamshard.layout.memory_plan import MIB, SCRATCH_BYTES, WINDOW_BYTES, MemoryPlan
from streamshard.layout.sample import Sample
from streamshard.model import ITEMSIZE
from streamshard.operations.checks.problems import Difference, Findings
from streamshard.operations.compare.matched_runs import RunPart, Runs, Side
from streamshard.operations.compare.pairing import Pair

EXTRA_BYTES: Final = WINDOW_BYTES + SCRATCH_BYTES + 2 * MIB
"""Memory that a worker takes besides one window and its scratch: both for the other side, and the
copies."""

_Result = list[Mismatch] | StreamshardError


class Comparing:
    """Two opened checkpoints, and the pairs of tensors to compare.

    Parameters
    ----------
    exactly
        Whether the bits of a NaN are compared too where one side is a cast.
    """

    def __init__(
        self, left: Side, right: Side, pairs: Sequence[Pair], *, exactly: bool = False
    ) -> None:
        self._runs = Runs(left, right, pairs)
        self._exactly = exactly

    @property
    def nbytes(self) -> int:
        """Bytes that are compared on each side."""
        return self._runs.nbytes

    def run(
        self, memory: MemoryPlan, findings: Findings, progress: Callable[[int], None]
    ) -> list[Difference]:
        """Compare all pairs; read errors are added to the findings."""
        waiting: deque[Sequence[RunPart]] = deque()
        counts: dict[int, tuple[int, int]] = {}
        tools = PairTools(Comparator, self._runs.readable, memory.window_bytes, SCRATCH_BYTES // 2)
        results = run_ordered(
            self._jobs(waiting),
            tools,
            workers=memory.workers,
            progress=progress,
            needed_bytes=memory.process_bytes,
        )
        for result in results:
            parts = waiting.popleft()
            if isinstance(result, StreamshardError):
                findings.add_error(result, self._runs.sides[0].path)
                continue
            for mismatch in result:
                part = parts[mismatch.part]
                _count(counts, self._runs.pairs[part.number], part, mismatch)
        findings.tensors += len(self._runs.pairs)
        return [
            _difference(self._runs.pairs[number], *found)
            for number, found in sorted(counts.items())
        ]

    def _jobs(self, waiting: deque[Sequence[RunPart]]) -> Iterator[Job[Comparator, _Result]]:
        for run in self._runs:
            waiting.append(run)
            yield self._job(run)

    def _job(self, run: Sequence[RunPart]) -> Job[Comparator, _Result]:
        try:
            return partial(_compare, self._comparison(run))
        except StreamshardError as error:
            return partial(_return, error)

    def _comparison(self, run: Sequence[RunPart]) -> Comparison:
        first = self._runs.pairs[run[0].number]
        ratio = first.itemsize // ITEMSIZE[first.dtype]
        ends = np.cumsum([part.stop - part.start for part in run])
        left, right = self._runs.regions(run)
        starts = np.concatenate([[0], ends[:-1]]) // ratio
        any_nan = not self._exactly and first.left.dtype != first.right.dtype
        return Comparison(left, right, starts, first.dtype, any_nan)


def _compare(comparison: Comparison, comparator: Comparator) -> _Result:
    try:
        return comparator.compare(comparison)
    except StreamshardError as error:
        return error


def _return(error: StreamshardError, comparator: Comparator) -> _Result:
    return error


def chosen(pairs: Sequence[Pair], sample: Sample) -> list[Pair]:
    """Return the pairs that are in a sample."""
    ends = list(accumulate(pair.nbytes for pair in pairs))
    total = ends[-1] if ends else 0
    both = zip(pairs, ends, strict=True)
    return [pair for pair, end in both if sample.holds(end - pair.nbytes, end, total)]


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
