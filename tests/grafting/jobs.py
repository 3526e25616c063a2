"""A trained job and what a changed one saved before its first step, and what a graft must hold."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import streamshard
from tests.fabricated import write
from tests.job import STATES, Job

TRAINED = Job(stage=2, tied={}, frozen=(("old.weight", (5, 3)), ("old.bias", (1,))))
"""SRC, unless a test says otherwise."""


class Start(Job):
    """A job whose values are others than those of SRC, everywhere."""

    __slots__ = ()

    def values(self, state: str, name: str, expert_rank: int = 0) -> Tensor:
        return super().values(state, name, expert_rank) + 1


@dataclass(frozen=True)
class Jobs:
    """SRC and START on a disk."""

    source: Path
    start: Path
    old: Job
    new: Start

    @classmethod
    def write(cls, root: Path, old: Job = TRAINED, **changes: Any) -> "Jobs":  # noqa: ANN401
        """Save SRC, and START, which differs by `changes`."""
        fields = {name: getattr(old, name) for name in Job.__dataclass_fields__}
        new = Start(**{**fields, **changes})
        write(old, root / "source")
        write(replace(new), root / "stepped", tag="global_step0")
        ranks = new.world_size * new.parts
        options: dict[str, Any] = {"world_size": ranks, "fresh_states": True}
        streamshard.repartition(root / "stepped", root / "start", **options)
        return cls(root / "source", root / "start", old, new)

    def graft(self, rules: str = "", **options: Any) -> Mapping[tuple[str, str], Tensor]:  # noqa: ANN401
        """Graft with rules; returns every tensor of the target, by (state, name)."""
        file = self.source.parent / "rules"
        file.write_text(rules)
        out = self.source.parent / "out"
        streamshard.graft(self.source, self.start, out, rules=file, verify=True, **options)
        return tensors_of(out)

    def kept(self, name: str) -> dict[str, Tensor]:
        """Return what SRC holds of a parameter, by state."""
        return {state: self.old.values(state, name) for state in ("fp32", *STATES)}


def tensors_of(run: Path) -> dict[tuple[str, str], Tensor]:
    """Read every tensor of a checkpoint, by (state, name)."""
    with streamshard.open(run) as opened:
        return {
            (state, name): tensor.torch()
            for name, parameter in opened.items()
            for state, tensor in parameter.tensors.items()
        }


def differing(
    found: Mapping[tuple[str, str], Tensor], name: str, states: Mapping[str, Tensor]
) -> list[str]:
    """Name the states of a parameter that are not what they should be, or not there."""
    held = {state: tensor for (state, key), tensor in found.items() if key == name}
    kept = {state: tensor for state, tensor in held.items() if state in ("fp32", *STATES)}
    return [
        state
        for state in kept.keys() | states.keys()
        if state not in kept or state not in states or not torch.equal(kept[state], states[state])
    ]
