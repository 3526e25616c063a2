"""Reads what belongs together in two checkpoints, window by window, and says where it differs."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby
from pathlib import Path
from typing import Final, Protocol

import numpy as np

from streamshard.engine.cast import cast_between
from streamshard.engine.compare import Comparator, Comparison, Mismatch
from streamshard.engine.files import Decoder, SourceReader
from streamshard.engine.pool import run_ordered
from streamshard.engine.work import Region
from streamshard.errors import StreamshardError
from streamshard.model import ITEMSIZE, SourceFile
from streamshard.operations.pairing import Half, Pair
from streamshard.operations.verification import Difference, Findings
from streamshard.plan.cutting import Cutting, Segments, coalesce
from streamshard.plan.memory import MIB, SCRATCH_BYTES, WINDOW_BYTES, MemoryPlan
from streamshard.plan.sample import Sample

_RUN_BYTES: Final = 64 << 20
"""What a worker compares in a row, if it is not in too many pieces."""
_PIECE_COST: Final = 8192
"""Bytes that a piece counts for, as each takes some integers: a run has 8192 at most."""

EXTRA_BYTES: Final = WINDOW_BYTES + SCRATCH_BYTES + 2 * MIB
"""What a worker takes beyond a window and its scratch: those of the other side, and the copies."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A range of a pair's elements."""

    number: int
    """Of the pair."""
    start: int
    stop: int


class Side(Protocol):
    """Opened files, and where in them the elements of tensors lie."""

    @property
    def path(self) -> Path:
        """Where they are."""

    @property
    def files(self) -> tuple[SourceFile, ...]:
        """The files."""

    @property
    def decoders(self) -> Mapping[int, Decoder]:
        """How to read files whose stored bytes are not the tensor's."""

    @property
    def codec_bytes(self) -> int:
        """Memory that decoding one file takes; 0 where none is decoded."""

    @property
    def cutting(self) -> Cutting:
        """Where every element lies."""


