"""Compares two inert values place by place: finds differences, and pairs tensors."""

import struct
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from streamshard.errors import SourceError, UnsupportedError
from streamshard.formats.pickle import inert_dump
from streamshard.formats.pickle.inert import Call, Global, Node, show, show_key
from streamshard.formats.torch.torch_tensor import Storage, Tensor, tensor_of
from streamshard.formats.torch.tree_copy import is_storage, put_together, take_apart
from streamshard.model import ITEMSIZE


@dataclass(frozen=True, slots=True)
class Disparity:
    """A place at which two values differ."""

    name: str
    message: str


@dataclass(frozen=True, slots=True)
class BlobPair:
    """Bytes of two blobs at the same place in two values. They still have to be compared."""

    name: str
    left: tuple[int, int]
    """(logical tensor, byte offset in it)."""
    right: tuple[int, int]
    nbytes: int
    itemsize: int


Found = Disparity | BlobPair

_ABSENT: Final = Global("streamshard", "ABSENT")
"""Stands for an element that one of two containers lacks."""


_SETS: Final = [
    Global(module, name) for module in ("builtins", "__builtin__") for name in ("set", "frozenset")
]
_MOST_LISTED: Final = 1000
"""Most differences within one value that are listed one by one."""
_LIMIT_AGAIN: Final = 16
"""How often parts may be visited on average, in bytes of the values' pickles."""
_FREE_BYTES: Final = 1 << 22
_PAIR_BYTES: Final = 16
"""Bytes that the visit of a pair counts as."""
_LIMIT_PATH: Final = 400
"""Most letters of a place in a message."""


@dataclass(frozen=True, slots=True, eq=False)
class _KeyPath:
    """The place of a part in a value. Its text is made only for a message, as it may be long."""

    above: "_KeyPath | None"
    step: str

    def below(self, step: str) -> "_KeyPath":
        return _KeyPath(self, step)

    def __str__(self) -> str:
        steps, at = [], self
        while at.above is not None:
            steps.append(at.step)
            at = at.above
        text = at.step + "".join(reversed(steps))
        half = _LIMIT_PATH // 2
        return text if len(text) <= _LIMIT_PATH else f"{text[:half]}...{text[-half:]}"


Pair = tuple[Node, Node, _KeyPath]


class _Effort:
    """The remaining work, which the size of the compared values limits."""

    def __init__(self, pickle_bytes: int) -> None:
        self._left = _FREE_BYTES + _LIMIT_AGAIN * pickle_bytes

    def spend(self, nbytes: int) -> None:
        self._left -= nbytes
        if self._left < 0:
            raise UnsupportedError("parts are shared without end")


def compare_nodes(left: Node, right: Node, name: str) -> Iterator[Found]:
    """Compare two values part by part; shared and recursive parts are visited once.

    Untrusted values may be built so that their comparison takes forever. Such values, and values
    that no pickler can serialize, count as a disparity: they are not known to be equal.
    """
    listed = 0
    try:
        for found in _compare(left, right, name):
            listed += isinstance(found, Disparity)
            if listed <= _MOST_LISTED or isinstance(found, BlobPair):
                yield found
    except SourceError as error:
        listed = min(listed, _MOST_LISTED)
        yield Disparity(name, f"cannot be compared: {error}")
    if listed > _MOST_LISTED:
        yield Disparity(name, f"{listed - _MOST_LISTED:,} more places in it differ")


def _compare(left: Node, right: Node, name: str) -> Iterator[Found]:
    # Both values stay in memory to the end, because `seen` knows their parts by identity.
    (one, size), (other, other_size) = _normal(left), _normal(right)
    effort = _Effort(size + other_size)
    stack: list[Pair] = [(one, other, _KeyPath(None, name))]
    seen: set[tuple[int, int]] = set()
    while stack:
        left_node, right_node, at = stack.pop()
        if (id(left_node), id(right_node)) in seen:
            continue
        if isinstance(left_node, Call | dict | list | tuple):
            seen.add((id(left_node), id(right_node)))
        tensors = _tensor(left_node), _tensor(right_node)
        if tensors[0] is not None and tensors[1] is not None:
            yield _compare_tensors(tensors[0], tensors[1], str(at))
            continue
        below = _below(left_node, right_node, at, effort)
        if below is None:
            yield Disparity(str(at), f"{_shown(left_node)} here, {_shown(right_node)} there")
        else:
            stack += reversed(below)


def _normal(node: Node) -> tuple[Node, int]:
    """Return a value in the form that pickling and loading gives it, and its pickle's size."""
    pickled, storages = take_apart(node, is_storage)
    return put_together(pickled, storages), len(pickled)


def _tensor(node: Node) -> Tensor | None:
    """Interpret a node as a tensor; None if it is not one whose elements can be located."""
    if isinstance(node, Storage):
        # A storage that was saved without a tensor.
        return Tensor(node, 0, (node.numel,), (1,), node.dtype, False, {})
    try:
        return tensor_of(node)
    except SourceError:
        return None  # a kind of tensor that is copied as it is


