"""Summarizes many files in few lines, such as the files of all ranks, or all chunks."""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from streamshard.formats.dcp import dcp_reader
from streamshard.formats.dcp.dcp_names import METADATA
from streamshard.formats.deepspeed import names
from streamshard.formats.zarr.array_paths import ROOT_DOCUMENT
from streamshard.formats.zarr.documents import MANIFEST_PATH, STATE_PATH, group_paths
from streamshard.formats.zarr.store_index import MANIFEST_FILES, STATE_FILES
from streamshard.io.entries import examine, is_listed
from streamshard.io.files import source_errors
from streamshard.io.relative_paths import examiner, names_below
from streamshard.model import MODULE
from streamshard.operations.inspect.inspect_report import FileGroup, FileSummary
from streamshard.operations.source.source import Source

_NUMBERS: Final = re.compile(r"(\d+)")


def list_files(source: Source) -> tuple[FileSummary, ...]:
    """List the files of a source with paths relative to it, in their natural order.

    These are all files that a verb counts when it writes such a checkpoint. They include files
    without tensors: a store's documents, and `latest` of a run directory.
    """
    found = {relative(source, n): f.nbytes for n, f in enumerate(source.files)}
    with source_errors(source.path):
        if source.kind == "store":
            found |= _sizes_in_store(source)
        found |= {
            path.relative_to(source.path).as_posix(): examine(path).nbytes
            for path in _without_tensors(source)
        }
    return tuple(FileSummary(path, found[path]) for path in sorted(found, key=natural_order))


def _without_tensors(source: Source) -> Iterator[Path]:
    if source.kind in ("dcp", "megatron"):
        yield from (place / METADATA for place in dcp_reader.parts_of(source.path))
    elif source.kind == "native":
        latest = source.path / names.LATEST
        with suppress(FileNotFoundError):
            if names.read_latest(latest) == source.checkpoint.tag:
                yield latest


def _sizes_in_store(source: Source) -> Iterator[tuple[str, int]]:
    """Yield path and size of what belongs to a store and holds no tensors."""
    if not is_listed(source.path):
        return
    examined = examiner(source.path)
    groups = group_paths(path.removesuffix(f"/{ROOT_DOCUMENT}") for path in source.documents)
    others = [path for path, nbytes in source.documents.items() if nbytes is None]
    yield from ((path, nbytes) for path, nbytes in source.documents.items() if nbytes is not None)
    # Another tool may have cut the manifest and the state into several chunks.
    for path in (*_chunks_of(source.path), MANIFEST_FILES[0], STATE_FILES[0], *groups, *others):
        try:
            status = examined(path)
            yield path, examine(source.path / path).nbytes if status.is_link else status.nbytes
        except (FileNotFoundError, NotADirectoryError):
            continue


def _chunks_of(store: Path) -> Iterator[str]:
    for array in (MANIFEST_PATH, STATE_PATH):
        chunks = f"{array}/c"
        with suppress(FileNotFoundError, NotADirectoryError):
            yield from (f"{chunks}/{name}" for name in names_below(store / chunks))


def relative(source: Source, number: int) -> str:
    """Return the path of a file relative to the source."""
    path, root = str(source.files[number].path), f"{source.path}/"
    return path.removeprefix(root) if path.startswith(root) else os.path.relpath(path, root)


def group_files(files: Sequence[FileSummary], *, is_store: bool) -> tuple[FileGroup, ...]:
    """Group files whose paths differ only in numbers; in a store, the files of each state."""
    members: dict[str, list[FileSummary]] = {}
    for file in files:
        key = _place(file.path) if is_store else _NUMBERS.sub("*", file.path)
        members.setdefault(key, []).append(file)
    return tuple(
        FileGroup(
            pattern=key if is_store else _common([file.path for file in held]),
            files=len(held),
            nbytes=sum(file.nbytes for file in held),
            smallest=min(file.nbytes for file in held),
            largest=max(file.nbytes for file in held),
        )
        for key, held in members.items()
    )


def _place(path: str) -> str:
    """Name a store's directory of all arrays of one state, or the pattern of group documents.

    >>> _place("state/fp32/a.weight/c/0"), _place("mp_rank_01/module/a.weight/c/0")
    ('state/fp32/**', 'mp_rank_01/module/**')
    >>> _place("zarr.json"), _place("state/zarr.json"), _place("state/fp32/a.weight/zarr.json")
    ('**/zarr.json', '**/zarr.json', 'state/fp32/**')
    """
    parts = path.split("/", 3)  # deeper ones make no difference
    depth = 1 + parts[0].startswith("mp_rank_")
    depth += parts[min(depth, len(parts)) - 1] not in (MODULE, "blob", "file", "meta")
    return "/".join([*parts[:depth], "**"]) if len(parts) > depth else f"**/{parts[-1]}"


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
