"""Stand-ins for whatever a pickle names, and a reader that builds them without running anything.

Reading a pickle here imports nothing and calls nothing: the opcodes of protocols 0-5 build plain
Python containers, and wherever a pickle would import a name or call it, a `Global` or a `Call`
remembers what it asked for. `dump` writes the same request back.
"""

import struct
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from streamshard.errors import CorruptFileError

Node = Any
"""A plain Python value, a container of nodes, a `Global`, a `Call`, or a persistent object."""


@dataclass(frozen=True, slots=True)
class Global:
    """A name that a pickle asks for. Nothing is imported for it."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


UNSET: Final = Global("streamshard", "UNSET")
"""Marks a call without a BUILD state: None is a state that a pickle can ask for."""


@dataclass(eq=False, slots=True)
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
    items: list[Node] = field(default_factory=list)
    """What APPEND, APPENDS and ADDITEMS added."""
    entries: list[tuple[Node, Node]] = field(default_factory=list)
    """What SETITEM and SETITEMS set."""

    @property
    def name(self) -> str:
        """Dotted name of what would be called, or the empty string where that is no name."""
        return str(self.function) if isinstance(self.function, Global) else ""


ORDERED_DICT: Final = Global("collections", "OrderedDict")


class _Mark:
    pass


class EndedTooEarlyError(CorruptFileError):
    """The bytes end before what they hold does."""


def load(data: bytes, persistent_load: Callable[[Node], Node]) -> Node:
    """Read one pickle into inert nodes; what follows it is not looked at.

    Raises
    ------
    CorruptFileError
        The bytes are no complete pickle, or one that asks for what no checkpoint needs.
    """
    return load_at(data, 0, persistent_load)[0]


def load_at(data: bytes, start: int, persistent_load: Callable[[Node], Node]) -> tuple[Node, int]:
    """Read the pickle that starts at a byte; also returns the byte behind its end.

    Raises
    ------
    EndedTooEarlyError
        There may be more of it behind the bytes that are given.
    CorruptFileError
        This is no pickle, or one that asks for what no checkpoint needs.
    """
    reader = _Reader(data, start, persistent_load)
    try:
        return reader.run(), reader.at
    except CorruptFileError:
        raise
    except (
        IndexError, KeyError, ValueError, TypeError, AttributeError, struct.error, RecursionError
    ) as error:  # fmt: skip
        message = f"not a readable pickle ({type(error).__name__}: {error})"
        raise CorruptFileError(message) from error


class _Reader:
    """A pickle machine whose only effects are on its own stack and memo."""

    def __init__(self, data: bytes, start: int, persistent_load: Callable[[Node], Node]) -> None:
        self._data = data
        self.at = start
        """Byte that is read next."""
        self._stack: list[Node] = []
        self._memo: dict[int, Node] = {}
        self._globals: dict[tuple[str, str], Global] = {}
        self._persistent_load = persistent_load

    def run(self) -> Node:
        data, stop = self._data, ord(".")
        table = _OPCODES
        while True:
            if self.at >= len(data):
                raise EndedTooEarlyError(f"pickle has no end before byte {self.at}")
            code = data[self.at]
            self.at += 1
            if code == stop:
                result = self.pop()
                if self._stack:
                    raise CorruptFileError("pickle leaves values behind")
                return result
            operation = table.get(code)
            if operation is None:
                message = f"pickle opcode {bytes([code])!r} at byte {self.at - 1} is not accepted"
                raise CorruptFileError(message)
            operation(self)

    # Reading the opcode's argument -------------------------------------------------------------

    def take(self, count: int) -> bytes:
        end = self.at + count
        if count < 0:
            raise CorruptFileError(f"pickle asks for {count} bytes")
        if end > len(self._data):
            message = f"pickle asks for {count} bytes where {len(self._data) - self.at} are left"
            raise EndedTooEarlyError(message)
        piece = self._data[self.at : end]
        self.at = end
        return piece

    def number(self, width: int, *, signed: bool = False) -> int:
        return int.from_bytes(self.take(width), "little", signed=signed)

    def raw_line(self) -> bytes:
        end = self._data.find(b"\n", self.at)
        if end < 0:
            raise EndedTooEarlyError("pickle has a line without an end")
        text = self._data[self.at : end]
        self.at = end + 1
        return text

    def line(self) -> str:
        return self.raw_line().decode()

    # Stack and memo ----------------------------------------------------------------------------

    def push(self, value: Node) -> None:
        self._stack.append(value)

    def pop(self) -> Node:
        value = self._stack.pop()
        if isinstance(value, _Mark):
            raise CorruptFileError("pickle takes a mark for a value")
        return value

    def pop_mark(self) -> list[Node]:
        stack = self._stack
        at = len(stack) - 1
        while not isinstance(stack[at], _Mark):
            at -= 1
            if at < 0:
                raise CorruptFileError("pickle misses a mark")
        values = stack[at + 1 :]
        del stack[at:]
        return values

    def top(self) -> Node:
        value = self._stack[-1]
        if isinstance(value, _Mark):
            raise CorruptFileError("pickle takes a mark for a value")
        return value

    def get(self, index: int) -> None:
        self.push(self._memo[index])

    def put(self, index: int) -> None:
        self._memo[index] = self.top()

    # Objects -----------------------------------------------------------------------------------

    def name(self, module: str, name: str) -> None:
        self.push(self._globals.setdefault((module, name), Global(module, name)))

    def stack_name(self) -> None:
        name, module = self.pop(), self.pop()
        # A line break would end the name where protocol 2 writes it, and the rest would be opcodes.
        if not (isinstance(name, str) and isinstance(module, str)) or "\n" in module + name:
            raise CorruptFileError("pickle names something by what is no name")
        self.name(module, name)

    def persistent(self, identifier: Node) -> None:
        self.push(self._persistent_load(identifier))

    def reduce(self) -> None:
        args, function = self.pop(), self.pop()
        plain = function == ORDERED_DICT and args == ()
        self.push(OrderedDict() if plain else _call(function, args))

    def new(self) -> None:
        args, function = self.pop(), self.pop()
        self.push(_call(function, args, new=True))

    def new_ex(self) -> None:
        kwargs, args, function = self.pop(), self.pop(), self.pop()
        self.push(_call(function, args, new=True, kwargs=kwargs))

    def instance(self) -> None:
        module, name = self.line(), self.line()
        args = tuple(self.pop_mark())
        self.name(module, name)
        self.push(_call(self.pop(), args))

    def mark_instance(self) -> None:
        function, *args = self.pop_mark()
        self.push(_call(function, tuple(args)))

    def build(self) -> None:
        state, target = self.pop(), self.top()
        if isinstance(target, Call):
            target.state = state
        elif isinstance(target, OrderedDict) and isinstance(state, dict):
            vars(target).update(state)
        else:
            raise CorruptFileError(f"pickle sets the state of a {type(target).__name__}")

    def append(self, values: list[Node]) -> None:
        target = self.top()
        if isinstance(target, list):
            target.extend(values)
        elif isinstance(target, Call):
            target.items.extend(values)
        else:
            raise CorruptFileError(f"pickle appends to a {type(target).__name__}")

    def add(self) -> None:
        values, target = self.pop_mark(), self.top()
        if isinstance(target, set):
            target.update(values)
        elif isinstance(target, Call):
            target.items.extend(values)
        else:
            raise CorruptFileError(f"pickle adds to a {type(target).__name__}")

    def set_items(self, flat: list[Node]) -> None:
        if len(flat) % 2:
            raise CorruptFileError("pickle sets a key without a value")
        target, pairs = self.top(), list(zip(flat[::2], flat[1::2], strict=True))
        if isinstance(target, dict):
            target.update(pairs)
        elif isinstance(target, Call):
            target.entries.extend(pairs)
        else:
            raise CorruptFileError(f"pickle sets items of a {type(target).__name__}")

    def dictionary(self) -> None:
        flat = self.pop_mark()
        self.push({})
        self.set_items(flat)

    def integer(self) -> None:
        text = self.line()
        self.push({"00": False, "01": True}[text] if text in ("00", "01") else int(text))

    def quoted(self) -> None:
        """STRING of protocol 0: a quoted Python 2 string, taken as text."""
        text = self.line().strip()
        if len(text) < 2 or text[0] != text[-1] or text[0] not in "'\"":
            raise CorruptFileError("pickle holds an unquoted string")
        self.push(text[1:-1].encode().decode("unicode_escape"))

    def frame(self) -> None:
        if self.number(8) > len(self._data) - self.at:
            raise EndedTooEarlyError("pickle frame reaches past the end")

    def protocol(self) -> None:
        version = self.number(1)
        if version > 5:
            raise CorruptFileError(f"pickle protocol {version} is newer than 5")


def _call(function: Node, args: Node, *, new: bool = False, kwargs: Node = None) -> Call:
    if not isinstance(args, tuple):
        raise CorruptFileError("pickle calls something without an argument tuple")
    return Call(function, args, new=new, kwargs=kwargs)


_OPCODES: Final[dict[int, Callable[[_Reader], None]]] = {
    ord(code): operation
    for code, operation in {
        "\x80": _Reader.protocol,
        "\x95": _Reader.frame,
        "(": lambda r: r.push(_Mark()),
        "0": lambda r: (r._stack.pop(), None)[1],
        "1": lambda r: (r.pop_mark(), None)[1],
        "2": lambda r: r.push(r.top()),
        "N": lambda r: r.push(None),
        "\x88": lambda r: r.push(True),
        "\x89": lambda r: r.push(False),
        "I": _Reader.integer,
        "J": lambda r: r.push(r.number(4, signed=True)),
        "K": lambda r: r.push(r.number(1)),
        "M": lambda r: r.push(r.number(2)),
        "L": lambda r: r.push(int(r.line().rstrip("L"))),
        "\x8a": lambda r: r.push(r.number(r.number(1), signed=True)),
        "\x8b": lambda r: r.push(r.number(r.number(4), signed=True)),
        "F": lambda r: r.push(float(r.line())),
        "G": lambda r: r.push(struct.unpack(">d", r.take(8))[0]),
        "S": _Reader.quoted,
        "T": lambda r: r.push(r.take(r.number(4)).decode("latin1")),
        "U": lambda r: r.push(r.take(r.number(1)).decode("latin1")),
        "V": lambda r: r.push(r.raw_line().decode("raw_unicode_escape")),
        "X": lambda r: r.push(r.take(r.number(4)).decode("utf-8", "surrogatepass")),
        "\x8c": lambda r: r.push(r.take(r.number(1)).decode("utf-8", "surrogatepass")),
        "\x8d": lambda r: r.push(r.take(r.number(8)).decode("utf-8", "surrogatepass")),
        "B": lambda r: r.push(r.take(r.number(4))),
        "C": lambda r: r.push(r.take(r.number(1))),
        "\x8e": lambda r: r.push(r.take(r.number(8))),
        "\x96": lambda r: r.push(bytearray(r.take(r.number(8)))),
        ")": lambda r: r.push(()),
        "t": lambda r: r.push(tuple(r.pop_mark())),
        "\x85": lambda r: r.push((r.pop(),)),
        "\x86": lambda r: r.push((r.pop(), r.pop())[::-1]),
        "\x87": lambda r: r.push((r.pop(), r.pop(), r.pop())[::-1]),
        "]": lambda r: r.push([]),
        "l": lambda r: r.push(r.pop_mark()),
        "a": lambda r: r.append([r.pop()]),
        "e": lambda r: r.append(r.pop_mark()),
        "}": lambda r: r.push({}),
        "d": _Reader.dictionary,
        "s": lambda r: r.set_items([r.pop(), r.pop()][::-1]),
        "u": lambda r: r.set_items(r.pop_mark()),
        "\x8f": lambda r: r.push(set()),
        "\x90": _Reader.add,
        "\x91": lambda r: r.push(frozenset(r.pop_mark())),
        "c": lambda r: r.name(r.line(), r.line()),
        "\x93": _Reader.stack_name,
        "R": _Reader.reduce,
        "\x81": _Reader.new,
        "\x92": _Reader.new_ex,
        "i": _Reader.instance,
        "o": _Reader.mark_instance,
        "b": _Reader.build,
        "P": lambda r: r.persistent(r.line()),
        "Q": lambda r: r.persistent(r.pop()),
        "g": lambda r: r.get(int(r.line())),
        "h": lambda r: r.get(r.number(1)),
        "j": lambda r: r.get(r.number(4)),
        "p": lambda r: r.put(int(r.line())),
        "q": lambda r: r.put(r.number(1)),
        "r": lambda r: r.put(r.number(4)),
        "\x94": lambda r: r.put(len(r._memo)),
    }.items()
}
"""Every opcode but STOP; the extension registry and out-of-band buffers are refused."""
