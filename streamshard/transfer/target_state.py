"""What lies at the place of a target: it is looked at once, and then judged."""

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from streamshard.engine.journals.journal import Journal
from streamshard.errors import Option, TargetExistsError
from streamshard.io.entries import examine_if_there, lexists, paths_in
from streamshard.io.file_system import is_mount_point
from streamshard.io.files import target_errors
from streamshard.io.object_path import is_object, is_packed_name
from streamshard.io.place import place_of
from streamshard.model import Template
from streamshard.registry import DISK_TARGET, PACKED_TARGET, UPLOADED_TARGET, load
from streamshard.source.unfinished import JOURNAL
from streamshard.transfer.target import partial_of, replaced_of, require_named

if TYPE_CHECKING:
    from streamshard.source.directory_content import DirectoryContent

_OVERWRITE: Final = Option("overwrite", True)
_IF_NEEDED: Final = Option("if_needed", True)


def transaction_of(target: Path) -> Any:  # noqa: ANN401
    """Return the class of `transaction.Transaction` that makes a target: name and place tell."""
    if is_packed_name(target):
        return load(PACKED_TARGET)
    return load(UPLOADED_TARGET if is_object(target) else DISK_TARGET)


class TargetState(ABC):
    """What a run finds at the place of its target, on a disk or in a bucket."""

    target: Path

    @staticmethod
    def of(target: Path, template: Template | None = None) -> "TargetState":
        require_named(target)
        with target_errors(target):
            state: TargetState = transaction_of(target).state.at(target, template)
        return state

    @classmethod
    @abstractmethod
    def at(cls, target: Any, template: Template | None = None) -> Self:  # noqa: ANN401
        """Look at a target of this kind."""

    @property
    @abstractmethod
    def is_settled(self) -> bool:
        """Whether nothing is there to compare: it is free, or a run is not done with it."""

    def require_free(self, *, overwrite: bool) -> None:
        """Refuse a target that exists, unless it is empty, or is one of ours and may be replaced.

        A directory of dumps is ours if nothing else is in it. The remains of an earlier run are
        allowed: the run is continued, or its renaming is finished first.
        """
        with target_errors(self.target):
            self._require_free(overwrite=overwrite)

    @abstractmethod
    def _require_free(self, *, overwrite: bool) -> None:
        """See `require_free`; system errors are turned into others there."""

    def _exists(self) -> TargetExistsError:
        error = TargetExistsError(f"{self.target}: exists; use {_OVERWRITE} to replace it")
        error.add_note(f"If this is already done, {_IF_NEEDED} of repartition and convert tells so")
        return error

    def _require_ours(self, content: "DirectoryContent | None") -> None:
        if content is None or not content.is_one_checkpoint():
            message = f"{self.target}: holds more than one checkpoint or store of ours, so"
            message = f"{message} {_OVERWRITE} will not replace it; remove it yourself"
            raise TargetExistsError(message)


@dataclass(frozen=True)
class DiskState(TargetState):
    target: Path
    is_there: bool
    """Whether there is anything at its path, even a link that leads to nothing."""
    content: "DirectoryContent | None"
    """What lies in it; None if it is no directory, or a link to one."""
    journal: Journal
    """The journal in it: it has taken its place, and the rest is to be tidied."""

    @classmethod
    def at(cls, target: Path, template: Template | None = None) -> Self:
        """Look at the target; what lies next to it is looked at when it matters."""
        status = examine_if_there(target, follows=False)
        is_directory = status is not None and status.is_directory
        content = None
        if is_directory:
            # Not at the top: most targets are new.
            from streamshard.source.directory_content import DirectoryContent

            content = DirectoryContent.of(target, template)
        return cls(target, status is not None, content, Journal(target / JOURNAL))

    @cached_property
    def begun(self) -> Journal:
        return Journal(partial_of(self.target) / JOURNAL)

    @cached_property
    def has_replaced(self) -> bool:
        """Whether anything is where an old target lies until the new one is in place."""
        return lexists(replaced_of(self.target))

    @property
    def is_vacant(self) -> bool:
        return not self.is_there if self.content is None else not self.content.entries

    @property
    def is_settled(self) -> bool:
        return self.is_vacant or self.journal.is_there

    def _require_free(self, *, overwrite: bool) -> None:
        if self.journal.is_whole:
            return
        may_replace = replaces(self.begun.header)
        if self.has_replaced and not (self.is_vacant and may_replace):
            raise in_the_way(replaced_of(self.target))
        require_of_a_run(partial_of(self.target), self.begun)
        if self.content is not None:
            _require_place(self.target)
        if self.is_vacant:
            return
        if not overwrite and not may_replace:
            raise self._exists()
        self._require_ours(self.content)


def require_of_a_run(partial: Path, begun: Journal) -> None:
    """Refuse what no run left where a target is built; `begun`: the journal in it, made first."""
    status = examine_if_there(partial, follows=False)
    if status is None or (status.is_directory and begun.header is not None):
        return
    if not status.is_directory or any(not p.name.startswith(JOURNAL) for p in paths_in(partial)):
        raise in_the_way(partial)


def in_the_way(path: Path) -> TargetExistsError:
    message = f"{path}: is in the way, and was not left by a run that was cut off"
    return TargetExistsError(f"{message}; move it, or choose another target")


def replaces(header: Mapping[str, Any] | None) -> bool:
    return header is not None and header.get("replaces") is True


def _require_place(target: Path) -> None:
    reason = None
    if is_mount_point(target):
        reason = "is a mount point, which no other directory can take the place of"
    elif not place_of(target).may_change(target.absolute().parent):
        reason = f"its place cannot be taken, as {target.absolute().parent} may not be written"
    elif (owner := place_of(target).foreign_owner(target)) is not None:
        reason = f"belongs to user {owner}, and user {os.geteuid()} can make no directory for them"
    if reason is not None:
        message = f"{target}: {reason}; what is made is built next to its place and then renamed"
        raise TargetExistsError(f"{message}. Give a new name in it: {target / 'NAME'}")
