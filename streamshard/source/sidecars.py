"""Finds the sidecars, which lie next to the tags and are carried along: tokenizer, configs, …"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from streamshard.errors import UnsupportedError
from streamshard.formats import frameworks
from streamshard.formats.deepspeed import names
from streamshard.io.entries import (
    is_directory,
    is_file,
    is_link,
    is_real_directory,
    link_target,
    paths_below,
    paths_in,
    resolve,
)
from streamshard.io.files import stays_inside
from streamshard.sizes import some_of


def find_beside(run_dir: Path, tag: str) -> tuple[list[tuple[Path, str]], list[str]]:
    """List sidecars with their paths relative to the run directory; notes name those left behind.

    Symbolic links are followed only to files within the run directory.
    """
    leftovers: list[Path] = []
    entries = may_come_along(run_dir)
    sidecars = [(path, path.name) for path in _carried(entries, run_dir, leftovers)]
    framework = frameworks.framework_of(tag, [name for _, name in sidecars])
    # A framework's directory holds one checkpoint, so files in its subdirectories belong to it too.
    for directory in sorted(d for d in entries if framework and is_real_directory(d)):
        if has_shards(directory) or directory.name == tag.partition("/")[0]:
            if framework == frameworks.ACCELERATE and directory.name != tag.partition("/")[0]:
                message = "a second model of one Accelerate checkpoint, which is not supported;"
                raise UnsupportedError(f"{message} save each model by itself", path=directory)
            continue
        inside = _carried(paths_below(directory), run_dir, leftovers)
        sidecars += [(path, path.relative_to(run_dir).as_posix()) for path in inside]
    for _, name in sidecars:
        if not name.isprintable():
            message = f"file {name!r} has a name that is not text; rename or move it"
            raise UnsupportedError(message, path=run_dir)
    return sidecars, _notes(leftovers, run_dir)


def may_come_along(run_dir: Path) -> list[Path]:
    """List a run directory, except the files that name tags, and streamshard's own files."""
    skipped = {names.LATEST, names.LATEST_UNIVERSAL}
    return [
        entry
        for entry in paths_in(run_dir)
        if entry.name not in skipped and not entry.name.startswith(names.OWN_PREFIX)
    ]


def has_shards(path: Path) -> bool:
    """Tell whether a directory holds files of ZeRO's."""
    return any(names.parse(entry.name) for entry in paths_in(path))


def _carried(entries: Iterable[Path], run_dir: Path, leftovers: list[Path]) -> list[Path]:
    """Return the files that are carried along; add links that are not carried to `leftovers`."""
    files = []
    for entry in sorted(entries):
        if is_link(entry):
            is_whole = is_file(entry) and stays_inside(entry, run_dir)
            # A link to a shard is not carried: as a file it would be a shard of the old ranks.
            if is_whole and names.parse(resolve(entry).name) is None:
                files.append(entry)
            elif is_whole or not is_directory(entry) or not stays_inside(entry, run_dir):
                leftovers.append(entry)
        elif is_file(entry):
            files.append(entry)
    return files


def _notes(leftovers: Sequence[Path], run_dir: Path) -> list[str]:
    if not leftovers:
        return []
    links = some_of([f"{path.relative_to(run_dir)} to {link_target(path)}" for path in leftovers])
    message = "Symbolic links that are not carried, as they lead out of the run directory, nowhere"
    what = "Put copies of what belongs to the checkpoint in their place."
    return [f"{message} or to a shard: {links}. {what}"]
