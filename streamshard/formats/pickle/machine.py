"""The stack, the memo and the objects of a pickle that is being read, without running any of it."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from streamshard.errors import CorruptFileError
from streamshard.formats.pickle.hash_guard import HashGuard
from streamshard.formats.pickle.inert import ORDERED_DICT, SET, UNSET, Call, Global, Node
from streamshard.formats.pickle.opcode_arguments import PickleBytes

_LIMIT_NAME: Final = 1000
"""Letters of a module's and a class's name."""
_LIMIT_ARGUMENTS: Final = 100
"""Of a call that is looked at more closely."""
_HOLE: Final = object()
"""Stands in the memo where nothing was put."""

PersistentLoad = Callable[[Node], Node]
"""Returns what a persistent id stands for."""


class PickleMachine(PickleBytes):
    """What the opcodes of a pickle work on. None of its methods does more than its name says."""

    def __init__(self, data: bytes, start: int, persistent_load: PersistentLoad) -> None:
        super().__init__(data, start)
        self.stack: list[Node] = []
        """What lies above the last mark."""
        self.below: list[list[Node]] = []
        """What lies below each mark."""
        self.persistent_load = persistent_load
        self._memo: list[Node] = []
        self._holes = 0
        self._globals = {("collections", "OrderedDict"): ORDERED_DICT}
        self._guard = HashGuard(len(data))

    # Stack and memo ----------------------------------------------------------------------------

    def push(self, value: Node) -> None:
        """Put a value on top."""
        self.stack.append(value)

    def mark(self) -> None:
        """Begin a run of values."""
        self.below.append(self.stack)
        self.stack = []

    def pop_mark(self) -> list[Node]:
        """Take all values above the last mark."""
        values = self.stack
        self.stack = self.below.pop()
        return values

    def drop_mark(self) -> None:
        """Drop all values above the last mark."""
        self.pop_mark()

    def drop(self) -> None:
        """Drop what is on top; what a call that is dropped does to another is kept with that."""
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
            # It was made inside its own arguments, and is taken from there.
            lists = {id(arg) for arg in dropped.args if type(arg) is list}
            made.shares |= any(id(arg) in lists for arg in made.args[:_LIMIT_ARGUMENTS])

    def _gets_next(self) -> Node:
        """Look ahead at what the next opcode takes from the memo, if it does."""
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
        """Push what was put into the memo."""
        value = self._memo[index]
        if value is _HOLE:
            raise CorruptFileError(f"pickle takes what was never put into its memo, at {index}")
        self.stack.append(value)

    def put(self, index: int) -> None:
        """Remember what is on top."""
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
        """Remember what is on top under the next number."""
        self.put(len(self._memo) - self._holes)

    # Containers --------------------------------------------------------------------------------

    def push_tuple(self, made: tuple[Node, ...]) -> None:
        """Push a tuple."""
        if tuple in map(type, made):
            self._guard.weigh(made)
        self.stack.append(made)

    def small_tuple(self, count: int) -> None:
        """Make a tuple of what is on top."""
        made = tuple(self.stack[-count:])
        if len(made) < count:
            raise CorruptFileError("pickle makes a tuple of what is not there")
        del self.stack[-count:]
        self.push_tuple(made)

    def append(self, values: list[Node]) -> None:
        """Append to the list, or what is to be one, on top."""
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
            raise CorruptFileError("pickle adds members to what is no set")
        target.args[0].extend(values)

    def set_items(self, flat: list[Node]) -> None:
        """Set items of the dict, or what is to be one, on top."""
        target, keys, values = self.stack[-1], flat[::2], flat[1::2]
        if len(keys) != len(values):
            raise CorruptFileError("pickle sets a key without a value")
        if isinstance(target, dict):
            self._guard.check(target, keys)
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
        """Push a name; nothing is looked up."""
        found = self._globals.get((module, name))
        if found is None:
            found = self._globals[module, name] = _global(module, name)
        self.stack.append(found)

    def stack_name(self) -> None:
        """Push the name whose two parts are on top."""
        name, module = self.stack.pop(), self.stack.pop()
        if type(name) is not str or type(module) is not str:
            raise CorruptFileError("pickle names something by what is no name")
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
        """Push an instance as protocols 0 and 1 make it: without arguments, without __init__."""
        function, *args = parts
        self.stack.append(Call(function, tuple(args), new=not args))

    def named_instance(self) -> None:
        """Push an instance of a class that is named behind the opcode."""
        args = self.pop_mark()
        self.name(self.line(), self.line())
        self.instance([self.stack.pop(), *args])

    def build(self) -> None:
        """Set the state of the object on top."""
        state, target = self.stack.pop(), self.stack[-1]
        if type(target) is Call and target.state is UNSET:
            target.state = state
        elif type(target) is OrderedDict and isinstance(state, dict) and not vars(target):
            target.__dict__ = state  # to copy it for each of many would take their product
        else:
            raise CorruptFileError(f"pickle sets the state of a {type(target).__name__}")


def _global(module: str, name: str) -> Global:
    # A line break would end the name where protocol 2 writes it, and the rest would be opcodes.
    if "\n" in module + name or len(module) + len(name) > _LIMIT_NAME:
        raise CorruptFileError("pickle names something by what is no name")
    (module + name).encode()  # raises ValueError at what protocol 2 cannot write
    return Global(module, name)


def _extended(sequence: Sequence[Node], values: Iterable[Node]) -> Sequence[Node]:
    """Return a list with the values behind those of a sequence: the sequence itself if it can."""
    if not isinstance(sequence, list):
        return list(values)
    sequence.extend(values)
    return sequence
