"""Reads a live ZeRO optimizer: its parameters, and the settings that cut their states."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Final, Self

import torch
from deepspeed import comm
from torch import distributed

from streamshard.errors import DisagreementError, UnsupportedError, UsageError
from streamshard.formats.checkpoint import Checkpoint, ModelPart, ParamGroup
from streamshard.formats.deepspeed import ds_config, names
from streamshard.model import MASTER, LogicalTensor

_STAGE_3: Final = "DeepSpeedZeroOptimizer_Stage3"
_BF16: Final = "BF16_Optimizer"
_KINDS: Final = ("DeepSpeedZeroOptimizer", _STAGE_3, _BF16)
"""Classes of optimizers that dumps are loaded into, by name; subclasses keep states otherwise."""
Optimizer = Any
"""One of DeepSpeed's optimizers; what it is depends on the version of DeepSpeed."""


def require_served(optimizer: Optimizer) -> None:
    """Refuse an optimizer that keeps its states in a way that this cannot serve."""
    kind = type(optimizer).__name__
    if kind not in _KINDS:
        message = f"the optimizer is a {kind}: give engine.optimizer of an engine of ZeRO stage 1,"
        raise UsageError(f"{message} 2 or 3 ({', '.join(_KINDS)})")
    ranks, own = distributed.get_world_size(), comm.get_world_size(group=optimizer.dp_process_group)
    if ranks != own:
        message = f"the job has {ranks} ranks, and {own} of them share the optimizer's states:"
        raise UnsupportedError(
            f"{message} dumps do not tell one model-parallel part from another. Save and load with "
            "the engine's checkpoints"
        )
    if any(group.get("moe") for group in optimizer.optimizer.param_groups):
        message = "the optimizer has param groups of experts, whose dumps are not loaded"
        raise UnsupportedError(f"{message}: save and load with the engine's checkpoints")


@dataclass(frozen=True, slots=True)
class LiveOptimizer:
    """What a live optimizer trains, and the settings that cut it; alike on all ranks."""

    config: ds_config.Config
    """The settings, as a DeepSpeed config has them."""
    groups: tuple[tuple[tuple[str, tuple[int, ...]], ...], ...]
    """Name and shape of each parameter of each param group."""

    @classmethod
    def of(cls, optimizer: Optimizer) -> Self:
        """Read a live optimizer."""
        named = names_in(optimizer)
        groups = tuple(
            tuple((named[param], _shape(param)) for param in group) for group in _groups(optimizer)
        )
        return cls(_config(optimizer), groups)

    @property
    def numels(self) -> dict[str, int]:
        """Element count of each parameter."""
        return {name: math.prod(shape) for group in self.groups for name, shape in group}

    def require_same_as(self, first: Self) -> None:
        """Require that rank 0 holds the same."""
        if self.config != first.config:
            message = f"the optimizer has the settings {self.config}, that of rank 0 has"
            raise DisagreementError(f"{message} {first.config}")
        for own, theirs in zip_longest(self._params(), first._params()):
            if own != theirs:
                message = f"the optimizer has {own} as (group, parameter, shape), that of rank 0"
                raise DisagreementError(f"{message} has {theirs}")

    def _params(self) -> Iterator[tuple[int, str, tuple[int, ...]]]:
        for number, group in enumerate(self.groups):
            yield from ((number, name, shape) for name, shape in group)

    def reference(self, hyper_parameters: Sequence[dict[str, Any]]) -> Checkpoint:
        """Describe the optimizer as a checkpoint of it would, to read dumps with."""
        groups = tuple(
            ParamGroup(tuple(name for name, _ in group), "float32", None, number)
            for number, group in enumerate(self.groups)
        )
        state = {names.BASE_OPTIMIZER: {"state": {}, "param_groups": list(hyper_parameters)}}
        stage = ds_config.zero_stage(self.config) or 0
        return Checkpoint(
            tag="",
            layout=ds_config.zero_layout(self.config, stage=stage, world_size=1),
            tensors=tuple(
                LogicalTensor(MASTER, name, "float32", shape)
                for group in self.groups
                for name, shape in group
            ),
            model_parts=(ModelPart("", groups, (), {}, {names.OPTIMIZER: state}, {}),),
            module_dtype=ds_config.module_dtype(self.config),
            files=(),
        )


def names_in(optimizer: Optimizer) -> dict[Any, str]:
    """Return parameter → name; stage 3 keeps the model and no names."""
    if is_stage_3(optimizer):
        return {param: name for name, param in optimizer.module.named_parameters()}
    return dict(optimizer.param_names)


def _groups(optimizer: Optimizer) -> list[list[Any]]:
    """List the parameters of each param group, in their order."""
    if not is_stage_3(optimizer):
        return [*(optimizer.bf16_groups if _is_bf16(optimizer) else optimizer.bit16_groups)]
    groups: list[list[Any]] = [[] for _ in optimizer.optimizer.param_groups]
    for number, sub_group in enumerate(optimizer.fp16_groups):
        groups[optimizer.sub_group_to_group_id[number]] += sub_group
    return groups


def _shape(param: Any) -> tuple[int, ...]:
    return tuple(getattr(param, "ds_shape", param.shape))


def is_stage_3(optimizer: Optimizer) -> bool:
    return type(optimizer).__name__ == _STAGE_3


def _is_bf16(optimizer: Optimizer) -> bool:
    return type(optimizer).__name__ == _BF16


def _config(optimizer: Optimizer) -> ds_config.Config:
    """Write the settings that cut the states as a DeepSpeed config."""
    dtype = next(param.dtype for group in _groups(optimizer) for param in group)
    precision = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype)
    config: dict[str, Any] = {precision: {"enabled": True}} if precision else {}
    if _is_bf16(optimizer):
        types = {"grad_accum_dtype": "fp32"}  # with it, stage 1 has this optimizer
        return {**config, "data_types": types, "zero_optimization": {"stage": 1}}
    if is_stage_3(optimizer):
        device = "nvme" if optimizer.swap_optimizer else "cpu"
        zero = {"stage": 3, "sub_group_size": optimizer.sub_group_size}
        offloads, ratio = optimizer.offload_optimizer, optimizer.partial_offload
    else:
        device, ratio, offloads = "cpu", 1.0, optimizer.cpu_offload
        zero = {
            "stage": 2 if optimizer.partition_gradients else 1,
            "round_robin_gradients": optimizer.round_robin_gradients,
            "parameter_alignment": getattr(optimizer, "parameter_alignment", False),
        }
    offload = {"offload_optimizer": {"device": device, "ratio": ratio}} if offloads else {}
    return {**config, "zero_optimization": {**zero, **offload}}


def hyper_parameters_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the param groups without parameters: dumps of `elastic_checkpoint` lack these."""
    return [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.optimizer.param_groups
    ]


def has_own_weights(optimizer: Optimizer) -> bool:
    """Tell whether the rank's part of the model's weights is its masters, rounded."""
    if is_stage_3(optimizer):
        return True  # it has just made them so
    if _is_bf16(optimizer):
        weights, masters = optimizer.bf16_partitioned_groups, optimizer.fp32_groups_flat_partition
    else:
        weights = optimizer.parallel_partitioned_bit16_groups
        masters = optimizer.single_partition_of_fp32_groups
    rank = comm.get_rank(group=optimizer.dp_process_group)
    both = zip(weights, masters, strict=True)
    return all(torch.equal(parts[rank], master.to(parts[rank])) for parts, master in both)
