"""Jobs that were trained from one another, and what a merge of their checkpoints must hold."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tests.fabricated import write
from tests.job import Job


def mean(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Add up in float64, in order, and round once to float32."""
    total = weights[0] * tensors[0].numpy().astype(np.float64)
    for weight, tensor in zip(weights[1:], tensors[1:], strict=True):
        total = total + weight * tensor.numpy().astype(np.float64)
    return torch.from_numpy(total.astype(np.float32))


@dataclass(frozen=True)
class Merged(Job):
    """The job that a merge stands in for."""

    jobs: tuple[Job, ...] = ()
    weights: tuple[float, ...] = ()
    averaged: tuple[str, ...] = ("fp32",)

    def values(self, state: str, name: str, expert_rank: int = 0) -> Tensor:
        """Make a state: the mean of those of all jobs, or that of the newest."""
        jobs = [replace(job, part=self.part) for job in self.jobs]
        newest = max(jobs, key=lambda job: job.step)
        if state not in self.averaged:
            return newest.values(state, name, expert_rank)
        return mean([job.values(state, name, expert_rank) for job in jobs], self.weights)

    @classmethod
    def of(
        cls,
        jobs: Sequence[Job],
        weights: Sequence[float],
        averaged: tuple[str, ...] = ("fp32",),
        **changes: int,
    ) -> "Merged":
        """Return the job that saved the newest, with the mean of all."""
        newest = max(jobs, key=lambda job: job.step)
        own = {name: getattr(newest, name) for name in Job.__dataclass_fields__}
        given = {"jobs": (*jobs,), "weights": (*weights,), "averaged": averaged, "garbage": False}
        return cls(**{**own, **given, **changes})


def save(jobs: Sequence[Job], root: Path) -> list[Path]:
    """Save each job in a run directory of its own; returns the tag directories."""
    tags = [f"global_step{job.step}" for job in jobs]
    return [write(job, root / tag, tag) / tag for job, tag in zip(jobs, tags, strict=True)]
