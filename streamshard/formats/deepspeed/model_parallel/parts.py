"""The parts of the model that a checkpoint's model parts are, tensor by tensor: a cut of each.

What a stage of a pipeline has, and in which order, follows from its layers (`PipelineModule._build`
of `deepspeed/runtime/pipe/module.py`, 0.19.8): first the modules that several layers share, in the
order in which layers of the stage use them, then layer by layer.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, TypeAlias

from streamshard.errors import DisagreementError, UnsupportedError, lacking
from streamshard.formats.checkpoint import Checkpoint, ModelPart, ParamGroup
from streamshard.formats.deepspeed import names
from streamshard.formats.deepspeed.model_parallel.cuts_in_files import cuts_in
from streamshard.formats.deepspeed.model_parallel.parallel_degrees import (
    AS_SAVED,
    TENSOR_PARALLEL,
    Degrees,
    degrees_of,
    is_pipeline,
)
from streamshard.formats.deepspeed.model_parallel.pipeline_layers import (
    beginning_of,
    in_order,
    order_of,
)
from streamshard.formats.deepspeed.model_parallel.stated_cuts import CutRules, StatedCuts
from streamshard.formats.deepspeed.read.fingerprints import fingerprint
from streamshard.formats.pickle.inert import Node
from streamshard.layout.model_cut import ModelCut, Shape, split_cut, whole_cut
from streamshard.model import MASTER, MODULE, LogicalTensor

_OF_WHOLE: Final[Mapping[str, Node]] = {
    names.MP_WORLD_SIZE: 1,
    names.PARALLEL_DEGREES: {"pp_degree": 1, "tp_degree": 1},
}
"""What the model file of a job with one part has in place of the source's degrees."""
_MOST_DIGITS: Final = 7
"""More digits than the number of any layer has."""


_TRAINED = "param"
_HELD = (_TRAINED, "frozen", "buffer", "loose")
"""Kinds of module entries that have elements of their own."""


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """A parameter or buffer, with its shape in each model part that has it."""

    kind: str
    shapes: Mapping[int, Shape]
    """Model part's number → shape there."""
    group: int | None
    """Number of the param group that trains it."""


