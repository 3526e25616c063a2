"""Reads the weights in files of FSDP's ranks, `model_world_size_N_rank_R.pt`, as verl saves them.

A rank's file is the state dict of its model: DTensors (FSDP2, HSDP, FSDP with tensor parallelism)
or ShardedTensors (FSDP1), and tensors that every rank has whole. verl 0.8 writes it with
`torch.save` (`verl/utils/checkpoint/fsdp_checkpoint_manager.py`).
"""

import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from streamshard.errors import (
    CorruptFileError,
    DisagreementError,
    IncompleteError,
    raise_first,
)
from streamshard.formats.checkpoint import Checkpoint, ModelPart, ModuleEntry, Reading
from streamshard.formats.deepspeed import names
from streamshard.formats.deepspeed.read.rank_files import SourceFiles, missing_ranks
from streamshard.formats.deepspeed.read.redundant_copies import alike
from streamshard.formats.deepspeed.read.zero_reader import adopt_files, malformed
from streamshard.formats.fsdp_ranks.sharded_tensors import Box, RankPart, boxes_of, part_of
from streamshard.formats.pickle.node_checks import name_of, of_file
from streamshard.formats.torch.tree_comparison import show_few
from streamshard.io.entries import is_directory, is_file, paths_in
from streamshard.io.files import require_regular
from streamshard.layout.boxes import NotTiledError, grid_of
from streamshard.layout.cutting import CuttingBuilder
from streamshard.model import (
    ITEMSIZE,
    MODULE,
    LogicalTensor,
    Note,
    NoteKind,
    Slot,
    ZeroLayout,
)

_WHAT: Final = "a model's weights in files of FSDP's ranks"
_MODEL_FILE: Final = re.compile(r"model_world_size_(\d{1,6})_rank_(\d{1,6})\.pt")
_OTHER_FILE: Final = re.compile(r"(optim|extra_state)_world_size_\d+_rank_\d+\.pt")
_PRETRAINED: Final = "huggingface"
"""Directory next to the files in which verl keeps the model's config and tokenizer."""


def is_of_ranks(directory: Path) -> bool:
    """Tell whether a directory holds files of FSDP's ranks."""
    return is_directory(directory) and any(
        _MODEL_FILE.fullmatch(entry.name) for entry in paths_in(directory)
    )


def files_of(directory: Path) -> list[Path]:
    """List the files of all ranks, in order of rank. Refuses missing ones, and those of two saves.

    Raises
    ------
    IncompleteError
        A rank's file is missing, or files of another count of ranks lie among them.
    """
    found: dict[int, dict[int, Path]] = {}
    for path in sorted(paths_in(directory)):
        if match := _MODEL_FILE.fullmatch(path.name):
            found.setdefault(int(match[1]), {})[int(match[2])] = path
    if len(found) > 1:
        one, other = list(found)[:2]
        message = f"holds files of {one} ranks and of {other}; move away the set that is older"
        raise IncompleteError(message, path=directory)
    ((ranks, paths),) = found.items()
    name = directory / f"model_world_size_{ranks}_rank_{{}}.pt"
    raise_first(missing_ranks(paths.keys(), ranks, lambda rank: Path(str(name).format(rank))))
    if len(paths) > ranks:
        raise IncompleteError(f"of a rank beyond the {ranks} of its save", path=paths[max(paths)])
    return [paths[rank] for rank in range(ranks)]


def read(directory: Path) -> Reading:
    """Open the weights of all ranks."""
    with malformed(directory):
        return _read(directory)


def _read(directory: Path) -> Reading:
    sources, paths = SourceFiles(), files_of(directory)
    roots = []
    for path in paths:
        require_regular(path, directory)
        roots.append(sources.read(path, sources.add(path)).root)
        if list(roots[-1]) != list(roots[0]):
            raise DisagreementError(f"holds other names than {paths[0]}", path=path)
    parts: dict[str, list[RankPart]] = {}
    skipped = []
    for key in roots[0]:
        own = []
        for path, root in zip(paths, roots, strict=True):
            with of_file(path):
                own.append(part_of(root[key]))
        held = [part for part in own if part is not None]
        if not held:
            skipped.append(key)
        elif len(held) < len(own):
            raise DisagreementError(
                f"{name_of(key)} is a tensor on some ranks only", path=directory
            )
        else:
            parts[name_of(key)] = held
    boxes = {name: _boxes(directory, name, own) for name, own in parts.items()}
    notes = [*_notes(directory, boxes, skipped)]
    return _opened(directory, sources, parts, boxes, notes)


