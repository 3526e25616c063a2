"""Checks that the parts of a store's training state agree with each other.

Each part was checked by itself when it was read. A checkpoint read from shards is consistent by
construction; a store may come from an unknown source.
"""

import math
from collections.abc import Mapping

from streamshard.errors import CorruptFileError
from streamshard.formats.checkpoint import Checkpoint, Family
from streamshard.formats.deepspeed import names
from streamshard.formats.pickle.inert import show
from streamshard.model import BLOB, FILE, MASTER, MODULE


def require_consistent(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint whose parts refer to something missing."""
    index = checkpoint.tensor_index()
    if len(index) != len(checkpoint.tensors):
        raise CorruptFileError("two tensors have one name")
    if not checkpoint.families:
        raise CorruptFileError("holds no part of a model")
    if checkpoint.dropped is not None:
        _require_no_states(checkpoint)
    for family in checkpoint.families:
        if checkpoint.layout.stage:
            _require_whole_optimizer(family)
        else:
            _require_uncut(family)
        _require_tensors(family, index)
        _require_shapes(family, checkpoint)


def _require_no_states(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint that is marked as weights only and has optimizer states."""
    left = {tensor.state for tensor in checkpoint.tensors} - {MASTER, MODULE, BLOB, FILE}
    for family in checkpoint.families:
        for group in family.groups:
            left |= {*(group.states or ())}
    if left:
        raise CorruptFileError(f"is said to hold weights only, and holds {show(min(left))}")


def _require_tensors(family: Family, index: Mapping[tuple[str, str, str], int]) -> None:
    """Require the tensors to which the param groups and the module refer."""
    for group in family.groups:
        for state in (MASTER, *group.flat_states()):
            for param in group.params:
                if (family.name, state, param) not in index:
                    raise CorruptFileError(f"{state} of {show(param)} is not there")
    held = family.model_state.get(names.MODULE_STATE)
    extra = held.keys() if isinstance(held, dict) else ()
    for entry in family.module:
        own = {(family.name, state, entry.name) for state in (MODULE, MASTER)}
        found = entry.name in extra if entry.kind == "extra" else bool(own & index.keys())
        if entry.kind not in ("alias", "excluded") and not found:
            raise CorruptFileError(f"module's {show(entry.name)} is not there")


def _require_shapes(family: Family, checkpoint: Checkpoint) -> None:
    """Require that the module's weights have as many elements as the tensors that hold them."""
    index = checkpoint.tensor_index()
    for entry in family.module:
        if entry.kind == "extra":
            continue
        name = entry.held_as
        numel = math.prod(entry.shape)
        for state in (MODULE, MASTER):
            tensor = index.get((family.name, state, name))
            if tensor is not None and checkpoint.tensors[tensor].numel != numel:
                message = f"module's {show(entry.name)} has {numel:,} elements, its {state} weights"
                raise CorruptFileError(f"{message} {checkpoint.tensors[tensor].numel:,}")
        if entry.dtype == "":
            raise CorruptFileError(f"module's {show(entry.name)} has no dtype")


def _require_uncut(family: Family) -> None:
    """Require the entries of a model file at stage 0, where nothing is partitioned."""
    if family.groups or family.optimizer_file:
        raise CorruptFileError("is said to be of stage 0, and holds what a ZeRO stage has cut")
    if not {names.MODULE_STATE, names.WHOLE_OPTIMIZER} <= {*family.model_state}:
        raise CorruptFileError("holds no whole model file")


def _require_whole_optimizer(family: Family) -> None:
    """Require the entries that every optimizer and every model file has."""
    state = family.optimizer_file.get(names.OPTIMIZER)
    wrapped = family.wrapped_optimizer if isinstance(state, dict) else None
    groups = wrapped.get("param_groups") if isinstance(wrapped, dict) else None
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise CorruptFileError("holds no param groups of an optimizer")
    if {group.number for group in family.groups} != {*range(len(groups))}:
        raise CorruptFileError(f"{len(groups)} param groups are not those of the optimizer")
    expert_ranks: dict[int, list[int]] = {}
    for group in family.groups:
        expert_ranks.setdefault(group.number, []).append(group.expert_rank)
    for group in family.groups:
        if expert_ranks[group.number] != [*range(group.expert_parallel)]:
            raise CorruptFileError(f"param group {group.number} lacks an expert rank")
    if family.model_state and not {names.MODULE_STATE, names.PARAM_SHAPES} <= {*family.model_state}:
        raise CorruptFileError("holds no whole model file")
    if not isinstance(family.model_state.get(names.SHARED_PARAMS) or {}, dict):
        raise CorruptFileError(f"its '{names.SHARED_PARAMS}' is not a list of tied parameters")
