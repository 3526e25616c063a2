"""Stand-ins for whatever a pickle names: what it would import or call is remembered, never done.

`inert_load` reads pickles into such nodes, `inert_dump` writes the same requests back.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

Node = Any
"""A plain Python value, a container of nodes, a `Global`, a `Call`, or a persistent object.

Nodes come from strangers: they may contain themselves, be nested without end, and share parts so
often that to walk along every path takes for ever. So nodes are not compared with each other,
shown by `repr`, or copied, but looked at with `isinstance`, and quoted with `show`. Hashing one is
safe.
"""


@dataclass(frozen=True, slots=True)
class Global:
    """A name that a pickle asks for. Nothing is imported for it."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


UNSET: Final = Global("streamshard", "UNSET")
"""Marks a call without a BUILD state: None is a state that a pickle can ask for."""


GETATTR: Final = (Global("__builtin__", "getattr"), Global("builtins", "getattr"))
"""What looks up an attribute; pickles of protocol 2 call it by its name in Python 2."""


@dataclass(eq=False, slots=True, repr=False)
class Call:
    """An object that a pickle builds by calling something; nothing has been called.

    Compared by identity, as two objects of an unknown class must be.
    """

    function: Node
    args: Node
    new: bool = False
    """Built by NEWOBJ (`cls.__new__(cls, *args)`) rather than by REDUCE (`function(*args)`)."""
    kwargs: Node = None
    """Keyword arguments of NEWOBJ_EX; None for the other ways."""
    state: Node = UNSET
    setter: Node = None
    """What is called with the object and its state, where that is not left to BUILD."""
    shares: bool = False
    """Of an object that is among its own arguments: it takes the very lists that it is in."""
    items: Sequence[Node] = ()
    """What APPEND and APPENDS added."""
    entries: Sequence[tuple[Node, Node]] = ()
    """What SETITEM and SETITEMS set."""

    @property
    def name(self) -> str:
        """Dotted name of what would be called, or the empty string where that is no name."""
        return str(self.function) if isinstance(self.function, Global) else ""

    def __repr__(self) -> str:
        return show(self)


ORDERED_DICT: Final = Global("collections", "OrderedDict")
SET: Final = Global("__builtin__", "set")
FROZENSET: Final = Global("__builtin__", "frozenset")
"""Below protocol 4 sets are calls with the list of their members; here they always are."""

_SHOWN_LETTERS: Final = 80
_SHOWN_PARTS: Final = 8


def show(node: Node) -> str:
    """Quote a node in a message: in a few words, whatever is in it.

    >>> show([4, 4]), show({"a": []}), show("x" * 1000)[:6]
    ('[4, 4]', 'a dict of 1', "'xxxxx")
    """
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
