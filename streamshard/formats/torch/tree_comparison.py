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
        mine, theirs, at = stack.pop()
        if (id(mine), id(theirs)) in seen:
            continue
        if isinstance(mine, Call | dict | list | tuple):
            seen.add((id(mine), id(theirs)))
        tensors = _tensor(mine), _tensor(theirs)
        if tensors[0] is not None and tensors[1] is not None:
            yield _compare_tensors(tensors[0], tensors[1], str(at))
            continue
        below = _below(mine, theirs, at, effort)
        if below is None:
            yield Disparity(str(at), f"{_shown(mine)} here, {_shown(theirs)} there")
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


def _below(one: Node, other: Node, at: _KeyPath, effort: _Effort) -> list[Pair] | None:
    """Pair the nodes directly below two nodes; None if the two nodes themselves differ."""
    if type(one) is not type(other):
        return None
    if isinstance(one, dict):
        effort.spend(_PAIR_BYTES * (len(one) + len(other)))
        return _below_dicts(one, other, at, effort)
    if isinstance(one, list | tuple):
        length = max(len(one), len(other))
        effort.spend(_PAIR_BYTES * length)
        both = ([*values, *[_ABSENT] * (length - len(values))] for values in (one, other))
        return [(a, b, at.below(f"[{i}]")) for i, (a, b) in enumerate(zip(*both, strict=True))]
    if isinstance(one, Call):
        effort.spend(_PAIR_BYTES)
        return _below_calls(one, other, at, effort)
    return [] if _is_same(one, other) else None


def _below_calls(one: Call, other: Call, at: _KeyPath, effort: _Effort) -> list[Pair] | None:
    sets = _members(one, effort), _members(other, effort)
    if sets[0] is not None and sets[1] is not None and one.function.name == other.function.name:
        return [(sets[0], sets[1], at)]
    if one.new != other.new:
        return None
    made_of = at.below(", what it was made of")
    return [
        (one.function, other.function, at.below(", its class")),
        (one.args, other.args, made_of),
        (one.kwargs, other.kwargs, made_of),
        (one.items, other.items, at),
        (one.entries, other.entries, at.below(", its entries")),
        (one.setter, other.setter, at.below(", what sets its state")),
        (one.state, other.state, at),
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
    one: dict[Node, Node], other: dict[Node, Node], at: _KeyPath, effort: _Effort
) -> list[Pair]:
    extra = [vars(d) if isinstance(d, OrderedDict) else {} for d in (one, other)]
    found: list[Pair] = [(extra[0], extra[1], at)] if any(extra) else []
    effort.spend(sum(len(key) for key in (*one, *other) if isinstance(key, tuple)))
    sides = [{_key_value(key): (key, value) for key, value in d.items()} for d in (one, other)]
    is_clear = len(sides[0]) == len(one) and len(sides[1]) == len(other)
    if not is_clear or any(map(_is_by_identity, (*one, *other))):
        # Keys that are compared by identity, and several NaN, are paired by position.
        items = at.below(", items")
        found.append((list(map(list, one.items())), list(map(list, other.items())), items))
        return found
    for known in dict.fromkeys([*sides[0], *sides[1]]):
        mine, theirs = (side.get(known) for side in sides)
        key, _ = mine or theirs or (None, None)
        values = [_ABSENT if pair is None else pair[1] for pair in (mine, theirs)]
        found.append((values[0], values[1], at.below(f".{show_key(key)}")))
    return found


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


def _is_same(one: Node, other: Node) -> bool:
    """Compare two values of one type that are not containers; floats by their bits."""
    if isinstance(one, float):
        return struct.pack("<d", one) == struct.pack("<d", other)
    return bool(one == other)


def _shown(node: Node) -> str:
    if node is _ABSENT:
        return "nothing"
    if isinstance(node, dict | list | tuple):
        return f"<{type(node).__name__} of {len(node)}>"
    return show(node)