class ModelInParts:
    """The model parts of a checkpoint as parts of one model."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        rules: CutRules | None = None,
        *,
        keeps_shards: bool = False,
    ) -> None:
        """Check that the model parts can be taken for that.

        `rules`: how tensor parallelism cut the parameters; None for what the files tell.
        `keeps_shards`: whether what a tensor-parallel rank has of a tensor stays as it is, since
        only the stages of a pipeline change. Then how tensors are cut need not be known.
        """
        self.checkpoint = checkpoint
        _require_plain(checkpoint)
        self.degrees: Degrees = degrees_of(checkpoint)
        self.keeps_shards = keeps_shards and self.degrees.tensor > 1
        self._cuts = self._stated_cuts(rules)
        self.tensors: Mapping[str, HeldTensor] = dict(self._held())
        self._known: dict[str, ModelCut] = {}

    def _stated_cuts(self, rules: CutRules | None) -> StatedCuts | None:
        stated, *infos = (
            f.model_state.get(names.UNIVERSAL_INFO) for f in self.checkpoint.model_parts
        )
        if self.degrees.tensor == 1 or self.keeps_shards:
            return None
        if rules is not None:
            return rules
        kind = cuts_in(stated)
        if stated is None or kind is None:
            message = f"cut among {self.degrees.tensor} tensor-parallel ranks, and no"
            raise UnsupportedError(
                f"{message} '{names.UNIVERSAL_INFO}' in its model files tells how, as what AutoTP "
                "saves does, and what other jobs save for the universal checkpoint: "
                f"{lacking('cut_rules')}. {AS_SAVED}"
            )
        for info in infos:
            if fingerprint(info) != fingerprint(stated):
                message = f"its parts have different '{names.UNIVERSAL_INFO}'"
                raise DisagreementError(f"{message}: they are not of one run")
        return kind(stated)

    def _held(self) -> Iterator[tuple[str, HeldTensor]]:
        shapes_by_name: dict[str, dict[int, Shape]] = {}
        kinds: dict[str, tuple[str, int | None]] = {}
        for number, model_part in enumerate(self.checkpoint.model_parts):
            for name, kind, shape, group in self._of_model_part(model_part):
                shapes_by_name.setdefault(name, {})[number] = shape
                first_kind = kinds.setdefault(name, (kind, group))
                if first_kind != (kind, group):
                    _require_elements(name, number, shape)
                    _require_elements(name, *next(iter(shapes_by_name[name].items())))
                    places = _place(*first_kind), _place(kind, group)
                    message = f"'{name}' is {places[0]}, in {model_part.name} {places[1]}"
                    raise DisagreementError(message)
        for name, shapes in shapes_by_name.items():
            yield name, HeldTensor(kinds[name][0], shapes, kinds[name][1])

    def _of_model_part(self, model_part: ModelPart) -> Iterator[tuple[str, str, Shape, int | None]]:
        shapes = self.checkpoint.group_shapes(model_part)
        for group, members in zip(model_part.groups, shapes, strict=True):
            for name, shape in members.items():
                yield name, _TRAINED, shape, group.number
        for entry in model_part.module:
            if entry.kind in _HELD and entry.kind != _TRAINED:
                yield entry.name, entry.kind, entry.shape, None

    def cut(self, name: str) -> ModelCut:
        if name not in self._known:
            self._known[name] = self._cut_of(name)
        return self._known[name]

    def _cut_of(self, name: str) -> ModelCut:
        tensor = self.tensors[name]
        count = len(self.checkpoint.model_parts)
        first = next(iter(tensor.shapes.values()))
        if self.keeps_shards:
            return self._cut_of_shards(name, tensor)
        if tensor.kind == "buffer" or self._cuts is None:
            for number, shape in tensor.shapes.items():
                if shape != first:
                    message = f"'{name}' is {list(first)}, in part {number} {list(shape)}"
                    raise DisagreementError(f"{message}: it is cut, and nothing tells how")
            return whole_cut(first, [number in tensor.shapes for number in range(count)])
        cut = self._cuts.cut(name, self.shards(name), self.degrees.tensor).spread(
            [m % self.degrees.tensor if m in tensor.shapes else None for m in range(count)]
        )
        for number, shard in enumerate(cut.shards):
            if shard is not None and 0 not in cut.shape:
                _require_elements(name, number, shard)
            _require_shard(name, number, shard, tensor.shapes.get(number))
        return cut

    def cut_by_default(self) -> Sequence[str]:
        """Return tensors that are in no list, and that all ranks hold in one shape.

        One that a job did not list as replicated looks the same, except its values.
        """
        if self._cuts is None:
            return []
        return [
            name
            for name, tensor in self.tensors.items()
            if tensor.kind != "buffer"
            and len(set(tensor.shapes.values())) == 1
            and self._cuts.is_default(name)
        ]

    def averaged(self) -> Sequence[str]:
        """Return the trained parameters of which the mean of the ranks' copies counts."""
        if self._cuts is None:
            return []
        return [
            name
            for name, tensor in self.tensors.items()
            if tensor.group is not None and self._cuts.is_averaged(name)
        ]

    def is_vocabulary(self, name: str) -> bool:
        """Tell whether lists say that a tensor has a row for each word, and more for padding."""
        return self._cuts is not None and self._cuts.is_vocabulary(name)

    def shards(self, name: str) -> Mapping[int, Shape]:
        """Return the shape that a tensor has on each tensor-parallel rank of a stage."""
        shapes: dict[int, Shape] = {}
        for number, shape in self.tensors[name].shapes.items():
            known = shapes.setdefault(number % self.degrees.tensor, shape)
            if known != shape:
                message = f"'{name}' is {list(known)} on a stage, in part {number} {list(shape)}"
                raise DisagreementError(message)
        return shapes

    def _cut_of_shards(self, name: str, tensor: HeldTensor) -> ModelCut:
        """Return the cut of the elements of all shards, one rank's after the other's."""
        shards, count = self.shards(name), len(self.checkpoint.model_parts)
        ranks = range(self.degrees.tensor)
        if len(shards) < len(ranks):
            message = f"'{name}' is on {len(shards)} of the {len(ranks)} tensor-parallel ranks"
            raise UnsupportedError(f"{message} of a stage. {AS_SAVED}")
        for rank in ranks:
            _require_elements(name, rank, shards[rank])
        widths = [math.prod(shards[rank]) for rank in ranks]
        return split_cut((sum(widths),), 0, widths).spread(
            [m % len(ranks) if m in tensor.shapes else None for m in range(count)]
        )


def with_cut_info(optimizer_file: Mapping[str, Node], info: Node) -> Mapping[str, Node]:
    """Return an optimizer's file with what it is to hold of how parameters are cut.

    DeepSpeed saves there what a parameter has in an attribute of that name, as model files hold it
    (`_enable_universal_checkpoint` of `deepspeed/runtime/zero/stage_1_and_2.py`, 0.19.8).
    """
    state = {k: v for k, v in optimizer_file[names.OPTIMIZER].items() if k != names.UNIVERSAL_INFO}
    stated = {} if info is None else {names.UNIVERSAL_INFO: info}
    return {**optimizer_file, names.OPTIMIZER: {**state, **stated}}


def _place(kind: str, group: int | None) -> str:
    return kind if group is None else f"trained in param group {group}"


def _require_elements(name: str, number: int, shape: Shape) -> None:
    # Such a rank's optimizer leaves the parameter out, and its file lists it as frozen.
    if 0 in shape:
        message = f"'{name}' has no elements on rank {number}: a rank without elements of a"
        raise UnsupportedError(f"{message} parameter keeps it out of its optimizer; not supported")


