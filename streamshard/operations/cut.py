"""Combines where a source keeps things with the arithmetic of how it was cut, and checks both."""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from streamshard.errors import CorruptFileError, DisagreementError
from streamshard.formats.checkpoint import Checkpoint, ParamGroup
from streamshard.model import ITEMSIZE, MASTER, RecordedCut, Slot, SourceMap, ZeroLayout
from streamshard.plan.cutting import Cutting, CuttingBuilder
from streamshard.plan.zero import FlatGroup, alignment_unit, flat_group, shard_numel

_LAYOUT_KEYS: Final = "round_robin_gradients, parameter_alignment"


def flat_groups(checkpoint: Checkpoint, layout: ZeroLayout, dtype: str) -> list[FlatGroup]:
    """Lay out every param group for stages 1 and 2; `dtype` is that of the module's weights."""
    numels = {t.name: t.numel for t in checkpoint.tensors if t.state == MASTER}
    unit = alignment_unit(ITEMSIZE[dtype]) if layout.parameter_alignment else 1
    return [
        flat_group(
            [numels[name] for name in group.params],
            world_size=layout.world_size,
            round_robin=layout.round_robin,
            alignment=unit,
        )
        for group in checkpoint.groups
    ]


def cut_source(checkpoint: Checkpoint, source_map: SourceMap) -> Cutting:
    """Say where every element of every logical tensor lies.

    Raises
    ------
    SourceError
        What the files hold or record is not what the arithmetic says; the message names the file.
    """
    tensors = checkpoint.tensors
    builder = CuttingBuilder([ITEMSIZE[tensor.dtype] for tensor in tensors])
    index = checkpoint.tensor_index()
    if source_map.partitions:
        _place_partitions(checkpoint, source_map, builder, index)
    if source_map.sub_groups:
        _place_sub_groups(checkpoint, source_map, builder, index)
    for tensor, (file, offset) in source_map.whole.items():
        numel = tensors[tensor].numel
        slot = Slot(np.array([file]), np.array([offset]), np.array([numel]))
        builder.place(tensor, builder.slot(slot), piece_numel=numel)
    for tensor, slot in source_map.shards.items():
        share = shard_numel(tensors[tensor].numel, checkpoint.layout.world_size)
        name = tensors[tensor].name
        _require_lengths(slot, [share] * len(slot.numels), source_map, f"the shard of {name}")
        builder.place(tensor, builder.slot(slot), piece_numel=share)
    for tensor, (chunk_numel, slot) in source_map.chunks.items():
        builder.place(tensor, builder.slot(slot), piece_numel=chunk_numel)
    for tensor in builder.missing():
        if tensors[tensor].numel:
            raise CorruptFileError(f"{tensors[tensor].state} of {tensors[tensor].name} is nowhere")
    return builder.build()


def _place_partitions(
    checkpoint: Checkpoint,
    source_map: SourceMap,
    builder: CuttingBuilder,
    index: Mapping[tuple[str, str], int],
) -> None:
    groups = flat_groups(checkpoint, checkpoint.layout, checkpoint.module_dtype)
    for (group, state), slot in source_map.partitions.items():
        flat, held = groups[group], checkpoint.groups[group]
        stripped = state == MASTER and not checkpoint.layout.bf16_optimizer
        lengths = [
            flat.partition_numel - (flat.padding(rank) if stripped else 0)
            for rank in range(flat.world_size)
        ]
        _require_lengths(slot, lengths, source_map, f"{state} of param group {group}")
        first = builder.slot(slot)
        for name, start in zip(held.params, flat.starts.tolist(), strict=True):
            tensor = index[state, name]
            builder.place(tensor, first, piece_numel=flat.partition_numel, origin=start)
    for rank, recorded in enumerate(source_map.recorded):
        _require_recorded(recorded, rank, groups, checkpoint.groups)


def _require_recorded(
    recorded: RecordedCut, rank: int, groups: Sequence[FlatGroup], held: Sequence[ParamGroup]
) -> None:
    """Refuse a source whose files describe another cut than the one computed from its config.

    The lengths alone would not tell: stored in another order, parameters take as much room.
    """
    cuts = [group.cut(rank) for group in groups]
    slices = tuple(
        tuple((group.params[index], start, numel) for index, start, numel in cut.recorded)
        for group, cut in zip(held, cuts, strict=True)
    )
    computed = {
        "group_paddings": (recorded.paddings, tuple(cut.padding for cut in cuts)),
        "param_alignment_paddings": (recorded.alignments, tuple(g.alignments for g in groups)),
        "param_slice_mappings": (recorded.slices, slices),
    }
    for key, (found, expected) in computed.items():
        if found is not None and found != expected:
            message = f"{recorded.path}: its {key} are not those of the layout that its ds_config"
            raise DisagreementError(
                f"{message} describes ({_LAYOUT_KEYS}). Was the config changed after the save?"
            )


def _place_sub_groups(
    checkpoint: Checkpoint,
    source_map: SourceMap,
    builder: CuttingBuilder,
    index: Mapping[tuple[str, str], int],
) -> None:
    tensors, world_size = checkpoint.tensors, checkpoint.layout.world_size
    for (unit, state), slot in source_map.sub_groups.items():
        params = source_map.sub_group_params[unit]
        shares = [shard_numel(tensors[index[state, n]].numel, world_size) for n in params]
        lengths = [sum(shares)] * world_size
        _require_lengths(slot, lengths, source_map, f"{state} of sub-group {unit}")
        first, held = builder.slot(slot), 0
        for name, share in zip(params, shares, strict=True):
            tensor = index[state, name]
            lead = held * ITEMSIZE[tensors[tensor].dtype]
            builder.place(tensor, first, piece_numel=share, lead=lead)
            held += share


def _require_lengths(slot: Slot, lengths: Sequence[int], source_map: SourceMap, what: str) -> None:
    """Refuse a source whose tensors are not as long as the arithmetic says."""
    for rank, (found, expected) in enumerate(zip(slot.numels.tolist(), lengths, strict=True)):
        if found != expected:
            path = source_map.files[int(slot.files[rank])].path
            message = f"{path}: {what} has {found} elements on rank {rank}, {expected} belong there"
            raise CorruptFileError(
                f"{message}. Is the ds_config in the checkpoint ({_LAYOUT_KEYS}) that of the run "
                "that saved it?"
            )