def _compare_tensors(left: Tensor, right: Tensor, at: str) -> Found:
    shown = [f"{t.dtype}{list(t.shape)}" for t in (left, right)]
    if shown[0] != shown[1]:
        return Disparity(at, f"{shown[0]} here, {shown[1]} there")
    marks = [(t.requires_grad, t.lazy, t.attributes.keys()) for t in (left, right)]
    if marks[0] != marks[1]:
        return Disparity(at, "tensors with other attributes")
    itemsize = ITEMSIZE[left.dtype]
    starts, nbytes = (left.start * itemsize, right.start * itemsize), left.numel * itemsize
    if not (left.is_dense and right.is_dense):
        same = (left.start, left.stride, left.storage.nbytes)
        if same != (right.start, right.stride, right.storage.nbytes):
            return Disparity(at, "tensors that are laid out in different ways")
        starts, nbytes = (0, 0), left.storage.nbytes
    places = [(t.storage.blob, start) for t, start in zip((left, right), starts, strict=True)]
    return BlobPair(at, places[0], places[1], nbytes, itemsize)


def _below(left: Node, right: Node, at: _KeyPath, effort: _Effort) -> list[Pair] | None:
    """Pair the nodes directly below two nodes; None if the two nodes themselves differ."""
    if type(left) is not type(right):
        return None
    if isinstance(left, dict):
        effort.spend(_PAIR_BYTES * (len(left) + len(right)))
        return _below_dicts(left, right, at, effort)
    if isinstance(left, list | tuple):
        length = max(len(left), len(right))
        effort.spend(_PAIR_BYTES * length)
        both = ([*values, *[_ABSENT] * (length - len(values))] for values in (left, right))
        return [(a, b, at.below(f"[{i}]")) for i, (a, b) in enumerate(zip(*both, strict=True))]
    if isinstance(left, Call):
        effort.spend(_PAIR_BYTES)
        return _below_calls(left, right, at, effort)
    return [] if _is_same(left, right) else None


def _below_calls(left: Call, right: Call, at: _KeyPath, effort: _Effort) -> list[Pair] | None:
    sets = _members(left, effort), _members(right, effort)
    if sets[0] is not None and sets[1] is not None and left.function.name == right.function.name:
        return [(sets[0], sets[1], at)]
    if left.new != right.new:
        return None
    made_of = at.below(", what it was made of")
    return [
        (left.function, right.function, at.below(", its class")),
        (left.args, right.args, made_of),
        (left.kwargs, right.kwargs, made_of),
        (left.items, right.items, at),
        (left.entries, right.entries, at.below(", its entries")),
        (left.setter, right.setter, at.below(", what sets its state")),
        (left.state, right.state, at),
    ]


def _members(node: Call, effort: _Effort) -> list[Node] | None:
    """List a set's members in an order that depends only on them; None if it is not a set."""
    if node.function not in _SETS or len(node.args) != 1 or not isinstance(node.args[0], list):
        return None
    serialized = []
    for member in node.args[0]:
        serialized.append(inert_dump.dump(member, _show_storage))
        effort.spend(len(serialized[-1]))
    order = sorted(range(len(serialized)), key=serialized.__getitem__)
    return [node.args[0][number] for number in order]


def _show_storage(node: Node) -> Node | None:
    """Serialize a storage to sort a set: without its place, which is not part of its value."""
    return (node.dtype, node.numel) if isinstance(node, Storage) else None


def _below_dicts(
    left: dict[Node, Node], right: dict[Node, Node], at: _KeyPath, effort: _Effort
) -> list[Pair]:
    extra = [vars(d) if isinstance(d, OrderedDict) else {} for d in (left, right)]
    pairs: list[Pair] = [(extra[0], extra[1], at)] if any(extra) else []
    effort.spend(sum(len(key) for key in (*left, *right) if isinstance(key, tuple)))
    sides = [{_key_value(key): (key, value) for key, value in d.items()} for d in (left, right)]
    is_clear = len(sides[0]) == len(left) and len(sides[1]) == len(right)
    if not is_clear or any(map(_is_by_identity, (*left, *right))):
        # Keys that are compared by identity, and several NaN, are paired by position.
        items = at.below(", items")
        pairs.append((list(map(list, left.items())), list(map(list, right.items())), items))
        return pairs
    for known in dict.fromkeys([*sides[0], *sides[1]]):
        mine, theirs = (side.get(known) for side in sides)
        key, _ = mine or theirs or (None, None)
        values = [_ABSENT if pair is None else pair[1] for pair in (mine, theirs)]
        pairs.append((values[0], values[1], at.below(f".{show_key(key)}")))
    return pairs


def _key_value(key: Node) -> Node:
    """Return what tells whether two keys are the same: True is not 1, and NaN is itself."""
    if isinstance(key, tuple):
        return tuple, tuple(map(_key_value, key))
    return type(key), struct.pack("<d", key) if isinstance(key, float) else key


def _is_by_identity(key: Node) -> bool:
    """Tell whether a key is, or may contain, an object that is compared by identity."""
    if isinstance(key, tuple):
        return any(isinstance(part, Call | tuple) for part in key)
    return isinstance(key, Call)


def _is_same(left: Node, right: Node) -> bool:
    """Compare two values of one type that are not containers; floats by their bits."""
    if isinstance(left, float):
        return struct.pack("<d", left) == struct.pack("<d", right)
    return bool(left == right)


def _shown(node: Node) -> str:
    if node is _ABSENT:
        return "nothing"
    if isinstance(node, dict | list | tuple):
        return f"<{type(node).__name__} of {len(node)}>"
    return show(node)
