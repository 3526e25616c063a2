"""Sums up many files in few lines: those of all ranks, those of all chunks."""

import os
import re
from collections.abc import Sequence
from typing import Final

from streamshard.model import MODULE
from streamshard.operations.inspection import FileGroup, FileSummary
from streamshard.operations.source import Source

_NUMBERS: Final = re.compile(r"(\d+)")


def list_files(source: Source) -> tuple[FileSummary, ...]:
    """List the files of a source with paths relative to it, in their natural order."""
    found = [FileSummary(relative(source, n), f.nbytes) for n, f in enumerate(source.files)]
    return tuple(sorted(found, key=lambda file: natural_order(file.path)))


def relative(source: Source, number: int) -> str:
    """Spell where a file is, from the source's own place."""
    return os.path.relpath(source.files[number].path, source.path)


def group_files(files: Sequence[FileSummary], *, is_store: bool) -> tuple[FileGroup, ...]:
    """Put together files that differ in numbers only; of a store, those of one state."""
    members: dict[str, list[FileSummary]] = {}
    for file in files:
        key = _directory(file.path) if is_store else _NUMBERS.sub("*", file.path)
        members.setdefault(key, []).append(file)
    return tuple(
        FileGroup(
            pattern=f"{key}/**" if is_store else _common([file.path for file in held]),
            files=len(held),
            nbytes=sum(file.nbytes for file in held),
            smallest=min(file.nbytes for file in held),
            largest=max(file.nbytes for file in held),
        )
        for key, held in members.items()
    )


def _directory(path: str) -> str:
    """Name the directory of a store that holds all arrays of one state.

    >>> _directory("state/fp32/a.weight/c/0"), _directory("mp_rank_01/module/a.weight/c/0")
    ('state/fp32', 'mp_rank_01/module')
    """
    parts = path.split("/")
    depth = 1 + parts[0].startswith("mp_rank_")
    return "/".join(parts[: depth + (parts[depth - 1] not in (MODULE, "blob", "file", "meta"))])


def _common(paths: Sequence[str]) -> str:
    """Spell paths that differ in numbers only as one, with `*` where they do.

    >>> _common(["a_0_mp_00.pt", "a_1_mp_00.pt"])
    'a_*_mp_00.pt'
    """
    columns = zip(*(_NUMBERS.split(path) for path in paths), strict=True)
    return "".join(column[0] if len(set(column)) == 1 else "*" for column in columns)


def natural_order(path: str) -> list[tuple[int, str]]:
    """Order rank 10 after rank 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in _NUMBERS.split(path)]
