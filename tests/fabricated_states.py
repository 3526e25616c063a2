"""What the optimizers of fabricated checkpoints hold, cut with torch's own operations."""

from collections import OrderedDict
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from tests.job import MOMENTUM, STATES, Job, LossScaler, ZeroStageEnum, fragment_address

# Stages 1 and 2 -----------------------------------------------------------------------------------


def flat(job: Job, state: str, group: int, expert_rank: int = 0) -> tuple[Tensor, list[int]]:
    """Flatten a state of a group with its padding; also returns the gaps after each parameter."""
    unit = 16 // job.dtype.itemsize if job.alignment else 1
    parts: list[Tensor] = []
    gaps: list[int] = []
    names = job.stored_order(group)
    for name in names:
        parts.append(job.values(state, name, expert_rank).flatten())
        gap = -sum(map(len, parts)) % unit if name != names[-1] else 0
        parts.append(torch.zeros(gap))
        gaps.append(gap)
    end = -sum(map(len, parts)) % (2 * job.sharers(group))
    return torch.cat([*parts, torch.zeros(end)]), gaps


def _slices(job: Job, group: int, rank: int, numel: int, gaps: list[int]) -> OrderedDict[str, Any]:
    """Spell which parameters a partition holds: in the group's own order unless there are gaps."""
    names = [name for name, _ in job.cut_groups[group]]
    order, starts, at = (job.stored_order(group) if any(gaps) else names), {}, 0
    for name, gap in zip(order, gaps, strict=True):
        starts[name] = at
        at += prod(job.shapes[name]) + gap
    found = OrderedDict()
    for name in names:
        first = max(starts[name], rank * numel)
        stop = min(starts[name] + prod(job.shapes[name]), (rank + 1) * numel)
        if first < stop:
            found[name] = fragment_address(numel=stop - first, start=first - rank * numel)
    return found


def flat_state(job: Job, rank: int) -> dict[str, Any]:
    """Make what a rank's optimizer of stages 1 and 2 saves."""
    masters, states, paddings, alignments, slices = [], {}, [], [], []
    for group in range(len(job.cut_groups)):
        ranks = job.sharers(group)
        expert_rank, at = job.place(group, rank)
        whole, gaps = flat(job, "fp32", group, expert_rank)
        numel = len(whole) // ranks
        used = sum(prod(job.shapes[name]) for name, _ in job.cut_groups[group]) + sum(gaps)
        padding = min(max((at + 1) * numel - used, 0), numel)
        part = whole.chunk(ranks)[at].clone() if numel else whole
        masters.append(part[: numel - padding].requires_grad_())
        states[group] = _states(job, group, rank)
        paddings.append(padding)
        alignments.append(gaps)
        slices.append(_slices(job, group, at, numel, gaps))
    wrapped: Any = _torch_state(job, states, [[g] for g in range(len(job.cut_groups))])
    for group in wrapped["param_groups"][len(job.groups) :]:
        group |= {"moe": True, "name": f"ep_size_{job.expert_parallel}"}
    return {
        "loss_scaler": LossScaler(1.0),
        "dynamic_loss_scale": False,
        "overflow": False,
        "clip_grad": 1.0,
        "base_optimizer_state": wrapped,
        "single_partition_of_fp32_groups": masters,
        "zero_stage": ZeroStageEnum(job.stage),
        "group_paddings": paddings,
        "param_alignment_paddings": alignments,
        "partition_count": [job.sharers(group) for group in range(len(job.cut_groups))],
        "ds_version": "0.19.8",
        "param_slice_mappings": slices,
    }


