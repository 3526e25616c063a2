"""Stand-ins for the imports and calls of a pickle: they are recorded, never done.

`inert_load` reads pickles into such nodes, `inert_dump` writes nodes as pickles.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

Node = Any
"""A plain Python value, a container of nodes, a `Global`, a `Call`, or a persistent object.

Nodes come from untrusted files: they may contain themselves, be nested without end, and share
parts so often that a walk along every path takes forever. So never compare nodes, copy them, or
show them with `repr`: test them with `isinstance`, and quote them with `show`. Hashing a node is
safe.
"""

LIMIT_BYTES: Final = 1 << 30
"""Size of the largest pickle that is read; tensors are not part of it."""


@dataclass(frozen=True, slots=True)
class Global:
    """A name that a pickle would import. It is not imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class _Unset(Global):
    """The mark itself. It is known by identity, so a copy that was pickled must be the same."""

    __slots__ = ()

    def __reduce__(self) -> str:
        return "UNSET"


UNSET: Final = _Unset("streamshard", "UNSET")
"""Marks a call without a BUILD state, because a pickle can set None as the state."""


GETATTR: Final = (Global("__builtin__", "getattr"), Global("builtins", "getattr"))
"""Names of `getattr`. Pickles of protocol 2 use its name in Python 2."""


@dataclass(eq=False, slots=True, repr=False)
class Call:
    """An object that a pickle would build by a call. The call was not made.

    Calls are compared by identity, as objects of an unknown class must be.
    """

    function: Node
    args: Node
    new: bool = False
    """Whether NEWOBJ (`cls.__new__(cls, *args)`) builds it, not REDUCE (`function(*args)`)."""
    kwargs: Node = None
    """Keyword arguments of NEWOBJ_EX; None for the other opcodes."""
    state: Node = UNSET
    setter: Node = None
    """Function that sets the state, called with the object and the state; None for BUILD."""
    shares: bool = False
    """For an object inside its own arguments: whether it keeps the same lists, not copies."""
    items: Sequence[Node] = ()
    """Values that APPEND and APPENDS added."""
    entries: Sequence[tuple[Node, Node]] = ()
    """Pairs that SETITEM and SETITEMS set."""

    @property
    def name(self) -> str:
        """Dotted name of the function, or the empty string if the function is not a name."""
        return str(self.function) if isinstance(self.function, Global) else ""

    def __repr__(self) -> str:
        return show(self)


ORDERED_DICT: Final = Global("collections", "OrderedDict")
SET: Final = Global("__builtin__", "set")
FROZENSET: Final = Global("__builtin__", "frozenset")
"""Below protocol 4 a set is a call with the list of its members; here it is one always."""


def nodes_below(node: Node) -> Sequence[Node]:
    """List the nodes directly below a node, in the order in which pickle visits them."""
    if isinstance(node, Call):
        pairs = [part for entry in node.entries for part in entry]
        built = [node.function, node.args, node.kwargs, *node.items, *pairs]
        return [*built, node.setter, node.state]
    if isinstance(node, dict):
        extra = vars(node).values() if isinstance(node, OrderedDict) else ()
        return [*[part for entry in node.items() for part in entry], *extra]
    return node if isinstance(node, (list, tuple)) else ()


_MOST_KEYS: Final = 8
"""Most keys that a message names."""
_LIMIT_KEY: Final = 80
_SHOWN_LETTERS: Final = 80
_SHOWN_BITS: Final = 128
_SHOWN_PARTS: Final = 8


def show(node: Node) -> str:
    """Quote a node in a message. The text is short, whatever the node holds.

    >>> show([4, 4]), show({"a": []}), show("x" * 1000)[:6]
    ('[4, 4]', 'a dict of 1', "'xxxxx")
    """
    if isinstance(node, int) and node.bit_length() > _SHOWN_BITS:
        return f"a number of {node.bit_length():,} bits"
    if node is None or isinstance(node, bool | int | float):
        return repr(node)
    if isinstance(node, str | bytes):
        return repr(node[:_SHOWN_LETTERS]) + ("..." if len(node) > _SHOWN_LETTERS else "")
    if isinstance(node, Global):
        return repr(str(node)[:_SHOWN_LETTERS])[1:-1]
    if isinstance(node, Call):
        return f"<{show(node.function) if node.name else 'object'}>"
    if isinstance(node, list | tuple) and len(node) <= _SHOWN_PARTS:
        plain = [part for part in node if part is None or isinstance(part, int | str)]
        if len(plain) == len(node):
            return f"[{', '.join(map(show, plain))}]"
    if isinstance(node, dict | list | tuple):
        kind = "dict" if isinstance(node, OrderedDict) else type(node).__name__
        return f"a {kind} of {len(node)}"
    return f"a {type(node).__name__}"


def show_few(keys: Sequence[Node]) -> str:
    """Return the first of possibly many keys as text for a message.

    >>> show_few(["a", "b"]), show_few(range(50))
    ('a, b', '0, 1, 2, 3, 4, 5, 6, 7 and 42 more')
    """
    more = len(keys) - _MOST_KEYS
    return ", ".join(map(show_key, keys[:_MOST_KEYS])) + f" and {more:,} more" * (more > 0)


def show_key(key: Node) -> str:
    """Return a key as part of a name: short text as it is, anything else quoted."""
    return key if isinstance(key, str) and len(key) <= _LIMIT_KEY else show(key)
