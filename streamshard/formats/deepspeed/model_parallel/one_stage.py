"""A pipeline with all layers on one stage, as the source's own stages tell it.

What a stage has, and in which order, follows from its layers (`PipelineModule._build` of
`deepspeed/runtime/pipe/module.py`, 0.19.8): first the modules that several layers share, in the
order in which layers of the stage use them, then layer by layer.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final, TypeAlias

from streamshard.errors import UnsupportedError
from streamshard.formats.checkpoint import Checkpoint, ModelPart
from streamshard.formats.deepspeed import names
from streamshard.formats.deepspeed.model_parallel.parts import ModelInParts, with_all_params
from streamshard.formats.deepspeed.model_parallel.pipeline_layers import beginning_of, order_of
from streamshard.formats.pickle.inert import Node
from streamshard.model import MASTER, MODULE, LogicalTensor

_MOST_DIGITS: Final = 7
"""More digits than the number of any layer has."""
LayerKey: TypeAlias = int | str
"""A layer's number, or what the names of a module begin with that layers share."""


def one_stage(parts: ModelInParts) -> ModelInParts:
    """Return the parts of a job that has all layers on one stage, and that is alike otherwise.

    `parts`: the parts of a job with a pipeline.
    """
    checkpoint, degree = parts.checkpoint, parts.degrees.tensor
    degrees: dict[str, Node] = {
        names.MP_WORLD_SIZE: degree,
        names.PARALLEL_DEGREES: {"pp_degree": 1, "tp_degree": degree},
    }
    model_parts = []
    for rank in range(degree):
        stage = _joined(checkpoint.model_parts[rank::degree])
        state = {key: degrees.get(key, node) for key, node in stage.model_state.items()}
        name = names.model_part(rank) if degree > 1 else ""
        model_parts.append(replace(stage, name=name, model_state=state))
    tensors = _tensors(checkpoint, model_parts)
    made = replace(checkpoint, model_parts=tuple(model_parts), tensors=tuple(tensors))
    return ModelInParts(made, keeps_shards=parts.keeps_shards)


def _joined(stages: Sequence[ModelPart]) -> ModelPart:
    """Return the stage that has all that one tensor-parallel rank has of the stages."""
    _require_order(stages)
    first = stages[0]
    listed = [stage.model_state.get(names.BUFFER_NAMES) or [] for stage in stages]
    buffers = dict.fromkeys(name for of_stage in listed for name in of_stage)
    state = {**first.model_state, names.BUFFER_NAMES: sorted(buffers, key=order_of)}
    # Only the first stage's file lists tied names, and nothing that loads a pipeline reads it.
    for name, other in (first.model_state.get(names.SHARED_PARAMS) or {}).items():
        if _layer_key(name) != _layer_key(other):
            message = f"'{name}' of one layer is tied to '{other}' of another without a"
            raise UnsupportedError(f"{message} TiedLayerSpec: on other stages it may not be")
    return replace(
        first,
        groups=tuple(with_all_params(group, stages) for group in first.groups),
        module=tuple(entry for stage in stages for entry in stage.module),
        model_state=state,
    )


def _tensors(checkpoint: Checkpoint, stages: Sequence[ModelPart]) -> list[LogicalTensor]:
    """Return a checkpoint's tensors, of which those of the module are of its new stages.

    Files of layers refer to tensors by number, so the master weights come behind.
    """
    ranks = [model_part.name for model_part in checkpoint.model_parts]
    home = {name: stages[number % len(stages)].name for number, name in enumerate(ranks)}
    masters = {(home[t.model_part], t.name): t for t in checkpoint.tensors if t.state == MASTER}
    tensors = [
        replace(t, model_part=home[t.model_part]) if t.state == MODULE else t
        for t in checkpoint.tensors
    ]
    tensors += [
        replace(masters[stage.name, name], model_part=stage.name)
        for stage in stages
        for group in stage.groups
        for name in group.params
    ]
    return tensors


def _require_order(stages: Sequence[ModelPart]) -> None:
    """Refuse stages whose optimizers do not have the order in which DeepSpeed lists layers."""
    layers = [{key for key in map(_layer_key, _names(stage)) if isinstance(key, int)}
              for stage in stages]  # fmt: skip
    if any(max(one) >= min(other) for one, other in pairwise(filter(None, layers))):
        message = "its stages do not have one layer after the other, as under DualPipeV, where each"
        raise UnsupportedError(f"{message} rank has two stages")
    groups = [group for stage in stages for group in stage.groups]
    if any(list(group.params) != sorted(group.params, key=order_of) for group in groups):
        message = "its optimizer does not have its parameters layer by layer"
        raise UnsupportedError(f"{message}, so their order on other stages is not known")
    if all(len(set(map(_layer_key, group.params))) < 2 for group in groups):
        message = "no stage trains several layers, so in which order one would have them"
        raise UnsupportedError(f"{message} is not known")


def _names(stage: ModelPart) -> Iterable[str]:
    """Yield the names of all tensors that a stage lists."""
    for group in stage.groups:
        yield from group.params
    yield from stage.model_state.get(names.BUFFER_NAMES) or []


def _layer_key(name: str) -> LayerKey:
    """Return where a name belongs.

    >>> _layer_key("12.up.weight"), _layer_key("tied_modules.embed.weight")
    (12, 'tied_modules.embed.')
    """
    beginning = beginning_of(name) or ""
    number = beginning.removesuffix(".")
    if number.isdecimal() and len(number) <= _MOST_DIGITS:
        return int(number)
    if beginning and not number.isdecimal():
        return beginning
    message = f"'{name[:100]}' is of no layer, so which stages have it is not known"
    raise UnsupportedError(message)