def _require_shard(name: str, number: int, mapped: Shape | None, own: Shape | None) -> None:
    numels = [None if shape is None else math.prod(shape) for shape in (mapped, own)]
    if numels[0] != numels[1]:
        shown = [shape and list(shape) for shape in (mapped, own)]
        message = f"'{name}' is {shown[1]} on rank {number}, and {shown[0]} as its cut is told"
        raise DisagreementError(message)


def _require_plain(checkpoint: Checkpoint) -> None:
    model_parts = checkpoint.model_parts
    what = None
    if checkpoint.is_dumps or checkpoint.foreign:
        what = "is no whole checkpoint of DeepSpeed"
    elif not checkpoint.layout.stage:
        what = "was saved without ZeRO (stage 0), whose optimizer does not name its parameters"
    elif any(f.model_state.get(names.EXPERT_COUNTS) for f in model_parts) or any(
        group.expert_parallel > 1 for model_part in model_parts for group in model_part.groups
    ):
        what = "has experts"
    elif checkpoint.largest_block > 1:
        what = "has optimizer states of 8 bits, with a scale for each block of a rank's elements"
    elif checkpoint.replicas > 1:
        what = "was trained on sequences cut among ranks"
    elif checkpoint.has_muon:
        what = "was trained with Muon, whose momentum is orthogonal for each rank's own matrix"
    elif any(entry.kind in ("extra", "excluded") for f in model_parts for entry in f.module):
        what = "was saved without frozen weights, or with entries of the module that are no tensors"
    if what is not None:
        message = f"{what}: its tensor and pipeline parallel degrees cannot change"
        raise UnsupportedError(f"{message}. {AS_SAVED}")


def whole_model(parts: ModelInParts) -> ModelInParts:
    """Return the one part of a job that does not cut the model.

    Each tensor is whole, and the order of parameters in the optimizer is that of any part, as
    AutoTP cuts tensors and leaves the module's names alone. Of a pipeline it is a stage that has
    all layers, whose optimizer's order is not known: no job can resume from it.
    """
    checkpoint = parts.checkpoint
    first = checkpoint.model_parts[0]
    shapes = {
        name: _own_shape(name, parts.cut(name).shape, next(iter(held.shapes.values())))
        for name, held in parts.tensors.items()
    }
    if is_pipeline(checkpoint):
        module = {
            entry.name: entry
            for model_part in checkpoint.model_parts
            for entry in model_part.module
        }
        groups = tuple(_with_all_params(group, checkpoint.model_parts) for group in first.groups)
        first = replace(first, groups=groups, module=in_order(tuple(module.values())))
    state = {
        key: _OF_WHOLE.get(key, node)
        for key, node in first.model_state.items()
        if key != names.UNIVERSAL_INFO
    }
    optimizer = with_cut_info(first.optimizer_file, None)
    entries = (replace(e, shape=shapes[e.alias_of or e.name]) for e in first.module)
    model_part = replace(
        first,
        name="",
        module=tuple(entries),
        model_state=state,
        optimizer_file={**optimizer, names.DS_CONFIG: _config_of_whole(checkpoint.config)},
    )
    tensors = [
        LogicalTensor(MASTER, param, group.master_dtype, shapes[param], "")
        for group in first.groups
        for param in group.params
    ]
    made = replace(checkpoint, model_parts=(model_part,), tensors=tuple(tensors), layers=())
    return ModelInParts(made)


def _with_all_params(group: ParamGroup, stages: Sequence[ModelPart]) -> ParamGroup:
    """Return a param group with the parameters that it has on all stages, layer by layer."""
    listed = [g.params for stage in stages for g in stage.groups if g.number == group.number]
    found = dict.fromkeys(name for params in listed for name in params)
    return replace(group, params=tuple(sorted(found, key=order_of)))


def _own_shape(name: str, mapped: Shape, shape: Shape) -> Shape:
    """Return the shape that a tensor has of its own; its map may be of a view in more dimensions.

    There the last dimension is the tensor's own, and the others are its first one
    (`_infer_subparam_logical_shapes` of `deepspeed/module_inject/layers.py`, 0.19.8).

    `held`: the shape of some rank's part of it.
    """
    if len(mapped) == len(shape):
        return mapped
    if len(shape) == 1:
        return (math.prod(mapped),)
    if len(shape) == 2:
        return (math.prod(mapped[:-1]), mapped[-1])
    message = f"'{name}' is cut in the shape {list(mapped)}, and has {len(shape)} dimensions"
    raise UnsupportedError(f"{message}: its own shape is not known")


def _config_of_whole(config: Node) -> Node:
    section = config.get(TENSOR_PARALLEL)
    if not isinstance(section, dict):
        return dict(config)
    return {**config, TENSOR_PARALLEL: {**section, "autotp_size": 1}}


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
        groups=tuple(_with_all_params(group, stages) for group in first.groups),
        module=tuple(entry for stage in stages for entry in stage.module),
        model_state=state,
    )


def _tensors(checkpoint: Checkpoint, stages: Sequence[ModelPart]) -> list[LogicalTensor]:
    """Return a checkpoint's tensors, of which those of the module are of its new stages.

    Files of layers refer to tensors by number, so the master weights come last.
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
