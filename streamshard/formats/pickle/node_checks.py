"""Checks nodes before they are interpreted as DeepSpeed's own data, and finds dangerous ones.

Shapes are refused before any product of their numbers is computed: a file can list a million
dimensions, or a size of a million digits, and to multiply those takes longer than all honest work
on a file of that length.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from streamshard.errors import CorruptFileError, DisagreementError, UnsupportedError
from streamshard.formats.pickle.inert import Call, Global, Node, nodes_below, show
from streamshard.sizes import some_of

_LIMIT_DEPTH: Final = 100
_LIMIT_AGAIN: Final = 16
"""How often parts may be shared on average."""
_FREE_PARTS: Final = 100_000
_LIMIT_NAME: Final = 4096
LIMIT_DIMENSIONS: Final = 64
"""Most dimensions that torch can iterate over."""
LIMIT_NUMEL: Final = 1 << 44
"""More elements than any real tensor has. The sum of many such numbers still fits an int64."""
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


def is_size(node: Node) -> bool:
    """Tell whether a value can be the length of a tensor along a dimension."""
    return type(node) is int and 0 <= node <= LIMIT_NUMEL


def sizes_of(node: Node) -> tuple[int, ...]:
    """Read a list of lengths, one for each dimension; their product may be any."""
    if isinstance(node, list | tuple) and len(node) <= LIMIT_DIMENSIONS and all(map(is_size, node)):
        return tuple(node)
    raise CorruptFileError(f"{show(node)} is not a shape")


def require_shape(node: Node) -> tuple[int, ...]:
    """Read the shape of a tensor."""
    shape = sizes_of(node)
    if math.prod(shape) > LIMIT_NUMEL:
        raise CorruptFileError(f"{show(node)} is not a shape: no tensor has as many elements")
    return shape


# Names that a pickle imports to run something. The list is short on purpose: what is on it is an
# attack, or as good as one; nothing that a training job keeps is. A name that is not on it may be
# one all the same, since any class of a job can run what it likes.

_MODULES: Final = (
    "_io _pickle _posixsubprocess _socket _winapi bdb cProfile cffi commands ctypes importlib imp "
    "marshal nt os pdb pickle platform popen2 posix profile pty runpy shutil socket subprocess sys "
    "timeit webbrowser zipimport"
)
_NAMES: Final = frozenset(
    f"{module}.{name}"
    for module, names in {
        "__builtin__": "__import__ apply compile eval exec execfile exit file input open quit",
        "builtins": "__import__ breakpoint compile eval exec exit input open quit",
        "asyncio": "create_subprocess_exec create_subprocess_shell",
        "code": "InteractiveConsole InteractiveInterpreter interact",
        "multiprocessing": "Process",
        "multiprocessing.util": "spawnv_passfds",
        "numpy": "load",
        "numpy.testing._private.utils": "runstring",
        "operator": "methodcaller",
        "pip": "main",
        "torch": "load",
        "torch.hub": "load",
        "torch.serialization": "load",
        "torch.utils.cpp_extension": "load load_inline",
        "urllib.request": "urlopen urlretrieve",
    }.items()
    for name in names.split()
)
_HARMLESS: Final = "os.stat_result os.terminal_size posix.stat_result platform.uname_result"
_INSIDE: Final = "builtins importlib os posix shutil socket subprocess sys"
"""Modules that other modules have in them by name, as `torch.hub.os.system`."""
_KNOWN_MODULES: Final = frozenset(_MODULES.split())
_KNOWN_INSIDE: Final = frozenset(_INSIDE.split())
_MOST_PLAIN: Final = 16


def _is_dangerous(name: Global) -> bool:
    """Tell whether a name runs what its arguments say.

    >>> _is_dangerous(Global("posix", "system")), _is_dangerous(Global("torch", "hub.os.system"))
    (True, True)
    >>> _is_dangerous(Global("collections", "OrderedDict"))
    False
    """
    text = str(name)
    if text in _NAMES:
        return True
    parts = text.split(".")
    is_inside = "." in name.name and not _KNOWN_INSIDE.isdisjoint(parts[1:-1])
    return (parts[0] in _KNOWN_MODULES or is_inside) and text not in _HARMLESS.split()


_WITH_PARTS: Final = (Call, Global, dict, list, tuple)


def _dangerous_in(node: Node) -> set[Global]:
    dangers: set[Global] = set()
    seen: set[int] = set()
    stack = [node]
    while stack:
        node = stack.pop()
        if isinstance(node, Global):
            if _is_dangerous(node):
                dangers.add(node)
            continue
        if id(node) in seen:
            continue
        inner = [one for one in nodes_below(node) if isinstance(one, _WITH_PARTS)]
        # Most containers are small and plain; to remember those would take most of the memory.
        if inner or isinstance(node, Call) or len(node) > _MOST_PLAIN:
            seen.add(id(node))
        stack += inner
    return dangers


_DANGER: Final = (
    ", which runs what the file says as soon as a job loads it. Nothing of it was run here, and it "
    "is carried as it is. Load the checkpoint only if you know why it is there."
)


def danger_in(nodes: Sequence[Node]) -> tuple[str, ...]:
    """Return a warning if nodes have names that run something when loaded."""
    found = sorted(map(str, _dangerous_in([*nodes])))
    calls = some_of(found, 1)
    return (f"DANGER: the training state calls {calls}{_DANGER}",) if found else ()
