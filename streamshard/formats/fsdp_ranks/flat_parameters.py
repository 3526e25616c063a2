"""Finds out which parameters FSDP1 has joined to flat ones, and how ranks cut these.

Without `use_orig_params` FSDP1 joins the parameters of each module that it wraps, in the order of
`named_modules()`, except those of modules inside that it wraps too; `torch.chunk` cuts what comes
out, and zeros fill the last part. The optimizer numbers flat parameters in the order of the wrapped
modules (torch 2.5 to 2.13: `torch/distributed/fsdp/_flat_param.py`). No file lists the wrapped
modules. The lengths of the parts prove them, where of all sets of modules one has these lengths.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, pairwise
from typing import Any, Final, Self

from streamshard.errors import Option, UnsupportedError, UsageError, lacking
from streamshard.formats.checkpoint import Checkpoint
from streamshard.formats.dcp.renaming import name_pattern
from streamshard.formats.fsdp_ranks.rank_names import OPTIMIZER
from streamshard.formats.pickle.inert import Call, Global, Node
from streamshard.formats.torch.torch_tensor import Storage, Tensor, make_tensor, tensor_of
from streamshard.formats.torch.tree_comparison import show_few
from streamshard.layout.zero import FlatGroup, ceil_div, flat_group
from streamshard.model import Literal
from streamshard.sizes import counted

Names = tuple[str, ...]
_FLAT: Final = Global("torch.distributed.fsdp", "FlatParameter")
_STATE: Final = "state"
_GROUPS: Final = "param_groups"
_PARAMS: Final = "params"
_MOST_STEPS: Final = 1 << 24
"""Names in all choices that are tried: more than any model takes that is not made for it."""
_DEEPEST: Final = 100
"""Modules in modules; no model has as many."""


def flat_node(tensors: Sequence[Node]) -> Call:
    """Return what stands for a flat tensor: the parameters' parts of it, each whole."""
    return Call(_FLAT, tuple(tensors))


def is_flat(node: Node) -> bool:
    """Tell whether a node stands for a flat tensor."""
    return isinstance(node, Call) and node.function == _FLAT


def group_of(numels: Sequence[int], ranks: int) -> FlatGroup:
    """Return how ranks cut what parameters of such lengths are joined to.

    >>> group_of([5, 4], 2).cut(1).slices
    ((1, 0, 4),)
    """
    group = flat_group(numels, world_size=ranks, round_robin=False, alignment=1)
    return replace(group, partition_numel=ceil_div(group.numel, ranks))


@dataclass(frozen=True, slots=True)
class Joined:
    """What FSDP1 has joined to flat parameters."""

    numels: Sequence[int]
    """Elements of each flat parameter."""
    names: Sequence[Names]
    """Parameters in each; none if not only these give what the files hold."""


def joined_parameters(
    numels: Mapping[str, int],
    lengths: Sequence[int],
    ranks: int,
    *,
    twins: AbstractSet[str] = frozenset(),
    wrapped: Sequence[str] = (),
) -> Joined:
    """Return what is in each flat parameter.

    `numels`: elements of each parameter, in the model's order.
    `lengths`: elements of each flat parameter that a rank has, in the optimizer's order.
    `twins`: parameters that may be second names of others, which are not joined again.
    `wrapped`: patterns of the modules that were wrapped in the model, where they are known.

    >>> joined_parameters({"embed": 6, "up.weight": 8, "up.bias": 2, "norm": 2}, [4, 5], 2)
    Joined(numels=(8, 10), names=(('embed', 'norm'), ('up.weight', 'up.bias')))
    """
    search = _Wrapping.of(numels, lengths, ranks, twins, wrapped)
    way = search.ways("", 0).get((len(lengths), 0))
    if way is not None and way.is_sized:
        return Joined(way.numels, way.joined if way.is_alone else ())
    held = f"{counted(len(lengths), 'flat parameter')} as FSDP1 makes them"
    if wrapped:
        message = f"{Option('facts')}: source.wrapped: the files have {held}, of"
        raise UsageError(
            f"{message} {show_few(lengths)} elements per rank; these modules give others"
        )
    if way is None:
        message = f"has {held}, and no choice of modules to wrap gives parts of their lengths"
        raise UnsupportedError(message)
    message = f"has {held}, and several choices of modules to wrap give parts of their lengths"
    raise UnsupportedError(f"{message}; {name_wrapped()}")


