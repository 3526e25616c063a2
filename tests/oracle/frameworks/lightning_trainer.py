"""Lightning's own Trainer with its DeepSpeed strategy, whole runs on a CPU; and loads with Fabric.

The strategy refuses any accelerator but CUDA, and devices without an index. Beside these two checks
and a seed, which are left out, all is Lightning's own code.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.utils.data import DataLoader

from tests.oracle.frameworks.common import (
    framework_process,
    language_model,
    samples,
    write_seen,
    write_truth,
    zero_config,
)


@dataclass(frozen=True)
class LightningFit:
    """Train, from the beginning or from a checkpoint, save one, and stop."""

    stage: int
    checkpoint: Path
    seen_path: Path
    last_step: int
    batch_size: int
    accumulation: int
    resume_from: Path | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    """For the configuration of the strategy."""
    saves_every: int = 0
    """Steps between the saves of a `ModelCheckpoint`, which keeps all of them, and links the last;
    without them, the job saves when it has ended."""
    loaded_truth: Path | None = None
    """For what the engine holds before the first step."""
    saved_truth: Path | None = None
    """For what it holds at the end."""
    change: Callable[[Any], Any] | None = None
    """What the script does to the model."""
    rate: float | None = None
    """Its base learning rate, which is halved at every step; None for 1e-3 at every step."""

    def run(self) -> None:
        with framework_process():
            _fit(self)


def _fit(job: LightningFit) -> None:
    lightning: Any = importlib.import_module("lightning")
    torch.manual_seed(11 if job.resume_from is None else 77)
    trainer = lightning.Trainer(
        strategy=_strategy(job.stage, job.sizes),
        accelerator="cpu",
        devices=distributed.get_world_size(),
        plugins=[
            importlib.import_module(
                "lightning.fabric.plugins.environments"
            ).TorchElasticEnvironment()
        ],
        precision="bf16-true",
        accumulate_grad_batches=job.accumulation,
        max_steps=job.last_step,
        logger=False,
        enable_checkpointing=bool(job.saves_every),
        callbacks=_callbacks(job),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader: Any = DataLoader(samples(), batch_size=job.batch_size)  # type: ignore[arg-type]
    resume = None if job.resume_from is None else str(job.resume_from)
    trainer.fit(_module(job.change, job.rate), loader, ckpt_path=resume)
    engine = trainer.strategy.deepspeed_engine
    seen = {
        "global_batch": engine.train_batch_size(),
        "last_step": trainer.global_step,
        "engine_step": engine.global_steps,
    }
    if not job.saves_every:
        trainer.save_checkpoint(str(job.checkpoint))
    if job.saved_truth is not None:
        write_truth(engine, job.saved_truth)
    write_seen(seen, job.seen_path)
    engine.destroy()


def _callbacks(job: LightningFit) -> list[Any]:
    callbacks: Any = importlib.import_module("lightning.pytorch.callbacks")

    class Watch(callbacks.Callback):  # type: ignore[misc]
        def on_train_start(self, trainer: Any, _module: object) -> None:  # noqa: ANN401
            if job.loaded_truth is not None:
                write_truth(trainer.strategy.deepspeed_engine, job.loaded_truth)

    if not job.saves_every:
        return [Watch()]
    return [
        callbacks.ModelCheckpoint(
            dirpath=job.checkpoint.parent,
            every_n_train_steps=job.saves_every,
            save_top_k=-1,
            save_last="link",
        )
    ]


def _strategy(stage: int, sizes: Mapping[str, int]) -> Any:  # noqa: ANN401
    strategies: Any = importlib.import_module("lightning.pytorch.strategies")

    class OnAnyDevice(strategies.DeepSpeedStrategy):  # type: ignore[misc]
        @property
        def root_device(self) -> torch.device:
            return torch.device("cpu", self.local_rank)

        def setup_environment(self) -> None:
            strategies.DDPStrategy.setup_environment(self)

        def setup_distributed(self) -> None:
            self.set_world_ranks()
            self._init_deepspeed_distributed()

    return OnAnyDevice(config=_config(stage) | dict(sizes), process_group_backend="gloo")


def _config(stage: int) -> dict[str, Any]:
    buckets = {key: 200 for key, value in zero_config(stage).items() if value == "auto"}
    return {
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero_config(stage) | buckets,
    }


def _module(change: Callable[[Any], Any] | None = None, rate: float | None = None) -> Any:  # noqa: ANN401
    lightning: Any = importlib.import_module("lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            model = language_model()
            self.model = model if change is None else change(model)

        def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(**batch).loss
            return loss

        def configure_optimizers(self) -> Any:  # noqa: ANN401
            optimizer = torch.optim.AdamW(self.parameters(), lr=rate or 1e-3)
            if rate is None:
                return optimizer
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            each_step = {"scheduler": scheduler, "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": each_step}

    return Module()


@dataclass(frozen=True)
class FabricLoad:
    """Let Fabric load what a Trainer saved into a fresh engine, and see what that computes."""

    stage: int
    checkpoint: Path
    loaded_truth: Path
    seen_path: Path
    weights_alone: bool

    def run(self) -> None:
        with framework_process():
            torch.manual_seed(77)
            deepspeed: Any = importlib.import_module("deepspeed")
            strategies: Any = importlib.import_module("lightning.fabric.strategies")
            module = _module()
            config = _config(self.stage) | {"train_micro_batch_size_per_gpu": 2}
            engine, *_ = deepspeed.initialize(
                model=module,
                optimizer=module.configure_optimizers(),
                config=config | {"bf16": {"enabled": True}},
                dist_init_required=False,
            )
            state = {"model": engine}
            if not self.weights_alone:
                state["optimizer"] = engine.optimizer
            strategies.DeepSpeedStrategy(stage=self.stage).load_checkpoint(self.checkpoint, state)
            write_truth(engine, self.loaded_truth)
            seen = {"engine_step": engine.global_steps}
            loss = engine.module.model(**torch.utils.data.default_collate(samples()[:2])).loss
            write_seen({**seen, "loss": float(loss.detach())}, self.seen_path)
            engine.destroy()
