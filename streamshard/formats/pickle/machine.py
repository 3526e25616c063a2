"""The stack, the memo and the objects of a pickle that is read without running it.

A tuple that would keep Python hashing forever is refused before a dict is built from it.
"""

import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from streamshard.errors import CorruptFileError, UnsupportedError
from streamshard.formats.pickle.inert import ORDERED_DICT, SET, UNSET, Call, Global, Node
from streamshard.formats.pickle.opcode_arguments import PickleBytes

_LIMIT_DEPTH: Final = 200
"""Most levels of nested tuples: Python hashes them by recursion, without checking the depth."""
_LIMIT_SHARED: Final = 1_000_000
"""A tuple and its nested tuples may have this many more parts than the pickle has bytes."""
_LIMIT_KEY_PARTS: Final = 1000
"""Most parts of a tuple that is a key: it is hashed again with every key that is set."""


class HashGuard:
    """Checks the tuples of one pickle, which Python hashes by recursion."""

    def __init__(self, pickle_bytes: int) -> None:
        self._limit_parts = pickle_bytes + _LIMIT_SHARED
        self._nested: dict[int, tuple[object, int, int]] = {}
        """Id of a tuple that contains tuples → the tuple, its depth, its count of parts."""

    def weigh(self, made: tuple[Any, ...]) -> None:
        """Check and record a tuple that contains tuples."""
        depth, parts = 0, len(made)
        for part in made:
            if type(part) is tuple:
                _, deeper, more = self._nested.get(id(part), (part, 1, len(part)))
                parts += more
                if deeper > depth:
                    depth = deeper
        if depth >= _LIMIT_DEPTH:
            raise UnsupportedError(f"pickle has more than {_LIMIT_DEPTH} tuples in each other")
        if parts > self._limit_parts:
            raise UnsupportedError(f"pickle has a tuple of {parts:,} parts, most of them again")
        self._nested[id(made)] = made, depth + 1, parts

    def check(self, keys: Sequence[Any]) -> None:
        """Check keys before they are set in a dict."""
        for key in keys:
            if type(key) is tuple:
                _, _, parts = self._nested.get(id(key), (key, 1, len(key)))
                if parts > _LIMIT_KEY_PARTS:
                    raise UnsupportedError(f"pickle has a key of {parts:,} parts")


_LIMIT_NAME: Final = 1000
"""Most letters of a module name and a class name together."""
_LIMIT_ARGUMENTS: Final = 100
"""Most arguments of a call that `drop` examines."""
_SMALL_INTEGERS: Final = re.compile(rb"(?:K.)+", re.DOTALL)
"""Opcodes that push an integer of one byte each."""
_HOLE: Final = object()
"""Marks an empty place in the memo."""

PersistentLoad = Callable[[Node], Node]
"""Returns the object for a persistent id."""


