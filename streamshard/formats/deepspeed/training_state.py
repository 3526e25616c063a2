"""Compares the training state of two checkpoints: everything except their tensors.

Values that depend on the world size or the ZeRO stage are left out. All others must be equal if
both checkpoints continue the same training run.

Experts may be spread over different counts of ranks. Which param groups of experts there are, and
for which ranks, follows from that count. But every expert's parameters have names of their own,
whichever rank holds them. So each parameter's group is compared with the group that the other
checkpoint has the same parameter in.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

from streamshard.formats.checkpoint import Checkpoint, ModelPart, ParamGroup
from streamshard.formats.deepspeed import names
from streamshard.formats.deepspeed.auto_experts import without_ranks
from streamshard.formats.pickle.inert import Node, show, show_key
from streamshard.formats.torch.tree_comparison import Disparity, Found, compare_nodes
from streamshard.model import ZeroLayout

_ANY_RANKS: Final = "ep_size_*"
"""Stands for the name that the count of ranks gives a group."""


def _have_other_degrees(left: ModelPart, right: ModelPart) -> bool:
    """Tell whether two model parts have experts, and spread them over different counts of ranks."""
    degrees = [{group.expert_parallel for group in _expert_groups(side)} for side in (left, right)]
    return all(degrees) and degrees[0] != degrees[1]


def _compare_experts(left: ModelPart, right: ModelPart, prefix: str) -> Iterator[Found]:
    """Compare states and hyper-parameters of the groups that have the same parameters of experts.

    Parameters that one side lacks are differences between tensors, and are left out here.
    """
    left_groups, right_groups = (
        {name: group for group in model_part.groups for name in group.params}
        for model_part in (left, right)
    )
    found = [name for side in (left, right) for g in _expert_groups(side) for name in g.params]
    done: set[tuple[int, ...]] = set()
    for name in dict.fromkeys(found):
        if name not in left_groups or name not in right_groups:
            continue
        group, counterpart = left_groups[name], right_groups[name]
        where = f"{prefix}optimizer/group of {show_key(name)}"
        numbers = group.number, counterpart.number
        if numbers not in done:
            yield from compare_nodes(_options(left, group), _options(right, counterpart), where)
        ranks = *numbers, group.expert_rank, counterpart.expert_rank
        if ranks not in done:
            yield from compare_nodes(_shown_scalars(group), _shown_scalars(counterpart), where)
        done |= {numbers, ranks}


def _without_experts(model_part: ModelPart) -> ModelPart:
    """Return a model part without its param groups of experts, and without their learning rates."""
    entries = model_part.hyper_parameters
    kept = [number for number, entry in enumerate(entries) if not names.is_of_experts(entry)]
    rates = {key: [rate[number] for number in kept] for key, rate in _rates(model_part).items()}
    model_state = dict(model_part.model_state)
    if rates:
        model_state[names.SCHEDULER] = {**model_state[names.SCHEDULER], **rates}
    return replace(
        model_part.with_hyper_parameters([entries[number] for number in kept]),
        groups=tuple(
            replace(group, number=kept.index(group.number))
            for group in model_part.groups
            if group.number in kept
        ),
        model_state=model_state,
    )


def _shown_scalars(group: ParamGroup) -> dict[str, Node]:
    """Return the unpartitioned states of a group, such as its step; tensors as text."""
    return {key: state.comparable() for key, state in group.common_states.items()}


def _expert_groups(model_part: ModelPart) -> list[ParamGroup]:
    entries = model_part.hyper_parameters
    return [group for group in model_part.groups if names.is_of_experts(entries[group.number])]


def _options(model_part: ModelPart, group: ParamGroup) -> dict[str, Node]:
    """Return a group's hyper-parameters and learning rates, without the count of its ranks."""
    options = dict(model_part.hyper_parameters[group.number])
    if options.get(names.GROUP_NAME) == names.ranks_name(group.expert_parallel):
        options[names.GROUP_NAME] = _ANY_RANKS
    rates = {
        f"{names.SCHEDULER}.{key}": rate[group.number] for key, rate in _rates(model_part).items()
    }
    return {**options, **rates}


