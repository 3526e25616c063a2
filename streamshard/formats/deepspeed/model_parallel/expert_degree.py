"""Spreads the experts of a checkpoint over another count of ranks.

Every expert's tensors have names of their own, whichever rank holds them. So tensors and their
places stay as they are, and only the param groups are made new: for each expert rank of the
target, the parameters of its experts, in the order in which an engine of the job lists them.

Each model part is spread by the rules of a job without tensor parallelism. With tensor parallelism
every tensor-parallel rank has its own part of each expert, and the ranks that share its files, one
model part, spread these parts among themselves: with `enable_expert_tensor_parallelism`,
`MoE._create_process_groups` has `_create_expert_data_and_model_parallel` divide each data-parallel
group by itself, and `DeepSpeedEngine._get_expert_ckpt_name` puts the model part's number into the
names of experts' files (0.19.8). Without it the groups of `_create_expert_and_data_parallel` go
through the model parts; `unsupported` refuses that.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

from streamshard.errors import DisagreementError, Option, UnsupportedError, UsageError
from streamshard.formats.checkpoint import LIKE, Checkpoint, ModelPart, ParamGroup
from streamshard.formats.deepspeed import names
from streamshard.formats.deepspeed.auto_experts import Layer, with_layers
from streamshard.formats.deepspeed.model_parallel.cuts_in_files import map_of
from streamshard.formats.deepspeed.model_parallel.expert_groups import (
    AS_SAVED,
    ExpertLayer,
    GroupContent,
    UndividedGroup,
    order_of_module,
    order_of_reference,
    supply,
    undivided_groups,
)
from streamshard.formats.deepspeed.model_parallel.parallel_degrees import is_pipeline
from streamshard.formats.pickle.inert import Node, show
from streamshard.formats.pickle.node_checks import require_shape
from streamshard.layout.model_cut import split_cut
from streamshard.sizes import counted

_LOCAL_EXPERT: Final = re.compile(r"deepspeed_experts\\*\.\d")
"""In the name of an expert's parameter, or in a regular expression of it."""


def is_own_degree(checkpoint: Checkpoint, degree: int) -> bool:
    """Tell whether a degree is the one that a checkpoint has; 1 is that of one without experts."""
    if degree == 1 and not _has_experts(checkpoint):
        return True
    if not checkpoint.layout.stage:
        return checkpoint.expert_parallel == degree
    return expert_degree(checkpoint) == degree


def _has_experts(checkpoint: Checkpoint) -> bool:
    return any(
        model_part.trains_experts
        or model_part.model_state.get(names.EXPERT_COUNTS)
        or any(names.expert_of(entry.name) for entry in model_part.module)
        for model_part in checkpoint.model_parts
    )


def expert_degree(checkpoint: Checkpoint) -> int:
    """Return over how many ranks the experts of a checkpoint are spread."""
    if not _has_experts(checkpoint):
        raise _no_experts()
    objection = _objection_to_spreading(checkpoint)
    if objection:
        message = f"its experts cannot be spread over another count of ranks: {objection}"
        raise UnsupportedError(f"{message}. {AS_SAVED}")
    _require_model_parts_alike(checkpoint)
    first = checkpoint.model_parts[0]
    with _naming(first):
        groups = undivided_groups(first)
    degrees = {group.template.expert_parallel for group in groups if group.has_experts}
    if not degrees:
        raise _no_experts()
    if len(degrees) > 1:
        message = f"has layers with expert parallel sizes {sorted(degrees)}"
        raise UnsupportedError(f"{message}, of which not one alone changes. {AS_SAVED}")
    return degrees.pop()


def _no_experts() -> UsageError:
    message = "the model has no experts of DeepSpeed's MoE layers in its param groups, so that none"
    return UsageError(f"{message} can be spread over ranks ({Option('expert_parallel')})")


def with_expert_degree(
    checkpoint: Checkpoint, degree: int, like: Checkpoint | None = None
) -> Checkpoint:
    """Return a checkpoint whose experts are spread over another count of ranks.

    `like`: reference checkpoint of the job that will resume, for the order of its parameters.
    """
    saved_degree = expert_degree(checkpoint)
    if like is not None:
        _require_degree(like, degree, len(checkpoint.model_parts))
    changed = []
    for number, model_part in enumerate(checkpoint.model_parts):
        with _naming(model_part):
            changed.append(_spread(checkpoint, number, saved_degree, degree, like))
    return replace(checkpoint, model_parts=tuple(changed))


