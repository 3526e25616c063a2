"""Reads pickles into inert nodes, by the unpickler of Python's standard library.

It is the one in Python: the one in C takes memory for any number that a few bytes put into its
memo. Whatever would import, call, or change an object is replaced: nothing is imported or called,
a `Global` or a `Call` records it. The pickle's size bounds memory.
"""

import io
import pickle
import re
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from streamshard.errors import CorruptFileError, SourceError, UnsupportedError
from streamshard.formats.pickle.inert import FROZENSET, ORDERED_DICT, SET, UNSET, Call, Global, Node

PersistentLoad = Callable[[Node], Node]
"""Returns the object for a persistent id."""

_PythonUnpickler: Any = pickle._Unpickler

_LIMIT_DEPTH: Final = 200
"""Most levels of nested tuples: Python hashes them by recursion, without checking the depth."""
_LIMIT_SHARED: Final = 1_000_000
"""A tuple and its nested tuples may have this many more parts than the pickle has bytes."""
_LIMIT_KEY_PARTS: Final = 1000
"""Most parts of a tuple that is a key: it is hashed again with every key that is set."""
_LIMIT_NAME: Final = 1000
"""Most letters of a module name and a class name together."""
_LIMIT_INTEGER_BITS: Final = 1 << 13
"""Python refuses to print much larger integers."""
_LIMIT_ARGUMENTS: Final = 100
"""Most arguments of a call that `drop` examines."""
_SMALL_INTEGERS: Final = re.compile(rb"(?:K.)+", re.DOTALL)
"""Opcodes that push an integer of one byte each."""
_HOLE: Final = object()
"""Marks an empty place in the memo."""


class EndedTooEarlyError(CorruptFileError):
    """The bytes end before their content is complete."""


def load(data: bytes, persistent_load: PersistentLoad) -> Node:
    """Read one pickle into inert nodes. Bytes after it are ignored."""
    return InertUnpickler(data, persistent_load).load()


