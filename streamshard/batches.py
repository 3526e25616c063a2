"""Where files are examined when there are thousands of them: here, or on workers.

A reader says what is to be done with each item, as a function that can be pickled. A context with
workers (`mapped_by`) sends them batches of items; without one it is done here, one by one.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, TypeVar

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class BatchMapper:
    """How functions are applied to batches of items."""

    map: Callable[[Callable[[Any], Any], Sequence[Any]], Iterable[Any]] = map
    """Applies a function to each batch; returns the results in the order of the batches, whatever
    the order in which they were made. Functions, batches and results can be pickled."""
    batch_items: int = 1 << 16
    """Most items of one batch."""


_HERE: Final = BatchMapper()
_mapper: Final[ContextVar[BatchMapper]] = ContextVar("mapper", default=_HERE)


@contextmanager
def mapped_by(mapper: BatchMapper) -> Iterator[None]:
    """Have `map_batches` use a mapper inside a `with` statement."""
    token = _mapper.set(mapper)
    try:
        yield
    finally:
        _mapper.reset(token)


def map_batches(function: Callable[[Sequence[T]], Sequence[R]], items: Sequence[T]) -> list[R]:
    """Apply a function to batches of items; returns the results, item by item, in their order.

    `function`: function of a module, or a `functools.partial` of one, that returns a result for
    each item of a batch and does not depend on how the items are divided.
    """
    mapper = _mapper.get()
    step = mapper.batch_items
    batches = [items[at : at + step] for at in range(0, len(items), step)]
    return list(chain.from_iterable(mapper.map(function, batches)))
