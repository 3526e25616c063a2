"""Lightning's own saving and loading of DeepSpeed checkpoints, on an engine that runs on a CPU.

Lightning trains with DeepSpeed on GPUs only. What it does to a checkpoint is in two methods of its
strategy, which ask no GPU: here they are called with a trainer that is only a name.
"""

import importlib
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.oracle.frameworks.common import (
    framework_process,
    language_model,
    samples,
    write_seen,
    write_truth,
    zero_config,
)
from tests.oracle.truth import Engine


@dataclass(frozen=True)
class LightningSave:
    """Train a little and let Lightning save."""

    stage: int
    checkpoint: Path
    truth_path: Path

    def run(self) -> None:
        """Do it, in every rank."""
        with framework_process():
            engine = _start_engine(self.stage, seed=11)
            for step in range(3):
                _step(engine, step)
            _strategy(engine, self.stage).save_checkpoint(
                {**trainer_state(), "state_dict": {}, "optimizer_states": []}, self.checkpoint
            )
            write_truth(engine, self.truth_path)
            engine.destroy()


@dataclass(frozen=True)
class LightningLoad:
    """Let Lightning load into a fresh engine, and train on."""

    stage: int
    checkpoint: Path
    truth_path: Path
    seen_path: Path
    with_fabric: bool = False
    weights_alone: bool = False
    """With Fabric, which then loads no states of the optimizer."""

    def run(self) -> None:
        """Do it, in every rank."""
        with framework_process():
            engine = _start_engine(self.stage, seed=77)
            returned = self._load(engine)
            write_truth(engine, self.truth_path)
            first, loss = engine.global_steps, _step(engine, 3)
            write_seen(
                {"returned": {k: repr(returned.get(k)) for k in trainer_state()},
                 "extra": sorted({"state_dict", "optimizer_states"} & returned.keys()),
                 "first_step": first, "last_step": engine.global_steps, "loss": loss},
                self.seen_path,
            )  # fmt: skip
            engine.destroy()

    def _load(self, engine: Engine) -> dict[str, Any]:
        returned: dict[str, Any]
        if self.with_fabric:
            strategies: Any = importlib.import_module("lightning.fabric.strategies")
            optimizer = {} if self.weights_alone else {"optimizer": engine.optimizer}
            state = {"model": engine, **optimizer}
            strategy = strategies.DeepSpeedStrategy(stage=self.stage)
            returned = strategy.load_checkpoint(self.checkpoint, state)
        else:
            returned = _strategy(engine, self.stage).load_checkpoint(self.checkpoint)
        return returned


def trainer_state() -> dict[str, Any]:
    """What Lightning's trainer dumps beside weights and optimizer states."""
    progress = {"ready": 3, "completed": 3, "started": 3, "processed": 3}
    return {
        "epoch": 1,
        "global_step": 3,
        "pytorch-lightning_version": "2.6.6",
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": progress}}},
        "callbacks": {
            "ModelCheckpoint{'monitor': None, 'mode': 'min'}": {
                "best_model_score": torch.tensor(2.5),
                "best_k_models": {},
            }
        },
        "lr_schedulers": [{"last_epoch": 3, "_last_lr": [1e-3]}],
        "hyper_parameters": {"lr": 1e-3},
    }


def _start_engine(stage: int, seed: int) -> Engine:
    deepspeed: Any = importlib.import_module("deepspeed")
    torch.manual_seed(seed)
    sizes = {key: 200 for key, value in zero_config(stage).items() if value == "auto"}
    model = language_model()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3 if seed == 11 else 1e-4),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "bf16": {"enabled": True},
            "steps_per_print": 10**9,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": zero_config(stage) | sizes,
        },
        dist_init_required=False,
    )
    return engine


def _step(engine: Engine, step: int) -> float:
    rows = samples()[2 * step : 2 * step + 2]
    batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    loss = engine(**batch).loss
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def _strategy(engine: Engine, stage: int) -> Any:  # noqa: ANN401
    """Lightning's strategy as it is while a trainer fits."""
    strategies: Any = importlib.import_module("lightning.pytorch.strategies")
    states: Any = importlib.import_module("lightning.pytorch.trainer.states")
    strategy = strategies.DeepSpeedStrategy(stage=stage)
    trainer = SimpleNamespace(state=SimpleNamespace(fn=states.TrainerFn.FITTING))
    strategy._lightning_module = SimpleNamespace(trainer=trainer, strict_loading=True)
    strategy.parallel_devices = [torch.device("cpu")]
    strategy.model = engine
    return strategy
