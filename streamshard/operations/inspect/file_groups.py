"""Summarizes many files in few lines, such as the files of all ranks, or all chunks."""

import os
import re
from collections.abc import Sequence
from typing import Final

from streamshard.io.files import source_errors
from streamshard.operations.inspect.inspect_report import FileGroup, FileSummary
from streamshard.source.source import Kind, Source

_NUMBERS: Final = re.compile(r"(\d+)")


def list_files(source: Source) -> tuple[FileSummary, ...]:
    """List the files of a source with paths relative to it, in their natural order.

    These are all files that a verb counts when it writes such a checkpoint. They include files
    without tensors: a store's documents, and `latest` of a run directory.
    """
    found = {relative(source, n): f.nbytes for n, f in enumerate(source.files)}
    with source_errors(source.path):
        found |= dict(source.kind.other_files(source))
    return tuple(FileSummary(path, found[path]) for path in sorted(found, key=natural_order))


def relative(source: Source, number: int) -> str:
    path, root = str(source.files[number].path), f"{source.path}/"
    return path.removeprefix(root) if path.startswith(root) else os.path.relpath(path, root)


def group_files(files: Sequence[FileSummary], kind: Kind) -> tuple[FileGroup, ...]:
    """Group files whose paths differ only in numbers, or as their kind wants it."""
    members: dict[str, list[FileSummary]] = {}
    for file in files:
        members.setdefault(kind.pattern_of(file.path), []).append(file)
    return tuple(
        FileGroup(
            pattern=key if kind.is_store else _common([file.path for file in group]),
            files=len(group),
            nbytes=sum(file.nbytes for file in group),
            smallest=min(file.nbytes for file in group),
            largest=max(file.nbytes for file in group),
        )
        for key, group in members.items()
    )


def _common(paths: Sequence[str]) -> str:
    """Return the pattern of paths that differ only in numbers, with `*` for those numbers.

    >>> _common(["a_0_mp_00.pt", "a_1_mp_00.pt"])
    'a_*_mp_00.pt'
    """
    columns = zip(*(_NUMBERS.split(path) for path in paths), strict=True)
    return "".join(column[0] if len(set(column)) == 1 else "*" for column in columns)


def natural_order(path: str) -> list[str | int]:
    """Return a sort key that orders rank 10 after rank 9: text and numbers in turn."""
    parts: list[str | int] = _NUMBERS.split(path)
    parts[1::2] = map(int, parts[1::2])
    return parts
