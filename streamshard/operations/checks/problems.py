"""What `verify` finds, and what it returns."""

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
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

MISSING: Final = "missing"
"""A file that belongs there is not there."""
EXTRA: Final = "extra"
"""A file is there that nothing lists."""
MALFORMED: Final = "malformed"
"""A file is truncated, or not what its name says."""
DAMAGED: Final = "damaged"
"""Bytes are not those of which a checksum was recorded."""
DISAGREEMENT: Final = "disagreement"
"""Two files contradict each other."""
UNSUPPORTED: Final = "unsupported"
"""A layout that is known and cannot be checked."""
UNREADABLE: Final = "unreadable"
"""A file cannot be read at all."""

_KINDS: Final[Mapping[type[StreamshardError], str]] = {
    CorruptFileError: MALFORMED,
    IncompleteError: MISSING,
    DisagreementError: DISAGREEMENT,
    UnsupportedError: UNSUPPORTED,
    IntegrityError: DAMAGED,
    UsageError: MALFORMED,  # a config kept in a checkpoint that asks for what cannot be
}


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is wrong with a checkpoint."""

    kind: str
    """`missing`, `extra`, `malformed`, `damaged`, `disagreement`, `unsupported` or `unreadable`."""
    file: str
    """Path of the file, or of the directory where it is none in particular."""
    message: str


@dataclass(frozen=True, slots=True)
class Difference:
    """Something that two checkpoints do not have in common."""

    kind: str
    """`elements`, `dtype`, `shape`, `value`; `missing` or `extra` where only the other has it, or
    only this one."""
    name: str
    """A tensor as arrays are called in a store, or a piece of training state."""
    message: str
    first: int | None = None
    """Index of the first element that differs, in the flattened tensor."""
    count: int | None = None
    """How many elements differ."""
    numel: int | None = None
    """How many elements there are."""


@dataclass(frozen=True, slots=True)
class Verification:
    """What was looked at, and everything that was found."""

    path: str
    against: str | None
    """What it was compared with."""
    kind: str
    """`native` for shards, `store` for a Zarr store, `dumps` for raw per-rank dumps."""
    tag: str | None
    """None where not even that could be found out."""
    sample: str
    """Part of the bytes that was read, such as `3/20`; `1/1` is all of them."""
    files: int
    """Files that were looked at."""
    checked: int
    """What has a checksum and was read: records of torch files, or a store's files."""
    tensors: int
    """Logical tensors that were compared, or whose digest was found right."""
    bytes_read: int
    problems: tuple[Problem, ...]
    differences: tuple[Difference, ...]
    digests: Mapping[str, str]
    """Tensor → digest of its elements, where that was taken: the same however they are cut."""
    notes: tuple[str, ...]
    floor_bytes: int
    """Resident memory before anything was opened."""
    limit_bytes: int
    """Memory allowed above the floor."""
    projected_bytes: int
    """Resident memory that the run was not to exceed, floor included."""
    peak_bytes: int
    """Highest resident memory that was measured."""
    seconds: float

    @property
    def is_good(self) -> bool:
        """Whether nothing is wrong and nothing differs."""
        return not self.problems and not self.differences


@dataclass(slots=True)
class Findings:
    """What was found so far."""

    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)
    files: int = 0
    checked: int = 0
    tensors: int = 0
    _known: set[Problem] = field(default_factory=set)

    def add(self, kind: str, file: Path, message: str) -> None:
        """Add a problem of a file, unless it is known already."""
        problem = Problem(kind, str(file), message)
        if problem not in self._known:
            self._known.add(problem)
            self.problems.append(problem)

    def add_error(self, error: StreamshardError, place: Path, files: Collection[Path] = ()) -> None:
        """Add what kept a reader from going on.

        Parameters
        ----------
        place
            What it is about if it names none of the files.
        files
            Those that the message may name: the one it names first has the problem. A set where
            there are many.
        """
        kind = next((k for t, k in _KINDS.items() if isinstance(error, t)), UNREADABLE)
        self.add(kind, _named(str(error), place, files), str(error))

    def add_unexplained(
        self, error: StreamshardError, place: Path, files: Collection[Path] = ()
    ) -> None:
        """Add what kept a reader from going on, unless something is known to be wrong already."""
        if not self.problems:
            self.add_error(error, place, files)


def _named(message: str, place: Path, files: Collection[Path]) -> Path:
    """Find the file that a message names first: one that is there, or one below a place."""
    head = message.partition(": ")[0]
    if Path(head) in files:
        return Path(head)
    places = {path: message.find(str(path)) for path in files}
    named = [path for path, at in places.items() if at >= 0]
    if not named and head.startswith(f"{place}{os.sep}"):
        return Path(head)  # as that of a file that is missing does
    # Of those that begin alike the longest is meant.
    return min(named, key=lambda path: (places[path], -len(str(path))), default=place)
