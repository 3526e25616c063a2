"""What an engine holds, gathered from all ranks into full, unpadded, named tensors.

The masters and optimizer states are read from the optimizer's own partitions. DeepSpeed's public
accessors (``safe_get_full_fp32_param``, ``safe_get_full_optimizer_state``) cannot be the truth at
stages 1 and 2. They all-reduce over zeros, which turns -0.0 into 0.0; they take a parameter's
offset from a mapping that is wrong under round_robin_gradients; and they are linked to the states
after the first param group's first step, when the other groups have none yet, so that asking for
those raises.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
from torch import distributed

from tests.oracle import momentum
from tests.oracle.places import Partition, Place, assembled, expert_names, global_names, of_experts
from tests.oracle.values import value_differences

K = TypeVar("K")
T = TypeVar("T")
Tensors: TypeAlias = dict[str, torch.Tensor]

# DeepSpeed has no types, and gives parameters methods of its own.
Engine: TypeAlias = Any
Param: TypeAlias = Any
Optimizer: TypeAlias = Any


@dataclass(frozen=True)
class Truth:
    """The whole training state, with nothing left in it that depends on the world size."""

    weights: Tensors
    """The module's trainable parameters, in the model's dtype."""
    frozen: Tensors
    buffers: Tensors
    """Persistent ones only."""
    states: dict[str, Tensors]
    """State name (``fp32`` for the masters, ``exp_avg``, ...) to parameter name to full tensor."""
    groups: list[dict[str, Any]]
    """Per param group: hyper-parameters, parameter names (sorted) and the states' scalars."""
    scaler: dict[str, Any]
    scheduler: dict[str, Any] | None
    counters: dict[str, Any]
    client_state: dict[str, Any]

    def save(self, path: Path) -> None:
        """Write it as plain values that ``load`` reads without an engine."""
        torch.save(vars(self), path)

    @classmethod
    def load(cls, path: Path) -> "Truth":
        return cls(**torch.load(path, weights_only=False))


def gather_truth(engine: Engine, client_state: Mapping[str, Any]) -> Truth:
    """Everything the ranks of `engine` hold together. A collective call: every rank gets it all."""
    named = global_names(engine)
    persistent = engine.module.state_dict().keys()
    params = _full_weights(engine)
    trainable = {name for name, param in named_params(engine) if param.requires_grad}
    states, groups = _states_and_groups(engine, named)
    buffers = {
        name: buffer.detach().clone()
        for name, buffer in engine.module.named_buffers()
        if name in persistent
    }

    def everywhere(mine: Tensors, what: str) -> Tensors:
        return _merged(of_experts({named(name): value for name, value in mine.items()}), what)

    return Truth(
        weights=everywhere({k: v for k, v in params.items() if k in trainable}, "weights"),
        frozen=everywhere({k: v for k, v in params.items() if k not in trainable}, "frozen"),
        buffers=everywhere(buffers, "buffers"),
        states=states,
        groups=groups,
        scaler=agreed(_scaler(engine.optimizer), "loss scaler"),
        scheduler=agreed(_scheduler(engine), "LR scheduler"),
        counters=agreed(
            {k: getattr(engine, k) for k in ("global_steps", "skipped_steps", "global_samples")},
            "counters",
        ),
        client_state=_merged({named(k): v for k, v in client_state.items()}, "client state"),
    )


def named_params(engine: Engine) -> Iterator[tuple[str, Param]]:
    """The module's parameters, a tied one once, under its first name."""
    yield from engine.module.named_parameters()


def agreed(mine: T, what: str) -> T:
    """`mine`, once every rank has been found to hold the same.

    Raises
    ------
    AssertionError
        When ranks disagree: there is no one truth then.
    """
    for rank, theirs in enumerate(_from_all_ranks(mine)):
        found = list(value_differences(mine, theirs, what))
        assert not found, f"rank {rank} disagrees: {found[:5]}"
    return mine


