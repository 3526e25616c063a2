"""Names that a pickle imports to run something; nothing that a training job keeps is one of them.

The list is short on purpose: what is on it is an attack, or as good as one. A name that is not on
it may be one all the same, since any class of a job can run what it likes.
"""

from typing import Final

from streamshard.formats.pickle.inert import Call, Global, Node, nodes_below

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


def dangerous_in(node: Node) -> set[Global]:
    found: set[Global] = set()
    seen: set[int] = set()
    stack = [node]
    while stack:
        node = stack.pop()
        if isinstance(node, Global):
            if _is_dangerous(node):
                found.add(node)
            continue
        if id(node) in seen:
            continue
        inner = [one for one in nodes_below(node) if isinstance(one, _WITH_PARTS)]
        # Most containers are small and plain; to remember those would take most of the memory.
        if inner or isinstance(node, Call) or len(node) > _MOST_PLAIN:
            seen.add(id(node))
        stack += inner
    return found
