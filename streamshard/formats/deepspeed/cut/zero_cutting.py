"""Computes where every element of a source lies, and checks the files against that layout."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Final

import numpy as np

from streamshard.errors import CorruptFileError, DisagreementError, UnsupportedError
from streamshard.formats.checkpoint import Checkpoint, ModelPart, Reading
from streamshard.formats.deepspeed import names
from streamshard.formats.deepspeed.cut.part_cut import flat_groups
from streamshard.formats.pickle.inert import Node, show
from streamshard.formats.pickle.node_checks import name_of, of_file
from streamshard.layout.cutting import CuttingBuilder
from streamshard.layout.zero import FlatGroup, shard_numel
from streamshard.model import ITEMSIZE, Repeat, Slot, SourceFile, ZeroLayout


@dataclass(frozen=True, slots=True)
class RecordedCut:
    """The cut as a rank's file records it (stages 1 and 2), to be checked against the arithmetic.

    A field is None where the DeepSpeed version that saved the file did not record it yet.
    """

    path: Path
    paddings: tuple[int, ...] | None
    alignments: tuple[tuple[int, ...], ...] | None
    slices: tuple[tuple[tuple[str, int, int], ...], ...] | None
    """(parameter, start in the partition, numel) per param group."""


def recorded_cut(state: Mapping[str, Node], path: Path, *, has_paddings: bool) -> RecordedCut:
    """Read the record in an optimizer's state.

    `has_paddings`: whether the state's `group_paddings` are those of the rank.
    """
    return RecordedCut(
        path=path,
        paddings=_tuple(state[names.GROUP_PADDINGS]) if has_paddings else None,
        alignments=_nested(state.get(names.ALIGNMENT_PADDINGS)),
        slices=_slices(state.get(names.SLICE_MAPPINGS), path),
    )


def _tuple(node: Node) -> tuple[int, ...] | None:
    return tuple(node) if isinstance(node, list) else None


def _nested(node: Node) -> tuple[tuple[int, ...], ...] | None:
    return tuple(tuple(inner) for inner in node) if isinstance(node, list) else None


def _slices(node: Node, path: Path) -> tuple[tuple[tuple[str, int, int], ...], ...] | None:
    """Read `param_slice_mappings`: for each group, parameter name → `fragment_address` object."""
    if not isinstance(node, list):
        return None
    try:
        with of_file(path):
            return tuple(
                tuple(_slice(name, at.state) for name, at in of_group.items()) for of_group in node
            )
    except (AttributeError, KeyError, TypeError) as error:
        raise CorruptFileError(f"'{names.SLICE_MAPPINGS}' is unreadable", path=path) from error


def _slice(name: Node, fragment: Mapping[Node, Node]) -> tuple[str, int, int]:
    start, numel = fragment["start"], fragment["numel"]
    if len(fragment) > 2:  # only these two are written again
        found = ", ".join(map(show, fragment))
        raise UnsupportedError(f"a fragment of {show(name)} has {found}: more than start and numel")
    if not isinstance(start, int) or not isinstance(numel, int):
        raise CorruptFileError(f"a slice of {show(name)} from {show(start)} on, {show(numel)} long")
    return name_of(name), start, numel


_LAYOUT_KEYS: Final = (
    "round_robin_gradients, parameter_alignment, offload_optimizer, "
    "use_data_before_expert_parallelism"
)


@dataclass(frozen=True, slots=True)
class ModelPartMap:
    """Where the shards of one model part store its cut tensors."""

    slots: Mapping[tuple[int, str], Slot] = field(default_factory=dict)
    """(param group, in stage 3 sub-group, state) → its places on the ranks."""
    recorded: tuple[RecordedCut, ...] = ()
    """One per rank (stages 1 and 2)."""
    sub_group_params: Sequence[Sequence[Sequence[str]]] = ()
    """The tensors of each parameter of each sub-group (stage 3)."""


def cut_source(
    checkpoint: Checkpoint,
    files: Sequence[SourceFile],
    whole: Mapping[int, tuple[int, int]],
    shards: Mapping[int, Slot],
    model_parts: Sequence[ModelPartMap] = (),
) -> Reading:
    """Compute the place of every element of every logical tensor.

    `whole`: tensor → (file, byte offset), for tensors that lie in one piece.
    `shards`: tensor → each rank's shard of it (stage 3, frozen weights).
    """
    tensors = checkpoint.tensors
    builder = CuttingBuilder([ITEMSIZE[tensor.dtype] for tensor in tensors])
    index = checkpoint.tensor_index()
    repeats: list[Repeat] = []
    place = _place_shards if checkpoint.layout.stage == 3 else _place_partitions
    for model_part, part_map in zip(checkpoint.model_parts, model_parts, strict=False):
        repeats += place(checkpoint, model_part, part_map, files, index, builder)
    for tensor, (file, offset) in whole.items():
        builder.place(tensor, file, offset, tensors[tensor].numel)
    for tensor, slot in shards.items():
        share = shard_numel(tensors[tensor].numel, checkpoint.layout.world_size)
        name = tensors[tensor].name
        _require_lengths(slot, [share] * len(slot.numels), files, f"the shard of {name}")
        builder.assign(tensor, builder.slot(slot), piece_numel=share)
    for tensor in builder.missing():
        if tensors[tensor].numel:
            raise CorruptFileError(f"{tensors[tensor].state} of {tensors[tensor].name} is nowhere")
    return Reading(checkpoint, builder.build(), tuple(files), tuple(repeats))


def _place_partitions(
    checkpoint: Checkpoint,
    model_part: ModelPart,
    part_map: ModelPartMap,
    files: Sequence[SourceFile],
    index: Mapping[tuple[str, str, str], int],
    builder: CuttingBuilder,
) -> list[Repeat]:
    """Place a model part's partitions of flat groups (stages 1 and 2); returns further copies."""
    layout, repeats = checkpoint.layout, list[Repeat]()
    groups = flat_groups(checkpoint, model_part, layout, checkpoint.module_dtype)
    kept = [model_part.kept_states(group, layout) for group in model_part.groups]
    for (group, key), slot in part_map.slots.items():
        params, state = model_part.groups[group].params, kept[group][key]
        tensors = np.array([index[model_part.name, key, name] for name in params])
        flat = groups[group].in_blocks(state.block)
        _require_lengths(slot, state.numels(flat, slot), files, f"{key} of param group {group}")
        repeats += state.place(flat, slot, tensors, files, builder)
    for rank, recorded in enumerate(part_map.recorded):
        _require_recorded(recorded, rank, model_part, groups, layout)
    return repeats


