"""Divides the pairs of tensors into runs; one worker reads a run from both sides."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final, TypeVar

import numpy as np

from streamshard.engine.jobs.executor import Job, run_ordered
from streamshard.engine.numeric.cast import comparing_cast
from streamshard.engine.run.work import Region
from streamshard.engine.scan.region_pair import PairReader, PairTools, RegionPair
from streamshard.layout.cutting import Segments, coalesce
from streamshard.layout.memory_plan import SCRATCH_BYTES, MemoryPlan
from streamshard.model import ITEMSIZE
from streamshard.operations.compare.pairing import Pair, SideElements
from streamshard.operations.source.source import Source

K = TypeVar("K", bound=PairReader)
R = TypeVar("R")

_RUN_BYTES: Final = 64 << 20
"""Length of a run, unless it consists of too many pieces."""
_PIECE_COST: Final = 8192
"""Bytes that a piece counts as, because each takes some integers: a run has at most 8192 pieces."""
_LEAST_CHUNKS: Final = 4
"""Fewest compressed chunks in a run that may end inside a chunk; that chunk is decoded twice."""


@dataclass(frozen=True, slots=True)
class RunPart:
    """A range of a pair's elements."""

    number: int
    """Number of the pair."""
    start: int
    stop: int


class Runs:
    """The runs into which the pairs of two opened checkpoints are divided.

    `block_numel`: parts of a pair begin at multiples of this number of elements.
    """

    def __init__(
        self, left: Source, right: Source, pairs: Sequence[Pair], *, block_numel: int = 1
    ) -> None:
        self.sides = left, right
        # Pairs of the same dtypes and item size can share a window.
        self.pairs = sorted(pairs, key=_alike)
        self._block_numel = block_numel

    @property
    def nbytes(self) -> int:
        """Bytes that are compared on each side."""
        return sum(pair.nbytes for pair in self.pairs)

    def work(
        self,
        kind: type[K],
        job: Callable[[Sequence[RunPart]], Job[K, R]],
        memory: MemoryPlan,
        progress: Callable[[int], None],
    ) -> Iterator[tuple[Sequence[RunPart], R]]:
        """Have workers do a job for each run; yields the runs in order, each with its result."""
        waiting: deque[Sequence[RunPart]] = deque()

        def jobs() -> Iterator[Job[K, R]]:
            for run in self:
                waiting.append(run)
                yield job(run)

        files = [side.files for side in self.sides]
        tools = PairTools(kind, files, memory.window_bytes, SCRATCH_BYTES // 2)
        results = run_ordered(
            jobs(),
            tools,
            workers=memory.workers,
            progress=progress,
            needed_bytes=memory.process_bytes,
        )
        for result in results:
            yield waiting.popleft(), result

    def __iter__(self) -> Iterator[list[RunPart]]:
        """Yield runs of about equal length that do not take too many copies."""
        for _, group in groupby(enumerate(self.pairs), key=lambda item: _alike(item[1])):
            yield from self._runs(group)

    def _runs(self, pairs: Iterable[tuple[int, Pair]]) -> Iterator[list[RunPart]]:
        run: list[RunPart] = []
        cost = 0
        for number, pair in pairs:
            step = self._step(pair)
            for start in range(0, pair.numel, step):
                stop = min(start + step, pair.numel)
                run.append(RunPart(number, start, stop))
                cost += self._cost(pair, stop - start)
                if cost >= _RUN_BYTES:
                    yield run
                    run, cost = [], 0
        if run:
            yield run

    def _cost(self, pair: Pair, numel: int) -> int:
        """Return the cost of comparing elements: their bytes, and the pieces they lie in."""
        pieces = sum(
            numel // self._piece_numel(side, elements) + 2 for side, elements in self._both(pair)
        )
        return numel * ITEMSIZE[pair.dtype] + pieces * _PIECE_COST

    def _step(self, pair: Pair) -> int:
        """Choose how many elements of a pair go into one part, at most.

        Compressed chunks are decoded as a whole: two workers should not decode the same chunk.
        """
        unit = pair.itemsize // ITEMSIZE[pair.dtype]
        block, least_numel = unit * self._block_numel, 0
        for side, elements in self._both(pair):
            if side.codec_bytes:
                unit = max(unit, self._piece_numel(side, elements))
                least_numel = _LEAST_CHUNKS * unit
        many = _RUN_BYTES // ITEMSIZE[pair.dtype]
        least = max(1, self._cost(pair, many) // _RUN_BYTES)
        step = max(1, many // least // unit) * unit
        return step if self._block_numel == 1 else -(-max(step, least_numel) // block) * block

    def _both(self, pair: Pair) -> Iterator[tuple[Source, SideElements]]:
        return zip(self.sides, (pair.left, pair.right), strict=True)

    def _piece_numel(self, side: Source, elements: SideElements) -> int:
        return int(side.cutting.piece_numel[elements.tensor])

    def regions(self, run: Sequence[RunPart], *, exactly: bool = False) -> RegionPair:
        """Return the regions that fill the windows of both sides.

        `exactly`: the bits of a NaN count too where one side is a cast.
        """
        pairs = [self.pairs[part.number] for part in run]
        first, (left, right) = pairs[0], self.sides
        ratio = first.itemsize // ITEMSIZE[first.dtype]
        return RegionPair(
            self._region(left, [pair.left for pair in pairs], run, first),
            self._region(right, [pair.right for pair in pairs], run, first),
            [(part.stop - part.start) // ratio for part in run],
            first.dtype,
            any_nan=not exactly and first.left.dtype != first.right.dtype,
        )

    def _region(
        self, side: Source, elements: Sequence[SideElements], run: Sequence[RunPart], first: Pair
    ) -> Region:
        """Return the region that fills the windows of one side."""
        source, target = ITEMSIZE[elements[0].dtype], ITEMSIZE[first.dtype]
        tensor = np.array([one.tensor for one in elements], dtype=np.int64)
        shift = np.array([one.start for one in elements], dtype=np.int64)
        start = np.array([part.start for part in run], dtype=np.int64)
        stop = np.array([part.stop for part in run], dtype=np.int64)
        ends = np.cumsum(stop - start) * target
        segments = Segments(tensor, start + shift, stop + shift, ends - (stop - start) * target)
        found = side.cutting.locate(segments, target_itemsize=target)
        ratio = first.itemsize // target
        return Region(
            content_bytes=int(ends[-1]),
            copies=coalesce(found, itemsize=source, target_itemsize=target),
            source_itemsize=source * ratio,
            target_itemsize=target * ratio,
            cast=comparing_cast(elements[0].dtype, first.dtype),
        )


def _alike(pair: Pair) -> tuple[str, str, str, int]:
    return pair.left.dtype, pair.right.dtype, pair.dtype, pair.itemsize
