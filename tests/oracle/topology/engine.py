"""What starting, feeding and ending an engine is like in every topology."""

import importlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from tests.oracle.models import GLOBAL_BATCH, Case, global_batch, warm_up
from tests.oracle.truth import Engine


def initialize(
    case: Case, model: nn.Module, groups: Iterable[dict[str, Any]], **more: object
) -> Engine:
    """Make an engine of `model` that trains these param groups."""
    deepspeed: Any = importlib.import_module("deepspeed")
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=(case.optimizer or torch.optim.AdamW)(list(groups)),
        config=case.ds_config(),
        lr_scheduler=lambda basic: torch.optim.lr_scheduler.LambdaLR(basic, warm_up),
        dist_init_required=False,
        **more,
    )
    return engine


def batch_of(replica: int, replicas: int, step: int) -> torch.Tensor:
    """Return the tokens of one replica of the model in one step."""
    share = GLOBAL_BATCH // replicas
    return global_batch(step)[share * replica : share * (replica + 1)]


def finish(engine: Engine) -> None:
    """Destroy the engine, and have DeepSpeed forget the groups of ranks that it was made of."""
    engine.destroy()
    groups: Any = importlib.import_module("deepspeed.utils.groups")
    # What DeepSpeed does when all of torch's process groups are destroyed; it keeps them for as
    # long as the process lives, and takes them for those of the next engine.
    groups._release_process_group_references()
