"""Reads the optimizer in files of FSDP's ranks, `optim_world_size_N_rank_R.pt`.

verl 0.9.1 saves `optimizer.state_dict()` of torch
(`verl/utils/checkpoint/fsdp_checkpoint_manager.py`), as SkyRL does: states are numbered in the
order of `model.parameters()`, frozen ones counted, and with FSDP2 each is a DTensor. What
`get_optimizer_state_dict` returns has names in their place. With FSDP1 the states are those of flat
parameters, as plain tensors (`flat_parameters`); with `use_orig_params` a rank has the elements of
each parameter that are in its parts of these, in order.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from streamshard.errors import CorruptFileError, DisagreementError, UnsupportedError, UsageError
from streamshard.formats.checkpoint import ParamGroup
from streamshard.formats.dcp.optimizer_state import is_plain, number_in
from streamshard.formats.deepspeed.read.rank_files import SourceFiles
from streamshard.formats.deepspeed.read.redundant_copies import alike
from streamshard.formats.deepspeed.read.state_of_ranks import read_scalar
from streamshard.formats.deepspeed.states import Elementwise, Plain, State
from streamshard.formats.fsdp_ranks.flat_parameters import evened_roots, joined_parameters
from streamshard.formats.fsdp_ranks.rank_trees import TreeShape, paths_to_tensors
from streamshard.formats.fsdp_ranks.sharded_tensors import (
    REPLICATE,
    Box,
    Placement,
    RankPart,
    Shape,
    boxes_of,
    dtype_of,
    part_of,
)
from streamshard.formats.pickle.inert import Node, show, show_few
from streamshard.formats.pickle.node_checks import name_of, of_file
from streamshard.formats.torch.torch_tensor import Tensor, tensor_of
from streamshard.model import BLOB, FILE, ITEMSIZE, MASTER, MODULE, LogicalTensor

_STATE: Final = "state"
_GROUPS: Final = "param_groups"
_PARAMS: Final = "params"
_MATRIX: Final = 2
_PARAM_NAMES: Final = "param_names"
"""Key of a group in which torch keeps names, where an optimizer was given them."""


@dataclass(frozen=True, slots=True)
class CutState:
    """A state that is cut among ranks."""

    state: str
    names: tuple[str, ...]
    """Its parameter, or those that FSDP1 has joined; its number where no file tells the name."""
    shapes: Sequence[Shape]
    dtype: str
    boxes: Sequence[Box]
    is_joined: bool = False
    """Whether the boxes are the ranks' parts of what parameters are joined to, in order."""

    @property
    def label(self) -> str:
        """What messages call it."""
        return f"{self.state} of {show_few(self.names)}"

    @property
    def tensors(self) -> Iterator[LogicalTensor]:
        for name, shape in zip(self.names, self.shapes, strict=True):
            yield LogicalTensor(self.state, name, self.dtype, shape)


@dataclass(frozen=True, slots=True)
class RanksOptimizer:
    """The optimizer of all ranks."""

    template: TreeShape
    """What rank 0 saved, without tensors."""
    cut: Mapping[int, CutState]
    """Number of a tensor in the template → what it is."""
    groups: tuple[ParamGroup, ...]
    """Empty if they cannot be told."""
    hyper_parameters: Sequence[Mapping[str, Node]]
    """The param groups without their parameters."""
    untold: str
    """Why they cannot be told."""
    tied: Mapping[str, str]
    """Other names of weights, and the names under which FSDP1 has joined them."""
    is_in_pieces: bool
    """Whether ranks have runs of each parameter, as with FSDP1's `use_orig_params`."""

    @property
    def is_flat(self) -> bool:
        """Whether it holds states of flat parameters."""
        return any(one.is_joined for one in self.cut.values())


NO_OPTIMIZER: Final = RanksOptimizer(TreeShape(b"", ()), {}, (), (), "", {}, is_in_pieces=False)


