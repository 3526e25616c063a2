"""The stages of a pipeline that begin at given layers, as the source's own stages tell them.

What a stage has, and in which order, follows from its layers (`PipelineModule._build` of
`deepspeed/runtime/pipe/module.py`, 0.19.8): first the modules that several layers share, in the
order in which layers of the stage use them, then layer by layer. A shared module is on every stage
with a layer that uses it. Such a layer lists no tensors under its own number, and it may have no
file. So which layers use the module is known within bounds: on each stage that has it, at least one
of those that list nothing.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final, TypeAlias

from streamshard.errors import DisagreementError, Option, UnsupportedError, UsageError
from streamshard.formats.checkpoint import Checkpoint, ModelPart, ModuleEntry, ParamGroup
from streamshard.formats.deepspeed import names
from streamshard.formats.deepspeed.model_parallel.parallel_degrees import layer_numbers
from streamshard.formats.deepspeed.model_parallel.parts import ModelInParts
from streamshard.formats.deepspeed.model_parallel.pipeline_layers import beginning_of, order_of
from streamshard.formats.pickle.inert import Node
from streamshard.formats.torch.tree_comparison import show_few
from streamshard.model import MASTER, MODULE
from streamshard.sizes import counted

STAGES: Final = "stages"
"""The option that tells with which layers stages begin."""
_MOST_LAYERS: Final = 1_000_000
"""More layers than any model has."""
LayerKey: TypeAlias = int | str
"""A layer's number, or what the names of a module begin with that layers share."""


def listed(starts: Sequence[int]) -> str:
    """Return the first layers of stages as the option lists them.

    >>> listed([0, 4, 7])
    '0,4,7'
    """
    return ",".join(map(str, starts))


def count_stages(starts: Sequence[int], degree: int | None) -> int:
    """Return how many stages are listed, which is the pipeline degree of their job.

    `degree`: the pipeline degree, if it was given too.
    """
    asked = Option(STAGES, starts)
    if not starts or starts[0] != 0 or any(one >= other for one, other in pairwise(starts)):
        raise UsageError(f"{asked}: give the first layer of each stage, ascending from 0: 0,4,7")
    if degree not in (None, len(starts)):
        message = f"{asked}: are {counted(len(starts), 'stage')}, and"
        says = Option("pipeline_parallel")
        raise UsageError(f"{message} {says} says {degree}; make them agree, or leave it out")
    return len(starts)


def have_equal_stages(one: Checkpoint, other: Checkpoint) -> bool:
    """Tell whether the stages of two checkpoints have the same parameters, in the same order."""
    return [*map(_params, one.model_parts)] == [*map(_params, other.model_parts)]


def with_stages(parts: ModelInParts, starts: Sequence[int]) -> ModelInParts:
    """Return the parts of a job whose stages begin at other layers, and that is alike otherwise.

    `parts`: the parts of a job with a pipeline.
    `starts`: first layer of each stage, ascending from 0.
    """
    checkpoint, degree = parts.checkpoint, parts.degrees.tensor
    ranks = [_Stages(checkpoint, checkpoint.model_parts[rank::degree]) for rank in range(degree)]
    split = zip(*(rank.split(starts) for rank in ranks), strict=True)
    model_parts = [model_part for of_stage in split for model_part in of_stage]
    own: dict[str, Node] = {
        names.MP_WORLD_SIZE: len(model_parts),
        names.PARALLEL_DEGREES: {"pp_degree": len(starts), "tp_degree": degree},
    }
    named = tuple(
        replace(
            model_part,
            name=names.model_part(number) if len(model_parts) > 1 else "",
            model_state={key: own.get(key, node) for key, node in model_part.model_state.items()},
        )
        for number, model_part in enumerate(model_parts)
    )
    made = replace(checkpoint, model_parts=named)
    return ModelInParts(_with_tensors(made, checkpoint, degree), keeps_shards=parts.keeps_shards)


def _params(model_part: ModelPart) -> list[tuple[str, ...]]:
    return [group.params for group in model_part.groups]


