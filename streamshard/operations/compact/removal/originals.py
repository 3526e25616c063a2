"""Checks the files of a tag before it may be removed: all are known, and all are unchanged."""

import os
from pathlib import Path

from streamshard.errors import CorruptFileError, IncompleteError, UnsupportedError
from streamshard.io.entries import examine, listed_below
from streamshard.io.files import source_errors
from streamshard.model import NoteKind
from streamshard.operations.compact.archive.proof import Means
from streamshard.operations.compact.archive.receipts import Receipt, SourceRecord
from streamshard.operations.source.source import Source


def accounted_for(source: Source, root: Path) -> str:
    """Require that every file in a directory that may go belongs to the opened source."""
    known = {file.path for file in source.files}
    known |= {source.path / file.path for file in source.checkpoint.files}
    count = 0
    with source_errors(root):
        for entry in listed_below(root):
            if entry.is_directory:
                continue
            count += 1
            if not entry.status().is_file or entry.path not in known:
                raise UnsupportedError(f"{entry.path}: would not be in an archive; move it away")
    return f"{count:,} files"


def ranks_agree(source: Source) -> str:
    """Require that nothing in a checkpoint's files is known to be left out by reading."""
    for note in source.checkpoint.notes:
        if note.kind is NoteKind.LEFT_OUT:
            raise UnsupportedError(f"{source.path / source.checkpoint.tag}: {note.text}")
    return ""


def records_of(source: Source, run_dir: Path) -> tuple[SourceRecord, ...]:
    """Record path, size, time of change, inode, device or etag of a source's files."""
    found = []
    for file in source.files:
        with source_errors(file.path):
            status = examine(file.path)
        found.append(SourceRecord.of(os.path.relpath(file.path, run_dir), status))
    return tuple(found)


def unchanged(receipt: Receipt, root: Path, means: Means | None) -> str:
    """Require that a tag's files are those that were archived.

    Parameters
    ----------
    root
        The present path of the tag directory.
    means
        Means to compare the files' SHA-256 too; without them, only size, time, and inode or etag.
    """
    records = receipt.below_tag()
    with source_errors(root):
        files = [entry for entry in listed_below(root) if not entry.is_directory]
        found = {entry.path.relative_to(root).as_posix(): entry.status() for entry in files}
        for name in sorted(found.keys() ^ records.keys()):
            there = "was archived, and is not there" if name in records else "was not archived"
            raise IncompleteError(f"{root / name}: {there}")
        for name, status in found.items():
            if difference := records[name].difference(status):
                raise CorruptFileError(f"{root / name}: {difference}")
        digests = means.hash_all([root / name for name in found], root) if means else []
    for name, digest in zip(found, digests, strict=bool(means)):
        if digest != records[name].sha256:
            raise CorruptFileError(f"{root / name}: its bytes are not those that were archived")
    return f"{len(found):,} files"