@contextmanager
def _naming(model_part: ModelPart) -> Iterator[None]:
    """Name a model part in an error about its files, if it is one of several."""
    try:
        yield
    except (UnsupportedError, DisagreementError) as error:
        raise type(error)(
            f"{model_part.name}: {error}" if model_part.name else str(error)
        ) from error


def _spread(
    checkpoint: Checkpoint, number: int, saved_degree: int, degree: int, like: Checkpoint | None
) -> ModelPart:
    """Return a model part whose experts are spread over another count of its ranks."""
    model_part = checkpoint.model_parts[number]
    groups = undivided_groups(model_part)
    layers = [layer for group in groups if group.has_experts for layer in group.layers()]
    _require_all_trained(model_part, layers)
    _require_even(layers, degree)
    if like is None:
        order = order_of_module(
            model_part, checkpoint.master_numels(model_part), groups, saved_degree, degree
        )
    else:
        order = order_of_reference(checkpoint, number, groups, like)
    regrouped = tuple(
        replace(
            groups[content.source].template,
            params=params,
            number=number,
            expert_parallel=len(content.params),
            expert_rank=rank,
        )
        for number, content in enumerate(order)
        for rank, params in enumerate(content.params)
    )
    return replace(
        model_part,
        groups=regrouped,
        optimizer_file=_with_groups(model_part, groups, order, saved_degree, degree),
        model_state=_placed_anew(
            _with_rates(model_part.model_state, groups, order),
            {layer.module: layer.count for layer in layers},
            saved_degree,
            degree,
        ),
    )


def _require_all_trained(model_part: ModelPart, layers: Iterable[ExpertLayer]) -> None:
    """Refuse experts that the param groups lack, and counts that the model file does not tell."""
    counts = {layer.module: layer.count for layer in layers}
    listed = model_part.model_state.get(names.EXPERT_COUNTS)
    stated = listed if isinstance(listed, list) else []
    if Counter(counts.values()) != Counter(stated):
        message = f"its param groups train {sorted(counts.values())} experts of a layer"
        raise UnsupportedError(
            f"{message}, and its model file lists {show(stated)}: experts that are not all trained "
            f"cannot be spread over another count of ranks. {AS_SAVED}"
        )


def _require_even(layers: Iterable[ExpertLayer], degree: int) -> None:
    """Refuse a count of ranks that cannot have as many experts each."""
    for layer in layers:
        if degree < 1 or layer.count % degree:
            fitting = [n for n in range(1, layer.count + 1) if layer.count % n == 0]
            asked = Option("expert_parallel", degree)
            message = f"{asked}: '{layer.module}' has {counted(layer.count, 'expert')}"
            choice = ", ".join(map(str, fitting))
            raise UsageError(f"{message}, of which each rank must have as many: give {choice}")


def _require_degree(like: Checkpoint, degree: int, parts: int) -> None:
    """Refuse a reference with another count of expert ranks, or of parts of the model."""
    if len(like.model_parts) != parts:
        message = (
            f"{LIKE} is of a model in {counted(len(like.model_parts), 'part')}, and this one in"
        )
        raise UsageError(f"{message} {parts}, which stay as they are: {supply()}")
    try:
        like_degree = expert_degree(like)
    except (UnsupportedError, UsageError) as error:
        raise type(error)(f"{LIKE}: {error}") from error
    if like_degree != degree:
        message = f"{LIKE} has its experts over {counted(like_degree, 'rank')}, and {degree} are"
        raise UsageError(f"{message} asked for: {supply()}")


def _with_groups(
    model_part: ModelPart,
    groups: Sequence[UndividedGroup],
    order: Sequence[GroupContent],
    saved_degree: int,
    degree: int,
) -> Mapping[str, Node]:
    """Return the optimizer file's dict with the entries of the target's param groups.

    Groups of experts have the name of the ranks that share these, as an engine looks for it.
    """
    saved = model_part.hyper_parameters
    entries: list[Mapping[str, Node]] = []
    for content in order:
        group = groups[content.source]
        entry = saved[group.numbers[0]]
        if group.has_experts:
            named, own_name = entry.get(names.GROUP_NAME), names.ranks_name(saved_degree)
            if named != own_name:
                message = f"param group {group.numbers[0]} of experts is named"
                message = f"{message} {show(named)}, and not '{own_name}'"
                raise UnsupportedError(f"{message}. {AS_SAVED}")
            entry = {**entry, names.GROUP_NAME: names.ranks_name(degree)}
        entries.append(dict(entry))
    return with_degree(model_part.with_hyper_parameters(entries).optimizer_file, degree)