def _merged(mine: dict[K, T], what: str) -> dict[K, T]:
    """What the ranks hold together, once those that hold the same thing have been found to agree.

    Raises
    ------
    AssertionError
        When two ranks disagree about a value that both hold.
    """
    merged: dict[K, T] = {}
    for rank, theirs in enumerate(_from_all_ranks(mine)):
        for key, value in theirs.items():
            found = list(value_differences(merged.setdefault(key, value), value, f"{what}[{key}]"))
            assert not found, f"rank {rank} disagrees: {found[:5]}"
    return merged


def _from_all_ranks(mine: T) -> list[T]:
    gathered: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(gathered, mine)
    return gathered


def _full_weights(engine: Engine) -> Tensors:
    """Each parameter's value as the model computes with it."""
    zero: Any = importlib.import_module("deepspeed").zero
    params = [param for _, param in named_params(engine)]
    # Does nothing for parameters that stages 1 and 2 leave whole.
    with zero.GatheredParameters([param for param in params if hasattr(param, "ds_id")]):
        return {name: param.detach().clone() for name, param in named_params(engine)}


def _scheduler(engine: Engine) -> dict[str, Any] | None:
    """The state of the LR scheduler, unless the user keeps it from the engine."""
    return None if engine.lr_scheduler is None else dict(engine.lr_scheduler.state_dict())


def _scaler(optimizer: Optimizer) -> dict[str, Any]:
    """The loss scaler's fields, and what the optimizer keeps beside it."""
    if not hasattr(optimizer, "loss_scaler"):  # stage 0, and BF16_Optimizer, which needs none
        holder = getattr(optimizer, "loss_scale_config", optimizer)
        kept = {key: getattr(holder, key) for key in _SCALER_OF_STAGE_0 if hasattr(holder, key)}
        return {**kept, "clip_grad": float(getattr(optimizer, "clip_grad", 0))}
    scaler = optimizer.loss_scaler
    return {
        "class": type(scaler).__name__,
        **vars(scaler),
        "overflow": bool(optimizer.overflow),
        "dynamic_loss_scale": optimizer.dynamic_loss_scale,
        "clip_grad": float(optimizer.clip_grad),
    }


_SCALER_OF_STAGE_0 = (
    "dynamic_loss_scale",
    "cur_scale",
    "cur_iter",
    "last_overflow_iter",
    "scale_factor",
    "scale_window",
)
"""Attributes of the optimizers in 16 bits, or since 0.18 of what they keep them in."""


@dataclass(frozen=True)
class _Flat:
    """One flat tensor of this rank, with the places of its parameters in the ranks' tensors."""

    group: int
    master: torch.Tensor
    params: list[Param]
    offsets: list[int]
    sharer: int | None = None
    """This rank's place among those that share it, where that is known of each sub-group."""


def _flats(optimizer: Optimizer) -> list[_Flat]:
    """This rank's flat partitions, as the optimizer itself cut and ordered them."""
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):  # ZeRO-3: per sub-group
        flats = []
        for k, master in enumerate(optimizer.fp32_partitioned_groups_flat):
            params = list(optimizer.fp16_groups[k])
            offsets = [optimizer.grad_position[optimizer.get_param_id(p)][1] for p in params]
            sharer = getattr(optimizer, "_get_sub_group_partition_rank", lambda k: None)(k)
            flats.append(_Flat(optimizer.sub_group_to_group_id[k], master, params, offsets, sharer))
        return flats
    if not hasattr(optimizer, "dp_process_group"):
        return list(_wholes(optimizer))
    if hasattr(optimizer, "fp32_groups_flat_partition"):  # BF16_Optimizer
        masters, groups = optimizer.fp32_groups_flat_partition, optimizer.bf16_groups
    else:
        # In the stored order, which under round robin is not that of `bit16_groups`.
        masters = optimizer.single_partition_of_fp32_groups
        groups = optimizer.round_robin_bit16_groups
    # Before 0.19.7 there was no alignment padding, and nothing that names the offsets.
    known = getattr(optimizer, "round_robin_bit16_offsets", None)
    return [
        _Flat(g, master, list(params), list(known[g]) if known else _starts(params))
        for g, (master, params) in enumerate(zip(masters, groups, strict=True))
    ]


