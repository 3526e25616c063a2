"""Where the ranks of a job keep each parameter, and what it is called among all of them."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import distributed

# DeepSpeed has no types, and gives parameters attributes of its own.
Engine: TypeAlias = Any
Param: TypeAlias = Any

FUSED = "|"
"""Before the list of the experts that AutoEP has in one parameter of a rank."""


def part_of_model(engine: Engine) -> int | None:
    """Return the model-parallel rank: which part of the layers this process holds, if not all."""
    if engine.mp_world_size == 1:
        return None
    # Older versions only ask the grid.
    known = getattr(engine, "checkpoint_mp_rank", None)
    return int(engine.mpu.get_model_parallel_rank() if known is None else known)


def global_names(engine: Engine) -> Callable[[str], str]:
    """Return what makes of a local name, of a parameter say, the one it has in the whole job.

    What a model-parallel rank holds is its own, whatever it is called. Experts have numbers
    that start at 0 on each rank that holds some. Random-LTD renames what it drops tokens of.
    """
    part = part_of_model(engine)
    own = "" if part is None else f"mp_rank_{part:02d}."
    first_expert = {
        f"{path}.deepspeed_moe.experts.deepspeed_experts.": module.num_local_experts
        * distributed.get_rank(module.deepspeed_moe.ep_group)
        for path, module in engine.module.named_modules()
        if hasattr(module, "deepspeed_moe")
    }

    fused = {
        f"{path}.experts.{weight}": [
            module.ep_rank * module.num_local_experts + expert
            for expert in range(module.num_local_experts)
        ]
        for path, module in engine.module.named_modules()
        if hasattr(module, "expert_placement_descriptor")
        for weight in ("w1", "w2", "w3")
    }

    def named(name: str) -> str:
        if name in fused:
            return f"{name}{FUSED}{fused[name]}"
        name = name.replace(".random_ltd_layer", "")
        for prefix, first in first_expert.items():
            if name.startswith(prefix):
                number, _, rest = name.removeprefix(prefix).partition(".")
                return f"{own}{prefix}{first + int(number)}.{rest}"
        return own + name

    return named


def of_experts(fused: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors with each expert's apart, which AutoEP has in one with others of its rank."""
    return {
        own: value if own == name else value[place].clone()
        for name, value in fused.items()
        for place, own in enumerate(expert_names(name))
    }


def expert_names(name: str) -> list[str]:
    """Return the names of the experts that are in one tensor; else its name alone."""
    fused, _, experts = name.partition(FUSED)
    return [f"{fused}.{expert}" for expert in json.loads(experts)] if experts else [name]


@dataclass(frozen=True)
class Place:
    """Where a parameter lies in the ranks' flat tensors, and its name among all of the job's."""

    name: str
    start: int
    """In the concatenation of all ranks' tensors, or at stage 3 in each of them."""
    shape: tuple[int, ...]
    shard: int | None
    """At stage 3, how many elements each rank holds of it."""

    @classmethod
    def of(cls, name: str, param: Param, start: int) -> "Place":
        """Take shape and shard from the parameter itself."""
        if hasattr(param, "ds_id"):
            return cls(name, start, tuple(param.ds_shape), param.partition_numel())
        return cls(name, start, tuple(param.shape), None)

    def cut(self, flats: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the full value out of all ranks' flat tensors, padding left out."""
        if self.shard is None:
            rest = torch.cat(list(flats))[self.start :]
        else:
            rest = torch.cat([flat[self.start : self.start + self.shard] for flat in flats])
        return rest[: math.prod(self.shape)].reshape(self.shape).clone()


@dataclass(frozen=True)
class Partition:
    """One rank's part of a flat tensor."""

    places: tuple[Place, ...]
    """Of the parameters in the whole flat tensor: the same on all ranks that share it."""
    rank: int
    """Among the ranks that share it: the data-parallel ones of a model-parallel rank or expert."""


def assembled(
    partitions: Mapping[Partition, Mapping[str, torch.Tensor]],
) -> dict[str, dict[str, torch.Tensor]]:
    """Return every state of every parameter, by state and name, out of the partitions of all ranks.

    Raises
    ------
    AssertionError
        When a partition is missing, or two flat tensors hold one parameter.
    """
    flats: dict[tuple[Place, ...], dict[int, Mapping[str, torch.Tensor]]] = {}
    for partition, tensors in partitions.items():
        flats.setdefault(partition.places, {})[partition.rank] = tensors
    states: dict[str, dict[str, torch.Tensor]] = {}
    for places, by_rank in flats.items():
        assert sorted(by_rank) == list(range(len(by_rank))), f"only partitions {sorted(by_rank)}"
        in_order = [by_rank[rank] for rank in range(len(by_rank))]
        for state in in_order[0]:
            by_name = states.setdefault(state, {})
            for place in places:
                assert place.name not in by_name, f"{place.name} is in two flat tensors"
                by_name[place.name] = place.cut([tensors[state] for tensors in in_order])
    return states
