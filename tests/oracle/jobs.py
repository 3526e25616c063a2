"""What the ranks do: train and save, load and resume, consolidate. Runs inside every rank."""

import gc
import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.nn import functional

from tests.oracle.models import (
    GLOBAL_BATCH,
    Case,
    TinyLanguageModel,
    client_state,
    global_batch,
    param_groups,
    warm_up,
)
from tests.oracle.truth import Engine, Truth, accessor_differences, gather_truth


@dataclass(frozen=True)
class Train:
    """Train a fresh engine, save a checkpoint, write the truth of that moment."""

    case: Case
    save_dir: Path
    truth_path: Path
    steps: int = 3
    seed: int = 11
    further_steps: int = 0
    """Steps after the save; the truth at their end goes beside the first one."""
    check_accessors: bool = False
    """Fail when DeepSpeed's public accessors disagree with the gathered truth."""


@dataclass(frozen=True)
class Resume:
    """Load a checkpoint into a fresh engine with ``load_checkpoint()`` and nothing else."""

    case: Case
    load_dir: Path
    truth_path: Path
    resave_dir: Path | None = None
    further_steps: int = 0
    tag: str | None = None
    seed: int = 77
    """Not the trained one: what was not loaded must differ."""


@dataclass(frozen=True)
class Consolidate:
    """Merge a checkpoint with DeepSpeed's ``zero_to_fp32`` and save the tensors to a file."""

    checkpoint_dir: Path
    path: Path


Job = Train | Resume | Consolidate


def after_path(truth_path: Path) -> Path:
    """Where the truth after the further steps is written."""
    return truth_path.with_name(f"{truth_path.stem}.after{truth_path.suffix}")


def run(job: Job) -> None:
    """Do `job` in this rank, and leave the process fit for the next one."""
    linear = functional.linear
    try:
        if isinstance(job, Train):
            _train(job)
        elif isinstance(job, Resume):
            _resume(job)
        elif distributed.get_rank() == 0:
            _consolidate(job)
    finally:
        # Stage 3 replaces it for the whole process and never puts it back: a later engine of
        # another stage would round its gradients unlike one in a process of its own.
        functional.linear = linear
        gc.collect()
    distributed.barrier()


def _train(job: Train) -> None:
    engine = _start_engine(job.case, job.seed)
    for step in range(job.steps):
        _step(engine, step)
    state = client_state(job.steps)
    engine.save_checkpoint(str(job.save_dir), client_state=state)
    truth = gather_truth(engine, state)
    _write(truth, job.truth_path)
    if job.check_accessors:
        found = accessor_differences(engine, truth)
        assert not found, f"DeepSpeed's accessors disagree: {found}"
    _further(engine, job.further_steps, job.truth_path, state)
    engine.destroy()


def _resume(job: Resume) -> None:
    # Other hyper-parameters than were saved: whatever is right afterwards came from the file.
    engine = _start_engine(job.case, job.seed, scale=1.7)
    path, returned = engine.load_checkpoint(str(job.load_dir), tag=job.tag)
    assert path is not None, f"DeepSpeed found no checkpoint in {job.load_dir}"
    # DeepSpeed returns its own keys among the user's and refuses or obeys them when they come back.
    state = {key: returned[key] for key in client_state(0) if key in returned}
    truth = gather_truth(engine, state)
    _write(truth, job.truth_path)
    if job.resave_dir is not None:
        engine.save_checkpoint(str(job.resave_dir), tag=Path(path).parent.name, client_state=state)
    _further(engine, job.further_steps, job.truth_path, state)
    engine.destroy()


def _consolidate(job: Consolidate) -> None:
    zero_to_fp32: Any = importlib.import_module("deepspeed.utils.zero_to_fp32")
    torch.save(
        zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(job.checkpoint_dir)), job.path
    )


def _further(engine: Engine, steps: int, truth_path: Path, state: dict[str, Any]) -> None:
    """Go on training for `steps` steps, if any, and write the truth at their end."""
    if steps:
        for step in range(engine.global_steps, engine.global_steps + steps):
            _step(engine, step)
        _write(gather_truth(engine, state), after_path(truth_path))


def _write(truth: Truth, path: Path) -> None:
    if distributed.get_rank() == 0:
        truth.save(path)


def _start_engine(case: Case, seed: int, scale: float = 1.0) -> Engine:
    deepspeed: Any = importlib.import_module("deepspeed")
    torch.manual_seed(seed)
    config = case.ds_config()
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=case.zero_init):
        model = TinyLanguageModel()
    optimizer = torch.optim.AdamW(param_groups(model, scale))
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config=config,
        lr_scheduler=None
        if "scheduler" in config
        else lambda basic: torch.optim.lr_scheduler.LambdaLR(basic, warm_up),
        dist_init_required=False,
    )
    return engine


def _step(engine: Engine, step: int) -> float:
    """One optimizer step on this rank's slice of the global batch."""
    per_rank = GLOBAL_BATCH // distributed.get_world_size()
    start = per_rank * distributed.get_rank()
    loss = engine(global_batch(step)[start : start + per_rank])
    engine.backward(loss)
    engine.step()
    return float(loss.detach())
