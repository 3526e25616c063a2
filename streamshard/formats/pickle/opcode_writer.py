"""Writes a pickle of protocol 4 opcode by opcode, for files whose nodes would fill the memory.

`inert_dump` writes a tree of nodes that exists. Here the caller writes the parts in the order in
which the unpickler puts them on its stack, and nothing is kept but the numbers of what is memoized.
"""

import pickle
import struct
from collections.abc import Hashable, Iterator
from typing import Final

from streamshard.formats.pickle.inert import Global

_BATCH: Final = 1000
"""Entries that go into a dict at once, as many as Python's own pickler puts."""


class OpcodeWriter:
    """A pickle while it is written."""

    def __init__(self) -> None:
        self._data = bytearray(pickle.PROTO + b"\x04")
        self._memo: dict[Hashable, int] = {}
        self._tuple = _Ended(self._data, pickle.TUPLE)
        self._list = _Ended(self._data, pickle.APPENDS)
        self._call = _Ended(self._data, pickle.TUPLE + pickle.REDUCE)
        self._object = _Ended(self._data, pickle.BUILD)
        self._dict = _Ended(self._data, pickle.SETITEMS)

    def done(self) -> bytes:
        """End the pickle, and return it."""
        self._data += pickle.STOP
        return bytes(self._data)

    def recall(self, key: Hashable) -> bool:
        """Put a memoized part on the stack again; returns whether there is one of this key."""
        number = self._memo.get(key)
        if number is None:
            return False
        if number < 256:
            self._data += pickle.BINGET + bytes((number,))
        else:
            self._data += pickle.LONG_BINGET + struct.pack("<I", number)
        return True

    def memoize(self, key: Hashable) -> None:
        """Memoize the part that was written last."""
        self._memo[key] = len(self._memo)
        self._data += pickle.MEMOIZE

    def text(self, value: str) -> None:
        if not self.recall(value):
            encoded = value.encode("utf-8", "surrogatepass")
            if len(encoded) < 256:
                self._data += pickle.SHORT_BINUNICODE + bytes((len(encoded),)) + encoded
            else:
                self._data += pickle.BINUNICODE + struct.pack("<I", len(encoded)) + encoded
            self.memoize(value)

    def number(self, value: int) -> None:
        """Write an integer that is not negative."""
        if value < 1 << 8:
            self._data += pickle.BININT1 + bytes((value,))
        elif value < 1 << 31:
            self._data += pickle.BININT + struct.pack("<i", value)
        else:
            self._data += pickle.LONG1 + bytes((9,)) + struct.pack("<Qx", value)

    def none(self) -> None:
        self._data += pickle.NONE

    def false(self) -> None:
        self._data += pickle.NEWFALSE

    def name(self, name: Global) -> None:
        if not self.recall(name):
            self.text(name.module)
            self.text(name.name)
            self._data += pickle.STACK_GLOBAL
            self.memoize(name)

    def in_tuple(self) -> "_Ended":
        """Make a tuple of the parts that are written inside."""
        self._data += pickle.MARK
        return self._tuple

    def in_list(self) -> "_Ended":
        """Make a list of the parts that are written inside."""
        self._data += pickle.EMPTY_LIST + pickle.MARK
        return self._list

    def call(self, function: Global) -> "_Ended":
        """Make a call; inside, its arguments are written."""
        self.name(function)
        self._data += pickle.MARK
        return self._call

    def new_object(self, kind: Global) -> "_Ended":
        """Make a new object; inside, its state is written."""
        self.name(kind)
        self._data += pickle.EMPTY_TUPLE + pickle.NEWOBJ
        return self._object

    def in_dict(self) -> "_Ended":
        """Make a dict of few entries; inside, keys and values are written in turn."""
        self._data += pickle.EMPTY_DICT + pickle.MARK
        return self._dict

    def in_large_dict(self, count: int) -> Iterator[None]:
        """Make a dict of many entries; each turn of a loop writes one key and its value."""
        self._data += pickle.EMPTY_DICT
        for number in range(count):
            if number % _BATCH == 0:
                self._data += pickle.MARK
            yield
            if number % _BATCH == _BATCH - 1 or number == count - 1:
                self._data += pickle.SETITEMS


class _Ended:
    """Writes what ends a part where a `with` statement ends; it has no state of its own."""

    def __init__(self, data: bytearray, end: bytes) -> None:
        self._data, self._end = data, end

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        self._data += self._end
