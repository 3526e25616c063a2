"""Lists every name that a checkpoint's pickles import, and loads none."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from streamshard.engine.run.source_reader import SourceReader
from streamshard.errors import IntegrityError, SourceError, SourceNotFoundError
from streamshard.formats.deepspeed import names
from streamshard.formats.deepspeed.dumps import dump_names
from streamshard.formats.pickle.dangerous import is_dangerous
from streamshard.formats.pickle.inert import Global
from streamshard.formats.pickle_files import KNOWN, Finding, look_into, look_into_state
from streamshard.formats.zarr.chunks import CHECKSUM_BYTES, require_checksum
from streamshard.formats.zarr.documents import STATE_PATH
from streamshard.formats.zarr.packed_place import packed
from streamshard.formats.zarr.store_index import is_hierarchy
from streamshard.io.entries import (
    exists,
    files_below,
    is_directory,
    is_file,
    open_readable,
    paths_in,
    read_all,
    resolve,
)
from streamshard.io.files import source_errors, stays_inside
from streamshard.io.object_path import as_path
from streamshard.model import FILE
from streamshard.operations.source.source import open_source
from streamshard.operations.source.stored_file import StoredFile
from streamshard.operations.source.tag_directory import find_tag
from streamshard.options import SourceOptions


@dataclass(frozen=True, slots=True)
class PickledFile:
    """A file with pickles in it."""

    path: str
    """Relative to the source."""
    pickles: int
    names: Mapping[str, int]
    """Name that the pickles import → how often."""
    problem: str | None
    """Why the file was not searched to its end."""


@dataclass(frozen=True, slots=True)
class NamedGlobal:
    """A name that pickles import."""

    name: str
    """Module and qualified name."""
    is_known: bool
    """Whether it is one of the names that DeepSpeed, torch, NumPy and collections write."""
    count: int
    files: tuple[str, ...]
    is_dangerous: bool = False
    """Whether it runs what its arguments say, such as `os.system`."""


@dataclass(frozen=True, slots=True)
class PickleListing:
    """The names that all pickles of a checkpoint import."""

    path: str
    names: tuple[NamedGlobal, ...]
    """Dangerous names come first, then unknown ones."""
    files: tuple[PickledFile, ...]
    notes: tuple[str, ...]

    @property
    def problems(self) -> tuple[PickledFile, ...]:
        """Files that were not searched to their end."""
        return tuple(file for file in self.files if file.problem is not None)

    @property
    def dangers(self) -> tuple[NamedGlobal, ...]:
        """Names that run what their arguments say."""
        return tuple(name for name in self.names if name.is_dangerous)


def list_pickles(source: str | os.PathLike[str], *, tag: str | None = None) -> PickleListing:
    """List the names in all pickles of a checkpoint, of a store, of dumps, or of a single file.

    Nothing is imported or called. The checkpoint may be one that no other verb accepts.

    Raises
    ------
    SourceNotFoundError
        There is nothing at the path, or nothing with a pickle in it.
    """
    with source_errors(as_path(source)):
        return _list(as_path(source), tag)


def _list(root: Path, tag: str | None) -> PickleListing:
    notes: list[str] = []
    if is_hierarchy(root):
        found = _in_store(packed(root), tag)
    else:
        found = _in_files(root, _files(root, tag, notes))
    files: list[PickledFile] = []
    counts: Counter[Global] = Counter()
    where: dict[Global, list[str]] = {}
    for path, finding in found:
        named: Counter[str] = Counter()
        for name, count in finding.names.items():
            named[str(name)] += count
            counts[name] += count
            where.setdefault(name, []).append(path)
        files.append(PickledFile(path, finding.pickles, dict(named), finding.problem))
    if not files:
        message = f"{root}: nothing in it holds a pickle. Give a run directory, a tag directory"
        raise SourceNotFoundError(f"{message}, a .zarr store, a template or a single file")
    listed = [
        NamedGlobal(str(name), name in KNOWN, counts[name], tuple(where[name]), is_dangerous(name))
        for name in counts
    ]
    listed.sort(key=lambda one: (not one.is_dangerous, one.is_known, one.name))
    return PickleListing(str(root), tuple(listed), tuple(files), tuple(notes))


def _files(root: Path, tag: str | None, notes: list[str]) -> list[Path]:
    """List the files of a checkpoint; or all files, if its tag cannot be chosen."""
    if dump_names.is_source_template(str(root)):
        template = dump_names.parse_source(str(root))
        entries = sorted(paths_in(template.directory))
        found = [path for path in entries if template.rank_of(path.name) is not None]
        if not found:
            message = f"{root}: no file of this name for any rank"
            raise SourceNotFoundError(f"{message}{dump_names.hint_of_templates(root)}")
        return found
    if not exists(root):
        raise SourceNotFoundError(f"{root}: no such file or directory")
    if not is_directory(root):
        return [root]
    try:
        run_dir, tag_dir = find_tag(root, tag)
    except SourceError as error:
        notes.append(f"All files of the directory are listed, as no tag could be chosen: {error}")
        return _below(root)
    if run_dir != root:
        return _below(tag_dir)
    found = _below(run_dir)
    tags = {path.parent for path in found if names.parse(path.name)}
    return [*_below(tag_dir), *(path for path in found if tags.isdisjoint(path.parents))]


def _below(root: Path) -> list[Path]:
    """List all files below a directory; links to directories are listed, not followed."""
    return sorted(files_below(root))


def _in_files(root: Path, paths: list[Path]) -> Iterator[tuple[str, Finding]]:
    """Search files on disk."""
    base = root if is_directory(root) else root.parent
    for path in paths:
        finding = _in_file(path, base, given=path == root)
        if finding is not None:
            yield path.relative_to(base).as_posix(), finding


def _in_file(path: Path, base: Path, *, given: bool) -> Finding | None:
    """Search one file; a link is followed if it stays inside, or if the user gave it."""
    try:
        if not given and not stays_inside(path, base):
            return Finding(0, {}, f"a symbolic link that leads out, to {resolve(path)}")
        if is_directory(path):
            return None  # a link to a directory whose files are listed themselves
        if not is_file(path):
            return Finding(0, {}, "not a regular file")
        with open_readable(path) as file:
            return look_into(file, path.name)
    except OSError as error:
        return Finding(0, {}, f"cannot be read ({error.strerror})")


def _in_store(root: Path, tag: str | None) -> Iterator[tuple[str, Finding]]:
    """Search a store's training state, and the files that the store keeps."""
    state = f"{STATE_PATH}/c/0"
    yield state, _in_state(root / state, root)
    try:
        source = open_source(root, SourceOptions(tag=tag))
    except (SourceError, IntegrityError) as error:
        yield FILE, Finding(0, {}, f"the files that the store keeps are not listed: {error}")
        return
    reader = SourceReader(source.files)
    try:
        for index, tensor in enumerate(source.checkpoint.tensors):
            if tensor.state == FILE:
                stored = StoredFile(source, reader, index)
                try:
                    found = look_into(stored, tensor.name)
                except (SourceError, IntegrityError) as error:
                    found = Finding(0, {}, str(error))
                if found is not None:
                    yield tensor.name, found
    finally:
        reader.close()


def _in_state(path: Path, root: Path) -> Finding:
    """Search a store's training state, even if its checksum is wrong."""
    try:
        place = resolve(path)
        if not place.is_relative_to(resolve(root)):
            return Finding(0, {}, f"a symbolic link leads out, to {place}")
        if not is_file(path):
            return Finding(0, {}, "not a regular file")
        stored = read_all(path)
    except OSError as error:
        return Finding(0, {}, f"cannot be read ({error.strerror})")
    found = look_into_state(stored[:-CHECKSUM_BYTES])
    try:
        require_checksum(stored, path)
    except IntegrityError as error:
        return Finding(found.pickles, found.names, str(error))
    return found
