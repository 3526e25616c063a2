"""Object graphs of all kinds that training state holds, and when two of them are the same."""

import argparse
import datetime
import enum
import pickle
import struct
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import reject
from hypothesis import strategies as st


class Colour(enum.Enum):
    """An enum."""

    RED = "red"
    BLUE = 2


class Level(enum.IntEnum):
    """An enum of ints."""

    LOW = 1


class Choice(enum.IntFlag):
    """An enum of bits."""

    READ = 1
    WRITE = 2


@dataclass
class Record:
    """A plain dataclass."""

    value: Any
    other: Any = None


@dataclass(frozen=True, slots=True)
class Slotted:
    """A dataclass without a dict."""

    value: Any


@dataclass
class Stateful:
    """Takes whatever state it is given, even what counts for nothing."""

    value: Any

    def __getstate__(self) -> Any:  # noqa: ANN401
        return self.value, 1

    def __setstate__(self, state: Any) -> None:  # noqa: ANN401
        self.value = state[0]


def set_value(target: "Kept", state: Any) -> None:  # noqa: ANN401
    target.value = state


@dataclass
class Kept:
    """Its state is not left to BUILD: a function of its own is called for it."""

    value: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Kept, (), self.value, None, None, set_value


class Mapped(dict[Any, Any]):
    """A dict with attributes."""


class Outer:
    """Holds a nested class."""

    @dataclass
    class Inner:
        """Its qualified name has a dot."""

        value: Any


@dataclass
class Both(Outer.Inner):
    """Its state is a pair: a dict, and the slots."""

    __slots__ = ("slot",)
    slot: Any


class Keyword:
    """Needs keyword arguments to be made, which NEWOBJ_EX carries."""

    value: Any

    def __new__(cls, *, value: Any) -> "Keyword":  # noqa: ANN401
        self = super().__new__(cls)
        self.value = value
        return self

    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]:
        return (), {"value": self.value}


class Point(NamedTuple):
    """A named tuple."""

    x: Any
    y: Any


class Bag(list[Any]):
    """A list with attributes."""


INTS = st.one_of(
    st.integers(-(2**70), 2**70),
    st.sampled_from([0, 1, 255, 256, 65535, 65536, 2**31 - 1, -(2**31), 2**31, -1, 1 << 2050]),
)
FLOATS = st.one_of(
    st.floats(),
    st.integers(0, 2**64 - 1).map(lambda bits: struct.unpack(">d", struct.pack(">Q", bits))[0]),
)
TEXTS = st.one_of(
    st.text(st.characters(), max_size=6),
    st.text(st.characters(categories=["Cs"]), max_size=3),
    st.sampled_from(["\n", "\\", "\\u0041", "\x00", "\x1a", "\xe9\xff", "'", "x" * 300, ""]),
)
KEYS = st.one_of(
    INTS, TEXTS, st.booleans(), st.none(), st.binary(max_size=4), st.sampled_from(list(Colour)),
    st.tuples(TEXTS, INTS),
)  # fmt: skip
LEAVES = st.one_of(
    KEYS,
    FLOATS,
    st.binary(max_size=300),
    st.sampled_from([torch.bfloat16, torch.float32, torch.Size([2, 3]), Level.LOW, Colour, len]),
    st.sampled_from([Choice.READ | Choice.WRITE, Choice(0), torch.device("cpu"), slice(1, None)]),
    st.sampled_from([range(3), datetime.datetime(2026, 1, 2, 3, 4, 5, 6)]),
    st.sampled_from([np.float32(1.5), np.int64(-7), np.float64("nan"), np.bool_(True)]),
    st.sampled_from(["int8", "float64", ">u2"]).map(lambda kind: np.arange(6).astype(kind)),
    st.integers(0, 99).map(lambda seed: np.random.RandomState(seed).get_state()),
    st.complex_numbers(allow_nan=False),
)