def _with_rates(
    model_state: Mapping[str, Node], groups: Sequence[UndividedGroup], order: Sequence[GroupContent]
) -> Mapping[str, Node]:
    """Return the model file's dict with a learning rate for each param group in the scheduler."""
    before = sum(len(group.numbers) for group in groups)
    if len(order) == before:
        return model_state
    scheduler = model_state.get(names.SCHEDULER)
    state = scheduler if isinstance(scheduler, dict) else {names.SCHEDULER: scheduler}
    changed = dict(state)
    for key, value in state.items():
        if key in names.RATES_PER_GROUP and isinstance(value, list) and len(value) == before:
            changed[key] = [value[groups[content.source].numbers[0]] for content in order]
        elif not isinstance(value, int | float | str | None):
            message = f"an engine has {len(order)} param groups then, instead of {before}, and"
            raise UnsupportedError(
                f"{message} '{key}' of the learning rate scheduler may have an element for each. "
                f"{AS_SAVED}"
            )
    return {**model_state, names.SCHEDULER: changed} if state is scheduler else model_state


def spread_note(own: int, degree: int, like: Checkpoint | None) -> str:
    """Say how the experts were spread, and where their order is from."""
    text = f"The experts, which {counted(own, 'rank')} shared, are spread over {degree}."
    if like is not None:
        return f"{text} Their order is that of the reference checkpoint, at {like.tag}."
    return f"{text} Their order is the module's, as it is in the source."


def _objection_to_spreading(checkpoint: Checkpoint) -> str | None:
    """Say why the experts of a checkpoint cannot be spread again, as far as its kind tells."""
    if checkpoint.is_dumps:
        return "raw dumps lack the experts' files"
    if _has_stages(checkpoint):
        return "it is of a pipeline, of which each stage has layers of its own"
    if checkpoint.layout.stage not in ((1, 2, 3) if checkpoint.has_auto_experts else (1, 2)):
        return f"it was saved at ZeRO stage {checkpoint.layout.stage}, and not at 1 or 2"
    if checkpoint.replicas > 1:
        return "it was trained on sequences that ranks share"
    of_ranks = f"{checkpoint.tag}/{names.WHOLE_EXPERT_OPTIMIZER}"
    if any(file.path.startswith(of_ranks) for file in checkpoint.files):
        return f"an older DeepSpeed saved it, with a file {of_ranks}* for each expert rank"
    if checkpoint.has_muon:
        return "it was trained with Muon"
    listed = [e.name for f in checkpoint.model_parts for e in f.module if names.expert_of(e.name)]
    if listed:
        return f"the model file has a weight of an expert, '{listed[0]}', as of a frozen one"
    stated = (
        model_part.model_state.get(names.UNIVERSAL_INFO) for model_part in checkpoint.model_parts
    )
    if any(_LOCAL_EXPERT.search(text) for info in stated for text in _strings(info)):
        message = f"its '{names.UNIVERSAL_INFO}' names experts as one rank numbers them"
        return f"{message}, as what AutoTP saves does"
    return None


def _strings(node: Node) -> Iterator[str]:
    """Yield the strings in a tree of dicts and lists, however deep it is."""
    stack, seen = [node], set()
    while stack:
        part = stack.pop()
        if isinstance(part, str):
            yield part
        elif isinstance(part, dict | list | tuple) and id(part) not in seen:
            seen.add(id(part))
            stack += [*part, *part.values()] if isinstance(part, dict) else part


def _has_stages(checkpoint: Checkpoint) -> bool:
    """Tell whether model parts are stages of a pipeline.

    `_save_moe_checkpoint` saves these with the weights in the model file, so that the degrees that
    DeepSpeed notes since 0.19.5 may be the only sign.
    """
    noted = checkpoint.model_parts[0].model_state.get(names.PARALLEL_DEGREES)
    return is_pipeline(checkpoint) or (isinstance(noted, dict) and noted.get("pp_degree", 1) != 1)


