"""The trash of a run directory, which holds tags until their grace time is over.

At any moment a tag is in one place: beside the other tags, in the trash, or in the part of the
trash that is being emptied. Each move is one rename within one file system.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from streamshard.errors import TargetError, TargetExistsError, UsageError
from streamshard.formats.deepspeed import names
from streamshard.io.durability import sync_path
from streamshard.io.entries import examine, exists, is_link, lexists, paths_in
from streamshard.io.files import target_errors
from streamshard.io.sink import make_directory, remove, rename

_TRASH: Final = f"{names.OWN_PREFIX}.trash"
_GOING: Final = f"{names.OWN_PREFIX}.going"


@dataclass(frozen=True, slots=True)
class Trash:
    """The tags of a run directory that were moved into its trash."""

    run_dir: Path

    @property
    def _place(self) -> Path:
        return self.run_dir / _TRASH

    @property
    def _going(self) -> Path:
        return self._place / _GOING

    def tags(self) -> list[str]:
        """List the tags that can be brought back."""
        return self._names(self._place)

    def going(self) -> list[str]:
        """List the tags of which a part may be removed already."""
        return self._names(self._going)

    def _names(self, place: Path) -> list[str]:
        with target_errors(place):
            self._require_own(place)
            found = paths_in(place) if exists(place) else iter(())
            kept = (path.name for path in found if not path.name.startswith(names.OWN_PREFIX))
            return sorted(map(names.unflat, kept))

    def place_of(self, tag: str) -> Path:
        """Return the path of a tag in the trash, whether it is there or not."""
        return self._place / names.flat(tag)

    def rest_of(self, tag: str) -> Path:
        """Return the path of the rest of a tag while it is removed for good."""
        return self._going / names.flat(tag)

    def take(self, tag: str) -> None:
        """Move a tag into the trash, durably.

        Raises
        ------
        TargetError
            The tag cannot be moved; then it is where it was.
        """
        source, target = self.run_dir / tag, self.place_of(tag)
        with target_errors(target):
            self._make(self._place)
            if lexists(target):
                message = f"{target}: another save of this tag is in the trash"
                raise TargetExistsError(f"{message}; --purge or --undelete that one first")
            if examine(source).device != examine(self._place).device:
                message = f"{self._place}: on another file system than {source}"
                raise TargetError(f"{message}, so that a tag could not be moved there at once")
            self._move(source, target)

    def bring_back(self, tag: str) -> None:
        """Move a tag out of the trash.

        Raises
        ------
        UsageError
            The tag is not in the trash.
        TargetExistsError
            Something of its name is in the run directory.
        """
        self.require(tag)
        source, target = self.place_of(tag), self.run_dir / tag
        with target_errors(target):
            if lexists(target):
                raise TargetExistsError(f"{target}: exists; move it away to bring {tag} back")
            make_directory(target.parent, parents=True, exist_ok=True)  # for a tag that is a path
            self._move(source, target)

    def condemn(self, tag: str) -> Path:
        """Move a tag to the part of the trash that is being emptied; return its path there."""
        with target_errors(self.rest_of(tag)):
            self._make(self._going)
            if tag not in self.going():
                self.require(tag)
                self._move(self.place_of(tag), self.rest_of(tag))
        return self.rest_of(tag)

    def empty(self, tag: str) -> None:
        """Remove a condemned tag for good.

        Raises
        ------
        TargetError
            A file of the tag cannot be removed.
        """
        with target_errors(self.rest_of(tag)):
            remove(self.rest_of(tag))
            sync_path(self._going)

    def require(self, tag: str) -> None:
        """Require that a tag is in the trash, and that no part of it is removed.

        Raises
        ------
        UsageError
            The tag is not in the trash, or a part of it may be removed.
        """
        if tag in self.going():
            raise UsageError(f"{self.rest_of(tag)}: was to be removed for good; some may be gone")
        if not names.is_tag(tag) or tag not in self.tags():
            held = ", ".join(self.tags()) or "nothing"
            raise UsageError(f"{self.run_dir}: no tag {tag} in its trash, which holds {held}")

    def _make(self, place: Path) -> None:
        self._require_own(place)
        make_directory(place, exist_ok=True)
        sync_path(place.parent)

    def _require_own(self, place: Path) -> None:
        for path in (self._place, place):
            if is_link(path):
                raise TargetError(f"{path}: a symbolic link, where tags are moved to; remove it")

    def _move(self, source: Path, target: Path) -> None:
        rename(source, target)
        for path in (target.parent, source.parent):
            sync_path(path)
