"""Cuts the parameters of one family as an engine with a given layout does."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from streamshard.formats.checkpoint import Checkpoint, Family
from streamshard.layout.zero import (
    FlatGroup,
    alignment_unit,
    flat_group,
    round_robin_order,
    sub_groups,
)
from streamshard.model import ITEMSIZE, SubGroup, ZeroLayout


@dataclass(frozen=True, slots=True)
class FamilyCut:
    """How a family is cut."""

    flat_groups: Sequence[FlatGroup]
    """One per param group (stages 1 and 2)."""
    sub_groups: Sequence[SubGroup]
    """Across all param groups (stage 3)."""


def cut_family(
    checkpoint: Checkpoint, family: Family, layout: ZeroLayout, module_dtype: str
) -> FamilyCut:
    """Cut one family as an engine with this layout does."""
    if layout.stage < 3:
        return FamilyCut(flat_groups(checkpoint, family, layout, module_dtype), ())
    numels = checkpoint.master_numels(family)
    units = sub_groups(
        [[numels[name] for name in group.params] for group in family.groups],
        world_size=layout.world_size,
        sub_group_size=layout.sub_group_size,
    )
    return FamilyCut((), units)


def flat_groups(
    checkpoint: Checkpoint, family: Family, layout: ZeroLayout, dtype: str
) -> list[FlatGroup]:
    """Lay out a family's param groups for stages 1 and 2; `dtype` is the module's dtype."""
    numels = checkpoint.master_numels(family)
    unit = alignment_unit(ITEMSIZE[dtype]) if layout.parameter_alignment else 1
    return [
        flat_group(
            [numels[name] for name in group.params],
            world_size=layout.world_size // group.expert_parallel,
            round_robin=layout.round_robin,
            alignment=unit,
        )
        for group in family.groups
    ]


def undo_round_robin(family: Family, world_size: int) -> Family:
    """Bring the parameters of every group from the stored order into the group's own order."""
    groups = []
    for group in family.groups:
        params = in_own_order(group.params, world_size // group.expert_parallel)
        groups.append(replace(group, params=tuple(params)))
    return replace(family, groups=tuple(groups))


def in_own_order(stored: Sequence[str], world_size: int) -> list[str]:
    """Bring parameters from the round-robin order into the group's own order."""
    params = [""] * len(stored)
    for name, index in zip(stored, round_robin_order(len(stored), world_size), strict=True):
        params[index] = name
    return params
