"""Small trainings by torch, and the model parts that readers would return for what they save."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.optim import AdamW

from streamshard.formats.checkpoint import ModelPart, ParamGroup
from streamshard.formats.deepspeed import names
from streamshard.formats.pickle.inert import Node
from streamshard.formats.torch import torch_file


def inert(value: object, directory: Path) -> Node:
    """Return what the program reads of a value that torch has saved."""
    path = directory / "value.pt"
    torch.save(value, path)
    return torch_file.read(path, 0).root


def model_part(
    groups: Sequence[Mapping[str, Any]],
    model: Mapping[str, Any] | None = None,
    **optimizer: Node,
) -> ModelPart:
    """Return one with these settings of param groups, each of which has one parameter."""
    wrapped = {"state": {}, "param_groups": [dict(group) for group in groups]}
    return ModelPart(
        "",
        tuple(ParamGroup((f"w{n}",), "float32", None, n) for n in range(len(groups))),
        (),
        {} if model is None else model,
        {names.OPTIMIZER: {names.BASE_OPTIMIZER: wrapped, **optimizer}},
        {},
    )


def settings(part: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the settings of param groups in an optimizer file's dict."""
    found: list[dict[str, Any]] = part[names.OPTIMIZER][names.BASE_OPTIMIZER]["param_groups"]
    return found


class Training:
    """An optimizer and its scheduler, which the engine steps one after the other."""

    def __init__(self, bases: Sequence[float], schedule: Callable[[AdamW], Any]) -> None:
        weights = [torch.nn.Parameter(torch.ones(2)) for _ in bases]
        groups = [{"params": [w], "lr": base} for w, base in zip(weights, bases, strict=True)]
        self.optimizer = AdamW(groups)
        self.scheduler = schedule(self.optimizer)

    def run(self, steps: int) -> list[list[float]]:
        """Train, and return the rates of each step."""
        rates = []
        for _ in range(steps):
            rates.append([group["lr"] for group in self.optimizer.param_groups])
            self.optimizer.step()
            self.scheduler.step()
        return rates

    def saved(self, directory: Path, **model: Node) -> ModelPart:
        """Return its model part, with the scheduler's state in the model file."""
        model = {names.SCHEDULER: self.scheduler.state_dict(), **model}
        groups = self.optimizer.state_dict()["param_groups"]
        return model_part(*inert((groups, model), directory))

    def load(self, optimizer_file: Mapping[str, Any], scheduler: Node) -> None:
        """Load as the engine does: the optimizer first."""
        loaded = {"state": {}, "param_groups": settings(optimizer_file)}
        self.optimizer.load_state_dict(loaded)
        self.scheduler.load_state_dict(scheduler)
