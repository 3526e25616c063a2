"""The trash of a run directory, which holds tags until their grace time is over.

At any moment a tag is in one place: next to the other tags, in the trash, or in the part of the
trash that is being emptied. Each move is one rename within one file system.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from streamshard.errors import Option, TargetError, TargetExistsError, UsageError
from streamshard.formats.deepspeed import names
from streamshard.io.changes import make_directory, remove, rename, sync_path
from streamshard.io.entries import (
    examine,
    is_directory,
    is_link,
    is_real_directory,
    lexists,
    paths_in,
)
from streamshard.io.files import target_errors

_TRASH: Final = f"{names.OWN_PREFIX}.trash"
_GOING: Final = f"{names.OWN_PREFIX}.going"


@dataclass(frozen=True, slots=True)
class Trash:
    """The tags of a run directory that were moved into its trash."""

    run_dir: Path

    @property
    def _directory(self) -> Path:
        return self.run_dir / _TRASH

    @property
    def _going(self) -> Path:
        return self._directory / _GOING

    def tags(self) -> list[str]:
        """List the tags that can be brought back."""
        return self._names(self._directory)

    def being_removed(self) -> list[str]:
        """List the tags of which a part may be removed already."""
        return self._names(self._going)

    def all_tags(self) -> set[str]:
        return {*self.tags(), *self.being_removed()}

    def _names(self, directory: Path) -> list[str]:
        with target_errors(directory):
            self._require_own(directory)
            try:
                found = list(paths_in(directory))
            except FileNotFoundError:
                return []
            there = [path for path in found if not path.name.startswith(names.OWN_PREFIX)]
            return sorted(names.unflat(path.name) for path in there if is_directory(path))

    def path_of(self, tag: str) -> Path:
        """Return the path of a tag in the trash, whether it is there or not."""
        return self._directory / names.flat(tag)

    def rest_of(self, tag: str) -> Path:
        """Return the path of the rest of a tag while it is removed for good."""
        return self._going / names.flat(tag)

    def move_in(self, tag: str) -> None:
        """Move a tag into the trash; after this, `make_durable`."""
        source, target = self.run_dir / tag, self.path_of(tag)
        with target_errors(target):
            self._make(self._directory)
            if lexists(target):
                message = f"{target}: another save of this tag is in the trash; {Option('purge')}"
                raise TargetExistsError(f"{message} or {Option('undelete')} that one first")
            if examine(source).device != examine(self._directory).device:
                message = f"{self._directory}: on another file system than {source}"
                raise TargetError(f"{message}, so that a tag could not be moved there at once")
            rename(source, target)

    def make_durable(self, tag: str) -> None:
        """Make durable that a tag is in the trash, and no longer in its place."""
        for path in (self.path_of(tag), self.run_dir / tag):
            with target_errors(path):
                sync_path(path.parent)

    def move_out(self, tag: str) -> None:
        self.require(tag)
        source, target = self.path_of(tag), self.run_dir / tag
        with target_errors(target):
            if lexists(target):
                raise TargetExistsError(f"{target}: exists; move it away to bring {tag} back")
            make_directory(target.parent, parents=True, exist_ok=True)  # for a tag that is a path
            self._move(source, target)

    def mark_for_removal(self, tag: str) -> None:
        with target_errors(self.rest_of(tag)):
            self._make(self._going)
            if tag not in self.being_removed():
                self.require(tag)
                self._move(self.path_of(tag), self.rest_of(tag))

    def remove(self, tag: str) -> None:
        with target_errors(self.rest_of(tag)):
            remove(self.rest_of(tag))
            sync_path(self._going)
        self.tidy()

    def tidy(self) -> None:
        """Remove the part of the trash that was being emptied, if nothing is left in it."""
        with target_errors(self._going):
            is_own = is_real_directory(self._directory) and is_real_directory(self._going)
            if is_own and next(paths_in(self._going), None) is None:
                remove(self._going)
                sync_path(self._directory)

    def require(self, tag: str) -> None:
        if tag in self.being_removed():
            raise UsageError(f"{self.rest_of(tag)}: was to be removed for good; some may be gone")
        if not names.is_tag(tag) or tag not in self.tags():
            held = ", ".join(self.tags()) or "nothing"
            raise UsageError(f"{self.run_dir}: no tag {tag} in its trash, which holds {held}")

    def _make(self, directory: Path) -> None:
        self._require_own(directory)
        make_directory(directory, exist_ok=True)
        sync_path(directory.parent)

    def _require_own(self, directory: Path) -> None:
        for path in (self._directory, directory):
            if is_link(path):
                raise TargetError(f"{path}: a symbolic link, where tags are moved to; remove it")

    def _move(self, source: Path, target: Path) -> None:
        rename(source, target)
        for path in (target.parent, source.parent):
            sync_path(path)