def _with_tensors(made: Checkpoint, of: Checkpoint, degree: int) -> Checkpoint:
    """Add the tensors of a checkpoint to its new model parts.

    `degree`: count of the tensor-parallel ranks of each stage.
    """
    rank_of = {model_part.name: number % degree for number, model_part in enumerate(of.model_parts)}
    masters = {(rank_of[t.model_part], t.name): t for t in of.tensors if t.state == MASTER}
    home = {
        (number % degree, entry.name): model_part.name
        for number, model_part in enumerate(made.model_parts)
        for entry in model_part.module
    }
    # `layers` refer to tensors by number.
    tensors = [
        replace(t, model_part=home[rank_of[t.model_part], t.name]) if t.state == MODULE else t
        for t in of.tensors
    ]
    tensors += [
        replace(masters[number % degree, name], model_part=model_part.name)
        for number, model_part in enumerate(made.model_parts)
        for params in _params(model_part)
        for name in params
    ]
    return replace(made, tensors=tuple(tensors))


class _Stages:
    """The stages of the source, as one tensor-parallel rank has them."""

    def __init__(self, checkpoint: Checkpoint, model_parts: Sequence[ModelPart]) -> None:
        self._model_parts = model_parts
        self._layer_keys = [_layer_keys(model_part) for model_part in model_parts]
        self._layers = [{p for p in keys if isinstance(p, int)} for keys in self._layer_keys]
        self._last = max(layer_numbers(checkpoint).union(*self._layers), default=0)
        """Number of the last layer that is known."""
        if self._last >= _MOST_LAYERS:
            raise UnsupportedError(f"has a layer {self._last}; {_MOST_LAYERS} are the most")
        self._require_order()

    def _require_order(self) -> None:
        """Refuse stages whose optimizers do not have the order in which DeepSpeed lists layers."""
        stages = [layers for layers in self._layers if layers]
        if any(max(one) >= min(other) for one, other in pairwise(stages)):
            message = (
                "its stages do not have one layer after the other, as under DualPipeV, where each"
            )
            raise UnsupportedError(f"{message} rank has two stages")
        groups = [group for model_part in self._model_parts for group in model_part.groups]
        if any(list(group.params) != sorted(group.params, key=order_of) for group in groups):
            message = "its optimizer does not have its parameters layer by layer"
            raise UnsupportedError(f"{message}, so their order on other stages is not known")
        if all(len(set(map(_layer_key, group.params))) < 2 for group in groups):
            message = "no stage trains several layers, so in which order one would have them"
            raise UnsupportedError(f"{message} is not known")

    def split(self, starts: Sequence[int]) -> Iterator[ModelPart]:
        """Yield each stage that begins at one of the layers, without name and degrees."""
        if starts[-1] > self._last:
            message = f"{Option(STAGES, starts)}: the last layer that is known is {self._last}"
            raise UsageError(f"{message}, and a stage needs one; list other layers")
        found = []
        for stage, (start, stop) in enumerate(pairwise([*starts, self._behind])):
            made = self._stage(range(start, stop))
            if (lacked := self._lacked_by(made)) is not None:
                message = f"{Option(STAGES, starts)}: stage {stage}, from layer {start} on"
                raise UsageError(f"{message}, would have no parameters {lacked}; list other layers")
            found.append(made)
        tells = [_layer_keys(model_part) for model_part in found]
        homes: list[list[ModuleEntry]] = [[] for _ in found]
        for entry in (entry for model_part in self._model_parts for entry in model_part.module):
            key = _layer_key(entry.name)
            homes[next((s for s, keys in enumerate(tells) if key in keys), 0)].append(entry)
        for model_part, entries in zip(found, homes, strict=True):
            yield replace(model_part, module=tuple(entries))

    def _lacked_by(self, made: ModelPart) -> str | None:
        """Say which parameters a stage must have and lacks: some of each group that is trained."""
        if not any(_params(made)):
            return "to train"
        trained = {
            g.number for model_part in self._model_parts for g in model_part.groups if g.params
        }
        lacked = (g.number for g in made.groups if g.number in trained and not g.params)
        return next((f"of param group {number}" for number in lacked), None)

    @property
    def _behind(self) -> int:
        """End of the layers. The one before stands for all that may follow the last known one."""
        return self._last + 2

    def _stage(self, layers: range) -> ModelPart:
        shared = {key for keys in self._layer_keys for key in keys if isinstance(key, str)}
        modules = {key for key in sorted(shared) if self._has(key, layers)}
        if len(modules) > 1 and layers.start:
            message = (
                f"the stage from layer {layers.start} on has {show_few(sorted(modules))}, which"
            )
            raise UnsupportedError(f"{message} several layers share: not known which it uses first")

        def is_held(name: str) -> bool:
            key = _layer_key(name)
            return key in modules if isinstance(key, str) else key in layers

        first = self._model_parts[0]
        groups = tuple(self._group(group, is_held) for group in first.groups)
        states = [model_part.model_state for model_part in self._model_parts]
        buffers = _chosen((state.get(names.BUFFER_NAMES) or [] for state in states), is_held)
        state = {**first.model_state, names.BUFFER_NAMES: list(buffers)}
        # Only the first stage's file lists tied names. Those of layers that come to it are not
        # known; nothing that loads a pipeline reads the list.
        if tied := first.model_state.get(names.SHARED_PARAMS):
            state[names.SHARED_PARAMS] = _ties(tied, is_held)
        return replace(first, groups=groups, model_state=state)

    def _group(self, group: ParamGroup, is_held: Callable[[str], bool]) -> ParamGroup:
        params = (
            one.params
            for model_part in self._model_parts
            for one in model_part.groups
            if one.number == group.number
        )
        return replace(group, params=_chosen(params, is_held))

    def _has(self, shared: str, layers: range) -> bool:
        """Tell whether some of the layers use a module that several layers share."""
        within = set(layers)
        users = [
            self._may_use(stage) for stage, keys in enumerate(self._layer_keys) if shared in keys
        ]
        if any(one <= within for one in users):
            return True
        perhaps = set[int]().union(*(one for one in users if one & within))
        if perhaps:
            shown = show_few([f"{layer}" for layer in sorted(perhaps)])
            message = f"not known which of layers {shown} use '{shared[:-1]}', which several layers"
            message = f"{message} share, and so which of the stages have it; with all of these"
            raise UnsupportedError(f"{message} layers on one stage it would be known")
        return False

    def _may_use(self, stage: int) -> set[int]:
        """Return the layers that may be of a stage and use what it shares with other layers."""
        before = set[int]().union(*self._layers[:stage])
        after = set[int]().union(*self._layers[stage + 1 :])
        between = range(max(before, default=-1) + 1, min(after, default=self._behind))
        found = set(between) - self._layers[stage]
        if not found:
            message = f"stage {stage} has a module that several layers share, and no layer"
            raise DisagreementError(f"{message} that may use it")
        return found


