"""Reads the matching tensors of two checkpoints, window by window, and reports differences.

The pairs of tensors are divided into runs; one worker reads a run from both sides.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Final, Self, TypeVar

import numpy as np

from streamshard.checks.problems import Difference, Findings
from streamshard.engine.jobs.executor import Job, ReadingTools, run_ordered
from streamshard.engine.numeric.cast import comparing_cast, wider
from streamshard.engine.run.memory_limits import Limits
from streamshard.engine.run.phases import READING, Count, Progress
from streamshard.engine.run.work import Region
from streamshard.engine.scan.region_pair import Comparator, Mismatch, PairReader, RegionPair
from streamshard.errors import SourceError, StreamshardError
from streamshard.formats.zarr.array_paths import array_path
from streamshard.layout.cutting import Segments, coalesce
from streamshard.layout.memory_plan import BUFFER_BYTES, COMPARING_BYTES, MemoryPlan
from streamshard.model import ITEMSIZE, LogicalTensor, NoteKind
from streamshard.source.source import Request, Source

_RUN_BYTES: Final = 64 << 20
"""Length of a run, unless it consists of too many pieces."""
_PIECE_COST: Final = 8192
"""Bytes that a piece counts as, because each takes some integers: a run has at most 8192 pieces."""
_LEAST_CHUNKS: Final = 4
"""Fewest compressed chunks in a run that may end inside a chunk; that chunk is decoded twice."""


@dataclass(frozen=True, slots=True)
class SideElements:
    """Elements of a logical tensor of one side."""

    tensor: int
    dtype: str
    start: int = 0
    """First element."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Elements of both sides that should be equal."""

    name: str
    left: SideElements
    right: SideElements
    numel: int
    """Elements on each side."""
    dtype: str
    """Dtype as which both sides are compared: the dtype of at least one side."""
    itemsize: int
    """Bytes of the unit in which differences are counted."""
    tensor: LogicalTensor | None = None
    """The tensor of the left side; None for a place in the training state."""

    @property
    def nbytes(self) -> int:
        return self.numel * ITEMSIZE[self.dtype]


@dataclass(slots=True)
class Pairing:
    """The matching tensors, and the differences that were found without reading tensors."""

    by_value: bool = False
    """Whether floats of different dtypes are compared too."""
    pairs: list[Pair] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    blobs: set[tuple[SideElements, SideElements, int]] = field(default_factory=set)
    """Parts of the training state's tensors that are paired already, and their bytes."""
    tensors: dict[str, LogicalTensor] = field(default_factory=dict)
    """Name of a difference → the tensor it is about, where it is about a tensor."""
    _paired: set[tuple[SideElements, SideElements]] = field(default_factory=set)

    def differ(self, kind: str, name: str, message: str) -> None:
        self.differences.append(Difference(kind, name, f"{name}: {message}"))

    def differ_in(self, kind: str, tensor: LogicalTensor, message: str) -> None:
        path = array_path(tensor)
        self.tensors[path] = tensor
        self.differ(kind, path, message)

    def add(
        self, tensor: LogicalTensor, left: SideElements, right: SideElements, dtype: str
    ) -> None:
        """Add a pair of whole tensors; tied tensors with several names are added once."""
        if (left, right) not in self._paired:
            self._paired.add((left, right))
            path, size = array_path(tensor), ITEMSIZE[dtype]
            self.pairs.append(Pair(path, left, right, tensor.numel, dtype, size, tensor))

    def only(self, tensor: LogicalTensor, *, is_left: bool) -> None:
        kind, place = ("extra", "here only") if is_left else ("missing", "there only")
        self.differ_in(kind, tensor, place)

    def add_same(self, tensor: LogicalTensor, left: SideElements, right: SideElements) -> None:
        """Add a pair of whole tensors, and report different dtypes."""
        if left.dtype != right.dtype:
            self.differ_in("dtype", tensor, f"{left.dtype} here, {right.dtype} there")
        dtype = wider(left.dtype, right.dtype) if self.by_value else left.dtype
        if dtype is not None and (self.by_value or left.dtype == right.dtype):
            self.add(tensor, left, right, dtype)


def open_alike(
    first: Request, second: Request, left: Source, right: Source
) -> tuple[Source, Source]:
    """Open the second one again by what FSDP1 wrapped in the first, if states need that."""
    is_unread = any(note.kind is NoteKind.UNREAD for note in right.checkpoint.notes)
    if first.facts.wrapped and left.kind == right.kind and is_unread:
        facts = replace(second.facts, wrapped=first.facts.wrapped)
        return left, replace(second, facts=facts).open()
    return left, right


K = TypeVar("K", bound=PairReader)
R = TypeVar("R")


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

        sides = [side.files for side in self.sides]
        reader = partial(kind.of, sides, memory.window_bytes, BUFFER_BYTES)
        tools = ReadingTools([file for files in sides for file in files], reader)
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
        source, target = ITEMSIZE[elements[0].dtype], ITEMSIZE[first.dtype]
        tensor = np.array([one.tensor for one in elements], dtype=np.int64)
        shift = np.array([one.start for one in elements], dtype=np.int64)
        start = np.array([part.start for part in run], dtype=np.int64)
        stop = np.array([part.stop for part in run], dtype=np.int64)
        ends = np.cumsum(stop - start) * target
        segments = Segments(tensor, start + shift, stop + shift, ends - (stop - start) * target)
        copies = side.cutting.locate(segments, target_itemsize=target)
        ratio = first.itemsize // target
        return Region(
            content_bytes=int(ends[-1]),
            copies=coalesce(copies, itemsize=source, target_itemsize=target),
            source_itemsize=source * ratio,
            target_itemsize=target * ratio,
            cast=comparing_cast(elements[0].dtype, first.dtype),
        )


def _alike(pair: Pair) -> tuple[str, str, str, int]:
    return pair.left.dtype, pair.right.dtype, pair.dtype, pair.itemsize


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
    read = Count(progress.advance, per=1 if phase == READING else 2)
    progress.start(runs.nbytes * (2 if phase == READING else 1), phase)
    differences = _differences(runs, plan, findings, read.add, exactly=exactly)
    findings.tensors += len(pairs)
    return Compared(differences, findings, plan, runs.nbytes, read.value)


def fit_sides(limits: Limits, left: Source, right: Source, *, copies_bytes: int = 0) -> MemoryPlan:
    """Fit the reading of two opened checkpoints into the memory limit."""
    codec_bytes = left.codec_bytes + right.codec_bytes + COMPARING_BYTES
    return limits.fit(codec_bytes, (*left.files, *right.files), copies_bytes)


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
    at = part.start * ITEMSIZE[pair.dtype] // pair.itemsize + found.first
    first, count = counts.get(part.number, (at, 0))
    counts[part.number] = min(first, at), count + found.count


def _difference(pair: Pair, first: int, count: int) -> Difference:
    numel = pair.nbytes // pair.itemsize
    message = f"{pair.name}: {count:,} of {numel:,} elements differ, the first at index {first:,}"
    if pair.left.dtype != pair.right.dtype:
        message += " (one side keeps no module weights: cast from its master weights)"
    return Difference("elements", pair.name, message, first, count, numel)