def _states(job: Job, group: int, rank: int) -> dict[str, Tensor]:
    """Make a rank's states of a group; empty where Muon has no parameter of it there."""
    ranks = job.sharers(group)
    expert_rank, at = job.place(group, rank)
    keys = (MOMENTUM,) if group in job.muon else STATES
    wholes = {key: flat(job, key, group, expert_rank)[0] for key in keys}
    cut = {key: whole.chunk(ranks)[at].clone() for key, whole in wholes.items()}
    if group not in job.muon:
        return _adam(job, cut)
    if job.offload:
        return {MOMENTUM: cut[MOMENTUM].bfloat16()}
    numel, start, owned = len(cut[MOMENTUM]), 0, []
    for name, gap in zip(job.stored_order(group), flat(job, MOMENTUM, group)[1], strict=True):
        stop = start + prod(job.shapes[name])
        if start < (at + 1) * numel and at * numel < stop:
            owned.append(job.values(MOMENTUM, name, expert_rank).flatten())
        start = stop + gap
    return {MOMENTUM: torch.cat(owned).bfloat16()} if owned else {}


def _adam(job: Job, states: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"step": torch.tensor(float(job.step)), **states}


def _torch_state(job: Job, states: dict[int, Any], members: list[list[int]]) -> dict[str, Any]:
    groups = []
    for number, params in enumerate(members):
        muon = {"use_muon": number in job.muon} if job.muon else {}
        group = {"lr": job.rate(number), "betas": (0.9, 0.95), "weight_decay": 0.1}
        groups.append({**group, **muon, "params": params})
    return {"state": {k: v for k, v in states.items() if v}, "param_groups": groups}


# Stage 3 ------------------------------------------------------------------------------------------


def units(job: Job) -> list[tuple[int, list[str]]]:
    """Put parameters into sub-groups: (param group, names) of each."""
    found = []
    for group, params in enumerate(job.cut_groups):
        names: list[str] = []
        held = 0
        for name, shape in params:
            names.append(name)
            held += -(-prod(shape) // job.sharers(group))
            if held >= job.sub_group_size:
                found.append((group, names))
                names, held = [], 0
        if names:
            found.append((group, names))
    return found


def shard(job: Job, whole: Tensor, rank: int, padding: float, ranks: int = 0) -> Tensor:
    """Take a rank's part of one tensor; what is past its end is whatever was in memory."""
    ranks = ranks or job.world_size
    share = -(-whole.numel() // ranks)
    padding = padding if job.garbage else 0.0
    padded = torch.full((share * ranks,), padding, dtype=whole.dtype)
    padded[: whole.numel()] = whole.flatten()
    return padded[rank * share : (rank + 1) * share].clone()


def _part(job: Job, group: int, rank: int, names: list[str], state: str, pad: float) -> Tensor:
    """Take a rank's part of some parameters of a group."""
    expert_rank, at = job.place(group, rank)
    wholes = [job.values(state, name, expert_rank) for name in names]
    return torch.cat([shard(job, whole, at, pad, job.sharers(group)) for whole in wholes])


def sharded_state(job: Job, rank: int) -> dict[str, Any]:
    """Make what a rank's optimizer of stage 3 saves."""
    masters, states = [], {}
    members: list[list[int]] = [[] for _ in job.cut_groups]
    ids = {name: number for number, name in enumerate(job.shapes)}
    for unit, (group, names) in enumerate(units(job)):
        members[group].append(unit)
        part = partial(_part, job, group, rank, names)

        master: Any = part("fp32", float("nan")).requires_grad_()
        master.ds_id = f"{ids[names[0]]}_{ids[names[-1]]}"
        masters.append(master)
        if group in job.muon:
            states[unit] = {MOMENTUM: part(MOMENTUM, 0.0).bfloat16()}
        else:
            states[unit] = _adam(job, {key: part(key, 0.0) for key in STATES})
    return {
        "zero_stage": ZeroStageEnum(3),
        "loss_scaler": LossScaler(1.0),
        "dynamic_loss_scale": False,
        "overflow": False,
        "partition_count": job.world_size,
        "optimizer_state_dict": _torch_state(job, states, members),
        "fp32_flat_groups": masters,
    }