def read_optimizer(
    paths: Sequence[Path],
    sources: SourceFiles,
    weights: Mapping[str, Sequence[RankPart]],
    wrapped: Sequence[str],
) -> RanksOptimizer:
    """Open the optimizers of all ranks, in order of rank.

    `weights`: the ranks' parts of each weight that is no other's second name, in the model's order.
    `wrapped`: patterns of the modules that FSDP1 wrapped, where they are known.
    """
    roots = [sources.read(path, sources.add(path)).root for path in paths]
    templates, is_in_pieces = _templates(paths, roots), False
    if _differing(templates) is not None and (evened := evened_roots(roots)) is not None:
        roots, templates, is_in_pieces = evened, _templates(paths, evened), True
    if (number := _differing(templates)) is not None:
        message = f"differs from {paths[0]} in more than tensors"
        raise DisagreementError(message, path=paths[number])
    if not roots[0]:
        return NO_OPTIMIZER
    with of_file(paths[0].parent):
        reading = _Reading(
            roots[0], templates, sources, weights, wrapped, is_in_pieces=is_in_pieces
        )
        return reading.optimizer()


def _templates(paths: Sequence[Path], roots: Sequence[Node]) -> list[TreeShape]:
    templates = []
    for path, root in zip(paths, roots, strict=True):
        with of_file(path):
            templates.append(TreeShape.of(root))
    return templates


def _differing(templates: Sequence[TreeShape]) -> int | None:
    """Return the first rank whose file differs from rank 0's in more than tensors."""
    both = enumerate(templates)
    return next((n for n, one in both if one.skeleton != templates[0].skeleton), None)