class Comparing:
    """Two opened checkpoints, and the pairs of tensors that are to be read.

    Parameters
    ----------
    exactly
        Whether the bits of a NaN count too where one side is a cast.
    """

    def __init__(
        self, left: Side, right: Side, pairs: Sequence[Pair], *, exactly: bool = False
    ) -> None:
        self._sides = left, right
        self._exactly = exactly
        # Pairs that are read alike can share a window.
        self._pairs = sorted(pairs, key=_alike)

    @property
    def nbytes(self) -> int:
        """Bytes that are compared, of either side."""
        return sum(pair.nbytes for pair in self._pairs)

    def run(
        self, memory: MemoryPlan, findings: Findings, progress: Callable[[int], None]
    ) -> list[Difference]:
        """Compare all pairs; what cannot be read is added to the findings."""
        waiting: deque[Sequence[_Part]] = deque()
        tallies: dict[int, tuple[int, int]] = {}
        make = partial(self._comparator, memory, progress)
        paths = {file.path for side in self._sides for file in side.files}
        for result in run_ordered(self._jobs(waiting), make, memory.workers):
            parts = waiting.popleft()
            if isinstance(result, StreamshardError):
                findings.add_error(result, self._sides[0].path, paths)
                continue
            for mismatch in result:
                part = parts[mismatch.part]
                _count(tallies, self._pairs[part.number], part, mismatch)
        findings.tensors += len(self._pairs)
        return [
            _difference(self._pairs[number], *found) for number, found in sorted(tallies.items())
        ]

    def _comparator(self, memory: MemoryPlan, progress: Callable[[int], None]) -> Comparator:
        readers = [SourceReader(side.files, side.decoders) for side in self._sides]
        return Comparator(
            readers[0],
            readers[1],
            window_bytes=memory.window_bytes,
            scratch_bytes=SCRATCH_BYTES // 2,
            progress=progress,
        )

    def _jobs(
        self, waiting: deque[Sequence[_Part]]
    ) -> Iterator[Callable[[Comparator], list[Mismatch] | StreamshardError]]:
        numbered = list(enumerate(self._pairs))
        for _, group in groupby(numbered, key=lambda item: _alike(item[1])):
            for run in self._runs(group):
                waiting.append(run)
                yield partial(self._compare, run)

    def _runs(self, pairs: Iterable[tuple[int, Pair]]) -> Iterator[list[_Part]]:
        """Share pairs out into runs of about equal length that do not take too many copies."""
        run: list[_Part] = []
        held = 0
        for number, pair in pairs:
            step = self._step(pair)
            for start in range(0, pair.numel, step):
                stop = min(start + step, pair.numel)
                run.append(_Part(number, start, stop))
                held += self._cost(pair, stop - start)
                if held >= _RUN_BYTES:
                    yield run
                    run, held = [], 0
        if run:
            yield run

    def _cost(self, pair: Pair, numel: int) -> int:
        """Weigh elements by their bytes and by the pieces in which they lie."""
        pieces = sum(
            numel // self._piece_numel(side, half) + 2 for side, half in self._halves(pair)
        )
        return numel * ITEMSIZE[pair.dtype] + pieces * _PIECE_COST

    def _step(self, pair: Pair) -> int:
        """Choose how many elements of a pair a worker compares in a row, if it has so many.

        Chunks that are compressed are decoded as a whole: no two workers are to decode the same.
        """
        unit = pair.itemsize // ITEMSIZE[pair.dtype]
        for side, half in self._halves(pair):
            if side.codec_bytes:
                unit = max(unit, self._piece_numel(side, half))
        many = _RUN_BYTES // ITEMSIZE[pair.dtype]
        least = max(1, self._cost(pair, many) // _RUN_BYTES)
        return max(1, many // least // unit) * unit

    def _halves(self, pair: Pair) -> Iterator[tuple[Side, Half]]:
        return zip(self._sides, (pair.left, pair.right), strict=True)

    def _piece_numel(self, side: Side, half: Half) -> int:
        return int(side.cutting.piece_numel[half.tensor])

    def _compare(
        self, run: Sequence[_Part], comparator: Comparator
    ) -> list[Mismatch] | StreamshardError:
        pairs = [self._pairs[part.number] for part in run]
        first = pairs[0]
        ratio = first.itemsize // ITEMSIZE[first.dtype]
        ends = np.cumsum([part.stop - part.start for part in run])
        try:
            return comparator.compare(
                Comparison(
                    left=self._region(self._sides[0], [pair.left for pair in pairs], run, first),
                    right=self._region(self._sides[1], [pair.right for pair in pairs], run, first),
                    starts=np.concatenate([[0], ends[:-1]]) // ratio,
                    dtype=first.dtype,
                    any_nan=not self._exactly and first.left.dtype != first.right.dtype,
                )
            )
        except StreamshardError as error:
            return error

    def _region(
        self, side: Side, halves: Sequence[Half], run: Sequence[_Part], first: Pair
    ) -> Region:
        """Say what fills the windows of one side."""
        source, target = ITEMSIZE[halves[0].dtype], ITEMSIZE[first.dtype]
        tensor = np.array([half.tensor for half in halves], dtype=np.int64)
        shift = np.array([half.start for half in halves], dtype=np.int64)
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
            cast=cast_between(halves[0].dtype, first.dtype),
        )


def chosen(pairs: Sequence[Pair], sample: Sample) -> list[Pair]:
    """Choose the pairs that are in a sample."""
    ends = list(accumulate(pair.nbytes for pair in pairs))
    total = ends[-1] if ends else 0
    both = zip(pairs, ends, strict=True)
    return [pair for pair, end in both if sample.holds(end - pair.nbytes, end, total)]


def _alike(pair: Pair) -> tuple[str, str, str, int]:
    return pair.left.dtype, pair.right.dtype, pair.dtype, pair.itemsize


def _count(tallies: dict[int, tuple[int, int]], pair: Pair, part: _Part, found: Mismatch) -> None:
    """Add what was found in a part of a pair."""
    at = part.start * ITEMSIZE[pair.dtype] // pair.itemsize + found.first
    first, count = tallies.get(part.number, (at, 0))
    tallies[part.number] = min(first, at), count + found.count


def _difference(pair: Pair, first: int, count: int) -> Difference:
    numel = pair.nbytes // pair.itemsize
    message = f"{pair.name}: {count:,} of {numel:,} elements differ, the first at index {first:,}"
    if pair.left.dtype != pair.right.dtype:
        message += " (one side keeps no module weights: cast from its master weights)"
    return Difference("elements", pair.name, message, first, count, numel)