def joined_of(checkpoint: Checkpoint) -> Joined | None:
    """Return what is in the flat parameters of an optimizer that was read, if it has such."""
    (model_part,) = checkpoint.model_parts
    optimizer: Any = model_part.model_state.get(OPTIMIZER)
    states = optimizer.get(_STATE) if isinstance(optimizer, dict) else None
    if not isinstance(states, dict) or not any(map(is_flat, _leaves(states))):
        return None
    keys = [key for group in optimizer[_GROUPS] for key in group[_PARAMS]]
    flats = (next(filter(is_flat, states[key].values())) for key in keys)
    found = ([tensor_of(node) for node in flat.args] for flat in flats)
    held = [[checkpoint.tensors[t.storage.blob] for t in some if t] for some in found]
    names = tuple(tuple(tensor.name for tensor in some) for some in held)
    is_named = {*chain(*names)} <= {entry.name for entry in model_part.module}
    return Joined([sum(t.numel for t in some) for some in held], names if is_named else ())


def _leaves(states: Mapping[Node, Node]) -> Iterator[Node]:
    return (node for own in states.values() if isinstance(own, dict) for node in own.values())


def require_lengths(joined: Joined, lengths: Sequence[int], ranks: int) -> None:
    """Require that ranks have parts of these lengths of what was joined."""
    if [ceil_div(numel, ranks) for numel in joined.numels] != [*lengths]:
        raise UnsupportedError(
            "has flat parameters whose lengths are not those of the parameters joined to them"
        )


def name_wrapped() -> str:
    """Say what to do where files do not prove which modules were wrapped."""
    return f"name those that were wrapped: {lacking('wrapped')}"


def evened_roots(roots: Sequence[Any]) -> list[Any] | None:
    """Let each rank have the states of all parameters, with no elements where it has none.

    With `use_orig_params` a rank has those of which elements are in its parts of flat parameters.
    None if what ranks have differs in another way.
    """
    if not all(isinstance(root, dict) and isinstance(root.get(_STATE), dict) for root in roots):
        return None
    held = [root[_STATE] for root in roots]
    first = {key: states for own in reversed(held) for key, states in own.items()}
    nodes = [node for own in held for states in own.values() for node in states.values()]
    if not all(isinstance(node, Call) and _is_run(tensor_of(node)) for node in nodes):
        return None
    empty = {key: {k: _emptied(n) for k, n in states.items()} for key, states in first.items()}
    order = [key for group in roots[0][_GROUPS] for key in group[_PARAMS] if key in first]
    return [
        {**root, _STATE: {key: own.get(key, empty[key]) for key in order}}
        for root, own in zip(roots, held, strict=True)
    ]


def _is_run(tensor: Tensor | None) -> bool:
    return tensor is not None and len(tensor.shape) <= 1


def _emptied(node: Call) -> Node:
    tensor = tensor_of(node)
    if tensor is None or not tensor.shape:
        return node
    return make_tensor(Storage(tensor.dtype, 0, Literal(b"")), (0,))


@dataclass(frozen=True, slots=True)
class _Way:
    """A choice of modules to wrap, up to a place in the model."""

    left: Names = ()
    """Parameters that are left to a module around."""
    joined: tuple[Names, ...] = ()
    numels: tuple[int, ...] = ()
    """Elements of each flat parameter."""
    is_alone: bool = True
    """Whether each other choice up to there makes more or fewer flat parameters, or leaves more
    or fewer elements."""
    is_sized: bool = True
    """Whether flat parameters of the other choices have as many elements."""


_Ways = dict[tuple[int, int], _Way]
"""By the flat parameters that are made, and the elements that are left."""


