"""Tells whether a layout cuts inside of the blocks that have one scale in states of 8 bits.

If each parameter, and what each rank has of it, is whole blocks, then so is all padding: zeros with
a scale of 0, as bitsandbytes makes new states.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from streamshard.errors import UnsupportedError
from streamshard.formats.checkpoint import Checkpoint, ParamGroup
from streamshard.layout.zero import flat_group, shard_numel
from streamshard.model import ZeroLayout
from streamshard.sizes import some_of

_MOST_RANKS: Final = 1024


def divided_block(group: ParamGroup, numels: Mapping[str, int], layout: ZeroLayout) -> str | None:
    """Say where a layout cuts inside of a block of a group's states; None if it does not.

    `numels`: element count of each of the group's parameters.
    """
    block, ranks = group.largest_block, layout.world_size // group.expert_parallel
    if block == 1:
        return None
    has = {f"'{name}' has {numel:,} elements": numel for name, numel in numels.items()}
    each = f"each of {ranks} ranks has"
    if layout.stage == 3:
        parts = {name: shard_numel(numel, ranks) for name, numel in numels.items()}
        has |= {f"{each} {part:,} elements of '{name}'": part for name, part in parts.items()}
    else:
        flat = flat_group([*numels.values()], world_size=ranks, round_robin=False, alignment=1)
        part = flat.partition_numel
        has[f"{each} {part:,} elements of group {group.number}"] = part
    for what, numel in has.items():
        if numel % block:
            return (
                f"the optimizer keeps 8 bits of each element and a scale for each block of {block},"
                f" but {what}. Parts of blocks would have to be quantised again, with a loss"
            )
    return None


def require_whole_blocks(checkpoint: Checkpoint, layout: ZeroLayout, path: Path) -> None:
    """Refuse to cut what is at a path so that a block is divided."""
    cut = _divided(checkpoint, layout)
    if cut is None:
        return
    step = checkpoint.expert_parallel
    layouts = (replace(layout, world_size=n) for n in range(step, _MOST_RANKS + 1, step))
    fitting = [f"{one.world_size}" for one in layouts if _divided(checkpoint, one) is None]
    ranks = some_of(fitting, 12) if fitting else "no number of"
    raise UnsupportedError(
        f"{cut}. At ZeRO stage {layout.stage} it can be cut for {ranks} "
        "data-parallel ranks. Or start the optimizer again from the weights that 'streamshard "
        "export' writes",
        path=path,
    )


def _divided(checkpoint: Checkpoint, layout: ZeroLayout) -> str | None:
    for model_part in checkpoint.model_parts:
        numels = checkpoint.master_numels(model_part)
        for group in model_part.groups:
            cut = divided_block(group, {name: numels[name] for name in group.params}, layout)
            if cut is not None:
                return cut
    return None
