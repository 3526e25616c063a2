"""Finds problems that do not prevent reading a checkpoint, but that the user should look at."""

from collections.abc import Iterator
from pathlib import Path

from streamshard.errors import SourceError
from streamshard.formats.deepspeed import names
from streamshard.formats.deepspeed.names import step_of
from streamshard.formats.deepspeed.read.rank_files import find
from streamshard.io.entries import is_directory, is_file, paths_below, paths_in
from streamshard.io.files import source_errors
from streamshard.operations.source.sidecars import has_shards
from streamshard.operations.source.source import Source, find_tag


def problems_of(source: Source) -> tuple[str, ...]:
    """Check the files around an opened checkpoint; only their names and `latest` are read."""
    with source_errors(source.path):
        return tuple(_problems(source)) if source.kind == "native" else ()


def _problems(source: Source) -> Iterator[str]:
    run_dir, tag = source.path, source.checkpoint.tag
    latest = run_dir / names.LATEST
    if not is_file(latest):
        yield f"{latest}: not there, so load_checkpoint() finds no tag unless it is given one."
    else:
        try:
            find_tag(run_dir, None)
        except SourceError as error:
            yield f"{error}."
    yield from _newer_tags(run_dir, tag)
    for path in sorted(paths_below(run_dir / tag)):
        if path.parent != run_dir / tag and is_file(path) and names.parse(path.name):
            yield f"{path}: looks like a shard, lies in a directory of its own, and is not read."


def _newer_tags(run_dir: Path, tag: str) -> Iterator[str]:
    """Find later saves than this one: a save that was interrupted never became `latest`."""
    step = step_of(tag)
    for entry in sorted(paths_in((run_dir / tag).parent)):
        other = step_of(entry.name)
        if step is None or other is None or other <= step or not is_directory(entry):
            continue
        try:
            if has_shards(entry):
                find(entry)
                later = entry.relative_to(run_dir).as_posix()
                yield f"{entry}: a later step than the one shown here; --tag {later} shows it."
        except SourceError as error:
            yield f"A later save is not whole: {error}."
        except OSError as error:
            yield f"{entry}: perhaps a later step; cannot be read ({error.strerror})."
