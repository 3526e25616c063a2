"""Tiny checkpoints as DeepSpeed would have saved them, made without it.

The cutting is done with torch's own operations on whole tensors, by the facts of DeepSpeed 0.19.8;
none of the arithmetic under test is used.
"""

from argparse import Namespace
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.job import (
    LOCAL_EXPERTS,
    MOMENTUM,
    STATES,
    TAG,
    Job,
    Keepsake,
    LossScaler,
    ZeroStageEnum,
    buffers,
    ds_config,
    fragment_address,
    stand_ins,
)


def write(job: Job, run_dir: Path, tag: str = TAG) -> Path:
    """Save a run directory; returns it."""
    place = run_dir / tag
    place.mkdir(parents=True)
    with stand_ins():
        for part in range(job.parts):
            _write_part(replace(job, part=part), place)
    (run_dir / "latest").write_text(tag)
    script = run_dir / "zero_to_fp32.py"
    script.write_text("#!/usr/bin/env python\n")
    script.chmod(0o755)
    return run_dir


def _write_part(job: Job, place: Path) -> None:
    dtype = "bf16_" if job.dtype == torch.bfloat16 else ""
    part = f"mp_rank_{job.part:02d}"
    for rank in range(job.world_size if job.stage == 3 else 1):
        name = f"zero_pp_rank_{rank}_{part}" if job.stage == 3 else part
        torch.save(_model_file(job, rank), place / f"{name}_model_states.pt")
    for rank in range(job.world_size):
        name = f"{dtype}zero_pp_rank_{rank}_{part}_optim_states.pt"
        torch.save(_optimizer_file(job, rank), place / name)
    for expert_rank in range(job.expert_parallel if job.experts else 0):
        for local in range(LOCAL_EXPERTS):
            number = expert_rank * LOCAL_EXPERTS + local
            weights = {
                job.in_model(name, expert_rank): job.values("fp32", name, expert_rank).to(job.dtype)
                for name, _ in job.experts
                if f".{local}." in name
            }
            torch.save(weights, place / f"layer_0_expert_{number}_{part}_model_states.pt")


def load(path: Path) -> Any:  # noqa: ANN401
    """Load a file with torch, classes and all."""
    with stand_ins():
        return torch.load(path, weights_only=False)


def save(content: object, path: Path) -> None:
    """Save a file with torch, classes and all."""
    with stand_ins():
        torch.save(content, path)


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


def _flat_state(job: Job, rank: int) -> dict[str, Any]:
    masters, states, paddings, alignments, slices = [], {}, [], [], []
    for group in range(len(job.cut_groups)):
        ranks = job.sharers(group)
        expert_rank, at = job.place(group, rank)
        whole, gaps = flat(job, "fp32", group, expert_rank)
        numel = len(whole) // ranks
        used = sum(prod(shape) for _, shape in job.cut_groups[group]) + sum(gaps)
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
    if job.elastic:
        both = zip(states.values(), paddings, strict=True)
        wrapped = [_lean(held, padding) for held, padding in both]
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
        return _adam(cut)
    if job.offload:
        return {MOMENTUM: cut[MOMENTUM].bfloat16()}
    numel, start, owned = len(cut[MOMENTUM]), 0, []
    for name, gap in zip(job.stored_order(group), flat(job, MOMENTUM, group)[1], strict=True):
        stop = start + prod(job.shapes[name])
        if start < (at + 1) * numel and at * numel < stop:
            owned.append(job.values(MOMENTUM, name, expert_rank).flatten())
        start = stop + gap
    return {MOMENTUM: torch.cat(owned).bfloat16()} if owned else {}


def _lean(states: dict[str, Tensor], padding: int) -> dict[str, Tensor]:
    """Strip states of what elastic_checkpoint takes for their padding."""
    return {k: v[: len(v) - padding].clone() if v.dim() else v for k, v in states.items()}


def _adam(states: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"step": torch.tensor(7.0), **states}


def _torch_state(job: Job, states: dict[int, Any], members: list[list[int]]) -> dict[str, Any]:
    groups = []
    for number, params in enumerate(members):
        muon = {"use_muon": number in job.muon} if job.muon else {}
        group = {"lr": 0.001 * (1 + number), "betas": (0.9, 0.95), "weight_decay": 0.1}
        groups.append({**group, **muon, "params": params})
    return {"state": {k: v for k, v in states.items() if v}, "param_groups": groups}


# Stage 3 ------------------------------------------------------------------------------------------


