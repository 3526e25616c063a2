"""Makes what a job with AutoEP saves, of one layer of experts."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.fabricated import edit, save, write
from tests.job import STEP, TAG, Job, Shapes, values

MODEL = "mp_rank_00_model_states.pt"
PREFIX = "mlp.experts"
WEIGHTS = {"w1": (5, 4), "w2": (4, 5), "w3": (5, 4)}
"""Shapes of each expert's."""


def fused(count: int) -> Shapes:
    """Return what a rank has of the layer if it has so many experts."""
    return tuple((f"{PREFIX}.{weight}", (count, *shape)) for weight, shape in WEIGHTS.items())


@dataclass(frozen=True, slots=True)
class AutoExpertsJob(Job):
    """A job of which AutoEP spreads the experts."""

    @property
    def experts_of_rank(self) -> int:
        return self.experts[0][1][0]

    def values(self, state: str, name: str, expert_rank: int = 0) -> Tensor:
        """Make a state of all experts of a rank, or of another parameter."""
        if name not in dict(self.experts):
            return Job.values(self, state, name)
        first, seed = expert_rank * self.experts_of_rank, state
        if self.step != STEP:
            seed = f"{seed}@{self.step}"
        shape = self.shapes[name][1:]
        numbers = range(first, first + self.experts_of_rank)
        return torch.stack([values(seed, f"{name}.{number}", shape) for number in numbers])


ON_2 = AutoExpertsJob(world_size=4, experts=fused(2), expert_parallel=2)


def write_auto(job: AutoExpertsJob, run_dir: Path) -> Path:
    """Save a run directory."""
    write(job, run_dir)
    place = run_dir / TAG
    section = {"enabled": True, "autoep_size": job.expert_parallel}
    for path in (place / MODEL, *place.glob("*_optim_states.pt")):
        edit(path, lambda content: content["ds_config"].update(expert_parallel=section))
    edit(place / MODEL, lambda content: content.update(noted(job)))
    for rank in range(job.expert_parallel):
        whole = {name: job.values("fp32", name, rank).to(job.dtype) for name, _ in job.experts}
        for local in range(job.experts_of_rank):
            number = rank * job.experts_of_rank + local
            own = {f"{name}.{number}": value[local].clone() for name, value in whole.items()}
            save(own, place / f"layer_0_expert_{number}_mp_rank_00_model_states.pt")
    return run_dir


def noted(job: AutoExpertsJob) -> dict[str, Any]:
    """Return what a model file tells of the experts' places."""
    own, degree = job.experts_of_rank, job.expert_parallel
    ranks = [{"rank": r, "experts": [r * own + e for e in range(own)]} for r in range(degree)]
    count = own * degree
    layer = {
        "moe_layer_id": 0,
        "module_path": "mlp",
        "num_experts": count,
        "num_local_experts": own,
        "ep_size": degree,
        "expert_placement": {
            "version": 1, "num_experts": count, "ep_size": degree, "ranks": ranks
        },
        "affine_maps": {
            "version": 1,
            "params": {name: _map([count, *shape[1:]], degree) for name, shape in job.experts},
        },
        "expert_key_prefix": PREFIX,
        "checkpoint_format": "per_expert_files",
        "checkpoint_format_version": None,
        "ep_group_name": f"ep_size_{degree}",
        "ep_rank": 0,
        "expert_data_parallel_rank": 0,
        "expert_data_parallel_world_size": job.world_size // degree,
        "global_expert_start": 0,
        "global_expert_end": own,
    }  # fmt: skip
    info = {"universal_checkpoint_version": 0.4, "ds_autoep_layers": [dict(layer)]}
    return {"ds_autoep_layers": [layer], "universal_checkpoint_info": info}


def _map(whole: Sequence[int], degree: int) -> dict[str, Any]:
    own = [whole[0] // degree, *whole[1:]]
    strides = [*torch.empty(*whole).stride()]
    return {
        "logical_shape": [*whole],
        "ranks": {
            rank: {
                "shard_shape": own,
                "pieces": [
                    {
                        "shape": own,
                        "source": [rank * prod(own), strides],
                        "dest": [0, strides],
                        "locations": [rank],
                    }
                ],
            }
            for rank in range(degree)
        },
    }