@dataclass(slots=True, eq=False)
class _Wrapping:
    """A search among all modules that FSDP1 may have wrapped, for those that fit."""

    numels: Mapping[str, int]
    lengths: Sequence[int]
    ranks: int
    twins: AbstractSet[str]
    wrapped: AbstractSet[str]
    """The modules that were wrapped; empty if any may have been."""
    around: AbstractSet[str]
    """The modules that these are in."""
    held: Mapping[str, Sequence[str]]
    """Parameters of each module and of those in it."""
    inside: Mapping[str, Sequence[str]]
    """Modules of each module."""
    most: int
    """No flat parameter has more elements."""
    known: dict[tuple[str, int], _Ways] = field(default_factory=dict)
    steps: int = 0

    @classmethod
    def of(
        cls,
        numels: Mapping[str, int],
        lengths: Sequence[int],
        ranks: int,
        twins: AbstractSet[str],
        wrapped: Sequence[str],
    ) -> Self:
        """List the modules of parameters."""
        held, inside = dict[str, list[str]]({"": []}), dict[str, list[str]]({"": []})
        for name in numels:
            around = _around(name)
            if len(around) > _DEEPEST:
                raise UnsupportedError(f"has parameters in more than {_DEEPEST} modules in modules")
            for outer, module in pairwise(around):
                if module not in held:
                    held[module], inside[module] = [], []
                    inside[outer].append(module)
            for module in around:
                held[module].append(name)
        most = max(lengths, default=0) * ranks
        known = {"": [""]} if wrapped else {}
        for pattern in wrapped:
            matches = name_pattern(pattern).fullmatch
            known[pattern] = [module for module in held if matches(module)]
            if not known[pattern]:
                message = f"{Option('facts')}: source.wrapped: no module around a parameter is"
                raise UsageError(
                    f"{message} named '{pattern}'; there are {show_few([m for m in held if m])}"
                )
        chosen = {*chain(*known.values())}
        outside = {*chain(*map(_around, chosen))}
        return cls(numels, lengths, ranks, twins, chosen, outside, held, inside, most)

    def ways(self, module: str, made: int) -> _Ways:
        """Return the choices in a module behind so many flat parameters."""
        found = self.known.get((module, made))
        if found is not None:
            return found
        found = self.known[module, made] = {}
        must, must_not = module in self.wrapped, bool(self.wrapped) and module not in self.wrapped
        for (total, numel), way in self._inside(module, made).items():
            if not must or not numel:
                self._add(found, total, numel, way)
            # A module as short as padding may also be frozen, and in no optimizer.
            if 0 < numel < self.ranks and not must_not:
                self._add(found, total, 0, replace(way, left=()))
        if made < len(self.lengths) and not must_not:
            for (total, numel), way in self._inside(module, made + 1).items():
                if numel and ceil_div(numel, self.ranks) == self.lengths[made]:
                    joined, numels = (way.left, *way.joined), (numel, *way.numels)
                    self._add(found, total, 0, replace(way, left=(), joined=joined, numels=numels))
        return found

    def _inside(self, module: str, made: int) -> _Ways:
        """Return the choices of modules in a module, which itself is not wrapped."""
        held = self.held[module]
        self._count(len(held))
        if not self._may_be_cut(module, held):
            return {(made, sum(map(self.numels.__getitem__, held))): _Way(tuple(held))}
        own = (name for name in held if name.rpartition(".")[0] == module)
        parts: list[Callable[[int], _Ways]] = [*map(self._parameter, own)]
        parts += (partial(self.ways, module) for module in self.inside[module])
        ways: _Ways = {(made, 0): _Way()}
        for part in parts:
            before, ways = ways, {}
            for (done, numel), way in before.items():
                for (total, more), other in part(done).items():
                    both = _Way(
                        way.left + other.left,
                        way.joined + other.joined,
                        way.numels + other.numels,
                        is_alone=way.is_alone and other.is_alone,
                        is_sized=way.is_sized and other.is_sized,
                    )
                    self._add(ways, total, numel + more, both)
                    self._count(1 + len(both.left) + len(both.joined))
        return ways

    def _parameter(self, name: str) -> Callable[[int], _Ways]:
        def ways(made: int) -> _Ways:
            found = {(made, self.numels[name]): _Way((name,))}
            return {**found, (made, 0): _Way()} if name in self.twins else found

        return ways

    def _may_be_cut(self, module: str, names: Sequence[str]) -> bool:
        """Tell whether a part of a module with such parameters may be a flat one."""
        if not self.twins.isdisjoint(names):
            return True
        if self.wrapped:
            return module in self.around
        numels = [self.numels[name] for name in names]
        if min(numels, default=0) < self.ranks:
            return True
        return ceil_div(sum(numels), self.ranks) >= min(self.lengths, default=0)

    def _count(self, steps: int) -> None:
        self.steps += steps
        if self.steps > _MOST_STEPS:
            message = "has flat parameters of FSDP1 that too many modules may make up"
            raise UnsupportedError(f"{message}; {name_wrapped()}")

    def _add(self, ways: _Ways, made: int, numel: int, way: _Way) -> None:
        if numel > self.most:
            return
        known = ways.setdefault((made, numel), way)
        if known is not way:
            is_sized = known.is_sized and way.is_sized and known.numels == way.numels
            is_alone = known.is_alone and way.is_alone
            is_alone = is_alone and (known.left, known.joined) == (way.left, way.joined)
            ways[made, numel] = replace(known, is_alone=is_alone, is_sized=is_sized)


def _around(name: str) -> list[str]:
    """Return the modules around a parameter, the outermost first."""
    steps = name.split(".")[:-1]
    return [".".join(steps[:n]) for n in range(len(steps) + 1)]
