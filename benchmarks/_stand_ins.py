"""Stand-ins for the classes that DeepSpeed pickles, which pickle alike.

Importing DeepSpeed itself takes seconds and hundreds of megabytes.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from types import ModuleType
from typing import Final
from unittest.mock import patch


class LossScaler:
    """Stands in for DeepSpeed's class of this name, which pickles alike."""

    def __init__(self) -> None:
        self.cur_scale = 1.0
        self.dynamic = False


class ZeroStageEnum(IntEnum):
    """Stands in for DeepSpeed's enum."""

    optimizer_states = 1
    gradients = 2
    weights = 3


class fragment_address:
    """Stands in for DeepSpeed's class: where a parameter lies in a partition."""

    def __init__(self, numel: int, start: int) -> None:
        self.numel = numel
        self.start = start


_HOMES: Final = {
    "deepspeed.runtime.fp16.loss_scaler": LossScaler,
    "deepspeed.runtime.zero.config": ZeroStageEnum,
    "deepspeed.utils.tensor_fragment": fragment_address,
}
for _home, _class in _HOMES.items():
    _class.__module__ = _home


@contextmanager
def deepspeed_stand_ins() -> Iterator[None]:
    """Let pickle find the classes above under DeepSpeed's names, without its seconds of import."""
    modules: dict[str, ModuleType] = {}
    for home, stand_in in _HOMES.items():
        parts = home.split(".")
        for depth in range(1, len(parts) + 1):
            name = ".".join(parts[:depth])
            modules.setdefault(name, ModuleType(name))
        setattr(modules[home], stand_in.__name__, stand_in)
    with patch.dict(sys.modules, modules):
        yield
