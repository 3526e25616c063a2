"""Lets all ranks of a job agree that a step succeeded before any goes on."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from deepspeed.utils import logger
from torch import distributed

from streamshard.errors import StreamshardError

T = TypeVar("T")


class OtherRankError(StreamshardError):
    """Another rank failed, in code that is not streamshard's."""


class Agreement:
    """Steps that all ranks do together: if one of them fails, all raise its error."""

    def __init__(self) -> None:
        self._is_over = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """Do a step on every rank, and raise on every rank if it failed on any.

        Raises
        ------
        StreamshardError
            The error of the first rank that failed, with the number of that rank.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as own:
            if self._is_over:
                raise  # all ranks know already
            error = own
        self._require(error)

    def share(self, value: T | None) -> T:
        """Send a value from rank 0 to all ranks."""
        box = [value]
        distributed.broadcast_object_list(box, src=0)
        received: T | None = box[0]
        if received is None:
            raise TypeError("rank 0 has nothing to send")
        return received

    def gather(self, value: T) -> list[T]:
        """Collect one value of each rank on all ranks."""
        found: list[T | None] = [None] * distributed.get_world_size()
        distributed.all_gather_object(found, value)
        return [value for value in found if value is not None]

    def _require(self, error: Exception | None) -> None:
        told = None if error is None else (_kind(error), str(error) or repr(error))
        found: list[tuple[type[StreamshardError], str] | None]
        found = [None] * distributed.get_world_size()
        distributed.all_gather_object(found, told)
        failed = [(rank, one) for rank, one in enumerate(found) if one is not None]
        if not failed:
            return
        self._is_over = True
        if error is not None and not isinstance(error, StreamshardError):
            raise error
        rank, (kind, message) = failed[0]
        raise kind(f"rank {rank}: {message}") from error


def _kind(error: Exception) -> type[StreamshardError]:
    return type(error) if isinstance(error, StreamshardError) else OtherRankError


def say(text: str) -> None:
    """Print a text on rank 0, as DeepSpeed prints warnings: it hides what is merely information."""
    if distributed.get_rank() == 0:
        logger.warning(text)
