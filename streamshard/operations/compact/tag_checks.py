"""Checks a tag before it may be removed: its files are known and unchanged, its padding alike.

No archive holds padding, which belongs to no parameter. At stages 1 and 2 padding begins as zeros
(`align_dense_tensors` of `deepspeed/runtime/utils.py`, 0.19.8) that no gradient reaches, so an
optimizer gives every element the same value. Elements that differ are not padding, whatever the
arithmetic says. At stage 3 padding is uninitialized memory, which cannot be checked.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from streamshard.engine.run.source_reader import SourceReader
from streamshard.errors import CorruptFileError, IncompleteError, Option, UnsupportedError
from streamshard.formats.checkpoint import ModelPart
from streamshard.formats.deepspeed.cut.part_cut import flat_groups
from streamshard.formats.deepspeed.states import Elementwise
from streamshard.io.entries import examine, listed_below
from streamshard.io.files import source_errors
from streamshard.layout.cutting import Ints, Segments
from streamshard.layout.zero import FlatGroup
from streamshard.model import ITEMSIZE, Copies, NoteKind
from streamshard.operations.compact.receipts import Receipt, SourceRecord
from streamshard.operations.compact.run_context import RunContext
from streamshard.sizes import counted
from streamshard.source.source import Source
from streamshard.source.structure import require_same_repeats


def accounted_for(source: Source, root: Path) -> str:
    paths = {file.path for file in source.files}
    paths |= {source.path / file.path for file in source.checkpoint.files}
    count = 0
    with source_errors(root):
        for entry in listed_below(root):
            if entry.is_directory:
                continue
            count += 1
            if not entry.status().is_file or entry.path not in paths:
                advice = "move it away"
                if entry.is_link:  # which may stand for a file that the tag needs
                    advice = f"put its target there, or keep the tag with {Option('keep_tags')}"
                raise UnsupportedError(f"{entry.path}: would not be in an archive; {advice}")
    return counted(count, "file")


def ranks_agree(source: Source) -> str:
    """Require that nothing in a checkpoint's files is left out by reading: no copy that differs."""
    for note in source.checkpoint.notes:
        if note.kind in (NoteKind.LEFT_OUT, NoteKind.UNREAD):
            raise UnsupportedError(f"{source.path / source.checkpoint.tag}: {note.text}")
    require_same_repeats(source)
    return ""


def records_of(source: Source, run_dir: Path) -> tuple[SourceRecord, ...]:
    records = []
    for file in source.files:
        with source_errors(file.path):
            status = examine(file.path)
        records.append(SourceRecord.of(os.path.relpath(file.path, run_dir), status))
    return tuple(records)


def unchanged(receipt: Receipt, root: Path, context: RunContext | None = None) -> str:
    """Require that a tag's files are those that were archived.

    `root` is the present path of the tag directory. With a `context`, the files' SHA-256 are
    compared too; without, only size, time, inode and device.
    """
    records = receipt.below_tag()
    with source_errors(root):
        files = [entry for entry in listed_below(root) if not entry.is_directory]
        statuses = {entry.path.relative_to(root).as_posix(): entry.status() for entry in files}
        for name in sorted(statuses.keys() ^ records.keys()):
            there = "was archived, and is not there" if name in records else "was not archived"
            raise IncompleteError(f"{root / name}: {there}")
        for name, status in statuses.items():
            if difference := records[name].difference(status):
                raise CorruptFileError(f"{root / name}: {difference}")
        digests = context.hash_all([root / name for name in statuses]) if context else []
    for name, digest in zip(statuses, digests, strict=bool(context)):
        if digest != records[name].sha256:
            raise CorruptFileError(f"{root / name}: its bytes are not those that were archived")
    return counted(len(statuses), "file")


@dataclass(frozen=True, slots=True)
class _Padding:
    """The places of one state of a param group where the elements belong to no parameter."""

    what: str
    itemsize: int
    runs: Copies


def padding_alike(source: Source) -> str:
    """Require that all padding of each state of a param group has one value."""
    checkpoint = source.checkpoint
    if checkpoint.layout.stage == 3:
        return "stage 3: never initialised"
    index, nbytes = checkpoint.tensor_index(), 0
    reader = SourceReader(source.files)
    try:
        for model_part in checkpoint.model_parts:
            for padding in _paddings(source, model_part, index):
                _require_alike(padding, source, reader)
                nbytes += int(padding.runs.nbytes.sum())
    finally:
        reader.close()
    return f"{nbytes:,} bytes"


def _paddings(
    source: Source, model_part: ModelPart, index: Mapping[tuple[str, str, str], int]
) -> Iterator[_Padding]:
    layout = source.checkpoint.layout
    groups = flat_groups(source.checkpoint, model_part, layout, source.checkpoint.module_dtype)
    for flat, group in zip(groups, model_part.groups, strict=True):
        for key, state in model_part.kept_states(group, layout).items():
            if state.is_whole:
                continue
            tensors = [index[model_part.name, key, name] for name in group.params]
            behind = _behind(flat.in_blocks(state.block), state, np.array(tensors, dtype=np.int64))
            itemsize = ITEMSIZE[state.dtype]
            runs = source.cutting.locate(behind, target_itemsize=itemsize)
            yield _Padding(f"{key} of param group {group.number}", itemsize, runs)


def _behind(flat: FlatGroup, state: Elementwise, tensors: Ints) -> Segments:
    """Return the padding after each parameter, addressed as further elements of the parameter."""
    gaps = np.array(flat.alignments, dtype=np.int64)
    gaps[-1:] += sum(state.numel(flat, rank) for rank in range(flat.world_size)) - flat.numel
    order = flat.lasts[np.array(flat.order, dtype=np.int64)]
    numels = flat.numels[order]
    return Segments(tensors[order], numels, numels + gaps, np.zeros_like(gaps))


def _require_alike(padding: _Padding, source: Source, reader: SourceReader) -> None:
    runs, first = padding.runs, b""
    for file, offset, nbytes in zip(runs.file, runs.source, runs.nbytes, strict=True):
        held = bytearray(int(nbytes))
        reader.read_into(int(file), int(offset), memoryview(held))
        first = first or bytes(held[: padding.itemsize])
        if held != first * (len(held) // padding.itemsize):
            message = (
                f"{source.files[file].path}: {padding.what}: what lies after the parameters is "
                "taken for padding, and is not one value throughout"
            )
            keeps = Option("keep_tags")
            raise UnsupportedError(f"{message}: an archive would lack it. {keeps} keeps the tag")
