"""Compares two inert values place by place: what differs, and which tensors stand side by side."""

import struct
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from streamshard.errors import SourceError
from streamshard.formats import inert_dump, inert_load
from streamshard.formats.inert import Call, Global, Node
from streamshard.formats.torch_tensor import Storage, Tensor, tensor_of
from streamshard.model import ITEMSIZE, Whole


@dataclass(frozen=True, slots=True)
class Disparity:
    """A place at which two values differ."""

    name: str
    message: str


@dataclass(frozen=True, slots=True)
class SamePlace:
    """Bytes of two blobs that stand at the same place in two values, and are yet to be read."""

    name: str
    left: tuple[int, int]
    """(logical tensor, byte offset in it)."""
    right: tuple[int, int]
    nbytes: int
    itemsize: int


Found = Disparity | SamePlace
Pair = tuple[Node, Node, str]

_ABSENT: Final = Global("streamshard", "ABSENT")
"""Stands for what one of two containers does not have."""


_SETS: Final = [
    Global(module, name) for module in ("builtins", "__builtin__") for name in ("set", "frozenset")
]


def compare_nodes(left: Node, right: Node, name: str) -> Iterator[Found]:
    """Walk through two values side by side; shared and recursive parts are looked at once."""
    roots = _normal(left), _normal(right)  # held to the end: their parts are known by identity
    stack: list[Pair] = [(*roots, name)]
    seen: set[tuple[int, int]] = set()
    while stack:
        one, other, at = stack.pop()
        if (id(one), id(other)) in seen:
            continue
        if isinstance(one, Call | dict | list | tuple):
            seen.add((id(one), id(other)))
        tensors = _tensor(one), _tensor(other)
        if tensors[0] is not None and tensors[1] is not None:
            yield _compare_tensors(tensors[0], tensors[1], at)
            continue
        below = _below(one, other, at)
        if below is None:
            yield Disparity(at, f"{_shown(one)} here, {_shown(other)} there")
        else:
            stack += reversed(below)


def _normal(node: Node) -> Node:
    """Bring a value into the form in which any way of pickling it ends."""
    storages: list[Storage] = []

    def persistent_id(part: Node) -> Node | None:
        if not isinstance(part, Storage):
            return None
        storages.append(part)
        return len(storages) - 1

    return inert_load.load(inert_dump.dump(node, persistent_id), lambda number: storages[number])


def _tensor(node: Node) -> Tensor | None:
    """Look at a node as a tensor whose elements are known to be somewhere."""
    if isinstance(node, Storage):
        # Saved without a tensor around it.
        return Tensor(node, 0, (node.numel,), (1,), node.dtype, False, {})
    try:
        return tensor_of(node)
    except SourceError:
        return None  # of a kind that is carried as it is


def _compare_tensors(left: Tensor, right: Tensor, at: str) -> Found:
    shown = [f"{t.dtype}{list(t.shape)}" for t in (left, right)]
    if shown[0] != shown[1]:
        return Disparity(at, f"{shown[0]} here, {shown[1]} there")
    if (
        left.requires_grad != right.requires_grad
        or left.attributes.keys() != right.attributes.keys()
    ):
        return Disparity(at, "tensors with other attributes")
    dense = [_is_dense(tensor) for tensor in (left, right)]
    itemsize = ITEMSIZE[left.dtype]
    starts, nbytes = (left.start * itemsize, right.start * itemsize), left.numel * itemsize
    if not all(dense):
        same = (left.start, left.stride, left.storage.nbytes)
        if same != (right.start, right.stride, right.storage.nbytes):
            return Disparity(at, "tensors that are laid out in different ways")
        starts, nbytes = (0, 0), left.storage.nbytes
    places = [(_blob(t.storage), start) for t, start in zip((left, right), starts, strict=True)]
    return SamePlace(at, places[0], places[1], nbytes, itemsize)


def _is_dense(tensor: Tensor) -> bool:
    try:
        tensor.require_contiguous("")
    except SourceError:
        return False
    return True


def _blob(storage: Storage) -> int:
    if not isinstance(storage.content, Whole):
        raise TypeError("a storage of the training state is no blob")
    return storage.content.tensor


def _below(one: Node, other: Node, at: str) -> list[Pair] | None:
    """Pair what is directly below two nodes; None where they differ themselves."""
    if type(one) is not type(other):
        return None
    if isinstance(one, dict):
        return _below_dicts(one, other, at)
    if isinstance(one, list | tuple):
        length = max(len(one), len(other))
        both = ([*values, *[_ABSENT] * (length - len(values))] for values in (one, other))
        return [(a, b, f"{at}[{i}]") for i, (a, b) in enumerate(zip(*both, strict=True))]
    if isinstance(one, Call):
        sets = _members(one), _members(other)
        if sets[0] is not None and sets[1] is not None and one.function.name == other.function.name:
            return [(sets[0], sets[1], at)]
        if one.new != other.new:
            return None
        return [
            (one.function, other.function, f"{at}, its class"),
            (one.args, other.args, f"{at}, what it was made of"),
            (one.kwargs, other.kwargs, f"{at}, what it was made of"),
            (one.items, other.items, at),
            (one.entries, other.entries, f"{at}, its entries"),
            (one.setter, other.setter, f"{at}, what sets its state"),
            (one.state, other.state, at),
        ]
    return [] if _is_same(one, other) else None


def _members(node: Call) -> list[Node] | None:
    """List a set's members in an order that only depends on them; None if it is no set."""
    if node.function not in _SETS or len(node.args) != 1 or not isinstance(node.args[0], list):
        return None
    return sorted(node.args[0], key=lambda member: inert_dump.dump(member, lambda _: None))


def _below_dicts(one: dict[Node, Node], other: dict[Node, Node], at: str) -> list[Pair] | None:
    extra = [vars(d) if isinstance(d, OrderedDict) else {} for d in (one, other)]
    found: list[Pair] = [(extra[0], extra[1], at)] if any(extra) else []
    if any(isinstance(key, Call) for key in (*one, *other)):
        # Keys that are only known by identity stand at the same place.
        found.append((list(map(list, one.items())), list(map(list, other.items())), f"{at}, items"))
        return found
    keys = dict.fromkeys([*one, *other])
    return found + [(one.get(k, _ABSENT), other.get(k, _ABSENT), f"{at}.{k}") for k in keys]


def _is_same(one: Node, other: Node) -> bool:
    """Compare two values of one type that hold no others; floats by their bits."""
    if isinstance(one, float):
        return struct.pack("<d", one) == struct.pack("<d", other)
    return bool(one == other)


def _shown(node: Node) -> str:
    if node is _ABSENT:
        return "nothing"
    if isinstance(node, Call):
        return f"<{node.name or 'object'}>"
    if isinstance(node, dict | list | tuple):
        return f"<{type(node).__name__} of {len(node)}>"
    return f"{node!r:.60}"
