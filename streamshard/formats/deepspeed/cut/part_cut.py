"""Cuts the parameters of one model part as an engine with a given layout does."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise
from typing import TypeVar

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
    """How a model part is cut."""

    flat_groups: Sequence[FlatGroup]
    """One per param group (stages 1 and 2)."""
    sub_groups: Sequence[SubGroup]
    """Across all param groups (stage 3)."""


def cut_model_part(
    checkpoint: Checkpoint, model_part: ModelPart, layout: ZeroLayout, module_dtype: str
) -> PartCut:
    """Cut one model part as an engine with this layout does."""
    if layout.stage < 3:
        return PartCut(flat_groups(checkpoint, model_part, layout, module_dtype), ())
    numels = checkpoint.master_numels(model_part)
    units = sub_groups(
        [[numels[name] for name in group.params] for group in model_part.groups],
        world_size=layout.world_size,
        sub_group_size=layout.sub_group_size,
    )
    return PartCut((), units)


def flat_groups(
    checkpoint: Checkpoint, model_part: ModelPart, layout: ZeroLayout, dtype: str
) -> list[FlatGroup]:
    """Lay out a model part's param groups for stages 1 and 2; `dtype` is the module's dtype."""
    numels = checkpoint.master_numels(model_part)
    unit = alignment_unit(ITEMSIZE[dtype]) if layout.parameter_alignment else 1
    return [
        flat_group(
            [numels[name] for name in group.params],
            world_size=layout.world_size // group.expert_parallel,
            round_robin=layout.round_robin,
            alignment=unit,
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
