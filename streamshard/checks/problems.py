"""The problems that `verify` finds, and the result that it returns."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Final

from streamshard.errors import (
    CorruptFileError,
    DisagreementError,
    IncompleteError,
    IntegrityError,
    StreamshardError,
    UnsupportedError,
    UsageError,
)
from streamshard.health import TensorHealth

_MISSING: Final = "missing"
"""A file that should exist does not."""
EXTRA: Final = "extra"
"""A file exists that nothing lists."""
MALFORMED: Final = "malformed"
"""A file is truncated, or not what its name says."""
DAMAGED: Final = "damaged"
"""Bytes do not have the recorded checksum."""
DISAGREEMENT: Final = "disagreement"
"""Two files contradict each other."""
UNSUPPORTED: Final = "unsupported"
"""The layout is known, but cannot be checked."""
UNREADABLE: Final = "unreadable"
"""A file cannot be read at all."""

UNHEALTHY: Final = "unhealthy"
"""A weight or a state of the optimizer holds NaN or infinities."""

_KINDS: Final[Mapping[type[StreamshardError], str]] = {
    CorruptFileError: MALFORMED,
    IncompleteError: _MISSING,
    DisagreementError: DISAGREEMENT,
    UnsupportedError: UNSUPPORTED,
    IntegrityError: DAMAGED,
    UsageError: MALFORMED,  # the config kept in a checkpoint asks for something impossible
}


def kind_of(error: StreamshardError) -> str:
    return next((k for t, k in _KINDS.items() if isinstance(error, t)), UNREADABLE)


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem of a checkpoint."""

    kind: str
    """`missing`, `extra`, `malformed`, `damaged`, `disagreement`, `unsupported`, `unreadable` or
    `unhealthy`."""
    file: str
    """Path of the file, or of the directory if the problem is of no file in particular."""
    message: str


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference between two checkpoints."""

    kind: str
    """`elements`, `dtype`, `shape`, `value`; `missing` if only the other checkpoint has it, `extra`
    if only this one has it; `unread` if one has it and it cannot be read."""
    name: str
    """Name of the tensor's array in a store, or a piece of training state."""
    message: str
    first: int | None = None
    """Index of the first element that differs, in the flattened tensor."""
    count: int | None = None
    """Count of elements that differ."""
    numel: int | None = None
    """Count of all elements."""


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of `verify`: counts of what was checked, and all problems and differences."""

    path: str
    against: str | None
    """Path of the checkpoint that it was compared with."""
    kind: str
    """`native` for shards, `store` for a Zarr store, `dumps` for raw per-rank dumps."""
    tag: str | None
    """None if the tag could not be found out."""
    files: int
    """Files that were checked."""
    checked: int
    """Items with a checksum that were read: records of torch files, or a store's files."""
    tensors: int
    """Logical tensors that were compared, or whose digest was correct."""
    bytes_read: int
    problems: tuple[Problem, ...]
    differences: tuple[Difference, ...]
    digests: Mapping[str, str]
    """Tensor of a store → digest of its elements, which does not depend on how they are cut."""
    health: Mapping[str, TensorHealth]
    """Tensor → which numbers it holds, if that was asked for."""
    notes: tuple[str, ...]
    floor_bytes: int
    """Resident memory before anything was opened."""
    limit_bytes: int
    """Memory allowed above the floor."""
    projected_bytes: int
    """Most resident memory that the plan allows the run, floor included."""
    peak_bytes: int
    """Highest resident memory that was measured."""
    seconds: float

    @property
    def is_good(self) -> bool:
        """Whether nothing is wrong and nothing differs."""
        return not self.problems and not self.differences


@dataclass(slots=True)
class Findings:
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)
    health: dict[str, TensorHealth] = field(default_factory=dict)
    files: int = 0
    checked: int = 0
    tensors: int = 0
    _known: set[Problem] = field(default_factory=set)
    _first: dict[tuple[str, str], str] = field(default_factory=dict)
    """Kind and file → the message of the first such problem."""

    def add(self, kind: str, file: PurePath, message: str) -> None:
        """Add a problem of a file, unless it is known already, or what stopped a reader of it."""
        problem = Problem(kind, str(file), message)
        first = self._first.setdefault((kind, problem.file), message)
        is_told = message != first and message.removeprefix(f"{file}: ") in first
        if problem not in self._known and not is_told:
            self._known.add(problem)
            self.problems.append(problem)

    def add_error(self, error: StreamshardError, place: PurePath) -> None:
        """Add an error that stopped a reader; `place` is reported if it is about no path."""
        self.add(kind_of(error), error.path or place, str(error))

    def add_unexplained(self, error: StreamshardError, place: PurePath) -> None:
        """Add an error that stopped a reader, unless there is a problem already."""
        if not self.problems:
            self.add_error(error, place)
