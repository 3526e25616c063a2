"""Checks nodes before they are interpreted as DeepSpeed's own data."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from streamshard.errors import CorruptFileError, DisagreementError, UnsupportedError
from streamshard.formats.pickle.inert import Node, show

_LIMIT_DEPTH: Final = 100
_LIMIT_AGAIN: Final = 16
"""How often parts may be shared on average."""
_FREE_PARTS: Final = 100_000
_LIMIT_NAME: Final = 4096
_NESTING: Final = dict, list, tuple
_CONTAINERS: Final = frozenset({*_NESTING, OrderedDict})


def require_unrolled(nodes: Iterable[Node]) -> None:
    """Refuse containers that are far too large when their shared parts are written out.

    A few bytes of pickle make nested lists that share their parts along any number of paths, or a
    list that contains itself. In a user's own objects, which are only copied, that is allowed.
    Containers that pass this check can be compared, counted and iterated like any other data.
    """
    parts = again = 0
    seen: set[int] = set()
    stack = [(node, 1) for node in nodes]
    while stack:
        node, depth = stack.pop()
        if not isinstance(node, _NESTING):
            continue
        again += len(node)
        if id(node) not in seen:
            seen.add(id(node))
            parts += len(node)
        if depth > _LIMIT_DEPTH:
            raise UnsupportedError(f"holds containers nested more than {_LIMIT_DEPTH} deep")
        if again > _LIMIT_AGAIN * parts + _FREE_PARTS:
            raise UnsupportedError("holds containers that share their parts without end")
        below = [*node, *node.values()] if isinstance(node, dict) else node
        if _CONTAINERS.isdisjoint(map(type, below)):
            continue
        stack += [(part, depth + 1) for part in below if isinstance(part, _NESTING)]


def name_of(node: Node) -> str:
    """Return a node as a tensor's name."""
    if not isinstance(node, str) or len(node) > _LIMIT_NAME or not is_text(node):
        raise CorruptFileError(f"{show(node)} is not a name of a tensor")
    return node


@contextmanager
def of_file(path: Path) -> Iterator[None]:
    """Make errors about a file's content say so, unless they are about another path."""
    try:
        yield
    except (CorruptFileError, DisagreementError, UnsupportedError) as error:
        if error.path is not None:
            raise
        raise type(error)(*error.args, path=path) from error


def is_text(text: str) -> bool:
    """Tell whether a text can be written as UTF-8: it has no half of a surrogate pair."""
    return text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text)
