"""Divides an export's files into spans that are made only when a worker needs them."""

from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeVar, overload

from streamshard.engine.run.work import Span, SpanResult
from streamshard.layout.memory_plan import MIB

SPAN_BYTES: Final = 128 * MIB
"""Workers get files in spans of about this size."""

T = TypeVar("T")


class LazySpans(Sequence[Span]):
    """Spans that are made when they are needed and not kept, because their copies take memory."""

    def __init__(self, makers: Sequence[Callable[[], Span]]) -> None:
        self._makers = makers

    def __len__(self) -> int:
        return len(self._makers)

    @overload
    def __getitem__(self, index: int) -> Span: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Span]: ...

    def __getitem__(self, index: int | slice) -> Span | Sequence[Span]:
        if isinstance(index, slice):
            return LazySpans(self._makers[index])
        return self._makers[index]()


def runs_of(items: Sequence[T], cost: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Divide items, in order, into runs of about the given cost."""
    run: list[T] = []
    held = 0
    for item in items:
        run.append(item)
        held += cost(item)
        if held >= most:
            yield run
            run, held = [], 0
    if run:
        yield run


def overflowed_regions(result: SpanResult) -> Iterator[tuple[int, int]]:
    """Yield where regions with elements that became infinite begin, and how many these are."""
    for region in result.regions:
        if region.overflowed:
            yield region.offset, region.overflowed