def _require_recorded(
    recorded: RecordedCut,
    rank: int,
    model_part: ModelPart,
    groups: Sequence[FlatGroup],
    layout: ZeroLayout,
) -> None:
    """Refuse a source whose files record another cut than the one computed from its config.

    The lengths alone do not show it: in another order, parameters take as much room.
    """
    places = model_part.held_by(rank, layout)
    params = [model_part.serialized(model_part.groups[group]) for group, _ in places]
    slices = tuple(
        tuple((names_[i], start, numel) for i, start, numel in groups[group].recorded(sharer))
        for names_, (group, sharer) in zip(params, places, strict=True)
    )
    alignments = tuple(groups[group].alignments for group, _ in places)
    paddings = tuple(groups[group].padding(sharer) for group, sharer in places)
    counted_last = tuple(groups[group].padding_counted_last(sharer) for group, sharer in places)
    computed = {
        "group_paddings": (recorded.paddings, (paddings, counted_last)),
        "param_alignment_paddings": (recorded.alignments, (alignments,)),
        "param_slice_mappings": (recorded.slices, (slices,)),
    }
    for key, (there, expected) in computed.items():
        if there is not None and there not in expected:
            message = f"its {key} are not those of the layout that its"
            raise DisagreementError(
                f"{message} ds_config describes ({_LAYOUT_KEYS}). Was the config changed "
                "after the save?",
                path=recorded.path,
            )


def _place_shards(
    checkpoint: Checkpoint,
    model_part: ModelPart,
    part_map: ModelPartMap,
    files: Sequence[SourceFile],
    index: Mapping[tuple[str, str, str], int],
    builder: CuttingBuilder,
) -> list[Repeat]:
    """Place a model part's shards of sub-groups (stage 3)."""
    tensors = checkpoint.tensors
    for (unit, key), slot in part_map.slots.items():
        params = [
            [index[model_part.name, key, name] for name in names_]
            for names_ in part_map.sub_group_params[unit]
        ]
        ranks = len(slot.numels)
        numels = [[tensors[tensor].numel for tensor in param] for param in params]
        shares = [shard_numel(sum(parts), ranks) for parts in numels]
        _require_lengths(slot, [sum(shares)] * ranks, files, f"{key} of sub-group {unit}")
        first, filled = builder.slot(slot), 0
        for param, parts, share in zip(params, numels, shares, strict=True):
            for tensor, origin in zip(param, accumulate(parts, initial=0), strict=False):
                lead = filled * ITEMSIZE[tensors[tensor].dtype]
                builder.assign(tensor, first, piece_numel=share, origin=origin, lead=lead)
            filled += share
    return []


def _require_lengths(
    slot: Slot, lengths: Sequence[int], files: Sequence[SourceFile], what: str
) -> None:
    """Refuse a source whose tensors do not have the computed lengths."""
    for rank, (found, expected) in enumerate(zip(slot.numels.tolist(), lengths, strict=True)):
        if found != expected:
            path = files[int(slot.files[rank])].path
            message = f"{what} has {found} elements on rank {rank}, {expected} belong there"
            raise CorruptFileError(
                f"{message}. Is the ds_config in the checkpoint ({_LAYOUT_KEYS}) that of the run "
                "that saved it?",
                path=path,
            )
