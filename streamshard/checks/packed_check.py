"""Checks what the file of a packed store holds next to the store's files.

That is headers, padding and descriptors: zip readers differ in which of these they go by.
"""

from collections.abc import Iterator
from pathlib import Path

from streamshard.checks.problems import DAMAGED, Findings
from streamshard.errors import SourceError
from streamshard.formats.torch.zip_directory import ZipEntry
from streamshard.formats.zarr.packed_directory import OURS, PackedDirectory, PackedEntry
from streamshard.formats.zarr.packed_place import directory_of, is_packed
from streamshard.io.entries import open_readable
from streamshard.io.readable import OpenedFile


def has_directory(root: Path, findings: Findings) -> bool:
    """Tell whether the files of a store can be found; if not, the reason is added."""
    try:
        if is_packed(root):
            directory_of(root)
    except SourceError as error:
        findings.add_error(error, root)
        return False
    return True


def check_packed(root: Path, findings: Findings) -> None:
    """Compare what the zip of a packed store says of each file with what is around the file."""
    if is_packed(root):
        for entry, problem in audit(directory_of(root)):
            if problem:
                place = root / entry.name.decode()
                findings.add(DAMAGED, place, f"{place}: {problem}")


def audit(directory: PackedDirectory) -> Iterator[tuple[ZipEntry, str]]:
    """Yield each file's entry, and what is wrong around it: empty if nothing is."""
    rows = range(directory.count)
    ends = {directory.entry_of(row)[0].unrepeated for row in (*rows[:1], *rows[-1:])}
    with open_readable(directory.archive) as file:
        for row in rows:
            yield directory.entry_of(row)[0], _problem(directory, row, file, is_ours=OURS in ends)


def _problem(directory: PackedDirectory, row: int, file: OpenedFile, *, is_ours: bool) -> str:
    if is_ours:
        is_so = _is_as_written(directory, *directory.entry_of(row), file)
        return "" if is_so else "what the zip holds around it is not as it was written"
    try:
        directory.header_of(row, file)
    except SourceError as error:
        return str(error.args[0])
    return ""


def _is_as_written(
    directory: PackedDirectory, entry: ZipEntry, stop: int, file: OpenedFile
) -> bool:
    """Tell whether a file has the bytes around it that we write, which end at `stop`."""
    expected = PackedEntry(entry.name.decode(), entry.header, entry.nbytes)
    end = expected.content + expected.nbytes
    return (
        expected.end == stop
        and directory.serialized(entry) == expected.central(entry.crc32)
        and file.read_at(expected.start, expected.content - expected.start) == expected.header()
        and file.read_at(end, stop - end) == expected.descriptor(entry.crc32)
    )
