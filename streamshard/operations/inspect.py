"""`inspect`: what is in a checkpoint, from its headers alone."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from streamshard.formats import deepspeed_names as names
from streamshard.formats.checkpoint import Checkpoint, Dropped, FlatState, ParamGroup, ScalarState
from streamshard.formats.inert import Call, Global, Node, show
from streamshard.model import MASTER
from streamshard.operations.source import Source, open_source

Plain = Any
"""What JSON can hold."""


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """One param group, or what one expert rank has of it."""

    family: str
    """Tensor or pipeline parallel part that it belongs to; empty where there is only one."""
    expert_rank: int | None
    """None where it holds no experts."""
    parameters: int
    numel: int
    master_dtype: str
    states: Mapping[str, Any]
    """State → its dtype where it has one element per parameter element, else its value."""
    hyper_parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ParameterSummary:
    """One trained parameter."""

    name: str
    shape: tuple[int, ...]
    numel: int
    group: int
    """Index in `Inspection.groups`."""


@dataclass(frozen=True, slots=True)
class Inspection:
    """What a checkpoint holds."""

    path: str
    kind: str
    """`native` for shards, `store` for a Zarr store, `dumps` for raw per-rank dumps."""
    tag: str
    zero_stage: int
    """Stage that saved it."""
    world_size: int
    """Ranks that saved it."""
    data_parallel: int
    """Ranks that share each part of the model."""
    model_parallel: int
    """Tensor and pipeline parallel parts of the model."""
    expert_parallel: int
    """Data-parallel ranks over which the experts are spread; 1 without experts."""
    module_dtype: str | None
    """None for raw dumps, which do not tell."""
    optimizer: str | None
    """Type named in the DeepSpeed config; the files themselves do not name it."""
    deepspeed_version: str | None
    global_steps: int | None
    skipped_steps: int | None
    global_samples: int | None
    groups: tuple[GroupSummary, ...]
    parameters: tuple[ParameterSummary, ...]
    frozen: int
    buffers: int
    tied: Mapping[str, str]
    """Name of a tied parameter → the name under which its values are kept."""
    state_bytes: Mapping[str, int]
    """Bytes of logical tensors by state, without padding and copies."""
    files: int
    """Files that hold them."""
    file_bytes: int
    notes: tuple[str, ...]
    weights_only: Dropped | None = None
    """What was dropped, when and why, of a store from which no job can resume; None of others."""


def inspect(
    source: str | os.PathLike[str],
    *,
    source_ds_config_file: str | os.PathLike[str] | None = None,
    like: str | os.PathLike[str] | None = None,
    tag: str | None = None,
) -> Inspection:
    """Read a checkpoint's headers; no tensor data is read.

    Parameters
    ----------
    source_ds_config_file, like
        For sources that do not tell all that is needed; see `plan_repartition`.

    Raises
    ------
    SourceError
        There is no checkpoint there, or it cannot be used; the message names the file.
    """
    opened = open_source(source, tag, ds_config_file=source_ds_config_file, like=like)
    opened.require_use_of_like()
    return summarize(opened)


def summarize(source: Source) -> Inspection:
    """Summarize an opened checkpoint."""
    checkpoint = source.checkpoint
    first = checkpoint.families[0]
    model, optimizer = first.model_state, first.optimizer_file
    entries = [entry for family in checkpoint.families for entry in family.module]
    kinds = [entry.kind for entry in entries]
    sizes: dict[str, int] = {}
    for tensor in checkpoint.tensors:
        sizes[tensor.state] = sizes.get(tensor.state, 0) + tensor.nbytes
    return Inspection(
        path=str(source.path),
        kind=source.kind,
        tag=checkpoint.tag,
        zero_stage=checkpoint.layout.stage,
        world_size=checkpoint.ranks,
        data_parallel=checkpoint.layout.world_size,
        model_parallel=len(checkpoint.families),
        expert_parallel=checkpoint.expert_parallel,
        module_dtype=None if checkpoint.is_dumps else checkpoint.module_dtype,
        optimizer=_optimizer_type(checkpoint.config),
        deepspeed_version=_text(optimizer.get(names.DS_VERSION)),
        global_steps=_count(model.get("global_steps")),
        skipped_steps=_count(model.get("skipped_steps")),
        global_samples=_count(model.get("global_samples")),
        groups=_groups(checkpoint),
        parameters=_parameters(checkpoint),
        frozen=kinds.count("frozen"),
        buffers=kinds.count("buffer"),
        tied={entry.name: entry.alias_of for entry in entries if entry.kind == "alias"},
        state_bytes=sizes,
        files=len(source.files),
        file_bytes=sum(file.nbytes for file in source.files),
        notes=checkpoint.remarks,
        weights_only=checkpoint.dropped,
    )


def _groups(checkpoint: Checkpoint) -> tuple[GroupSummary, ...]:
    found = []
    for family in checkpoint.families:
        numels = checkpoint.master_numels(family)
        hyper = family.wrapped_optimizer["param_groups"]
        found += [
            GroupSummary(
                family=family.name,
                expert_rank=group.expert_rank if group.expert_parallel > 1 else None,
                parameters=len(group.params),
                numel=sum(numels[name] for name in group.params),
                master_dtype=group.master_dtype,
                states=_states(group),
                hyper_parameters={
                    k: _plain(v) for k, v in hyper[group.number].items() if k != "params"
                },
            )
            for group in family.groups
        ]
    return tuple(found)


def _parameters(checkpoint: Checkpoint) -> tuple[ParameterSummary, ...]:
    tensors, index = checkpoint.tensors, checkpoint.tensor_index()
    groups = [(family, group) for family in checkpoint.families for group in family.groups]
    held = (
        (number, tensors[index[family.name, MASTER, name]])
        for number, (family, group) in enumerate(groups)
        for name in group.params
    )
    return tuple(ParameterSummary(t.name, t.shape, t.numel, number) for number, t in held)


def _states(group: ParamGroup) -> dict[str, Any]:
    shown: dict[str, Any] = {}
    for key, value in (group.states or {}).items():
        if isinstance(value, FlatState):
            shown[key] = value.dtype
        elif isinstance(value, ScalarState):
            shown[key] = _scalar(value)
        else:
            shown[key] = _plain(value)
    return shown


def _scalar(value: ScalarState) -> Plain:
    try:
        array = np.frombuffer(value.data, dtype=value.dtype)
    except TypeError:  # a dtype that NumPy has not
        return f"{value.dtype} {value.data.hex()}"
    return array[0].item() if len(array) == 1 else array.tolist()


def _plain(node: Node) -> Plain:
    """Show a node as plain values; calls by their name only, as they have never been made.

    Only for nodes that readers look into, which are known not to be nested without end.
    """
    if node is None or isinstance(node, bool | int | float | str):
        return node
    if isinstance(node, dict):
        return {str(key): _plain(value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [_plain(value) for value in node]
    return show(node) if isinstance(node, Call | Global) else f"<{type(node).__name__}>"


def _text(node: Node) -> str | None:
    return node if isinstance(node, str) else None


def _count(node: Node) -> int | None:
    return node if isinstance(node, int) else None


def _optimizer_type(config: Node) -> str | None:
    section = config.get("optimizer") if isinstance(config, dict) else None
    return _text(section.get("type")) if isinstance(section, dict) else None