def _layer_keys(model_part: ModelPart) -> set[LayerKey]:
    """Return the layers, and the modules that layers share, of which a stage lists tensors."""
    lists = [*_params(model_part), model_part.model_state.get(names.BUFFER_NAMES) or []]
    return {_layer_key(name) for one in lists for name in one}


def _layer_key(name: str) -> LayerKey:
    """Return where a name belongs.

    >>> _layer_key("12.up.weight"), _layer_key("tied_modules.embed.weight")
    (12, 'tied_modules.embed.')
    """
    beginning = beginning_of(name) or ""
    number = beginning.removesuffix(".")
    if number.isdecimal() and len(number) <= len(str(_MOST_LAYERS)):
        return int(number)
    if beginning and not number.isdecimal():
        return beginning
    message = f"'{name[:100]}' is of no layer, so which stages have it is not known"
    raise UnsupportedError(message)


def _chosen(lists: Iterable[Iterable[str]], is_held: Callable[[str], bool]) -> tuple[str, ...]:
    """Return the names that a stage has out of the lists of all stages, in its order."""
    found = dict.fromkeys(name for one in lists for name in one if is_held(name))
    return tuple(sorted(found, key=order_of))


def _ties(tied: Mapping[str, str], is_held: Callable[[str], bool]) -> OrderedDict[str, Node]:
    """Return the names of tied parameters of a stage, with those that they are tied to."""
    for name, other in tied.items():
        if _layer_key(name) != _layer_key(other):
            message = f"'{name}' of one layer is tied to '{other}' of another without a"
            raise UnsupportedError(f"{message} TiedLayerSpec: on other stages it may not be")
    return OrderedDict(pair for pair in tied.items() if is_held(pair[0]))
