"""Finds the checkpoints to choose from in a directory that is none itself."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from streamshard import registry
from streamshard.errors import SourceError, command
from streamshard.formats.deepspeed import names
from streamshard.formats.deepspeed.names import step_of
from streamshard.io.entries import is_directory, is_file, paths_in
from streamshard.io.object_path import is_packed_name
from streamshard.sizes import some_of
from streamshard.source.unfinished import is_unfinished

_SUFFIXES: Final = (".zip", ".zarr", ".ckpt")
"""Suffixes of stores, packed or not, and of the directories that Lightning saves."""


def find_candidates(root: Path) -> list[str]:
    """List the relative paths of the checkpoints in a directory, in order of their steps.

    Each path can be opened as a source: a tag directory; a directory with its own `latest`, such as
    HF Trainer's `checkpoint-500`; a store. If a directory has no `latest`, the tag directories in
    it are listed instead.
    """
    paths: list[str] = []
    for entry in paths_in(root):
        try:
            if entry.name.startswith(names.OWN_PREFIX):
                continue
            if is_packed_name(entry) and is_file(entry):
                paths.append(entry.name)  # opening it tells whether it is a store
            elif is_directory(entry):
                paths += _candidates_at(entry)
        except FileNotFoundError:  # removed meanwhile, as by Trainer's save_total_limit
            continue
        except PermissionError:  # opening this checkpoint reports the error
            if step_of_path(entry.name) is not None:
                paths.append(entry.name)
    steps = {path: step_of_path(path) for path in paths}
    return sorted(paths, key=lambda path: (steps[path] is not None, steps[path] or 0, path))


def _candidates_at(entry: Path) -> Iterator[str]:
    """Yield the checkpoint that a directory is, or the checkpoints in it."""
    if is_unfinished(entry) or _is_checkpoint(entry) or is_file(entry / names.LATEST):
        yield entry.name
        return
    inside = [place for place in paths_in(entry) if is_directory(place)]
    yield from (f"{entry.name}/{place.name}" for place in inside if _is_checkpoint(place))


def _is_checkpoint(directory: Path) -> bool:
    return any(reader.holds(directory) for reader in registry.own_readers())


def kind_at(place: Path) -> Any:  # noqa: ANN401
    """Return the kind of a checkpoint in a directory; that of a framework's is DeepSpeed's own."""
    holding = (reader for reader in registry.own_readers() if reader.holds(place))
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


def choose_one(error: SourceError, root: Path) -> SourceError:
    """Add to an error which checkpoints are in a directory that is none itself, newest first."""
    paths = [name for name in find_candidates(root)[::-1] if may_be_finished(root / name)]
    reason = error.args[0]
    if not paths:
        message = f"{reason}. Give the directory that holds 'latest', or a tag directory"
        return type(error)(message, path=error.path)
    if len(paths) == 1:
        return type(error)(f"{reason}. Give the one in it: {root / paths[0]}", path=error.path)
    message = f"{reason}. Give one of the {len(paths):,} checkpoints in it, such as"
    chosen = type(error)(f"{message} {root / paths[0]}: {some_of(paths)}", path=error.path)
    chosen.add_note(f"Which are complete says: {command('inspect', root)}")
    return chosen
