"""Finds what a directory holds: the tag directory of a checkpoint, weights, or several of them."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from streamshard import registry
from streamshard.commands import command
from streamshard.errors import IncompleteError, SourceError, SourceNotFoundError, UnsupportedError
from streamshard.formats.deepspeed import names
from streamshard.formats.deepspeed.names import step_of
from streamshard.formats.pickle.inert import show
from streamshard.io.entries import exists, is_directory, is_file, list_ahead, paths_in
from streamshard.io.files import require_inside
from streamshard.io.object_path import is_packed_name
from streamshard.operations.source.sidecars import has_shards
from streamshard.operations.source.unfinished import is_unfinished
from streamshard.sizes import some_of

_SUFFIXES: Final = (".zip", ".zarr", ".ckpt")
"""Suffixes of stores, packed or not, and of the directories that Lightning saves."""


def find_candidates(root: Path) -> list[str]:
    """List the relative paths of the checkpoints in a directory, in order of their steps.

    Each path can be opened as a source: a tag directory; a directory with its own `latest`, such as
    HF Trainer's `checkpoint-500`; a store. If a directory has no `latest`, the tag directories in
    it are listed instead.
    """
    found: list[str] = []
    for entry in paths_in(root):
        try:
            if entry.name.startswith(names.OWN_PREFIX):
                continue
            if is_packed_name(entry) and is_file(entry):
                found.append(entry.name)  # opening it tells whether it is a store
            elif is_directory(entry):
                found += _candidates_at(entry)
        except FileNotFoundError:  # removed meanwhile, as by Trainer's save_total_limit
            continue
        except PermissionError:  # opening this checkpoint reports the error
            if step_of_path(entry.name) is not None:
                found.append(entry.name)
    return sorted(found, key=lambda name: (step_of_path(name) or -1, name))


def _candidates_at(entry: Path) -> Iterator[str]:
    """Yield the checkpoint that a directory is, or the checkpoints in it."""
    if is_unfinished(entry) or _is_checkpoint(entry) or is_file(entry / names.LATEST):
        yield entry.name
        return
    inside = [place for place in paths_in(entry) if is_directory(place)]
    yield from (f"{entry.name}/{place.name}" for place in inside if _is_checkpoint(place))


def _is_checkpoint(directory: Path) -> bool:
    return any(reader.holds(directory) for reader in registry.readers())


def kind_at(place: Path) -> Any:  # noqa: ANN401
    """Return the kind of a checkpoint in a directory; that of a framework's is DeepSpeed's own."""
    holding = (reader for reader in registry.readers() if reader.holds(place))
    return next(holding, None) or registry.reader_of("native")


def step_of_path(path: str) -> int | None:
    """Read the step in the name of a tag, a store or a framework's directory.

    >>> step_of_path("checkpoint-500"), step_of_path("global_step7.zarr"), step_of_path("best")
    (500, 7, None)
    """
    return step_of(without_suffix(path))


def without_suffix(path: str) -> str:
    """Return a name without what tells that it is a store.

    >>> without_suffix("global_step7.zarr.zip")
    'global_step7'
    """
    for suffix in _SUFFIXES:
        path = path.removesuffix(suffix)
    return path


def may_be_finished(place: Path) -> bool:
    """Tell whether a checkpoint can be entered, and no run is writing it."""
    try:
        return not is_unfinished(place)
    except PermissionError:
        return False


def _choose_one(error: SourceError, root: Path) -> SourceError:
    """Add to an error which checkpoints are in a directory that is none itself, newest first."""
    found = [name for name in find_candidates(root)[::-1] if may_be_finished(root / name)]
    said = error.args[0]
    if not found:
        message = f"{said}. Give the directory that holds 'latest', or a tag directory"
        return type(error)(message, path=error.path)
    if len(found) == 1:
        return type(error)(f"{said}. Give the one in it: {root / found[0]}", path=error.path)
    message = f"{said}. Give one of the {len(found):,} checkpoints in it, such as"
    chosen = type(error)(f"{message} {root / found[0]}: {some_of(found)}", path=error.path)
    chosen.add_note(f"Which are complete says: {command('inspect', root)}")
    return chosen


_MOST_DEEP: Final = 4
"""How many directories around a tag directory are searched for its run directory."""


def require_there(root: Path) -> None:
    """Refuse a path where nothing is."""
    if not exists(root):
        raise SourceNotFoundError("no such file or directory", path=root)


def find_tag(root: Path, tag: str | None) -> tuple[Path, Path]:
    """Return the run directory and the tag directory in it."""
    require_there(root)
    if not is_directory(root):
        from streamshard.formats import detect  # not at the top: only refusals need it

        what = detect.file(root)
        if what is not None:
            raise UnsupportedError(f"{what}", path=root)
        message = "a file; give the run directory, the tag directory or a .zarr store"
        raise SourceNotFoundError(message, path=root)
    if tag is None and has_shards(root):
        return run_directory_of(root.absolute()), root.absolute()
    tag = _latest(root) if tag is None else names.tag_of(tag)
    if not names.is_tag(tag):
        raise SourceError(f"tag {show(tag)} is not a path of a directory in it", path=root)
    if not is_directory(root / tag):
        raise _choose_one(SourceNotFoundError("no such tag directory", path=root / tag), root)
    require_inside(root / tag, root)
    list_ahead(root / tag)
    if not has_shards(root / tag) and find_candidates(root / tag):
        # A framework's directory around a checkpoint, such as HF Trainer's `checkpoint-500`.
        return find_tag(root / tag, None)
    return root, root / tag


def run_directory_of(tag_dir: Path) -> Path:
    """Find the run directory of a tag directory: its parent, unless the tag is a path.

    For `epoch/1` it is the directory whose `latest` names a tag of the same depth, as `epoch/2`.
    """
    for place in tag_dir.parents[:_MOST_DEEP]:
        if is_file(place / names.LATEST):
            depth = len(tag_dir.relative_to(place).parts)
            with suppress(SourceError):
                if len(Path(_latest(place)).parts) == depth:
                    return place
            break
    return tag_dir.parent


def _latest(root: Path) -> str:
    latest = root / names.LATEST
    if not is_file(latest):
        from streamshard.formats import detect  # not at the top: only refusals need it

        what = None if find_candidates(root) else detect.directory(root)
        if what is not None:
            raise UnsupportedError(f"{what}", path=root)
        message = "no 'latest' file and no shards in it"
        raise _choose_one(SourceNotFoundError(message, path=root), root)
    require_inside(latest, root)
    tag = names.read_latest(latest)
    if not tag:
        message = "empty, as a save that was killed leaves it"
        raise _choose_one(IncompleteError(message, path=latest), root)
    if not names.is_tag(tag):
        message = f"names {show(tag)}, which is not a name or leads out of the run directory"
        raise _choose_one(SourceError(message, path=latest), root)
    if not is_directory(root / tag):
        message = f"names {show(tag)}, which is not there"
        raise _choose_one(IncompleteError(message, path=latest), root)
    return tag
