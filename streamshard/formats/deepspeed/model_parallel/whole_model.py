"""The one part that a job without tensor parallelism has, as the parts of another job tell it.

Nothing of it depends on a choice of that job: each tensor is whole, and the order of parameters in
the optimizer is that of any part, as AutoTP cuts tensors and leaves the module's names alone.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from streamshard.errors import UnsupportedError
from streamshard.formats.checkpoint import Checkpoint, ModelPart, ParamGroup
from streamshard.formats.deepspeed import names
from streamshard.formats.deepspeed.model_parallel.parallel_degrees import (
    TENSOR_PARALLEL,
    is_pipeline,
)
from streamshard.formats.deepspeed.model_parallel.parts import ModelInParts, with_cut_info
from streamshard.formats.deepspeed.model_parallel.pipeline_layers import in_order, order_of
from streamshard.formats.pickle.inert import Node
from streamshard.layout.model_cut import Shape
from streamshard.model import MASTER, LogicalTensor


def whole_model(parts: ModelInParts) -> ModelInParts:
    """Return the parts, one, of a job that does not cut the model.

    Of a pipeline it is a stage that has all layers. What its optimizer's order would be is not
    known, so no job can resume from it.
    """
    checkpoint = parts.checkpoint
    first = checkpoint.model_parts[0]
    shards = {
        name: [own_shape(name, parts.cut(name).shape, next(iter(held.shapes.values())))]
        for name, held in parts.tensors.items()
    }
    if is_pipeline(checkpoint):
        held = {
            entry.name: entry
            for model_part in checkpoint.model_parts
            for entry in model_part.module
        }
        groups = tuple(map(partial(_with_all_params, checkpoint), first.groups))
        first = replace(first, groups=groups, module=in_order(tuple(held.values())))
    return made_parts(checkpoint, first, shards, None)


def made_parts(
    checkpoint: Checkpoint,
    like: ModelPart,
    shards: Mapping[str, Sequence[Shape]],
    info: Mapping[str, Node] | None,
) -> ModelInParts:
    """Return the parts of a job that has all that one part has, in other shapes.

    `shards`: tensor → its shape on each tensor-parallel rank.
    `info`: what model files tell of how tensors are cut; None if they are whole.
    """
    count = len(next(iter(shards.values())))
    own: dict[str, Node] = {
        names.MP_WORLD_SIZE: count,
        names.PARALLEL_DEGREES: {"pp_degree": 1, "tp_degree": count},
        names.UNIVERSAL_INFO: info,
    }
    state = {
        key: own.get(key, node)
        for key, node in like.model_state.items()
        if info is not None or key != names.UNIVERSAL_INFO
    }
    config = _config(checkpoint.config, count)
    has_told = names.UNIVERSAL_INFO in like.optimizer_file[names.OPTIMIZER]
    optimizer = with_cut_info(like.optimizer_file, info if has_told else None)
    model_parts, tensors = [], []
    for rank in range(count):
        name = names.model_part(rank) if count > 1 else ""
        entries = (
            replace(entry, shape=shards[entry.alias_of or entry.name][rank])
            for entry in like.module
        )
        model_parts.append(
            replace(
                like,
                name=name,
                module=tuple(entries),
                model_state=state,
                optimizer_file={**optimizer, names.DS_CONFIG: config},
            )
        )
        tensors += [
            LogicalTensor(MASTER, param, group.master_dtype, shards[param][rank], name)
            for group in like.groups
            for param in group.params
        ]
    made = replace(checkpoint, model_parts=tuple(model_parts), tensors=tuple(tensors), layers=())
    return ModelInParts(made)


def _with_all_params(checkpoint: Checkpoint, group: ParamGroup) -> ParamGroup:
    """Return a param group with the parameters that it has on all stages, layer by layer."""
    held = [g.params for model_part in checkpoint.model_parts for g in model_part.groups
            if g.number == group.number]  # fmt: skip
    found = dict.fromkeys(name for params in held for name in params)
    return replace(group, params=tuple(sorted(found, key=order_of)))


def own_shape(name: str, mapped: Shape, held: Shape) -> Shape:
    """Return the shape that a tensor has of its own; its map may be of a view in more dimensions.

    There the last dimension is the tensor's own, and the others are its first one
    (`_infer_subparam_logical_shapes` of `deepspeed/module_inject/layers.py`, 0.19.8).

    `held`: the shape of some rank's part of it.
    """
    if len(mapped) == len(held):
        return mapped
    if len(held) == 1:
        return (math.prod(mapped),)
    if len(held) == 2:
        return (math.prod(mapped[:-1]), mapped[-1])
    message = f"'{name}' is cut in the shape {list(mapped)}, and has {len(held)} dimensions"
    raise UnsupportedError(f"{message}: its own shape is not known")


def _config(config: Node, degree: int) -> Node:
    section = config.get(TENSOR_PARALLEL)
    if not isinstance(section, dict):
        return dict(config)
    return {**config, TENSOR_PARALLEL: {**section, "autotp_size": degree}}
