"""Muon's momentum as an engine holds it: at stages 1 and 2 whole parameters, on several ranks."""

from typing import Any, TypeAlias

import torch
from torch import distributed

# DeepSpeed has no types.
Optimizer: TypeAlias = Any

KEY = "momentum_buffer"


def partition(optimizer: Optimizer, group: int, master: torch.Tensor) -> dict[str, torch.Tensor]:
    """This rank's part of the momentum as it would be if it were cut like any other state.

    Nothing where it is, or where there is none yet. A collective call.

    Raises
    ------
    AssertionError
        When ranks hold different momentum of one parameter.
    """
    if not hasattr(optimizer, "params_in_partition") or optimizer.cpu_offload:
        return {}
    mine = _by_param(optimizer, group, master)
    ranks: list[Any] = [{}] * distributed.get_world_size()
    distributed.all_gather_object(ranks, mine)
    if not any(ranks):
        return {}
    for theirs in ranks:
        for key in theirs.keys() & mine.keys():
            assert torch.equal(theirs[key], mine[key]), f"ranks disagree about momentum {key}"
    dtype = next(value.dtype for held in ranks for value in held.values())
    rank = distributed.get_rank(optimizer.real_dp_process_group[group])
    cut = torch.zeros_like(master, dtype=dtype).detach()
    for param in optimizer.params_in_partition[group]:
        key = optimizer.get_param_id(param)
        start = optimizer.grad_start_offset[group][rank][key]
        at = optimizer.grad_partition_insertion_offset[group][rank][key]
        numel = min(param.numel() - start, len(cut) - at)
        cut[at : at + numel] = mine[key][start : start + numel]
    return {KEY: cut}


def _by_param(optimizer: Optimizer, group: int, master: torch.Tensor) -> dict[int, torch.Tensor]:
    """The momentum of each parameter that this rank owns a part of, by the parameter's id."""
    buffer = optimizer.optimizer.state.get(master, {}).get(KEY)
    if buffer is None or not optimizer.optimizer.param_groups[group].get("use_muon"):
        return {}
    params = optimizer.params_in_partition[group]
    pieces = buffer.detach().split([param.numel() for param in params])
    return {optimizer.get_param_id(p): piece for p, piece in zip(params, pieces, strict=True)}