class _Reading:
    """What is known while the optimizer is read."""

    def __init__(
        self,
        root: dict[str, Any],
        templates: Sequence[TreeShape],
        sources: SourceFiles,
        weights: Mapping[str, Sequence[RankPart]],
        wrapped: Sequence[str],
        *,
        is_in_pieces: bool,
    ) -> None:
        self._is_in_pieces = is_in_pieces
        self._root, self._templates = root, templates
        self._sources, self._wrapped = sources, wrapped
        self._parts = weights
        self._weights = {name: parts[0] for name, parts in weights.items()}
        self._tied: Mapping[str, str] = {}
        self._numbers = {id(leaf): n for n, leaf in enumerate(templates[0].leaves)}
        self._is_flat = self._has_flat_states()

    def optimizer(self) -> RanksOptimizer:
        names, untold = self._names()
        if untold and self._is_flat and not self._is_in_pieces:
            raise UnsupportedError(untold)
        cut = dict[int, CutState]()
        paths = {id(leaf): path for path, leaf in paths_to_tensors(self._root)}
        for number, leaf in enumerate(self._templates[0].leaves):
            path = paths.get(id(leaf))
            if path is None:
                message = "holds a tensor inside of another object, as quantised states are"
                raise UnsupportedError(message)
            by_rank = [part_of(template.leaves[number]) for template in self._templates]
            parts = [part for part in by_rank if part is not None]
            if self._is_flat and parts[0].shape and path[0] == _STATE:
                cut_of = self._piece_cut if self._is_in_pieces else self._flat_cut
                cut[number] = cut_of(path, names, [part.local[0] for part in parts])
            elif all(part.is_plain for part in parts):
                self._require_alike(path, [part.local[0] for part in parts])
            else:
                state, (name,) = _state_of(path, names)
                what = f"{state} of '{name}'"
                boxes, dtype = boxes_of(what, parts), dtype_of(what, parts)
                cut[number] = CutState(state, (name,), [parts[0].shape], dtype, boxes)
        if len({(one.state, one.names) for one in cut.values()}) < len(cut):
            raise CorruptFileError("has a state of a parameter twice")
        groups, options = list[ParamGroup](), list[Mapping[str, Node]]()
        if not untold:
            try:
                groups += self._groups(names, cut)
                options += map(self._options, self._root[_GROUPS])
            except UnsupportedError as error:
                untold = str(error)
                groups.clear()
        found = self._templates[0], cut, tuple(groups), options, untold, self._tied
        return RanksOptimizer(*found, self._is_in_pieces)

    def _has_flat_states(self) -> bool:
        """Tell whether states are those of FSDP1's flat parameters, as no state of FSDP2 is."""
        states = self._root.get(_STATE)
        if not isinstance(states, dict):
            return False
        parts = [part_of(node) for held in states.values() for node in held.values()]
        shaped = [part for part in parts if part is not None and part.shape]
        is_plain = bool(shaped) and all(p.is_plain and len(p.shape) == 1 for p in shaped)
        return is_plain and any(part.is_dtensor for part in self._weights.values())

    def _joined(self, keys: Sequence[Node]) -> dict[Node, tuple[str, ...]]:
        """Return the parameters in each flat one."""
        numels, lengths = self._numels(), [self._length(key) for key in keys]
        ranks = max(self._shards()) + 1
        search = partial(joined_parameters, lengths=lengths, ranks=ranks, wrapped=self._wrapped)
        try:
            joined = search(numels)
        except (UnsupportedError, UsageError):
            self._tied = dict(self._twins())
            if not self._tied:
                raise
            joined = search({n: numel for n, numel in numels.items() if n not in self._tied})
        return dict(zip(keys, joined, strict=True))

    def _numels(self) -> dict[str, int]:
        """Return the elements of each weight that FSDP1 may have joined."""
        for name, part in self._weights.items():
            *others, last = part.placements or (Placement(REPLICATE),)
            if any(one.kind != REPLICATE for one in others) or last.dim > 0:
                message = f"'{name}' is cut as FSDP1 does not cut, and states are joined as it does"
                raise UnsupportedError(message)
        return {n: math.prod(part.shape) for n, part in self._weights.items() if part.is_dtensor}

    def _length(self, key: Node) -> int:
        """Return the elements that a rank has of a flat parameter."""
        tensors = [tensor_of(node) for node in self._root[_STATE].get(key, {}).values()]
        shapes = {tensor.shape for tensor in tensors if tensor is not None and tensor.shape}
        if len(shapes) != 1 or len(*shapes) != 1:
            message = f"does not have states of one length of flat parameter {show(key)}"
            raise UnsupportedError(f"{message}, and so does not tell what FSDP1 joined to it")
        ((length,),) = shapes
        return length

    def _twins(self) -> Iterator[tuple[str, str]]:
        """Yield matrices that hold the same as others before, as tied ones do, and these."""
        first: dict[tuple[str, Shape], list[str]] = {}
        for name, parts in self._parts.items():
            if not parts[0].is_dtensor or len(parts[0].shape) < _MATRIX:
                continue
            candidates = first.setdefault((parts[0].local[0].dtype, parts[0].shape), [])
            for other in candidates:
                both = zip(parts, self._parts[other], strict=True)
                if all(alike(one.local[0], another.local[0]) for one, another in both):
                    yield name, other
                    break
            else:
                candidates.append(name)

    def _shards(self) -> list[int]:
        """Return which part of flat parameters each rank has."""
        cut = next(parts for parts in self._parts.values() if parts[0].is_dtensor)
        return [part.coordinate[-1] for part in cut]

    def _flat_cut(
        self, path: Sequence[Node], names: Mapping[Node, tuple[str, ...]], tensors: Sequence[Tensor]
    ) -> CutState:
        """Return a state of joined parameters, of which each rank has as many elements."""
        state, joined = _state_of(path, names)
        what = f"{state} of flat parameter {show(path[1])}"
        if len({(tensor.dtype, tensor.shape) for tensor in tensors}) > 1:
            raise DisagreementError(f"{what} differs in length or dtype between ranks")
        if not {*joined} <= self._weights.keys():
            raise UnsupportedError(f"{what} is of parameters that no file of the model names")
        shapes, boxes = [self._weights[name].shape for name in joined], self._runs(what, tensors)
        self._require_padding(what, sum(map(math.prod, shapes)), boxes)
        return CutState(state, joined, shapes, tensors[0].dtype, boxes, is_joined=True)

    def _piece_cut(
        self, path: Sequence[Node], names: Mapping[Node, tuple[str, ...]], runs: Sequence[Tensor]
    ) -> CutState:
        """Return a state of which each rank has a run of elements, or none."""
        state, (name,) = _state_of(path, names)
        what = f"{state} of parameter {show(path[1])}"
        boxes, weight = self._runs(what, runs), self._weights.get(name)
        numel = sum(box.tensor.numel for box in boxes)
        if weight is None or numel != math.prod(weight.shape) or len({t.dtype for t in runs}) > 1:
            message = f"{what} has {numel:,} elements of all ranks, and is no state of '{name}'"
            raise UnsupportedError(message)
        boxes = [box for box in boxes if box.tensor.numel]
        return CutState(state, (name,), [weight.shape], runs[0].dtype, boxes)

    def _runs(self, what: str, tensors: Sequence[Tensor]) -> list[Box]:
        """Return the ranks' parts of what has one dimension, one after the other."""
        runs, boxes, start = dict[int, list[Tensor]](), list[Box](), 0
        for shard, tensor in zip(self._shards(), tensors, strict=True):
            runs.setdefault(shard, []).append(tensor.require_contiguous(what))
        for shard in sorted(runs):
            first, *copies = runs[shard]
            if any((first.dtype, first.shape) != (copy.dtype, copy.shape) for copy in copies):
                raise DisagreementError(f"{what} differs in length between replicas")
            boxes.append(Box((start,), first, copies))
            start += first.numel
        return boxes

    def _require_padding(self, what: str, numel: int, boxes: Sequence[Box]) -> None:
        """Require zeros after the last parameter: an optimizer makes none of padding."""
        for tensor, (begin,) in ((box.tensor, box.offset) for box in boxes):
            start = max(numel - begin, 0)
            if start < tensor.numel:
                itemsize = ITEMSIZE[tensor.dtype]
                behind = tensor.offset + start * itemsize, (tensor.numel - start) * itemsize
                if any(self._sources.read_bytes(tensor.storage, *behind)):
                    message = f"{what} holds more than zeros after its {numel:,} elements"
                    raise UnsupportedError(f"{message}, so what FSDP1 joined to it is not sure")

    def _options(self, group: Mapping[str, Node]) -> Mapping[str, Node]:
        """Return a group's hyper-parameters; those in tensors as the numbers that they are."""
        options: dict[str, Node] = {_PARAMS: []}
        for key, node in group.items():
            if key == _PARAMS:
                continue
            tensor = tensor_of(node)
            if tensor is not None and not tensor.shape:
                options[key] = number_in(name_of(key), read_scalar(tensor, self._sources))
            elif tensor is None and is_plain(node):
                options[key] = node
            else:
                raise UnsupportedError(f"its {show(key)} is {show(node)}, which is no number")
        return options

    def _require_alike(self, path: Sequence[Node], tensors: Sequence[Tensor]) -> None:
        """Refuse plain tensors that are not the same on all ranks."""
        if all(alike(tensors[0], other) for other in tensors):
            return
        what = ".".join(map(str, path))
        if not tensors[0].shape:
            message = f"{what} is not the same on all ranks, as if their files were of two saves"
            raise DisagreementError(message)
        message = f"{what} is another plain tensor on each rank, and no file tells how it was cut"
        raise UnsupportedError(f"{message}. FSDP1 saves an optimizer so, FSDP2 does not")

    def _names(self) -> tuple[Mapping[Node, tuple[str, ...]], str]:
        """Return the names of numbered parameters, or why they are not known."""
        states, groups = self._root.get(_STATE), self._root.get(_GROUPS)
        if not isinstance(states, dict) or not isinstance(groups, list):
            return {}, "it is flattened, and does not list its param groups"
        listed = [(group[_PARAMS], group.get(_PARAM_NAMES)) for group in groups]
        keys = [key for params, _ in listed for key in params]
        if all(isinstance(key, str) for key in keys):
            return {key: (name_of(key),) for key in keys}, ""
        if all(isinstance(named, list) and len(named) == len(ps) for ps, named in listed):
            both = (zip(params, named, strict=True) for params, named in listed)
            return {key: (name_of(name),) for pairs in both for key, name in pairs}, ""
        if len(groups) > 1:
            return {}, f"its parameters are numbered, in {len(groups)} param groups"
        if self._is_flat and not self._is_in_pieces:
            return self._joined(keys), ""
        return self._numbered(keys)

    def _numbered(self, keys: Sequence[Node]) -> tuple[Mapping[Node, tuple[str, ...]], str]:
        """Return the names of parameters that are numbered in the model's order."""
        sharded = {n: part.shape for n, part in self._weights.items() if part.is_dtensor}
        if self._is_in_pieces and len(keys) < len(sharded):
            self._tied = dict(self._twins())
            sharded = {name: s for name, s in sharded.items() if name not in self._tied}
        if len(keys) != len(sharded):
            message = f"it numbers {len(keys)} parameters, and the model has {len(sharded)}"
            return {}, message
        names = dict(zip(keys, sharded, strict=True))
        for key, held in self._root[_STATE].items():
            for node in held.values():
                part = part_of(node)
                if part is not None and part.is_dtensor and part.shape != sharded[names[key]]:
                    message = f"the model's parameter {key}, '{names[key]}', is"
                    shapes = f"{list(sharded[names[key]])}, its state {list(part.shape)}"
                    return {}, f"{message} {shapes}"
        return {key: (name,) for key, name in names.items()}, ""

    def _groups(
        self, names: Mapping[Node, tuple[str, ...]], cut: Mapping[int, CutState]
    ) -> Iterator[ParamGroup]:
        states = self._root[_STATE]
        for number, group in enumerate(self._root[_GROUPS]):
            keys = [key for key in group[_PARAMS] if states.get(key) or not states]
            named = [name for key in keys for name in names[key]]
            unknown = [name for name in named if name not in self._weights]
            if unknown:
                message = f"it trains {show_few(unknown)}, which the model's files do not have"
                raise UnsupportedError(message)
            own = [self._states(states[k], cut) for k in keys for _ in names[k]] if states else []
            differing = [name for name, found in zip(named, own, strict=False) if found != own[0]]
            if differing:
                message = (
                    f"'{differing[0]}' and '{named[0]}' differ in steps or in dtypes of states"
                )
                raise UnsupportedError(message)
            dtypes = list(dict.fromkeys(self._weights[name].local[0].dtype for name in named))
            if len(dtypes) > 1:
                message = f"weights of one param group are {' and '.join(dtypes)}"
                raise UnsupportedError(message)
            dtype = dtypes[0] if dtypes else "float32"
            yield ParamGroup(tuple(named), dtype, own[0] if own else None, number)

    def _states(self, nodes: Mapping[Node, Node], cut: Mapping[int, CutState]) -> dict[str, State]:
        """Return the states of one parameter, without its elements."""
        states: dict[str, State] = {}
        for key, node in nodes.items():
            number = self._numbers.get(id(node), -1)
            tensor = tensor_of(node)
            if number in cut:
                states[name_of(key)] = Elementwise(cut[number].dtype)
            elif tensor is not None and not tensor.shape:
                states[name_of(key)] = read_scalar(tensor, self._sources)
            elif isinstance(node, bool | int | float | str) or node is None:
                states[name_of(key)] = Plain(node)
            else:
                raise UnsupportedError(f"its state {show(key)} is {show(node)}")
        return states


def _state_of(
    path: Sequence[Node], names: Mapping[Node, tuple[str, ...]]
) -> tuple[str, tuple[str, ...]]:
    """Return the state and the parameters of a tensor that is cut among ranks."""
    state, params = "", tuple[str, ...]()
    if len(path) == 3 and path[0] == _STATE:
        state, params = name_of(path[2]), names.get(path[1], (str(path[1]),))
    elif len(path) == 1 and name_of(path[0]).startswith(f"{_STATE}."):
        name, _, state = name_of(path[0]).removeprefix(f"{_STATE}.").rpartition(".")
        params = (name,)
    if not state or state in (MASTER, MODULE, BLOB, FILE):
        raise UnsupportedError(f"{'.'.join(map(str, path))} is no state of a parameter")
    return state, params
