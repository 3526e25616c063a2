"""Lets all ranks of a job agree that a step succeeded before any goes on."""

import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from deepspeed.utils import logger
from torch import distributed

from streamshard.errors import DisagreementError, StreamshardError

T = TypeVar("T")


class OtherRankError(StreamshardError):
    """Another rank failed, in code that is not streamshard's, or has ended."""


class Agreement:
    """Steps that all ranks do together: if one of them fails, all raise its error."""

    def __init__(self) -> None:
        self._is_over = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """Do a step on every rank, and raise on every rank if it failed on any."""
        error: Exception | None = None
        try:
            yield
        except Exception as own:
            if self._is_over:
                raise  # all ranks know already
            error = own
        self._require(error)

    @contextmanager
    def step_at(self, owner: Any, method: str) -> Iterator[None]:
        """Make each call of an object's method a step, for a while.

        DeepSpeed goes on with collectives, in which all would wait for a rank that has failed.
        """
        plain = getattr(owner, method, None)
        if plain is None:  # DeepSpeed does not call it either
            yield
            return
        attribute = vars(owner).get(method)

        def call(*args: object, **kwargs: object) -> object:
            with self.step():
                return plain(*args, **kwargs)

        setattr(owner, method, call)
        try:
            yield
        finally:
            delattr(owner, method)
            if attribute is not None:
                setattr(owner, method, attribute)

    def share(self, value: T | None) -> T:
        """Send a value from rank 0 to all ranks."""
        box: list[bytes | None] = [None]
        with self.step():
            if distributed.get_rank() == 0:
                box[0] = pickle.dumps(value)
        distributed.broadcast_object_list(box, src=0)
        received: T | None = value
        with self.step():
            if distributed.get_rank() != 0:
                received = pickle.loads(box[0] or b"")  # noqa: S301 - it is from rank 0
            if received is None:
                raise TypeError("rank 0 has nothing to send")
        return received

    def gather(self, value: T) -> list[T]:
        """Collect one value of each rank on all ranks."""
        found: list[T | None] = [None] * distributed.get_world_size()
        distributed.all_gather_object(found, value)
        return [value for value in found if value is not None]

    def require_alike(self, values: Mapping[str, object]) -> None:
        """Refuse values that differ among the ranks."""
        first, *others = self.gather(dict(values))
        for rank, other in enumerate(others, start=1):
            for name, value in other.items():
                if value != first[name]:
                    message = f"rank {rank} loads with {name}={value!r}, rank 0 with"
                    raise DisagreementError(
                        f"{message} {name}={first[name]!r}: call it alike on all ranks"
                    )

    def _require(self, error: Exception | None) -> None:
        failure = None if error is None else (_kind(error), str(error) or repr(error))
        failures: list[tuple[type[StreamshardError], str] | None]
        failures = [None] * distributed.get_world_size()
        try:
            distributed.all_gather_object(failures, failure)
        except RuntimeError as broken:
            self._is_over = True  # no rank can answer any more
            if error is not None:
                raise error from broken
            message = "another rank has ended, or does not answer, while all load a checkpoint"
            raise OtherRankError(f"{message} ({broken})") from broken
        failed = [(rank, one) for rank, one in enumerate(failures) if one is not None]
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