def _rates(model_part: ModelPart) -> dict[str, list[Node]]:
    """Return the lists of the scheduler that have an element for each param group."""
    scheduler = model_part.model_state.get(names.SCHEDULER)
    entries = scheduler if isinstance(scheduler, dict) else {}
    count = len(model_part.hyper_parameters)
    return {
        key: entries[key]
        for key in names.RATES_PER_GROUP
        if isinstance(entries.get(key), list) and len(entries[key]) == count
    }


_CUT_IN_MODEL: Final = names.CUT_IN_MODEL - {names.MODULE_STATE}
"""Excludes the module's state: its entries other than tensors are compared."""
_CUT_IN_OPTIMIZER: Final = names.CUT_IN_OPTIMIZER | {names.ZERO_STAGE}
_PROVENANCE: Final = frozenset({names.DS_CONFIG, names.DS_VERSION})
"""Entries that describe the job that saved. They are not state: a resuming job has its own."""

_MOST_PLAIN: Final = 8
"""Longest list that is a hyper-parameter, such as `betas`."""

_KEPT_WITHOUT_STAGE: Final = frozenset({names.CLIP_GRAD})
_KEPT_AT_12: Final = frozenset({"loss_scaler", "dynamic_loss_scale", "overflow", names.CLIP_GRAD})
_KEPT_AT_3: Final = _KEPT_AT_12 - {names.CLIP_GRAD}


def compare(left: Checkpoint, right: Checkpoint) -> Iterator[Found]:
    """Compare the training state of two checkpoints that have the same model parts."""
    whole = not (left.is_dumps or right.is_dumps)
    for model_parts in zip(left.model_parts, right.model_parts, strict=True):
        left_part, right_part = model_parts
        prefix = f"{left_part.name}/" if left_part.name else ""
        if _have_other_degrees(left_part, right_part):
            yield from _compare_experts(left_part, right_part, prefix)
            left_part, right_part = map(_without_experts, model_parts)
        yield from _compare_optimizers(left_part, right_part, left.layout, right.layout, prefix)
        yield from _compare_scalars(left_part, right_part, prefix)
        if whole:
            yield from _compare_dicts(
                _kept(without_ranks(left_part.model_state), _CUT_IN_MODEL | _PROVENANCE),
                _kept(without_ranks(right_part.model_state), _CUT_IN_MODEL | _PROVENANCE),
                f"{prefix}model/",
            )
            aside = {names.OPTIMIZER} | _PROVENANCE
            yield from _compare_dicts(
                _kept(left_part.optimizer_file, aside),
                _kept(right_part.optimizer_file, aside),
                f"{prefix}optimizer file/",
            )
    if whole and left.accelerate_step != right.accelerate_step:
        message = f"{left.accelerate_step} here, {right.accelerate_step} there"
        yield Disparity("Accelerate's step", message)


def compare_shared(left: ModelPart, right: ModelPart) -> Iterator[Disparity]:
    """Compare the steps and the hyper-parameters that both sides have, group by group.

    For checkpoints of which one is not DeepSpeed's. Its groups may be cut otherwise.
    """
    owner = {name: group for group in right.groups for name in group.params}
    done = set()
    for group in left.groups:
        for name in group.params:
            counterpart = owner.get(name)
            if counterpart is None or (group.number, counterpart.number) in done:
                continue
            done.add((group.number, counterpart.number))
            mine, theirs = _stated(left, group), _stated(right, counterpart)
            for key in mine:
                if key in theirs and mine[key] != theirs[key]:
                    message = f"{mine[key]} here, {theirs[key]} there"
                    yield Disparity(f"optimizer/group of {show_key(name)}/{key}", message)