def _opened(
    directory: Path,
    sources: SourceFiles,
    parts: Mapping[str, Sequence[RankPart]],
    boxes: Mapping[str, Sequence[Box]],
    notes: Sequence[Note],
) -> Reading:
    entries, first = [], dict[tuple[object, ...], str]()
    for name, own in parts.items():
        dtype = _dtype(directory, name, own)
        places = [(box.offset, box.tensor.shape, box.tensor.location) for box in boxes[name]]
        key = dtype, own[0].shape, *places
        tied = first.setdefault(key, name) if places else name
        kind = "weight" if tied == name else "alias"
        entries.append(ModuleEntry(name, kind, dtype, own[0].shape, "" if tied == name else tied))
    held = [entry for entry in entries if entry.kind != "alias"]
    tensors = [LogicalTensor(MODULE, entry.name, entry.dtype, entry.shape) for entry in held]
    whole: dict[int, tuple[int, int]] = {}
    files = adopt_files(_sidecars(directory), sources, tensors, whole)
    builder = CuttingBuilder([ITEMSIZE[tensor.dtype] for tensor in tensors])
    for number, entry in enumerate(held):
        _place(builder, number, entry, boxes[entry.name], directory)
    for number, (file, offset) in whole.items():
        numel = tensors[number].numel
        slot = builder.slot(Slot(np.array([file]), np.array([offset]), np.array([numel])))
        builder.assign(number, slot, piece_numel=numel)
    model_part = ModelPart("", (), tuple(entries), {names.MODULE_STATE: OrderedDict()}, {}, {})
    checkpoint = Checkpoint(
        tag=directory.name,
        layout=ZeroLayout(stage=0, world_size=len(files_of(directory))),
        tensors=tuple(tensors),
        model_parts=(model_part,),
        module_dtype=next((entry.dtype for entry in entries), "float32"),
        files=files,
        notes=(*sources.notes, *notes),
        foreign=_WHAT,
    )
    return Reading(checkpoint, builder.build(), tuple(sources.files))


def _boxes(directory: Path, name: str, own: Sequence[RankPart]) -> list[Box]:
    try:
        return boxes_of(own)
    except (CorruptFileError, DisagreementError) as error:
        raise type(error)(f"'{name}': {error.args[0]}", path=directory) from error


def _dtype(directory: Path, name: str, own: Sequence[RankPart]) -> str:
    dtypes = list(dict.fromkeys(tensor.dtype for part in own for tensor in part.local))
    if len(dtypes) != 1:
        message = f"'{name}' has the dtypes {', '.join(dtypes) or 'of no rank'}"
        raise DisagreementError(message, path=directory)
    return dtypes[0]


def _place(
    builder: CuttingBuilder, number: int, entry: ModuleEntry, boxes: Sequence[Box], place: Path
) -> None:
    if 0 in entry.shape:
        nothing = np.zeros(1, dtype=np.int64)
        builder.assign(number, builder.slot(Slot(nothing, nothing, nothing)), piece_numel=1)
        return
    what = f"'{entry.name}'"
    held = [box.tensor.require_contiguous(f"{place}: {what}") for box in boxes]
    form = len(held), len(entry.shape)
    offsets = np.array([box.offset for box in boxes], dtype=np.int64).reshape(form)
    sizes = np.array([tensor.shape for tensor in held], dtype=np.int64).reshape(form)
    try:
        grid = grid_of(entry.shape, offsets, sizes)
    except NotTiledError as error:
        raise CorruptFileError(f"{what} of {list(entry.shape)}: {error}", path=place) from error
    slot = Slot(
        np.array([tensor.storage.file for tensor in held], dtype=np.int64),
        np.array([tensor.offset for tensor in held], dtype=np.int64),
        np.array([tensor.numel for tensor in held], dtype=np.int64),
    )
    builder.place_boxes(number, builder.slot(slot), grid)


def _sidecars(directory: Path) -> list[tuple[Path, str]]:
    """List the model's config and tokenizer, by the names that they have next to weights."""
    place = directory / _PRETRAINED
    entries = sorted(paths_in(place)) if is_directory(place) else []
    found = [path for path in entries if is_file(path)]
    for path in found:
        require_regular(path, directory)
    return [(path, path.name) for path in found]


def _notes(
    directory: Path, boxes: Mapping[str, Sequence[Box]], skipped: Sequence[str]
) -> Iterator[Note]:
    others = [path.name for path in sorted(paths_in(directory)) if _OTHER_FILE.fullmatch(path.name)]
    if others:
        text = f"Not read: the optimizer's state and other state of ranks, {show_few(others)}."
        yield Note(text, NoteKind.LEFT_OUT)
    if skipped:
        text = f"Not read, as they are no tensors: {show_few(skipped)}."
        yield Note(text, NoteKind.LEFT_OUT)
    differing = [
        name
        for name, held in boxes.items()
        if not all(alike(box.tensor, copy) for box in held for copy in box.copies)
    ]
    if differing:
        text = f"The ranks' files differ in {show_few(differing)}"
        # The checksums that tell are those of storages.
        more = f", or in memory that was saved with {'it' if len(differing) == 1 else 'them'}"
        held_alone = all(map(_is_alone, (box for name in differing for box in boxes[name])))
        text = f"{text}{'' if held_alone else more}; rank 0's are taken for all."
        yield Note(text, NoteKind.LEFT_OUT)


def _is_alone(box: Box) -> bool:
    """Tell whether storages hold this part alone, without padding."""
    return all(held.storage.numel == held.numel for held in (box.tensor, *box.copies))
