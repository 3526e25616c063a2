"""Compares the param groups of experts that two checkpoints spread over different counts of ranks.

Which groups there are, and for which ranks, follows from that count. But every expert's parameters
have names of their own, whichever rank holds them. So each parameter's group is compared with the
group that the other checkpoint has the same parameter in.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from streamshard.formats.checkpoint import FlatState, ModelPart, ParamGroup, ScalarState
from streamshard.formats.deepspeed import names
from streamshard.formats.deepspeed.expert_groups import (
    GROUP_NAME,
    RATES_PER_GROUP,
    SCHEDULER,
    is_of_experts,
    ranks_name,
)
from streamshard.formats.pickle.inert import Node
from streamshard.formats.torch.tree_comparison import Found, compare_nodes, show_key

_ANY_RANKS: Final = "ep_size_*"
"""Stands for the name that the count of ranks gives a group."""


def have_other_degrees(one: ModelPart, other: ModelPart) -> bool:
    """Tell whether two model parts have experts, and spread them over different counts of ranks."""
    degrees = [{group.expert_parallel for group in _expert_groups(side)} for side in (one, other)]
    return all(degrees) and degrees[0] != degrees[1]


def compare_experts(one: ModelPart, other: ModelPart, prefix: str) -> Iterator[Found]:
    """Compare states and hyper-parameters of the groups that have the same parameters of experts.

    Parameters that one side lacks are differences between tensors, and are left out here.
    """
    mine, theirs = (
        {name: group for group in model_part.groups for name in group.params}
        for model_part in (one, other)
    )
    found = [name for side in (one, other) for g in _expert_groups(side) for name in g.params]
    done: set[tuple[int, ...]] = set()
    for name in dict.fromkeys(found):
        if name not in mine or name not in theirs:
            continue
        group, counterpart = mine[name], theirs[name]
        where = f"{prefix}optimizer/group of {show_key(name)}"
        numbers = group.number, counterpart.number
        if numbers not in done:
            yield from compare_nodes(_options(one, group), _options(other, counterpart), where)
        ranks = *numbers, group.expert_rank, counterpart.expert_rank
        if ranks not in done:
            yield from compare_nodes(shown_scalars(group), shown_scalars(counterpart), where)
        done |= {numbers, ranks}


def without_experts(model_part: ModelPart) -> ModelPart:
    """Return a model part without its param groups of experts, and without their learning rates."""
    entries = _entries(model_part)
    kept = [number for number, entry in enumerate(entries) if not is_of_experts(entry)]
    state = model_part.optimizer_file[names.OPTIMIZER]
    key = names.BASE_OPTIMIZER if state.get(names.BASE_OPTIMIZER) else names.OPTIMIZER
    wrapped = {**state[key], "param_groups": [entries[number] for number in kept]}
    rates = {key: [held[number] for number in kept] for key, held in _rates(model_part).items()}
    model_state = dict(model_part.model_state)
    if rates:
        model_state[SCHEDULER] = {**model_state[SCHEDULER], **rates}
    return replace(
        model_part,
        groups=tuple(
            replace(group, number=kept.index(group.number))
            for group in model_part.groups
            if group.number in kept
        ),
        optimizer_file={**model_part.optimizer_file, names.OPTIMIZER: {**state, key: wrapped}},
        model_state=model_state,
    )


def shown_scalars(group: ParamGroup) -> dict[str, Node]:
    """Return the unpartitioned states of a group, such as its step; tensors as text."""
    return {
        key: _show_scalar(value) if isinstance(value, ScalarState) else value
        for key, value in (group.states or {}).items()
        if not isinstance(value, FlatState)
    }


def _show_scalar(value: ScalarState) -> str:
    """Serialize a small tensor as text, so that equal texts mean equal bits."""
    try:
        shown = np.frombuffer(value.data, dtype=value.dtype).tolist()
    except (TypeError, ValueError):  # a dtype that NumPy lacks, or an incomplete element
        shown = []
    return f"{shown} {value.dtype}{list(value.shape)} {value.data.hex()}"


def _entries(model_part: ModelPart) -> Sequence[Mapping[str, Node]]:
    found: Sequence[Mapping[str, Node]] = (
        model_part.wrapped_optimizer["param_groups"] if model_part.groups else []
    )
    return found


def _expert_groups(model_part: ModelPart) -> list[ParamGroup]:
    entries = _entries(model_part)
    return [group for group in model_part.groups if is_of_experts(entries[group.number])]


def _options(model_part: ModelPart, group: ParamGroup) -> dict[str, Node]:
    """Return a group's hyper-parameters and learning rates, without the count of its ranks."""
    options = dict(_entries(model_part)[group.number])
    if options.get(GROUP_NAME) == ranks_name(group.expert_parallel):
        options[GROUP_NAME] = _ANY_RANKS
    rates = {f"{SCHEDULER}.{key}": held[group.number] for key, held in _rates(model_part).items()}
    return {**options, **rates}


def _rates(model_part: ModelPart) -> dict[str, list[Node]]:
    """Return the lists of the scheduler that have an element for each param group."""
    scheduler = model_part.model_state.get(SCHEDULER)
    held = scheduler if isinstance(scheduler, dict) else {}
    count = len(_entries(model_part))
    return {
        key: held[key]
        for key in RATES_PER_GROUP
        if isinstance(held.get(key), list) and len(held[key]) == count
    }
