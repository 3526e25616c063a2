"""Tells whether a save went on to its end: frameworks write files after DeepSpeed has done so."""

import json
from pathlib import Path
from typing import Final

from streamshard.errors import CorruptFileError, IncompleteError
from streamshard.formats import frameworks
from streamshard.formats.deepspeed import names
from streamshard.io.entries import examine, is_file, paths_in, read_document
from streamshard.io.files import source_errors
from streamshard.source.source import Source

_MOST_BYTES: Final = 256 << 20
"""More bytes than the state of HF Trainer has, with an entry for each step that it logs."""


def require_named(directory: Path) -> None:
    """Refuse a framework's checkpoint without `latest`: its save is not known to be whole."""
    latest = directory / names.LATEST
    if not is_file(latest):
        message = f"{latest}: not there, so load_checkpoint() finds no tag unless it is given one"
        why = "DeepSpeed writes it last, so the save may have been cut off"
        raise IncompleteError(f"{message}; {why}")


def require_saved_to_end(opened: Source) -> None:
    """Refuse a framework's checkpoint that lacks what the framework writes last."""
    if not opened.kind.is_tag:
        return
    directory, checkpoint = opened.path, opened.checkpoint
    with source_errors(directory):
        file_names = [path.name for path in paths_in(directory) if is_file(path)]
        last = frameworks.written_last(directory.name, checkpoint.tag, file_names, checkpoint.ranks)
        for name in last:
            if name not in file_names:
                message = "not there, and it is written last, so the save was cut off"
                raise IncompleteError(message, path=directory / name)
        for name in (*last, *filter(frameworks.is_of_rank, file_names)):
            _require_content(directory / name)


def _require_content(path: Path) -> None:
    """Refuse a file that a save has only begun; torch's files are checked by their containers."""
    if path.name != frameworks.TRAINER_STATE:
        if not examine(path).nbytes:
            raise IncompleteError("empty, as a save that was killed leaves it", path=path)
        return
    try:
        # Not the strict parser: losses may be NaN, which Trainer writes as such.
        json.loads(read_document(path, _MOST_BYTES))
    except (RecursionError, ValueError) as error:
        message = f"not whole ({error!r:.80}), and it is written last, so the save was cut off"
        raise CorruptFileError(message, path=path) from error
