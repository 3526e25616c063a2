"""A job as a user writes it, which begins to train in one of the ways that there are."""

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from tests.oracle import jobs
from tests.oracle.jobs import start_engine
from tests.oracle.models import Case, TinyLanguageModel, Topology
from tests.oracle.truth import Engine


@dataclass(frozen=True)
class Begin:
    """A job that begins to train in one of the ways that there are, and saves whatever happens."""

    case: Case
    by: Literal["load_checkpoint", "forward", "backward", "step", "train_batch", "eval_batch"]
    save_dir: Path
    load_dir: Path = Path("none")
    saves_first: bool = False
    """Save in place of the beginning, as a user with an engine at hand does."""
    reference: bool = False
    """Whether there is another model, which does not train, and computes first."""
    closes: Path | None = None
    """A path that the job puts a file at, so that nothing can be saved below it."""

    def run(self) -> None:
        engine = start_engine(self.case, 11)
        tokens = (self.case.topology or Topology()).batch(0)
        if self.reference:
            _reference_model()(tokens)
        if self.closes is not None:
            self.closes.write_text("")
        loss = engine.module(tokens) if self.by in ("backward", "step") else None
        if self.saves_first:
            engine.save_checkpoint(str(self.save_dir))
            jobs.finish(engine, self.case)
            return
        try:
            self._begin(engine, tokens, loss)
        except BaseException:  # as scripts do, alas
            pass
        finally:
            engine.save_checkpoint(str(self.save_dir))

    def _begin(self, engine: Engine, tokens: torch.Tensor, loss: Any) -> None:  # noqa: ANN401
        if self.by == "load_checkpoint":
            engine.load_checkpoint(str(self.load_dir))
        elif self.by == "forward":
            engine(tokens)
        elif self.by == "backward":
            engine.backward(loss)
        elif self.by == "step":
            engine.step()
        else:
            getattr(engine, self.by)(iter([(part, part) for part in tokens.chunk(2)]))


def _reference_model() -> Any:  # noqa: ANN401
    deepspeed: Any = importlib.import_module("deepspeed")
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 2000},
    }
    return deepspeed.initialize(model=TinyLanguageModel(), config=config)[0]