def _wholes(optimizer: Optimizer) -> Iterator[_Flat]:
    """What every rank holds at stage 0: in 16 bits beside the weights, in fp32 the weights."""
    if hasattr(optimizer, "fp32_groups_flat"):  # FP16_Optimizer
        both = zip(optimizer.fp32_groups_flat, optimizer.fp16_groups, strict=True)
        for g, (master, params) in enumerate(both):
            yield _Flat(g, master, list(params), _starts(params))
        return
    wrapped = _wrapped(optimizer)
    masters = [group["params"] for group in wrapped.param_groups]
    groups = masters if wrapped is optimizer else optimizer.fp16_groups
    for g, (group, params) in enumerate(zip(masters, groups, strict=True)):
        for master, param in zip(group, params, strict=True):
            yield _Flat(g, master, [param], [0])


def _wrapped(optimizer: Optimizer) -> Optimizer:
    """torch's own optimizer, which at stage 0 in fp32 DeepSpeed does not wrap."""
    return getattr(optimizer, "optimizer", optimizer)


def _starts(params: Sequence[Param]) -> list[int]:
    """Where each parameter starts in a flat tensor that holds one right after the other."""
    return list(accumulate((param.numel() for param in params[:-1]), initial=0))


def _states_and_groups(
    engine: Engine, named: Callable[[str], str]
) -> tuple[dict[str, Tensors], list[dict[str, Any]]]:
    """Full states by name, and per param group what belongs to no single element."""
    optimizer = engine.optimizer
    names = {id(param): named(name) for name, param in named_params(engine)}
    groups: list[dict[str, Any]] = [
        {"hyper_parameters": {k: v for k, v in group.items() if k != "params"}, "params": []}
        for group in _wrapped(optimizer).param_groups
    ]
    pieces: dict[Partition, Mapping[str, torch.Tensor]] = {}
    for flat in _flats(optimizer):
        mine = {"fp32": flat.master, **_wrapped(optimizer).state.get(flat.master, {})}
        mine |= momentum.partition(optimizer, flat.group, flat.master)
        # A partition-like state has an element for each of the master's; all else is per group.
        tensors = {k: v.detach().flatten() for k, v in mine.items() if _same_length(v, flat.master)}
        scalars = {k: _copied(v) for k, v in mine.items() if k not in tensors}
        group = groups[flat.group]
        params = chain.from_iterable(expert_names(names[id(param)]) for param in flat.params)
        group["params"] = sorted([*group["params"], *params])
        _agree_with_sub_groups(group, scalars)
        places = tuple(
            Place.of(names[id(param)], param, offset)
            for param, offset in zip(flat.params, flat.offsets, strict=True)
        )
        sharer = flat.sharer
        sharer = _partition_rank(optimizer, flat.group) if sharer is None else sharer
        pieces[Partition(places, sharer)] = tensors
    states = {
        state: of_experts(tensors)
        for state, tensors in assembled(_merged(pieces, "partitions")).items()
    }
    # By the names in it: an expert group has other experts on other ranks.
    by_params = {(g, tuple(group["params"])): group for g, group in enumerate(groups)}
    return states, [group for _, group in sorted(_merged(by_params, "param groups").items())]


def _same_length(value: object, master: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == master.shape


def _copied(value: object) -> object:
    # The engine goes on counting in its own ``step`` tensor.
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _agree_with_sub_groups(group: dict[str, Any], scalars: dict[str, Any]) -> None:
    """Keep one copy of the scalars that every sub-group of a param group has (``step``)."""
    found = list(value_differences(group.setdefault("scalars", scalars), scalars, "scalars"))
    assert not found, f"sub-groups of param group {group['hyper_parameters']} disagree: {found}"


def _partition_rank(optimizer: Optimizer, group: int) -> int:
    """Which of the partitions of a param group this rank holds; experts are shared by fewer."""
    if not hasattr(optimizer, "dp_process_group"):
        return 0  # all of it
    if hasattr(optimizer, "real_dp_process_group"):
        return distributed.get_rank(optimizer.real_dp_process_group[group])
    return distributed.get_rank(optimizer.dp_process_group)
