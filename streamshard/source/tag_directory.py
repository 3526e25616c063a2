"""Finds the tag directory of a checkpoint, and the run directory around it."""

from contextlib import suppress
from pathlib import Path
from typing import Final

from streamshard.errors import IncompleteError, SourceError, SourceNotFoundError, UnsupportedError
from streamshard.formats.deepspeed import names
from streamshard.formats.pickle.inert import show
from streamshard.io.entries import exists, is_directory, is_file, list_ahead
from streamshard.io.files import require_inside
from streamshard.source.sidecars import has_shards

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
        raise _of_several(SourceNotFoundError("no such tag directory", path=root / tag), root)
    require_inside(root / tag, root)
    list_ahead(root / tag)
    if not has_shards(root / tag):
        # Not at the top: most tag directories hold shards.
        from streamshard.source.candidates import find_candidates

        if find_candidates(root / tag):
            # A framework's directory around a checkpoint, such as HF Trainer's `checkpoint-500`.
            return find_tag(root / tag, None)
    return root, root / tag


def _of_several(error: SourceError, root: Path) -> SourceError:
    """Add to an error which checkpoints are in a directory that is none itself."""
    from streamshard.source.candidates import choose_one  # not at the top: for refusals

    return choose_one(error, root)


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
        # Not at the top: only refusals need them.
        from streamshard.formats import detect
        from streamshard.source.candidates import find_candidates

        what = None if find_candidates(root) else detect.directory(root)
        if what is not None:
            raise UnsupportedError(f"{what}", path=root)
        message = "no 'latest' file and no shards in it"
        raise _of_several(SourceNotFoundError(message, path=root), root)
    require_inside(latest, root)
    tag = names.read_latest(latest)
    if not tag:
        message = "empty, as a save that was killed leaves it"
        raise _of_several(IncompleteError(message, path=latest), root)
    if not names.is_tag(tag):
        message = f"names {show(tag)}, which is not a name or leads out of the run directory"
        raise _of_several(SourceError(message, path=latest), root)
    if not is_directory(root / tag):
        message = f"names {show(tag)}, which is not there"
        raise _of_several(IncompleteError(message, path=latest), root)
    return tag