@st.composite
def graphs(draw: st.DrawFn, leaves: st.SearchStrategy[Any] = LEAVES) -> Any:  # noqa: ANN401
    """Build objects out of earlier ones, so that many are shared, then tie some into rings."""
    pool: list[Any] = draw(st.lists(leaves, min_size=1, max_size=4))

    def some() -> list[Any]:
        return [pool[i] for i in draw(st.lists(st.integers(0, len(pool) - 1), max_size=4))]

    def one() -> Any:  # noqa: ANN401
        return pool[draw(st.integers(0, len(pool) - 1))]

    def pairs() -> list[tuple[Any, Any]]:
        return [(draw(leaves_of_keys), one()) for _ in range(draw(st.integers(0, 3)))]

    leaves_of_keys = KEYS if leaves is LEAVES else TEXTS.map(sys.intern)
    makers: list[Callable[[], Any]] = [
        some,
        lambda: tuple(some()),
        lambda: dict(pairs()),
        lambda: attributed(OrderedDict(pairs()), one()),  # as a module's state dict is
        lambda: argparse.Namespace(lr=one(), args=one()),
        lambda: Record(one(), one()),
        lambda: Slotted(one()),
        lambda: Outer.Inner(one()),
        lambda: Point(one(), one()),
        lambda: attributed(Bag(some()), one()),
        lambda: Both(one(), one()),
        lambda: Stateful(one()),
    ]
    if leaves is LEAVES:
        makers += [
            lambda: Keyword(value=one()),
            lambda: {draw(KEYS) for _ in range(3)},
            lambda: frozenset({draw(KEYS) for _ in range(3)}),
            lambda: defaultdict(list, pairs()),
            lambda: bytearray(draw(st.binary(max_size=5))),
            lambda: deque(some(), maxlen=draw(st.sampled_from([None, 2]))),
            lambda: attributed(Mapped(pairs()), one()),
            lambda: Kept(one()),
        ]
    for maker in draw(st.lists(st.sampled_from(makers), max_size=8)):
        pool.append(maker())  # noqa: PERF401 - makers look at the pool
    # What is made with itself among its arguments is refused, and has a test of its own.
    rings = 0 if any(isinstance(node, Keyword) for node in pool) else draw(st.integers(0, 2))
    for _ in range(rings):
        ring = one()
        if type(ring) is list or isinstance(ring, Bag):
            ring.append(one())
        elif isinstance(ring, Record | Outer.Inner | Kept):
            ring.value = one()
    return pool[-1] if draw(st.booleans()) else pool


def pickled(graph: object, protocol: int) -> bytes:
    """Pickle a graph; give up one that the standard pickler gets lost in."""
    try:
        return pickle.dumps(graph, protocol=protocol)
    except (RecursionError, TypeError):
        # Below protocol 2: a list with attributes in a ring, or an object with slots.
        if protocol >= 2:
            raise
        reject()


def attributed(made: Any, value: object) -> Any:  # noqa: ANN401
    made.attribute = value
    return made


EXACT = (torch.device, slice, range, datetime.datetime, torch.Size)
"""Kinds of which two are the same if they are equal."""

PLAIN = st.one_of(
    INTS, FLOATS, TEXTS.map(sys.intern), st.booleans(), st.none(), st.sampled_from(list(Colour)),
    st.sampled_from([Level.LOW, Colour, len, torch.bfloat16]),
)  # fmt: skip
"""Leaves of which no two are equal strings in distinct objects, not even inside their pickles."""


def same(one: object, other: object, seen: dict[int, int] | None = None) -> bool:
    """Compare values, bit by bit, and which objects are the same in two places."""
    seen = {} if seen is None else seen
    if type(one) is not type(other):
        return False
    if isinstance(one, int | str | bytes | bool | complex | type | None):
        return one == other
    if isinstance(one, float):
        return struct.pack(">d", one) == struct.pack(">d", other)
    if isinstance(one, np.ndarray | np.generic) and isinstance(other, np.ndarray | np.generic):
        return one.dtype == other.dtype and one.tobytes() == other.tobytes()
    if isinstance(one, set | frozenset) and isinstance(other, set | frozenset):
        return sorted(map(repr, one)) == sorted(map(repr, other))
    if isinstance(one, enum.Enum | torch.dtype) or callable(one):
        return one is other
    if one == () or isinstance(one, EXACT):
        return one == other
    if id(one) in seen or id(other) in seen.values():
        return seen.get(id(one)) == id(other)
    seen[id(one)] = id(other)
    return _parts_same(one, other, seen)


def _parts_same(one: Any, other: Any, seen: dict[int, int]) -> bool:  # noqa: ANN401
    parts, others = _parts(one), _parts(other)
    return len(parts) == len(others) and all(
        same(a, b, seen) for a, b in zip(parts, others, strict=True)
    )


def _parts(node: Any) -> list[Any]:  # noqa: ANN401
    found: list[Any] = []
    if isinstance(node, dict):
        found += [part for item in node.items() for part in item]
    elif isinstance(node, list | tuple | bytearray | deque):
        found += list(node)
    if isinstance(node, deque):
        found.append(node.maxlen)
    if isinstance(node, Both):
        found.append(node.slot)
    if isinstance(node, Slotted):
        found.append(node.value)
    elif hasattr(node, "__dict__"):
        found += [part for item in vars(node).items() for part in item]
    return found