def _require_model_parts_alike(checkpoint: Checkpoint) -> None:
    """Refuse model parts that do not have parts of the same experts in the same order."""
    first, *others = checkpoint.model_parts
    for model_part in others:
        for what, left, right in (
            ("experts", *(f.model_state.get(names.EXPERT_COUNTS) for f in (first, model_part))),
            ("param groups", *([_place(g) for g in f.groups] for f in (first, model_part))),
        ):
            if left != right:
                message = f"{first.name} and {model_part.name} have different {what}, or in another"
                raise DisagreementError(
                    f"{message} order: they are not of tensor-parallel ranks that have parts of "
                    f"the same experts. {AS_SAVED}"
                )


def _place(group: ParamGroup) -> tuple[object, ...]:
    return group.number, group.expert_parallel, group.expert_rank, group.params


_SECTION: Final = "expert_parallel"
_MAPS: Final = "affine_maps"


def _placed_anew(
    model: Mapping[str, Node], counts: Mapping[str, int], saved_degree: int, degree: int
) -> Mapping[str, Node]:
    """Return a model file's dict with its experts over `degree` ranks, no longer `saved_degree`.

    `counts`: of the experts of each layer.
    """
    return with_degree(
        with_layers(model, lambda layer: _placed(layer, counts, saved_degree, degree)), degree
    )


def with_degree(file: Mapping[str, Node], degree: int) -> Mapping[str, Node]:
    """Return a file's dict whose DeepSpeed config has the count of ranks, if it has AutoEP on."""
    config = file.get(names.DS_CONFIG)
    if not isinstance(config, dict):
        return file
    section = config.get(_SECTION)
    if not isinstance(section, dict) or not section.get("enabled"):
        return file
    return {**file, names.DS_CONFIG: {**config, _SECTION: {**section, "autoep_size": degree}}}


def _placed(layer: Layer, counts: Mapping[str, int], saved_degree: int, degree: int) -> Layer:
    """Return the entries of a layer on another count of ranks, as the first of them saves it."""
    prefix = str(layer.get("expert_key_prefix"))
    count = counts.get(prefix, 0)
    for key, node in {"num_experts": count, **_placing(layer, count, saved_degree)}.items():
        if layer.get(key) != node:
            message = f"the '{key}' of the experts '{prefix}' is not that of {count} experts, in"
            raise UnsupportedError(
                f"{message} their order on {saved_degree} ranks, as DeepSpeed 0.19.8 places them: "
                f"they cannot be spread over another count of ranks. {AS_SAVED}"
            )
    return {**layer, **_placing(layer, count, degree)}


def _placing(layer: Layer, count: int, degree: int) -> dict[str, Node]:
    """Return the entries of a layer that depend on the count of ranks.

    Each rank gets as many experts, in the order of their numbers, as engines place and note them:
    `legacy_uniform_autoep_placement_descriptor` and `autoep_placement_to_affine_map` of
    `deepspeed/checkpoint/autoep_affine.py` (0.19.8).
    """
    share, maps = count // degree, layer.get(_MAPS)
    ranks = [
        {"rank": rank, "experts": [*range(share * rank, share * (rank + 1))]}
        for rank in range(degree)
    ]
    placement = {"version": 1, "num_experts": count, "ep_size": degree, "ranks": ranks}
    entries = {
        "num_local_experts": share,
        "ep_size": degree,
        "expert_placement": placement,
        "ep_group_name": names.ranks_name(degree),
        "ep_rank": 0,
        "expert_data_parallel_rank": 0,
        "global_expert_start": 0,
        "global_expert_end": share,
    }
    params = maps.get("params") if isinstance(maps, dict) else None
    if isinstance(params, dict):
        shapes = {name: _shape(node, count) for name, node in params.items()}
        mapped = {n: map_of(split_cut(shape, 0, [share] * degree)) for n, shape in shapes.items()}
        entries[_MAPS] = {"version": 1, "params": mapped}
    return entries


def _shape(node: Node, count: int) -> tuple[int, ...]:
    shape = node.get("logical_shape") if isinstance(node, dict) else None
    if isinstance(shape, list) and shape[:1] == [count]:
        return require_shape(shape)
    raise UnsupportedError(f"an affine map of {count} experts has the logical shape {show(shape)}")