def _stated(model_part: ModelPart, group: ParamGroup) -> dict[str, str]:
    """Return the plain hyper-parameters and scalar states of a group, as text."""
    options = model_part.hyper_parameters[group.number]
    states = {key: state.plain() for key, state in group.common_states.items()}
    return {
        key: _plain_text(value)
        for key, value in {**options, **states}.items()
        if key != "params" and _is_plain(value)
    }


def _is_plain(value: Node) -> bool:
    if isinstance(value, list | tuple):
        return len(value) <= _MOST_PLAIN and all(isinstance(part, int | float) for part in value)
    return isinstance(value, bool | int | float | str)


def _plain_text(value: Node) -> str:
    """Serialize a plain value, alike for numbers that are equal and for a list and a tuple."""
    if isinstance(value, list | tuple):
        return str([_plain_text(part) for part in value])
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return repr(float(value)) if is_number else show(value)


def provenance(checkpoint: Checkpoint) -> Mapping[str, Node]:
    """Return the entries that describe the job that saved, by key."""
    first = checkpoint.model_parts[0]
    entries = {**first.model_state, **first.optimizer_file}
    return {key: entries[key] for key in sorted(_PROVENANCE) if entries.get(key) is not None}


def differing_keys(left: Node, right: Node) -> list[str]:
    """List the places where two plain values differ, each as a path of keys."""
    return [found.name for found in compare_nodes(left, right, "") if isinstance(found, Disparity)]


def _kept(entries: Mapping[str, Node], aside: frozenset[str] | set[str]) -> dict[str, Node]:
    return {key: value for key, value in entries.items() if key not in aside}


def _compare_optimizers(
    left_part: ModelPart, right_part: ModelPart, left: ZeroLayout, right: ZeroLayout, prefix: str
) -> Iterator[Found]:
    if not left_part.optimizer_file or not right_part.optimizer_file:
        return  # at stage 0 the model file holds the optimizer's state, and is compared elsewhere
    aside = _CUT_IN_OPTIMIZER | _PROVENANCE
    left_entries, right_entries = (
        _kept(part.optimizer_file[names.OPTIMIZER], aside) for part in (left_part, right_part)
    )
    for entries, counterpart, layout in (
        (left_entries, right_entries, right),
        (right_entries, left_entries, left),
    ):
        for key in (_KEPT_AT_12 - _kept_by(layout)) & entries.keys() - counterpart.keys():
            del entries[key]
    yield from _compare_dicts(left_entries, right_entries, f"{prefix}optimizer/")
    yield from compare_nodes(
        left_part.wrapped_optimizer, right_part.wrapped_optimizer, f"{prefix}optimizer/wrapped"
    )


def _kept_by(layout: ZeroLayout) -> frozenset[str]:
    """Return which of the entries that only some stages save the optimizer of a layout saves."""
    if layout.bf16_optimizer:
        return _KEPT_WITHOUT_STAGE
    return _KEPT_AT_3 if layout.stage == 3 else _KEPT_AT_12


def _compare_scalars(left_part: ModelPart, right_part: ModelPart, prefix: str) -> Iterator[Found]:
    """Compare the unpartitioned states of each group, such as step counters."""
    left, right = (
        {
            f"group {group.number}"
            + (f", expert rank {group.expert_rank}" if experts else ""): _shown_scalars(group)
            for group in model_part.groups
            for experts in (group.expert_parallel > 1,)
        }
        for model_part in (left_part, right_part)
    )
    yield from compare_nodes(left, right, f"{prefix}optimizer/state")


def _compare_dicts(
    left: Mapping[str, Node], right: Mapping[str, Node], prefix: str
) -> Iterator[Found]:
    for key in {**left, **right}:
        name = f"{prefix}{show_key(key)}"
        if key not in right:
            yield Disparity(name, "here only")
        elif key not in left:
            yield Disparity(name, "there only")
        else:
            yield from compare_nodes(left[key], right[key], name)
