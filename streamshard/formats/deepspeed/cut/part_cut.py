"""Cuts the parameters of one model part as an engine with a given layout does."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise
from typing import Any, TypeVar

from streamshard.formats.checkpoint import Checkpoint, ModelPart
from streamshard.layout.zero import (
    FlatGroup,
    alignment_unit,
    flat_group,
    round_robin_order,
    sub_groups,
)
from streamshard.model import ITEMSIZE, SubGroup, ZeroLayout

_Param = TypeVar("_Param", str, tuple[str, ...])


@dataclass(frozen=True, slots=True)
class PartCut:
    flat_groups: Sequence[FlatGroup]
    """One per param group (stages 1 and 2)."""
    sub_groups: Sequence[SubGroup]
    """Across all param groups (stage 3)."""


def cut_model_part(
    checkpoint: Checkpoint, model_part: ModelPart, layout: ZeroLayout, module_dtype: str
) -> PartCut:
    if layout.stage < 3:
        return PartCut(flat_groups(checkpoint, model_part, layout, module_dtype), ())
    numels = checkpoint.master_numels(model_part)
    groups = model_part.groups
    stops = [[*accumulate(model_part.tensor_counts(group), initial=0)] for group in groups]
    sizes = [
        [sum(map(numels.__getitem__, group.params[a:b])) for a, b in pairwise(own)]
        for group, own in zip(groups, stops, strict=True)
    ]
    units = sub_groups(
        sizes,
        world_size=layout.world_size,
        sub_group_size=layout.sub_group_size,
        sharers=[layout.world_size // group.expert_parallel for group in groups],
    )
    return PartCut(
        (),
        [
            replace(unit, first=stops[unit.group][unit.first], stop=stops[unit.group][unit.stop])
            for unit in units
        ],
    )


def flat_groups(
    checkpoint: Checkpoint, model_part: ModelPart, layout: ZeroLayout, dtype: str
) -> list[FlatGroup]:
    """Lay out a model part's param groups for stages 1 and 2; `dtype` is the module's dtype.

    The unit of `parameter_alignment` is that of the dtype of a group's first parameter
    (`DeepSpeedZeroOptimizer.__init__`). A module that is not cast may have several dtypes.
    """
    numels = checkpoint.master_numels(model_part)
    same = dtype == checkpoint.module_dtype
    dtypes = {entry.name: entry.dtype for entry in model_part.module if same}
    return [
        flat_group(
            [numels[name] for name in group.params],
            world_size=layout.world_size // group.expert_parallel,
            round_robin=layout.round_robin,
            alignment=alignment_unit(ITEMSIZE[dtypes.get(group.params[0], dtype)])
            if layout.parameter_alignment and group.params
            else 1,
            counts=model_part.tensor_counts(group),
        )
        for group in model_part.groups
    ]


def undo_round_robin(model_part: ModelPart, world_size: int) -> ModelPart:
    """Bring the parameters of every group from the stored order into the group's own order."""
    groups = []
    for group in model_part.groups:
        stops = [*accumulate(model_part.tensor_counts(group), initial=0)]
        stored = [group.params[start:stop] for start, stop in pairwise(stops)]
        params = in_own_order(stored, world_size // group.expert_parallel)
        groups.append(replace(group, params=tuple(chain.from_iterable(params))))
    return replace(model_part, groups=tuple(groups))


def in_own_order(stored: Sequence[_Param], world_size: int) -> list[_Param]:
    """Bring parameters from the round-robin order into the group's own order."""
    order = round_robin_order(len(stored), world_size)
    return [param for _, param in sorted(zip(order, stored, strict=True))]


@dataclass(frozen=True, slots=True)
class ZeroTarget:
    """A model part of a checkpoint, and its partitioning in the target."""

    checkpoint: Checkpoint
    model_part: ModelPart
    mp_rank: int
    """Number of the model part."""
    layout: ZeroLayout
    config: Mapping[str, Any]
    """DeepSpeed config that the files will hold."""
    module_dtype: str
    is_bf16: bool
    """Whether the resuming engine has bf16 on: it then looks for other file names."""
    cut: PartCut
    """How the layout cuts the model part."""
    index: Mapping[tuple[str, str, str], int]
    """The checkpoint's `tensor_index`."""
