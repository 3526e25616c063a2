"""Checks the files of a tag before it may be removed: all are known, and all are unchanged."""

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from streamshard.errors import CorruptFileError, IncompleteError, UnsupportedError
from streamshard.formats.deepspeed.read.redundant_copies import UNLIKE
from streamshard.io.entries import examine, files_below
from streamshard.io.files import source_errors
from streamshard.operations.compact.archive.proof import Means
from streamshard.operations.compact.archive.receipts import Receipt, SourceRecord
from streamshard.operations.source.source import Source

_TIME: Final = "time of change"


def accounted_for(source: Source) -> str:
    """Require that every file in a tag directory belongs to the opened source.

    Raises
    ------
    UnsupportedError
        A file does not belong to it, so an archive would lack that file.
    """
    tag = source.checkpoint.tag
    known = {file.path for file in source.files}
    known |= {source.path / file.path for file in source.checkpoint.files}
    count = 0
    with source_errors(source.path / tag):
        for path in files_below(source.path / tag):
            count += 1
            if not examine(path, follows=False).is_file or path not in known:
                raise UnsupportedError(f"{path}: would not be in an archive; move it away")
    return f"{count:,} files"


def ranks_agree(source: Source) -> str:
    """Require that nothing in a checkpoint's files is known to be left out by reading.

    Raises
    ------
    UnsupportedError
        Ranks or copies differ, or a file holds records that are not read: an archive would lack
        something.
    """
    for note in source.checkpoint.notes:
        if note.startswith(UNLIKE):
            raise UnsupportedError(f"{source.path / source.checkpoint.tag}: {note}")
    return ""


def records_of(source: Source, run_dir: Path) -> tuple[SourceRecord, ...]:
    """Record path, size, time of change, inode and device of a source's files.

    Raises
    ------
    SourceError
        A file cannot be read any more.
    """
    found = []
    for file in source.files:
        with source_errors(file.path):
            stat = examine(file.path)
        looks = stat.nbytes, stat.modified_ns, stat.file_id, stat.device
        found.append(SourceRecord(os.path.relpath(file.path, run_dir), *looks))
    return tuple(found)


def unchanged(receipt: Receipt, root: Path, means: Means | None) -> str:
    """Require that a tag's files are those that were archived.

    Parameters
    ----------
    root
        The present path of the tag directory.
    means
        Means to compare the files' SHA-256 too; without them, only size, time and inode.

    Raises
    ------
    CorruptFileError
        A file's size, time, inode, device or content has changed.
    IncompleteError
        A file is missing, or was not archived.
    """
    records = receipt.below_tag()
    with source_errors(root):
        paths = {path.relative_to(root).as_posix(): path for path in files_below(root)}
        for name in sorted(paths.keys() ^ records.keys()):
            there = "was archived, and is not there" if name in records else "was not archived"
            raise IncompleteError(f"{root / name}: {there}")
        for name, path in paths.items():
            _require_as_recorded(path, records[name])
        digests = means.hash_all(list(paths.values())) if means else []
    for name, digest in zip(paths, digests, strict=bool(means)):
        if digest != records[name].sha256:
            raise CorruptFileError(f"{paths[name]}: its bytes are not those that were archived")
    return f"{len(paths):,} files"


def _require_as_recorded(path: Path, record: SourceRecord) -> None:
    stat = examine(path, follows=False)
    found = stat.nbytes, stat.modified_ns, stat.file_id, stat.device
    known = record.nbytes, record.mtime_ns, record.inode, record.device
    words = "size", _TIME, "inode", "device"
    for word, now, then in zip(words, found, known, strict=True):
        if now != then:
            shown = [_moment(value) if word == _TIME else str(value) for value in (now, then)]
            raise CorruptFileError(f"{path}: has {word} {shown[0]}, was archived with {shown[1]}")


def _moment(epoch_ns: int) -> str:
    """Format the time of a file for a message."""
    try:
        moment = datetime.fromtimestamp(epoch_ns // 10**9, UTC)
    except (OSError, OverflowError, ValueError):  # some file systems keep any number
        return f"{epoch_ns} ns"
    return f"{moment:%Y-%m-%d %H:%M:%S}.{epoch_ns % 10**9:09d} UTC"
