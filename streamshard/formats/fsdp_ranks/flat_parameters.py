"""Finds out which parameters FSDP1 has joined to flat ones, and how ranks cut these.

Without `use_orig_params` FSDP1 joins the parameters of each module that it wraps, in the order of
`named_modules()`, except those of modules inside that it wraps too; `torch.chunk` cuts what comes
out, and zeros fill the last part. The optimizer numbers flat parameters in the order of the wrapped
modules (torch 2.5 to 2.13: `torch/distributed/fsdp/_flat_param.py`). No file lists the wrapped
modules. But the lengths of the parts tell them, where a single choice of modules has these lengths.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

from streamshard.errors import UnsupportedError
from streamshard.formats.pickle.inert import Call, Global, Node
from streamshard.formats.torch.torch_tensor import Storage, Tensor, make_tensor, tensor_of
from streamshard.layout.zero import FlatGroup, ceil_div, flat_group
from streamshard.model import Literal
from streamshard.sizes import counted

Names = tuple[str, ...]
_FLAT: Final = Global("torch.distributed.fsdp", "FlatParameter")
_STATE: Final = "state"
_GROUPS: Final = "param_groups"
_PARAMS: Final = "params"
_NUMBER: Final = "*"
_MOST_STEPS: Final = 1 << 11
"""More than the modules of any model take whose parts do not all have one length."""


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


def joined_parameters(numels: Mapping[str, int], lengths: Sequence[int], ranks: int) -> list[Names]:
    """Return the parameters in each flat parameter.

    `numels`: elements of each parameter, in the model's order.
    `lengths`: elements of each flat parameter that a rank has, in the optimizer's order.

    >>> joined_parameters({"embed": 6, "up.weight": 8, "up.bias": 2, "norm": 2}, [4, 5], 2)
    [('embed', 'norm'), ('up.weight', 'up.bias')]
    """
    choices = _Choices.of(numels, lengths, ranks)
    found = {tuple(joined): own for own in choices.wrapped(0) if (joined := choices.joined(own))}
    if len(found) == 1:
        others = map(choices.joined, choices.exchanged(*found.values()))
        found.update((tuple(joined), frozenset()) for joined in others if joined)
    if len(found) == 1:
        return [*next(iter(found))]
    what = "several choices" if found else "no choice"
    message = f"has {counted(len(lengths), 'flat parameter')} as FSDP1 makes them, and {what} of"
    raise UnsupportedError(f"{message} modules that it may wrap gives parts of their lengths")


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


@dataclass(slots=True, eq=False)
class _Choices:
    """The choices of modules that FSDP1 may have wrapped.

    It wraps all modules of a class, or none: here those whose names differ in numbers alone.
    """

    numels: Mapping[str, int]
    lengths: Sequence[int]
    ranks: int
    own: Mapping[str, int]
    """Elements of each module's own parameters, in the order of `named_modules()`."""
    alike: Sequence[Sequence[str]]
    """Modules of a class; those inside of others first."""
    left: dict[str, int] = field(default_factory=dict)
    """Elements that a module leaves to one around it."""
    steps: int = 0

    @classmethod
    def of(cls, numels: Mapping[str, int], lengths: Sequence[int], ranks: int) -> Self:
        """List the modules of parameters."""
        own, alike = dict.fromkeys([""], 0), dict[tuple[str, ...], list[str]]()
        for name, numel in numels.items():
            for module in _around(name):
                own.setdefault(module, 0)
            own[name.rpartition(".")[0]] += numel
        for module in own:
            steps = (_NUMBER if step.isdecimal() else step for step in module.split("."))
            alike.setdefault(tuple(steps) if module else (), []).append(module)
        return cls(numels, lengths, ranks, own, sorted(alike.values(), key=_depth, reverse=True))

    def wrapped(self, number: int) -> Iterator[frozenset[str]]:
        """Yield sets of modules, decided from a class on, whose parts have lengths that occur."""
        self.steps += 1
        if self.steps > _MOST_STEPS:
            raise UnsupportedError("has flat parameters of FSDP1 that too many modules may make up")
        if number == len(self.alike):
            if not self.left[""]:
                yield frozenset()
            return
        modules = self.alike[number]
        inside = Counter[str]()
        for module, numel in self.left.items():
            inside[module.rpartition(".")[0]] += numel if module else 0
        numels = [self.own[module] + inside[module] for module in modules]
        before = dict(self.left)
        self.left.update(zip(modules, numels, strict=True))
        yield from self.wrapped(number + 1)
        if any(numels) and all(self._part(n) in {0, *self.lengths} for n in numels):
            self.left = {**before, **dict.fromkeys(modules, 0)}
            yield from (more.union(modules) for more in self.wrapped(number + 1))
        self.left = before

    def joined(self, wrapped: Collection[str]) -> list[Names]:
        """Return the parameters that such modules join; none if their parts have other lengths."""
        found: dict[str, list[str]] = {module: [] for module in self.own if module in wrapped}
        for name in self.numels:
            around = next(module for module in reversed(_around(name)) if module in wrapped)
            found[around].append(name)
        joined = [tuple(names) for names in found.values() if names]
        parts = [self._part(sum(self.numels[name] for name in names)) for names in joined]
        return joined if parts == list(self.lengths) else []

    def exchanged(self, wrapped: frozenset[str]) -> Iterator[frozenset[str]]:
        """Yield choices with one module in place of one that is as long: others may be right."""
        numels = Counter[str]()
        for name, numel in self.numels.items():
            for module in reversed(_around(name)):
                numels[module] += numel
                if module in wrapped:
                    break
        places = dict[tuple[str, int], list[str]]()
        for module, numel in numels.items():
            around = (other for other in reversed(_around(module)) if other in wrapped)
            places.setdefault((next(around, ""), self._part(numel)), []).append(module)
        for modules in places.values():
            for own in wrapped.intersection(modules):
                yield from (wrapped - {own} | {other} for other in modules if other not in wrapped)

    def _part(self, numel: int) -> int:
        return ceil_div(numel, self.ranks)


def _around(name: str) -> list[str]:
    """Return the modules around a parameter, the outermost first."""
    steps = name.split(".")[:-1]
    return [".".join(steps[:n]) for n in range(len(steps) + 1)]


def _depth(modules: Sequence[str]) -> int:
    return len(modules[0].split(".")) if modules[0] else 0
