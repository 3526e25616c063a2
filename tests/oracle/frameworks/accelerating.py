"""A training loop of one's own with Accelerate, its `save_state` and `load_state`."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from tests.oracle.frameworks.common import (
    Seen,
    framework_process,
    generator_digest,
    language_model,
    samples,
    start_generators_apart,
    write_seen,
    write_truth,
    zero_config,
)

BATCH_SIZE, ACCUMULATION = 2, 2


@dataclass(frozen=True)
class AccelerateRun:
    """Load a state if there is one, train some steps, and save the state."""

    stage: int
    save_dir: Path
    seen_path: Path
    saved_truth: Path
    optimizer_steps: int
    load_dir: Path | None = None
    loaded_truth: Path | None = None
    batch_size: int = BATCH_SIZE
    accumulation: int = ACCUMULATION
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Numbers in the DeepSpeed configuration in place of "auto"."""
    project_dir: Path | None = None
    """Where Accelerate names the states itself: the last one there is loaded, not `load_dir`."""
    scheduler_steps: int | None = None
    """How often the script calls the scheduler after each optimizer step; else Accelerate does."""

    def run(self) -> None:
        with framework_process():
            _run(self)


class Progress:
    """An object of the user's that Accelerate saves along."""

    def __init__(self) -> None:
        self.batches = 0

    def state_dict(self) -> dict[str, int]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.batches = state["batches"]


def ds_config(stage: int) -> dict[str, Any]:
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": 0.5,
        "bf16": {"enabled": "auto"},
        "steps_per_print": 10**9,
        "zero_optimization": zero_config(stage),
    }


def _run(job: AccelerateRun) -> None:
    accelerate: Any = importlib.import_module("accelerate")
    seed = 11 if job.load_dir is None else 77
    accelerate.utils.set_seed(seed)
    accelerator = accelerate.Accelerator(
        mixed_precision="bf16",
        gradient_accumulation_steps=job.accumulation,
        deepspeed_plugin=accelerate.DeepSpeedPlugin(
            hf_ds_config=ds_config(job.stage) | dict(job.sizes)
        ),
        step_scheduler_with_optimizer=job.scheduler_steps is None,
        project_config=accelerate.utils.ProjectConfiguration(
            project_dir=job.project_dir, automatic_checkpoint_naming=job.project_dir is not None
        ),
    )
    model = language_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3 if job.load_dir is None else 1e-4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader: Any = DataLoader(samples(), batch_size=job.batch_size, shuffle=True)  # type: ignore[arg-type]
    engine, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    start_generators_apart(seed)
    seen: Seen = {"generator_before": generator_digest()}
    if job.load_dir is not None:
        accelerator.load_state(str(job.load_dir) if job.project_dir is None else None)
    accelerator.project_configuration.automatic_checkpoint_naming = False
    seen |= {
        "generator": generator_digest(),
        "step": accelerator.step,
        "engine_step": engine.global_steps,
        "batches": progress.batches,
        "scheduler": scheduler.scheduler.last_epoch,
    }
    if job.loaded_truth is not None:
        write_truth(engine, job.loaded_truth)
    seen["global_batch"] = engine.train_batch_size()
    seen["synced"], seen["losses"], seen["rates"] = [], [], []
    batches = iter(loader)
    for _ in range(job.accumulation * job.optimizer_steps):
        with accelerator.accumulate(engine):
            loss = engine(**next(batches)).loss
            accelerator.backward(loss)
            optimizer.step()
            if job.scheduler_steps is None:
                scheduler.step()
            elif accelerator.sync_gradients:
                for _ in range(job.scheduler_steps):
                    scheduler.step()
            optimizer.zero_grad()
        progress.batches += 1
        seen["synced"].append(accelerator.sync_gradients)
        seen["losses"].append(float(loss.detach()))
        seen["rates"].append(engine.optimizer.param_groups[0]["lr"])
    accelerator.save_state(str(job.save_dir))
    write_truth(engine, job.saved_truth)
    seen["saved"] = {
        "step": accelerator.step,
        "engine_step": engine.global_steps,
        "batches": progress.batches,
        "scheduler": scheduler.scheduler.last_epoch,
    }
    write_seen(seen, job.seen_path)
    engine.destroy()
