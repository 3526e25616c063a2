"""How every engine is made, whatever its job is divided by."""

import importlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from tests.oracle.models import Case, warm_up
from tests.oracle.truth import Engine


def initialize(
    case: Case, model: nn.Module, groups: Iterable[dict[str, Any]], **more: object
) -> Engine:
    """Make an engine of `model` that trains these param groups."""
    deepspeed: Any = importlib.import_module("deepspeed")
    config, groups = case.ds_config(), list(groups)
    optimizer = None if case.optimizer is None else case.optimizer(groups)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        model_parameters=groups if optimizer is None else None,
        config=config,
        lr_scheduler=None
        if "scheduler" in config or not case.warms_up
        else lambda basic: torch.optim.lr_scheduler.LambdaLR(basic, warm_up),
        dist_init_required=False,
        **more,
    )
    return engine
