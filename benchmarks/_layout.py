"""What DeepSpeed 0.19.8 would save of a model: its files as trees, tensors as their description.

Own arithmetic, on purpose: nothing here may come from the package that is measured and checked.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch

from benchmarks._model import MASTER, MODULE, PADDING, STATES, STEP, Model, Run, Shape
from benchmarks._stand_ins import LossScaler, ZeroStageEnum, fragment_address

TAG: Final = "global_step7"
VERSION: Final = "0.19.8"


@dataclass(frozen=True, eq=False, slots=True)
class Stored:
    """A storage: what fills it, in order."""

    dtype: torch.dtype
    runs: tuple[Run, ...]

    @property
    def numel(self) -> int:
        """Count of elements."""
        return sum(run.numel for run in self.runs)


@dataclass(frozen=True, eq=False, slots=True)
class Leaf:
    """A tensor: a contiguous view of a storage."""

    stored: Stored
    start: int
    shape: Shape
    requires_grad: bool = False
    ds_id: str | None = None


@dataclass(frozen=True, slots=True)
class NativeLayout:
    """A model's checkpoint at one stage and world size."""

    model: Model
    stage: int
    world_size: int

    def files(self, ranks: Iterable[int] | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield each torch file: its path in the run directory, and its object.

        Parameters
        ----------
        ranks
            Whose files; by default all ranks'.
        """
        for rank in range(self.world_size) if ranks is None else ranks:
            if self.stage == 3:
                name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
                yield f"{TAG}/{name}", self._model_file(self._partitioned_module(rank))
            name = f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            state = self._stage_3(rank) if self.stage == 3 else self._stage_12(rank)
            file = {"optimizer_state_dict": state, "ds_config": self._config()}
            yield f"{TAG}/{name}", {**file, "ds_version": VERSION}
        if self.stage < 3:
            yield f"{TAG}/mp_rank_00_model_states.pt", self._model_file(self._whole_module())

    def _config(self) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "zero_optimization": {
                "stage": self.stage,
                "sub_group_size": self.model.sub_group_numel,
            },
        }

    # Model files -------------------------------------------------------------------------------

    def _model_file(self, module: dict[str, Any]) -> dict[str, Any]:
        return {**module, "dp_world_size": self.world_size, "mp_world_size": 1, "global_steps": 7,
                "ds_config": self._config(), "ds_version": VERSION}  # fmt: skip

    def _whole_module(self) -> dict[str, Any]:
        """Spell stages 1 and 2: weights are views of one storage per param group."""
        module = OrderedDict[str, Any]()
        for group in self.model.groups:
            stored = _stored(group, MASTER, torch.bfloat16, padding=self._padding(group))
            start = 0
            for name, shape in group.items():
                module[name] = Leaf(stored, start, shape)
                start += math.prod(shape)
        frozen = OrderedDict(
            (name, Leaf(_stored({name: shape}, MODULE, torch.bfloat16), 0, shape))
            for name, shape in self.model.frozen.items()
        )
        shapes = [_shapes(group) for group in self.model.groups]
        return self._module(module, frozen, frozen if self.stage > 1 else None, shapes, rank=0)

    def _partitioned_module(self, rank: int) -> dict[str, Any]:
        """Spell stage 3: weights are placeholders, frozen ones a shard."""
        module = OrderedDict[str, Any](
            (name, _placeholder()) for group in self.model.groups for name in group
        )
        fragments = OrderedDict[str, Any]()
        for name, shape in self.model.frozen.items():
            stored = Stored(torch.bfloat16, self._shard(MODULE, name, shape, rank))
            fragments[name] = Leaf(stored, 0, (stored.numel,))
        placeholders = OrderedDict((name, _placeholder()) for name in self.model.frozen)
        shapes = [_shapes(unit) for _, unit in self._sub_groups()]
        return self._module(module, placeholders, fragments, shapes, rank=rank)

    def _module(
        self,
        module: OrderedDict[str, Any],
        frozen: dict[str, Leaf],
        fragments: dict[str, Leaf] | None,
        shapes: list[Any],
        *,
        rank: int,
    ) -> dict[str, Any]:
        module |= {alias: module[name] for alias, name in self.model.tied.items()}
        module |= frozen
        for name, shape in self.model.buffers.items():
            module[name] = Leaf(_stored({name: shape}, MODULE, torch.float32), 0, shape)
        return {
            "module": module,
            "buffer_names": list(self.model.buffers),
            "optimizer": None,
            "param_shapes": shapes,
            "frozen_param_shapes": None if fragments is None else _shapes(self.model.frozen),
            "shared_params": dict(self.model.tied) if rank == 0 else {},
            "frozen_param_fragments": fragments,
        }

    # Optimizer files ---------------------------------------------------------------------------

    def _padding(self, group: dict[str, Shape]) -> int:
        return -sum(map(math.prod, group.values())) % (2 * self.world_size)

    def _stage_12(self, rank: int) -> dict[str, Any]:
        masters, states, mappings, paddings = [], {}, [], []
        for index, group in enumerate(self.model.groups):
            lean = sum(map(math.prod, group.values()))
            numel = (lean + self._padding(group)) // self.world_size
            lower, upper = rank * numel, (rank + 1) * numel
            padding = min(max(upper - lean, 0), numel)
            leaves = {
                state: Leaf(Stored(torch.float32, _window(group, state, lower, upper)), 0, (numel,))
                for state in STATES
            }
            masters.append(Leaf(leaves.pop(MASTER).stored, 0, (numel - padding,), True))
            states[index] = {STEP: _step(), **leaves}
            mappings.append(_mapping(group, lower, upper))
            paddings.append(padding)
        groups = [[index] for index in range(len(masters))]
        return {
            **_scaling(),
            "clip_grad": 0.0,
            "base_optimizer_state": {"state": states, "param_groups": _param_groups(groups)},
            "single_partition_of_fp32_groups": masters,
            "zero_stage": ZeroStageEnum(self.stage),
            "group_paddings": paddings,
            "param_alignment_paddings": [[0] * len(group) for group in self.model.groups],
            "partition_count": [self.world_size] * len(masters),
            "ds_version": VERSION,
            "param_slice_mappings": mappings,
        }

    def _sub_groups(self) -> list[tuple[int, dict[str, Shape]]]:
        """Pair each sub-group's parameters with the param group that they are of."""
        found: list[tuple[int, dict[str, Shape]]] = []
        for index, group in enumerate(self.model.groups):
            held, unit = 0, dict[str, Shape]()
            for name, shape in group.items():
                unit[name] = shape
                held += -(-math.prod(shape) // self.world_size)
                if held >= self.model.sub_group_numel:
                    found.append((index, unit))
                    held, unit = 0, {}
            found += [(index, unit)] if unit else []
        return found

    def _shard(self, state: str, name: str, shape: Shape, rank: int) -> tuple[Run, ...]:
        numel = math.prod(shape)
        share = -(-numel // self.world_size)
        start = min(rank * share, numel)
        own = min(share, numel - start)
        return (Run(state, name, start, own), Run(PADDING, "", 0, share - own))

    def _stage_3(self, rank: int) -> dict[str, Any]:
        order = [*self.model.trained, *self.model.frozen]
        masters, states = [], {}
        members: list[list[int]] = [[] for _ in self.model.groups]
        for unit, (group, params) in enumerate(self._sub_groups()):
            members[group].append(unit)
            leaves = {}
            for state in STATES:
                shards = (self._shard(state, name, shape, rank) for name, shape in params.items())
                stored = Stored(torch.float32, tuple(run for shard in shards for run in shard))
                leaves[state] = Leaf(stored, 0, (stored.numel,))
            master = leaves.pop(MASTER)
            first, *_, last = [*params, *params]
            ds_id = f"{order.index(first)}_{order.index(last)}"
            masters.append(Leaf(master.stored, 0, master.shape, True, ds_id))
            states[unit] = {STEP: _step(), **leaves}
        return {
            "zero_stage": ZeroStageEnum(3),
            **_scaling(),
            "partition_count": self.world_size,
            "optimizer_state_dict": {"state": states, "param_groups": _param_groups(members)},
            "fp32_flat_groups": masters,
        }


def _placeholder() -> Leaf:
    """Describe what a partitioned weight leaves behind: an empty tensor with its own storage."""
    return Leaf(Stored(torch.bfloat16, ()), 0, (0,))


def _shapes(params: dict[str, Shape]) -> OrderedDict[str, torch.Size]:
    return OrderedDict((name, torch.Size(shape)) for name, shape in params.items())


def _stored(
    params: dict[str, Shape], state: str, dtype: torch.dtype, *, padding: int = 0
) -> Stored:
    runs = (Run(state, name, 0, math.prod(shape)) for name, shape in params.items())
    return Stored(dtype, (*runs, Run(PADDING, "", 0, padding)))


def _step() -> Leaf:
    return Leaf(Stored(torch.float32, (Run(STEP, "", 0, 1),)), 0, ())


def _scaling() -> dict[str, Any]:
    return {"loss_scaler": LossScaler(), "dynamic_loss_scale": False, "overflow": False}


def _param_groups(members: list[list[int]]) -> list[dict[str, Any]]:
    return [
        {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1 / (1 + n), "params": p}
        for n, p in enumerate(members)
    ]


def _owned(group: dict[str, Shape], lower: int, upper: int) -> Iterator[tuple[str, int, int, int]]:
    """Yield (parameter, first element, start in the range, numel) of all inside a flat range."""
    at = 0
    for name, shape in group.items():
        stop = at + math.prod(shape)
        first, last = max(at, lower), min(stop, upper)
        if last > first:
            yield name, first - at, first - lower, last - first
        at = stop


def _window(group: dict[str, Shape], state: str, lower: int, upper: int) -> tuple[Run, ...]:
    runs = [Run(state, name, first, n) for name, first, _, n in _owned(group, lower, upper)]
    held = sum(run.numel for run in runs)
    return (*runs, Run(PADDING, "", 0, upper - lower - held))


def _mapping(group: dict[str, Shape], lower: int, upper: int) -> OrderedDict[str, Any]:
    owned = _owned(group, lower, upper)
    return OrderedDict((name, fragment_address(n, start)) for name, _, start, n in owned)
