"""Lightning's own Trainer with its DeepSpeed strategy, whole runs on a CPU.

The strategy refuses any accelerator but CUDA, and devices without an index. Beside these two checks
and a seed, which are left out, all is Lightning's own code.
"""

import importlib
from collections.abc import Mapping
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

    def run(self) -> None:
        """Do it, in every rank."""
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
    trainer.fit(_module(), loader, ckpt_path=resume)
    engine = trainer.strategy.deepspeed_engine
    seen = {
        "global_batch": engine.train_batch_size(),
        "last_step": trainer.global_step,
        "engine_step": engine.global_steps,
    }
    if not job.saves_every:
        trainer.save_checkpoint(str(job.checkpoint))
    write_seen(seen, job.seen_path)
    engine.destroy()


def _callbacks(job: LightningFit) -> list[Any]:
    if not job.saves_every:
        return []
    callbacks: Any = importlib.import_module("lightning.pytorch.callbacks")
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

    buckets = {key: 200 for key, value in zero_config(stage).items() if value == "auto"}
    return OnAnyDevice(
        config={
            "steps_per_print": 10**9,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": zero_config(stage) | buckets,
            **sizes,
        },
        process_group_backend="gloo",
    )


def _module() -> Any:  # noqa: ANN401
    lightning: Any = importlib.import_module("lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = language_model()

        def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(**batch).loss
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    return Module()
