"""Tiny checkpoints as DeepSpeed would have saved them, made without it.

The cutting is done with torch's own operations on whole tensors, by the facts of DeepSpeed 0.19.8;
none of the arithmetic under test is used.
"""

from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.fabricated_states import flat, flat_state, shard, sharded_state, units
from tests.job import TAG, Job, Keepsake, ZeroStageEnum, buffers, ds_config, stand_ins

DUMPS = "optimizer.{rank:02d}.pt"


def write(job: Job, run_dir: Path, tag: str = TAG) -> Path:
    """Save a run directory; returns it."""
    place = run_dir / tag
    place.mkdir(parents=True)
    with stand_ins():
        key = key_of(job)
        files = _TAGS.get(key)
        if files is None:
            for part in range(job.parts):
                _write_part(replace(job, part=part), place)
            _remember(key, place)
    for name, content in (files or {}).items():
        (place / name).write_bytes(content)
    (run_dir / "latest").write_text(tag)
    script = run_dir / "zero_to_fp32.py"
    script.write_text("#!/usr/bin/env python\n")
    script.chmod(0o755)
    return run_dir


_TAGS: dict[bytes, dict[str, bytes]] = {}
"""A job, saved → name and content of each file of its tag: many tests save the same job."""
_MOST_TAGS = 200
_MOST_BYTES = 1 << 20
"""Of a tag that is remembered."""


def key_of(job: Job) -> bytes:
    """Save a job itself, as a key for what it saves."""
    key = BytesIO()
    with stand_ins():
        # Some tests give the module no buffers, or save stages in another way.
        torch.save((job, [*buffers()], ZeroStageEnum.weights), key)
    return key.getvalue()


def _remember(job: bytes, place: Path) -> None:
    files = list(place.iterdir())
    if sum(path.stat().st_size for path in files) > _MOST_BYTES:
        return
    if len(_TAGS) == _MOST_TAGS:
        del _TAGS[next(iter(_TAGS))]
    _TAGS[job] = {path.name: path.read_bytes() for path in files}


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
        for local in range(job.experts_of_rank):
            number = expert_rank * job.experts_of_rank + local
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
    with stand_ins():
        torch.save(content, path)


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what a file holds, keeping what is shared in it shared."""
    content = load(path)
    change(content)
    save(content, path)


def edit_all(run_dir: Path, pattern: str, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what all files of a tag hold whose names fit a pattern."""
    paths = sorted((run_dir / TAG).glob(pattern))
    assert paths
    for path in paths:
        edit(path, change)


def optimizer_file(run_dir: Path, rank: int) -> Path:
    """Where a rank's optimizer file of a job in bf16 lies."""
    return run_dir / TAG / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def _optimizer_file(job: Job, rank: int) -> dict[str, Any]:
    state = sharded_state(job, rank) if job.stage == 3 else flat_state(job, rank)
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
    also = [(name, job.shapes[name]) for name in module if name in job.paused]
    shapes = OrderedDict((name, _size(job, shape)) for name, shape in (*also, *job.frozen))
    if job.stage == 2:
        return shapes, OrderedDict((name, module[name]) for name in shapes)
    states = {name: "fp32" if name in job.paused else "frozen" for name in shapes}
    wholes = {name: job.values(states[name], name).to(job.dtype) for name in shapes}
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
        "lr_scheduler": {"last_epoch": job.step, **_table(job)},
        "data_sampler": None,
        "skipped_steps": 0,
        "global_steps": job.step,
        "global_samples": 24 * job.step,
        "dp_world_size": job.world_size,
        "mp_world_size": job.parts,
        "num_experts": [job.experts_of_rank * job.expert_parallel] if job.experts else [],
    }
    kept = {"ds_config": ds_config(job)} if job.config else {}
    return {**state, **kept, "ds_version": "0.19.8", **job.client_state}


def _table(job: Job) -> dict[str, Any]:
    rates = [job.rate(group) for group in range(len(job.cut_groups))]
    return {job.rates: rates} if job.rates else {"table": torch.arange(5.0)}


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


def edit_optimizers(run_dir: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the states of the optimizers in all ranks' files."""
    edit_all(run_dir, "*_optim_states.pt", lambda held: change(held["optimizer_state_dict"]))


def make_adam(run_dir: Path) -> None:
    """Give each param group what torch's Adam and AdamW alone have."""

    def change(state: dict[str, Any]) -> None:
        for group in wrapped(state)["param_groups"]:
            group["amsgrad"] = False

    edit_optimizers(run_dir, change)


def wrapped(state: dict[str, Any]) -> dict[str, Any]:
    """Find the wrapped optimizer's state dict in what a rank's optimizer saves."""
    found: dict[str, Any] = state.get("base_optimizer_state") or state["optimizer_state_dict"]
    return found


def optimizer_state(run_dir: Path, rank: int) -> dict[str, Any]:
    """Load what a rank's optimizer of a job in bf16 saved."""
    found: dict[str, Any] = load(optimizer_file(run_dir, rank))["optimizer_state_dict"]
    return found


def write_dumps(run_dir: Path, directory: Path) -> Path:
    """Save what each rank's optimizer file holds of the optimizer alone; returns the template."""
    directory.mkdir()
    for path in sorted((run_dir / TAG).glob("*_optim_states.pt")):
        rank = int(path.name.partition("pp_rank_")[2].partition("_")[0])
        save(load(path)["optimizer_state_dict"], directory / DUMPS.format(rank=rank))
    return directory / DUMPS


def without_zero(run_dir: Path, **changes: object) -> Path:
    """Make of a checkpoint what DeepSpeed saves without ZeRO: model files, the optimizer in them.

    It is what `FP16_Optimizer` saves: flat masters, and nothing that names a parameter.
    """
    for path in (run_dir / TAG).glob("*_optim_states.pt"):
        path.unlink()

    def change(model: dict[str, Any]) -> None:
        flat = [torch.arange(5.0) + group for group in range(2)]
        state = {
            group: {"step": torch.tensor(7.0), "exp_avg": master * 2, "exp_avg_sq": master * 3}
            for group, master in enumerate(flat)
        }
        groups = [{"lr": 0.1 * group, "params": [group]} for group in range(2)]
        model["ds_config"]["zero_optimization"]["stage"] = 0
        model["optimizer"] = {
            "cur_scale": 1.0,
            "optimizer_state_dict": {"state": state, "param_groups": groups},
            "fp32_groups_flat": [master.requires_grad_() for master in flat],
            "clip_grad": 1.0,
        }
        model |= {"param_shapes": None, "shared_params": None, **changes}

    edit_all(run_dir, "mp_rank_*_model_states.pt", change)
    return run_dir
