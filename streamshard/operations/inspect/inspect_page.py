"""Makes the page that `inspect` draws: the report, how parameters are cut, and where bytes lie."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import PurePosixPath
from typing import Any, Final

import numpy as np

from streamshard.drawing.page import Document, column, page, pooled, table
from streamshard.formats.deepspeed import names
from streamshard.formats.zarr.rewritten_documents import remark
from streamshard.io.entries import resolve
from streamshard.layout.cutting import Ints
from streamshard.model import MASTER, MODULE, NoteKind
from streamshard.operations.checks.structure import title_of
from streamshard.operations.inspect.file_groups import relative
from streamshard.operations.inspect.inspect_report import (
    CheckpointList,
    FileSummary,
    IncompleteCheckpoint,
    Inspection,
)
from streamshard.operations.inspect.ownership import ranks_of_files
from streamshard.operations.source.source import Source

_MOST_CHARACTERS: Final = 1 << 21
"""Longer columns than these would make a page that is slow to open: without them, it names the
command that tells where bytes lie."""


def cut_page(found: Inspection, source: Source, cut: Document) -> bytes:
    """Draw a checkpoint on a page."""
    is_of_ranks = source.is_of_ranks
    numbers = {file.path: number for number, file in enumerate(found.file_list)}
    listed = np.array([numbers.get(relative(source, n), -1) for n in range(len(source.files))])
    ranks = dict(zip(listed.tolist(), ranks_of_files(source), strict=True))
    document = {
        **asdict(replace(found, parameters=(), file_list=())),
        "parameters": table(found.parameters),
        "file_list": _files(found.file_list, list(map(ranks.get, numbers.values())))
        if is_of_ranks
        else {},
        "kind_title": title_of(found.kind),
        "alarms": _alarms(source),
        **cut,
    }
    if is_of_ranks:
        _add_places(document["panels"], source, listed)
    pool: dict[str, int] = {}
    pooled(document["panels"], pool)
    if sum(map(len, pool)) > _MOST_CHARACTERS:
        document["panels"] = [{**panel, "places": None} for panel in document["panels"]]
        pool.clear()
    document["panels"] = pooled(document["panels"], pool)
    document["columns"] = [*map(json.loads, pool)]
    return page(f"{resolve(source.path).name} at {found.tag}", document)


def unopened_page(found: CheckpointList | IncompleteCheckpoint) -> bytes:
    """Draw what there is of a checkpoint that cannot be opened, or of several."""
    document: Document = {**asdict(found), "kind_title": "directory of checkpoints"}
    if isinstance(found, IncompleteCheckpoint):
        document["kind_title"] = title_of(found.kind)
        parsed = [names.parse(PurePosixPath(file.path).name) for file in found.file_list]
        ranks = [None if one is None else one.dp_rank for one in parsed]
        document["file_list"] = _files(found.file_list, ranks)
        document["model_parts"] = len({one.mp_rank for one in parsed if one is not None})
    return page(PurePosixPath(found.path).name, document)


def _files(files: Sequence[FileSummary], ranks: Sequence[int | None]) -> Document:
    return {**table(files), "rank": column(ranks)}


def _alarms(source: Source) -> list[str]:
    """Return those of its notes that put a checkpoint in doubt."""
    checkpoint = source.checkpoint
    doubted = replace(
        checkpoint, notes=tuple(n for n in checkpoint.notes if n.kind is NoteKind.MIXED)
    )
    return [
        *([remark(source.rewritten)] if source.rewritten else []),
        *replace(doubted, dropped=None).remarks,
    ]


def _add_places(panels: Sequence[Document], source: Source, listed: Ints) -> None:
    """Add to each param group where each state of its parameters lies.

    Element e of a parameter is in piece k = (origin + e) // piece, which has the number `slot` + k,
    at (`lead` + origin + e - k * piece) * itemsize bytes from the piece's offset. A column that the
    group's first way has as well is left out.
    """
    parts = [(p, g) for p in source.checkpoint.model_parts for g in p.groups if g.params]
    index = source.checkpoint.tensor_index()
    for panel, (model_part, group) in zip(panels, parts, strict=True):
        places = []
        for state in (MASTER, *group.flat_states(), MODULE):
            if group.block(state) > 1:
                continue
            keys = [(model_part.name, state, name) for name in group.params]
            if all(key in index for key in keys):
                rows = np.array([index[key] for key in keys], dtype=np.int64)
                places.append(_place(source, state, rows, listed, panel["ways"][0]))
        panel["places"] = None if None in places else places


def _place(
    source: Source, state: str, rows: Ints, listed: Ints, drawn: Mapping[str, Any]
) -> Document | None:
    """Return where one state of parameters lies; None if it is not cut regularly, or too much."""
    cutting, tensors = source.cutting, source.checkpoint.tensors
    if cutting.of is not None or cutting.pieces(rows).any():
        return None
    held = [tensors[row] for row in rows.tolist()]
    numels = np.array([tensor.numel for tensor in held], dtype=np.int64)
    origin, piece = cutting.origin[rows], cutting.piece_numel[rows]
    itemsize = cutting.itemsize[rows]
    first = origin // piece
    lower = cutting.first_piece[rows] + first
    upper = np.where(numels > 0, lower + (origin + numels - 1) // piece - first + 1, lower)
    ranges = set(zip(lower.tolist(), upper.tolist(), strict=True))
    if sum(stop - start for start, stop in ranges) > _MOST_CHARACTERS:
        return None
    pieces = np.unique(np.concatenate([np.arange(*ends) for ends in ranges]))
    columns = {"origin": origin, "piece": piece, "lead": cutting.lead[rows] // itemsize}
    packed = {name: column(values) for name, values in columns.items()}
    same = {"origin": "origin", "piece": "piece", "lead": "at"}
    return {
        "state": state,
        "dtype": held[0].dtype,
        "itemsize": int(itemsize[0]),
        "slot": column(np.searchsorted(pieces, lower) - first),
        "file": column(listed[cutting.file[pieces]]),
        "offset": column(cutting.offset[pieces]),
        **{name: values for name, values in packed.items() if values != drawn[same[name]]},
    }