class InertUnpickler(_PythonUnpickler):  # type: ignore[misc]
    """The state of a pickle that is read: the stack, the memo and the objects."""

    def __init__(self, data: bytes, persistent_load: PersistentLoad) -> None:
        self.stream = io.BytesIO(data)
        super().__init__(self.stream, encoding="latin1")
        self.persistent_load = persistent_load
        self.read, self.readline = self.stream.read, self.stream.readline
        self._data, self._nbytes = data, len(data)
        self.memo: list[Node] = []
        """In place of the library's dict, which takes ten times the memory."""
        self._holes = 0
        self._globals = {("collections", "OrderedDict"): ORDERED_DICT}
        self._nested: dict[int, tuple[object, int, int]] = {}
        """Id of a tuple that contains tuples → the tuple, its depth, its count of parts."""

    def load(self) -> Node:
        """Read the pickle to its end and return the node that it builds."""
        try:
            return self._load()
        except SourceError:
            raise
        except (
            AttributeError, LookupError, OverflowError, TypeError, ValueError, struct.error,
            pickle.UnpicklingError,
        ) as error:  # fmt: skip
            at = self.stream.tell()
            if at >= self._nbytes:
                raise EndedTooEarlyError("pickle has no end") from error
            message = f"not a readable pickle ({type(error).__name__} before byte {at})"
            raise CorruptFileError(message) from error

    def _load(self) -> Node:
        # The library's own loop copies frames, after which an error's place is not known.
        self.metastack: list[list[Node]] = []
        self.stack: list[Node] = []
        self.append = self.stack.append
        read, table = self.read, _TABLE
        while (code := read(1)) != pickle.STOP:
            table[code[0]](self)
        result = self.stack.pop()
        if self.stack or self.metastack:
            raise CorruptFileError("pickle leaves values behind")
        return result

    # Numbers, frames, names ---------------------------------------------------------------------

    def small_integers(self) -> None:
        """Push an integer of one byte, and those that follow it.

        Each rank of stages 1 and 2 saves a list with a number for every parameter.
        """
        at = self.stream.tell()
        if self._data[at + 1 : at + 2] != pickle.BININT1:
            self.append(self.read(1)[0])
            return
        run = _SMALL_INTEGERS.match(self._data, at - 1)
        end = run.end() if run is not None else at
        self.stack.extend(self._data[at:end:2])
        self.stream.seek(end)

    def frame(self) -> None:
        """Begin a frame, which is read as all else is."""
        (nbytes,) = struct.unpack("<Q", self.read(8))
        if nbytes > self._nbytes - self.stream.tell():
            raise EndedTooEarlyError("pickle frame reaches past the end")

    def byte_array(self) -> None:
        (nbytes,) = struct.unpack("<Q", self.read(8))
        self.append(bytearray(self.read(nbytes)))

    def find_class(self, module: str, name: str) -> Global:
        """Return a name without importing it."""
        reference = self._globals.get((module, name))
        if reference is None:
            # In protocol 2 a line break would end the name, and the rest would be opcodes.
            if "\n" in module + name or len(module) + len(name) > _LIMIT_NAME:
                raise CorruptFileError("pickle names something by what is not a name")
            (module + name).encode()  # raises ValueError at what protocol 2 cannot write
            reference = self._globals[module, name] = Global(module, name)
        return reference

    # The memo -----------------------------------------------------------------------------------

    def put(self, index: int) -> None:
        """Put the top value into the memo."""
        memo, value = self.memo, self.stack[-1]
        if index == len(memo):
            memo.append(value)
        elif 0 <= index < len(memo):
            self._holes -= memo[index] is _HOLE
            memo[index] = value
        elif 0 <= index <= self._nbytes:
            self._holes += index - len(memo)
            memo.extend([_HOLE] * (index - len(memo)))
            memo.append(value)
        else:
            raise CorruptFileError(f"pickle of {self._nbytes} bytes puts {index} in its memo")

    def get(self, index: int) -> None:
        """Push a value from the memo."""
        value = self.memo[index] if index >= 0 else _HOLE
        if value is _HOLE:
            raise CorruptFileError(f"pickle takes what was never put into its memo, at {index}")
        self.append(value)

    def drop(self) -> None:
        """Drop the top value. If it is a call that changes another object, record it there."""
        if not self.stack:
            self.pop_mark()
            return
        dropped = self.stack.pop()
        if type(dropped) is not Call or not 0 < len(dropped.args) <= _LIMIT_ARGUMENTS:
            return
        target = dropped.args[0]
        if len(dropped.args) == 2 and self.stack and target is self.stack[-1]:
            if type(target) is Call and target.state is UNSET and not dropped.new:
                target.setter, target.state = dropped.function, dropped.args[1]
            return
        successor = self._gets_next()
        if type(successor) is Call:
            # The object was built inside its own arguments. The pickle takes it from the memo.
            lists = {id(arg) for arg in dropped.args if type(arg) is list}
            successor.shares |= any(id(arg) in lists for arg in successor.args[:_LIMIT_ARGUMENTS])

    def _gets_next(self) -> Node:
        """Return the memo value that the next opcode would push; None if it pushes none."""
        at, code, index = self.stream.tell(), self.read(1), -1
        if code in (pickle.BINGET, pickle.LONG_BINGET):
            index = int.from_bytes(self.read(1 if code == pickle.BINGET else 4), "little")
        elif code == pickle.GET:
            index = int(self.readline())
        self.stream.seek(at)
        return self.memo[index] if 0 <= index < len(self.memo) else None

    # Containers ---------------------------------------------------------------------------------

    def weigh(self) -> None:
        """Check the tuple on top, if it contains tuples: hashing it must be safe."""
        top = self.stack[-1]
        if tuple not in map(type, top):
            return
        depth, parts = 0, len(top)
        for part in top:
            if type(part) is tuple:
                _, deeper, more = self._nested.get(id(part), (part, 1, len(part)))
                parts += more
                depth = max(depth, deeper)
        if depth >= _LIMIT_DEPTH:
            raise UnsupportedError(f"pickle has more than {_LIMIT_DEPTH} tuples in each other")
        if parts > self._nbytes + _LIMIT_SHARED:
            raise UnsupportedError(f"pickle has a tuple of {parts:,} parts, most of them again")
        self._nested[id(top)] = top, depth + 1, parts

    def extend(self, values: list[Node]) -> None:
        """Append to the list on top, or to a call that builds one."""
        target = self.stack[-1]
        if type(target) is list:
            target.extend(values)
        elif type(target) is Call:
            target.items = _extended(target.items, values)
        else:
            raise CorruptFileError(f"pickle appends to a {type(target).__name__}")

    def add(self) -> None:
        """Add members to the set on top."""
        values, target = self.pop_mark(), self.stack[-1]
        if type(target) is not Call or target.function is not SET:
            raise CorruptFileError("pickle adds members to what is not a set")
        target.args[0].extend(values)

    def frozen_set(self) -> None:
        members = self.pop_mark()
        self.append(Call(FROZENSET, (members,)))

    def set_items(self, flat: list[Node]) -> None:
        """Set keys and values in the dict on top, or in a call that builds one."""
        target, keys, values = self.stack[-1], flat[::2], flat[1::2]
        if isinstance(target, dict):
            for key in keys:
                if type(key) is tuple:
                    _, _, parts = self._nested.get(id(key), (key, 1, len(key)))
                    if parts > _LIMIT_KEY_PARTS:
                        raise UnsupportedError(f"pickle has a key of {parts:,} parts")
            target.update(zip(keys, values, strict=True))
        elif type(target) is Call:
            target.entries = _extended(target.entries, zip(keys, values, strict=True))
        else:
            raise CorruptFileError(f"pickle sets items of a {type(target).__name__}")

    def dictionary(self) -> None:
        """Make a dict of the keys and values above the last mark."""
        flat = self.pop_mark()
        self.append({})
        self.set_items(flat)

    # Objects ------------------------------------------------------------------------------------

    def call(self, *, new: bool = False, kwargs: Node = None) -> None:
        """Replace a function and its arguments by the call."""
        args, function = self.stack.pop(), self.stack.pop()
        if type(args) is not tuple:
            raise CorruptFileError("pickle calls something without an argument tuple")
        if function is ORDERED_DICT and not args and not new:
            self.append(OrderedDict())
        else:
            self.append(Call(function, args, new, kwargs))

    def _instantiate(self, function: Node, args: list[Node]) -> None:
        """Push an instance as protocols 0 and 1 build it: without arguments, without __init__."""
        self.append(Call(function, tuple(args), new=not args))

    def build(self) -> None:
        """Set the state of the object on top."""
        state, target = self.stack.pop(), self.stack[-1]
        if type(target) is Call and target.state is UNSET:
            target.state = state
        elif type(target) is OrderedDict and isinstance(state, dict) and not vars(target):
            target.__dict__ = state  # not copied: many objects may share one large state
        else:
            raise CorruptFileError(f"pickle sets the state of a {type(target).__name__}")


