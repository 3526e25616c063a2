"""The one part that a job without tensor parallelism has, as the parts of another job tell it.

Nothing of it depends on a choice of that job: each tensor is whole, and the order of parameters in
the optimizer is that of any part, as AutoTP cuts tensors and leaves the module's names alone.
"""

import math
from dataclasses import replace
from functools import partial

from streamshard.errors import UnsupportedError
from streamshard.formats.checkpoint import Checkpoint, ParamGroup
from streamshard.formats.deepspeed import names
from streamshard.formats.deepspeed.model_parallel.parallel_degrees import (
    TENSOR_PARALLEL,
    is_pipeline,
)
from streamshard.formats.deepspeed.model_parallel.parts import ModelParts
from streamshard.formats.deepspeed.model_parallel.pipeline_layers import in_order, order_of
from streamshard.formats.pickle.inert import Node
from streamshard.layout.model_cut import Shape
from streamshard.model import MASTER, LogicalTensor


def whole_model(parts: ModelParts) -> ModelParts:
    """Return the parts, one, of a job that does not cut the model.

    Of a pipeline it is a stage that has all layers. What its optimizer's order would be is not
    known, so no job can resume from it.

    Raises
    ------
    UnsupportedError
        The whole shape of a parameter is not known.
    """
    checkpoint = parts.checkpoint
    first = checkpoint.families[0]
    shapes = {name: _whole_shape(parts, name) for name in parts.tensors}
    held = {entry.name: entry for family in checkpoint.families for entry in family.module}
    entries = tuple(
        replace(entry, shape=shapes[entry.alias_of or entry.name]) for entry in held.values()
    )
    groups = first.groups
    if is_pipeline(checkpoint):
        entries = in_order(entries)
        groups = tuple(map(partial(_with_all_params, checkpoint), groups))
    tensors = tuple(
        LogicalTensor(MASTER, name, group.master_dtype, shapes[name])
        for group in groups
        for name in group.params
    )
    state = {k: node for k, node in first.model_state.items() if k != names.UNIVERSAL_INFO}
    degrees = {"pp_degree": 1, "tp_degree": 1}
    own = {names.MP_WORLD_SIZE: 1, names.PARALLEL_DEGREES: degrees}
    state |= {key: node for key, node in own.items() if key in state}
    family = replace(
        first,
        name="",
        groups=groups,
        module=entries,
        model_state=state,
        optimizer_file={**first.optimizer_file, names.DS_CONFIG: _config(checkpoint.config)},
    )
    return ModelParts(replace(checkpoint, families=(family,), tensors=tensors))


def _with_all_params(checkpoint: Checkpoint, group: ParamGroup) -> ParamGroup:
    """Return a param group with the parameters that it has on all stages, layer by layer."""
    held = [g.params for family in checkpoint.families for g in family.groups
            if g.number == group.number]  # fmt: skip
    found = dict.fromkeys(name for params in held for name in params)
    return replace(group, params=tuple(sorted(found, key=order_of)))


def _whole_shape(parts: ModelParts, name: str) -> Shape:
    """Return a tensor's whole shape; its map may be of a view in more dimensions.

    There the last dimension is the tensor's own, and the others are its first one
    (`_infer_subparam_logical_shapes` of `deepspeed/module_inject/layers.py`, 0.19.8).
    """
    mapped, held = parts.cut(name).shape, next(iter(parts.tensors[name].shapes.values()))
    if len(mapped) == len(held):
        return mapped
    if len(held) == 1:
        return (math.prod(mapped),)
    if len(held) == 2:
        return (math.prod(mapped[:-1]), mapped[-1])
    message = f"'{name}' is cut in the shape {list(mapped)}, and has {len(held)} dimensions"
    raise UnsupportedError(f"{message}: its whole shape is not known")


def _config(config: Node) -> Node:
    section = config.get(TENSOR_PARALLEL)
    if not isinstance(section, dict):
        return dict(config)
    return {**config, TENSOR_PARALLEL: {**section, "autotp_size": 1}}