class PickleMachine(PickleBytes):
    """The state on which a pickle's opcodes work. No method does more than its name says."""

    def __init__(self, data: bytes, start: int, persistent_load: PersistentLoad) -> None:
        super().__init__(data, start)
        self.stack: list[Node] = []
        """Values above the last mark."""
        self.below: list[list[Node]] = []
        """Values below each mark."""
        self.persistent_load = persistent_load
        self._memo: list[Node] = []
        self._holes = 0
        self._globals = {("collections", "OrderedDict"): ORDERED_DICT}
        self._guard = HashGuard(len(data))

    # Stack and memo ----------------------------------------------------------------------------

    def push(self, value: Node) -> None:
        self.stack.append(value)

    def mark(self) -> None:
        self.below.append(self.stack)
        self.stack = []

    def pop_mark(self) -> list[Node]:
        """Take all values above the last mark."""
        values = self.stack
        self.stack = self.below.pop()
        return values

    def drop_mark(self) -> None:
        self.pop_mark()

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
        made = self._gets_next()
        if type(made) is Call:
            # The object was built inside its own arguments. The pickle takes it from the memo.
            lists = {id(arg) for arg in dropped.args if type(arg) is list}
            made.shares |= any(id(arg) in lists for arg in made.args[:_LIMIT_ARGUMENTS])

    def _gets_next(self) -> Node:
        """Return the memo value that the next opcode would push; None if it pushes none."""
        at, code = self.at, self.data[self.at : self.at + 1]
        self.at += 1
        index = -1
        if code == b"h":
            index = self.byte()
        elif code == b"j":
            index = self.number()
        elif code == b"g":
            index = self.line_index()
        self.at = at
        return self._memo[index] if 0 <= index < len(self._memo) else None

    def get(self, index: int) -> None:
        """Push a value from the memo."""
        value = self._memo[index]
        if value is _HOLE:
            raise CorruptFileError(f"pickle takes what was never put into its memo, at {index}")
        self.stack.append(value)

    def small_integers(self) -> None:
        """Push an integer of one byte, and those that follow it.

        Each rank of stages 1 and 2 saves a list with a number for every parameter.
        """
        at, data = self.at, self.data
        if data[at + 1 : at + 2] != b"K":
            self.stack.append(self.byte())
            return
        run = _SMALL_INTEGERS.match(data, at - 1)
        self.at = run.end() if run is not None else at
        self.stack.extend(data[at : self.at : 2])

    def put(self, index: int) -> None:
        """Put the top value into the memo."""
        value, memo = self.stack[-1], self._memo
        if index == len(memo):
            memo.append(value)
        elif index < len(memo):
            self._holes -= memo[index] is _HOLE
            memo[index] = value
        elif index > len(self.data):
            raise CorruptFileError(f"pickle of {len(self.data)} bytes puts {index} in its memo")
        else:
            self._holes += index - len(memo)
            memo.extend([_HOLE] * (index - len(memo)))
            memo.append(value)

    def memoize(self) -> None:
        """Put the top value into the memo under the next number."""
        self.put(len(self._memo) - self._holes)

    # Containers --------------------------------------------------------------------------------

    def push_tuple(self, made: tuple[Node, ...]) -> None:
        if tuple in map(type, made):
            self._guard.weigh(made)
        self.stack.append(made)

    def small_tuple(self, count: int) -> None:
        """Replace the top values by a tuple of them."""
        made = tuple(self.stack[-count:])
        if len(made) < count:
            raise CorruptFileError("pickle makes a tuple of what is not there")
        del self.stack[-count:]
        self.push_tuple(made)

    def append(self, values: list[Node]) -> None:
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

    def set_items(self, flat: list[Node]) -> None:
        target, keys, values = self.stack[-1], flat[::2], flat[1::2]
        if len(keys) != len(values):
            raise CorruptFileError("pickle sets a key without a value")
        if isinstance(target, dict):
            self._guard.check(keys)
            target.update(zip(keys, values, strict=True))
        elif type(target) is Call:
            target.entries = _extended(target.entries, zip(keys, values, strict=True))
        else:
            raise CorruptFileError(f"pickle sets items of a {type(target).__name__}")

    def dictionary(self) -> None:
        """Make a dict of the keys and values above the last mark."""
        flat = self.pop_mark()
        self.stack.append({})
        self.set_items(flat)

    # Objects -----------------------------------------------------------------------------------

    def name(self, module: str, name: str) -> None:
        """Push a name without importing it."""
        found = self._globals.get((module, name))
        if found is None:
            found = self._globals[module, name] = _global(module, name)
        self.stack.append(found)

    def stack_name(self) -> None:
        """Push the name whose two parts are on top."""
        name, module = self.stack.pop(), self.stack.pop()
        if type(name) is not str or type(module) is not str:
            raise CorruptFileError("pickle names something by what is not a name")
        self.name(module, name)

    def call(self, *, new: bool = False, kwargs: Node = None) -> None:
        """Replace a function and its arguments by the call."""
        args, function = self.stack.pop(), self.stack.pop()
        if type(args) is not tuple:
            raise CorruptFileError("pickle calls something without an argument tuple")
        if function is ORDERED_DICT and not args and not new:
            self.stack.append(OrderedDict())
        else:
            self.stack.append(Call(function, args, new, kwargs))

    def instance(self, parts: list[Node]) -> None:
        """Push an instance as protocols 0 and 1 build it: without arguments, without __init__."""
        function, *args = parts
        self.stack.append(Call(function, tuple(args), new=not args))

    def named_instance(self) -> None:
        """Push an instance of the class whose name follows the opcode."""
        args = self.pop_mark()
        self.name(self.line(), self.line())
        self.instance([self.stack.pop(), *args])

    def build(self) -> None:
        """Set the state of the object on top."""
        state, target = self.stack.pop(), self.stack[-1]
        if type(target) is Call and target.state is UNSET:
            target.state = state
        elif type(target) is OrderedDict and isinstance(state, dict) and not vars(target):
            target.__dict__ = state  # not copied: many objects may share one large state
        else:
            raise CorruptFileError(f"pickle sets the state of a {type(target).__name__}")


def _global(module: str, name: str) -> Global:
    # In protocol 2 a line break would end the name, and the rest would be read as opcodes.
    if "\n" in module + name or len(module) + len(name) > _LIMIT_NAME:
        raise CorruptFileError("pickle names something by what is not a name")
    (module + name).encode()  # raises ValueError at what protocol 2 cannot write
    return Global(module, name)


def _extended(sequence: Sequence[Node], values: Iterable[Node]) -> Sequence[Node]:
    """Append values to a list and return it; begin a new list if the sequence is not one yet."""
    if not isinstance(sequence, list):
        return list(values)
    sequence.extend(values)
    return sequence
