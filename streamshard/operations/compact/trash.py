"""The trash of a run directory, which holds tags until their grace time is over.

At any moment a tag is in one place: next to the other tags, in the trash, or in the part of the
trash that is being emptied. Each move is one rename within one file system.

In a bucket nothing can be renamed, and a copy of a tag would have to be proved as its archive is.
So there a tag in the trash stays where it is, whole, for as long as its grace time lasts; an object
of its name in the trash marks it, and `compact` counts it as gone. After that another mark says
that it is being removed, and only then an object of it is: first the model's file that every job
opens, so that nobody takes the rest for a checkpoint. The next run finishes what a killed one
began. A job may save a tag of that name again, at the same place; so nothing is removed that is not
the very object that was archived.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from streamshard.commands import command
from streamshard.errors import CorruptFileError, Option, TargetError, TargetExistsError, UsageError
from streamshard.formats.deepspeed import names
from streamshard.io.changes import make_directory, remove, remove_file, rename, sync_path, write_new
from streamshard.io.entries import examine, exists, is_link, lexists, listed_below, paths_in
from streamshard.io.files import target_errors
from streamshard.io.object_path import is_object
from streamshard.io.objects.buckets import for_each
from streamshard.io.readable import Status
from streamshard.operations.compact.receipts import SourceRecord

_TRASH: Final = f"{names.OWN_PREFIX}.trash"
_GOING: Final = f"{names.OWN_PREFIX}.going"
_MARK: Final = (
    f"{command('compact', undelete=True)} brings this tag back, unless it is in .going\n".encode()
)
"""What marks hold, for whoever looks into one; compact goes by their names."""


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

    def hidden(self) -> set[str]:
        """Name the tags in the trash whose files are next to the other tags nevertheless."""
        return set()

    def tags(self) -> list[str]:
        """List the tags that can be brought back."""
        return self._names(self._directory)

    def being_removed(self) -> list[str]:
        """List the tags of which a part may be removed already."""
        return self._names(self._going)

    def all_tags(self) -> set[str]:
        """Name both: the tags that can be brought back, and those that are being removed."""
        return {*self.tags(), *self.being_removed()}

    def _names(self, directory: Path) -> list[str]:
        with target_errors(directory):
            self._require_own(directory)
            try:
                found = list(paths_in(directory))
            except FileNotFoundError:
                return []
            kept = (path.name for path in found if not path.name.startswith(names.OWN_PREFIX))
            return sorted(map(names.unflat, kept))

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
        """Move a tag out of the trash."""
        self.require(tag)
        source, target = self.path_of(tag), self.run_dir / tag
        with target_errors(target):
            if lexists(target):
                raise TargetExistsError(f"{target}: exists; move it away to bring {tag} back")
            make_directory(target.parent, parents=True, exist_ok=True)  # for a tag that is a path
            self._move(source, target)

    def mark_for_removal(self, tag: str) -> None:
        """Move a tag to the part of the trash that is being emptied."""
        with target_errors(self.rest_of(tag)):
            self._make(self._going)
            if tag not in self.being_removed():
                self.require(tag)
                self._move(self.path_of(tag), self.rest_of(tag))

    def remove(self, tag: str, records: Mapping[str, SourceRecord]) -> None:
        """Remove a marked tag for good; in a bucket only the objects of the archived `records`."""
        with target_errors(self.rest_of(tag)):
            remove(self.rest_of(tag))
            sync_path(self._going)

    def require(self, tag: str) -> None:
        """Require that a tag is in the trash, and that no part of it is removed."""
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
            if not is_object(path) and is_link(path):
                raise TargetError(f"{path}: a symbolic link, where tags are moved to; remove it")

    def _move(self, source: Path, target: Path) -> None:
        rename(source, target)
        for path in (target.parent, source.parent):
            sync_path(path)


class BucketTrash(Trash):
    """The tags of a run directory in a bucket that are marked for removal; see the module."""

    def hidden(self) -> set[str]:
        """Name all of them: they are where they were."""
        return self.all_tags()

    def path_of(self, tag: str) -> Path:
        return self.run_dir / tag

    def rest_of(self, tag: str) -> Path:
        return self.run_dir / tag

    def _mark(self, tag: str) -> Path:
        return self._directory / names.flat(tag)

    def _last_mark(self, tag: str) -> Path:
        return self._going / names.flat(tag)

    def move_in(self, tag: str) -> None:
        with target_errors(self._mark(tag)):
            write_new(self._mark(tag), _MARK)

    def move_out(self, tag: str) -> None:
        self.require(tag)
        with target_errors(self._mark(tag)):
            remove_file(self._mark(tag))

    def mark_for_removal(self, tag: str) -> None:
        with target_errors(self._last_mark(tag)):
            if tag not in self.being_removed():
                self.require(tag)
                write_new(self._last_mark(tag), _MARK)
            remove_file(self._mark(tag))

    def remove(self, tag: str, records: Mapping[str, SourceRecord]) -> None:
        """Remove the objects of a marked tag for good, then its mark."""
        root = self.run_dir / tag
        known = {root / name: record for name, record in records.items()}

        def require_known(path: Path, status: Status) -> None:
            other = known[path].difference(status) if path in known else "was not archived"
            if other:
                message = f"{path}: {other}: is it of another save of {tag}? Nothing of it is"
                raise CorruptFileError(f"{message} removed; to keep it, remove {last_mark}")

        def remove_known(path: Path) -> None:
            with suppress(FileNotFoundError):  # a run that was killed removed it
                require_known(path, examine(path))
                remove_file(path)

        last_mark = self._last_mark(tag)
        with target_errors(root):
            listed = listed_below(root) if exists(root) else []
            for entry in listed:
                if not entry.is_directory:
                    require_known(entry.path, entry.status())
            # Not what is listed, as a service may list late.
            first, *others = sorted(known, key=_order)
            remove_known(first)
            for_each(others, remove_known)
            remove_file(last_mark)


def _order(path: Path) -> tuple[bool, str]:
    """Order the objects of a tag: the model's file that every job opens comes first."""
    file = names.parse(path.name)
    return file is None or file.kind != "model", path.name


def trash_of(run_dir: Path) -> Trash:
    """Return the trash of a run directory, local or in a bucket."""
    return BucketTrash(run_dir) if is_object(run_dir) else Trash(run_dir)