def _extended(sequence: Sequence[Node], values: Iterable[Node]) -> Sequence[Node]:
    """Append values to a list and return it; begin a new list if the sequence is not one yet."""
    if not isinstance(sequence, list):
        return list(values)
    sequence.extend(values)
    return sequence


_Load = Callable[[InertUnpickler], None]


def _of_library(code: bytes) -> _Load:
    """Return what the library does at an opcode."""
    found: _Load = _PythonUnpickler.dispatch[code[0]]
    return found


def _weighed(code: bytes) -> _Load:
    """Return what the library does at an opcode that makes a tuple, which is then weighed."""
    make = _of_library(code)

    def push(unpickler: InertUnpickler) -> None:
        make(unpickler)
        unpickler.weigh()

    return push


def _integer(code: bytes) -> _Load:
    """Return what the library does at an opcode with an integer of any length, which is checked."""
    read = _of_library(code)

    def push(unpickler: InertUnpickler) -> None:
        read(unpickler)
        bits = unpickler.stack[-1].bit_length()
        if bits > _LIMIT_INTEGER_BITS:
            raise UnsupportedError(f"pickle holds an integer of {bits:,} bits")

    return push


def _refuse(unpickler: InertUnpickler) -> None:
    at = unpickler.stream.tell() - 1
    raise CorruptFileError(f"pickle opcode at byte {at} is not accepted")


_AS_IN_LIBRARY: Final = "\x80(12N\x88\x89JM\x8aFGSTUVX\x8c\x8dBC\x8e)]l}c\x93ioPQ"
"""Opcodes with plain values, the stack, and names; `find_class` and others are ours."""
_unsigned: Final = struct.Struct("<I").unpack
_OPCODES: Final[dict[str, _Load]] = {
    **{code: _of_library(code.encode("latin1")) for code in _AS_IN_LIBRARY},
    "\x95": InertUnpickler.frame,
    "\x96": InertUnpickler.byte_array,
    "K": InertUnpickler.small_integers,
    "0": InertUnpickler.drop,
    "I": _integer(pickle.INT),
    "L": _integer(pickle.LONG),
    "\x8b": _integer(pickle.LONG4),
    "t": _weighed(pickle.TUPLE),
    "\x85": _weighed(pickle.TUPLE1),
    "\x86": _weighed(pickle.TUPLE2),
    "\x87": _weighed(pickle.TUPLE3),
    "a": lambda u: u.extend([u.stack.pop()]),
    "e": lambda u: u.extend(u.pop_mark()),
    "d": InertUnpickler.dictionary,
    "s": lambda u: u.set_items([u.stack.pop(), u.stack.pop()][::-1]),
    "u": lambda u: u.set_items(u.pop_mark()),
    "\x8f": lambda u: u.stack.append(Call(SET, ([],))),
    "\x90": InertUnpickler.add,
    "\x91": InertUnpickler.frozen_set,
    "R": InertUnpickler.call,
    "\x81": lambda u: u.call(new=True),
    "\x92": lambda u: u.call(new=True, kwargs=u.stack.pop()),
    "b": InertUnpickler.build,
    "g": lambda u: u.get(int(u.readline())),
    "h": lambda u: u.get(u.read(1)[0]),
    "j": lambda u: u.get(_unsigned(u.read(4))[0]),
    "p": lambda u: u.put(int(u.readline())),
    "q": lambda u: u.put(u.read(1)[0]),
    "r": lambda u: u.put(_unsigned(u.read(4))[0]),
    "\x94": lambda u: u.put(len(u.memo) - u._holes),
}
"""All opcodes but STOP. Those for the extension registry and out-of-band buffers are refused."""
_TABLE: Final = [_OPCODES.get(chr(code), _refuse) for code in range(256)]