def units(job: Job) -> list[tuple[int, list[str]]]:
    """Put parameters into sub-groups: (param group, names) of each."""
    found = []
    for group, params in enumerate(job.groups):
        names: list[str] = []
        held = 0
        for name, shape in params:
            names.append(name)
            held += -(-prod(shape) // job.world_size)
            if held >= job.sub_group_size:
                found.append((group, names))
                names, held = [], 0
        if names:
            found.append((group, names))
    return found


def shard(job: Job, whole: Tensor, rank: int, padding: float) -> Tensor:
    """Take a rank's part of one tensor; what is past its end is whatever was in memory."""
    share = -(-whole.numel() // job.world_size)
    padding = padding if job.garbage else 0.0
    padded = torch.full((share * job.world_size,), padding, dtype=whole.dtype)
    padded[: whole.numel()] = whole.flatten()
    return padded[rank * share : (rank + 1) * share].clone()


def _sharded_state(job: Job, rank: int) -> dict[str, Any]:
    masters, states = [], {}
    members: list[list[int]] = [[] for _ in job.groups]
    ids = {name: number for number, name in enumerate(job.shapes)}
    for unit, (group, names) in enumerate(units(job)):
        members[group].append(unit)

        def part(state: str, padding: float, names: list[str] = names) -> Tensor:
            wholes = [job.values(state, name) for name in names]
            return torch.cat([shard(job, whole, rank, padding) for whole in wholes])

        master: Any = part("fp32", float("nan")).requires_grad_()
        master.ds_id = f"{ids[names[0]]}_{ids[names[-1]]}"
        masters.append(master)
        if group in job.muon:
            states[unit] = {MOMENTUM: part(MOMENTUM, 0.0).bfloat16()}
        else:
            states[unit] = _adam({key: part(key, 0.0) for key in STATES})
    return {
        "zero_stage": ZeroStageEnum(3),
        "loss_scaler": LossScaler(1.0),
        "dynamic_loss_scale": False,
        "overflow": False,
        "partition_count": job.world_size,
        "optimizer_state_dict": _torch_state(job, states, members),
        "fp32_flat_groups": masters,
    }


# Files --------------------------------------------------------------------------------------------


def _optimizer_file(job: Job, rank: int) -> dict[str, Any]:
    state = _sharded_state(job, rank) if job.stage == 3 else _flat_state(job, rank)
    kept = {"ds_config": ds_config(job)} if job.config else {}
    return {"optimizer_state_dict": state, **kept, "ds_version": "0.19.8"}


def _module(job: Job) -> OrderedDict[str, Tensor]:
    """Make the module's state dict; below stage 3 weights are views of one storage per group."""
    module: OrderedDict[str, Tensor] = OrderedDict()
    for group in range(len(job.groups)):
        whole, at = flat(job, "fp32", group)[0].to(job.dtype), 0
        for name, gap in zip(job.stored_order(group), flat(job, "fp32", group)[1], strict=True):
            shape = job.shapes[name]
            module[name] = whole[at : at + prod(shape)].view(shape)
            at += prod(shape) + gap
    module = OrderedDict((name, module[name]) for group in job.groups for name, _ in group)
    for name, _ in job.frozen:
        module[name] = job.values("frozen", name).to(job.dtype)
    if job.stage == 3:
        module = OrderedDict((name, torch.empty(0, dtype=job.dtype)) for name in module)
    module |= buffers()
    for alias, kept in job.tied.items():
        module[alias] = module[kept] if job.stage < 3 else torch.empty(0, dtype=job.dtype)
    return module


def _frozen(job: Job, module: Mapping[str, Tensor], rank: int) -> tuple[Any, Any]:
    if job.stage == 1:
        return None, None
    shapes = OrderedDict((name, _size(job, shape)) for name, shape in job.frozen)
    if job.stage == 2:
        return shapes, OrderedDict((name, module[name]) for name in shapes)
    wholes = {name: job.values("frozen", name).to(job.dtype) for name, _ in job.frozen}
    return shapes, OrderedDict((n, shard(job, w, rank, -1e30)) for n, w in wholes.items())


def _model_file(job: Job, rank: int) -> dict[str, Any]:
    module = _module(job)
    shapes, fragments = _frozen(job, module, rank)
    if job.stage == 3:
        named = [names for _, names in units(job)]
    else:
        named = [job.stored_order(group) for group in range(len(job.cut_groups))]
    state = {
        "module": module,
        "buffer_names": list(buffers()),
        "optimizer": None,
        "param_shapes": [
            OrderedDict((name, _size(job, job.shapes[name])) for name in names) for names in named
        ],
        "frozen_param_shapes": shapes,
        "shared_params": dict(job.tied) if rank == job.part == 0 else {},
        "frozen_param_fragments": fragments,
        "lr_scheduler": {"last_epoch": 7, "table": torch.arange(5.0)},
        "data_sampler": None,
        "skipped_steps": 0,
        "global_steps": 7,
        "global_samples": 168,
        "dp_world_size": job.world_size,
        "mp_world_size": job.parts,
        "num_experts": [LOCAL_EXPERTS * job.expert_parallel] if job.experts else [],
    }
    kept = {"ds_config": ds_config(job)} if job.config else {}
    return {**state, **kept, "ds_version": "0.19.8", **job.client_state}


def _size(job: Job, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Spell a shape: DeepSpeed clones what has experts before it saves, which leaves a tuple."""
    return shape if job.experts else torch.Size(shape)


def client_state() -> dict[str, Any]:
    """Make what a training script might keep: a class of its own, shared objects, a tensor."""
    table = torch.arange(6.0)
    shared = ["one", "list"]
    return {
        "args": Namespace(lr=0.1, path="a/b", nested=Namespace(seed=3)),
        "keepsake": Keepsake({"shared": shared, "again": shared}),
        "views": [table[:3], table[3:], table],
        "rng": torch.get_rng_state(),
    }
