"""Writes inert nodes as a pickle of protocol 2, the one that torch.save uses."""

import io
import pickle
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import RLock
from typing import Any, ClassVar, Final

from streamshard.errors import UnsupportedError
from streamshard.formats.pickle.inert import LIMIT_BYTES, ORDERED_DICT, UNSET, Call, Global, Node

_PythonPickler: Any = pickle._Pickler
"""The standard library's pickler in Python. The C pickler imports the names that it writes."""

_BY_VALUE: Final = frozenset({str, Global})
_PLAIN: Final = _BY_VALUE | {int, float, bool, type(None), list, tuple, dict, OrderedDict}
_GETATTR = Global("__builtin__", "getattr")
_NEWOBJ_EX = Global("copyreg", "__newobj_ex__")

_FRAMES: Final = 3000
"""Stack frames for the pickler, which takes about three per level of nesting."""
_LIMIT_LOCK: Final = RLock()
"""Guards Python's recursion limit, which all threads share."""


def dump(node: Node, persistent_id: Callable[[Node], Node | None]) -> bytes:
    """Serialize nodes as a pickle. Unpickling it makes the recorded calls.

    Equal strings and equal globals are written once, even if they are different objects, so that
    the bytes depend only on the value, and not on its origin. Nothing persistent stands for plain
    values and containers.
    """
    pickled: bytes | None = None
    with _LIMIT_LOCK:
        with suppress(RecursionError):
            pickled = _pickled(node, persistent_id)
        if pickled is None:
            with _room_to_recurse():
                pickled = _pickled(node, persistent_id)
    if len(pickled) > LIMIT_BYTES:
        message = f"training state takes {len(pickled):,} bytes as a pickle"
        raise UnsupportedError(f"{message}, and {LIMIT_BYTES:,} is most that is read")
    return pickled


def _pickled(node: Node, persistent_id: Callable[[Node], Node | None]) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, persistent_id).dump(node)
    return buffer.getvalue()


@contextmanager
def _room_to_recurse() -> Iterator[None]:
    """Give the pickler at least the same stack depth wherever it is called from.

    So a node that could be serialized when a run was planned can be serialized when it is written.
    The depth suffices for all that torch can save, whose pickler takes fewer frames per level.
    """
    depth, frame = 0, sys._getframe()
    while frame.f_back is not None:
        depth, frame = depth + 1, frame.f_back
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, depth + _FRAMES))
    try:
        yield
    except RecursionError as error:
        raise UnsupportedError("training state is nested too deeply") from error
    finally:
        sys.setrecursionlimit(before)


class _Pickler(_PythonPickler):  # type: ignore[misc]
    dispatch: ClassVar[dict[type, Any]] = dict(_PythonPickler.dispatch)

    def __init__(self, buffer: io.BytesIO, persistent_id: Callable[[Node], Node | None]) -> None:
        super().__init__(buffer, protocol=2)
        self.write = buffer.write  # there are no frames below protocol 4
        self.persistent_id = persistent_id
        self._unmade: set[int] = set()
        """Calls whose arguments are being written."""

    def save(self, node: Node, save_persistent_id: bool = True) -> None:
        """Write a node in fewer steps than the standard library does."""
        kind = type(node)
        held = self.memo.get(node if kind in _BY_VALUE else id(node))
        if held is not None:
            self.write(self.get(held[0]))
            return
        may_persist = save_persistent_id and kind not in _PLAIN
        identifier = self.persistent_id(node) if may_persist else None
        write_node = self.dispatch.get(kind)
        if identifier is not None:
            self.save_pers(identifier)
        elif write_node is not None:
            write_node(self, node)
        else:
            super().save(node, save_persistent_id)

    def memoize(self, node: Node) -> None:
        number = len(self.memo)
        self.write(pickle.BINPUT + bytes((number,)) if number < 256 else self.put(number))
        self.memo[node if type(node) in _BY_VALUE else id(node)] = number, node

    def _batch_appends(self, items: Sequence[Node]) -> None:
        """Write the items of a list, long lists of small integers in one go.

        Each rank of stages 1 and 2 saves a number for every parameter, nearly all of them 0.
        """
        for at in range(0, len(items), self._BATCHSIZE):
            batch = items[at : at + self._BATCHSIZE]
            if len(batch) < 2 or set(map(type, batch)) != {int} or not _are_bytes(batch):
                super()._batch_appends(batch)
                continue
            pairs = bytearray(pickle.BININT1 * (2 * len(batch)))
            pairs[1::2] = bytes(batch)
            self.write(pickle.MARK + pairs + pickle.APPENDS)

    def save_global_node(self, node: Global) -> None:
        head, _, tail = node.name.rpartition(".")
        if head:
            # Protocol 2 has no dotted names: a nested class is an attribute of its outer class.
            self.save(_GETATTR)
            self.save((Global(node.module, head), tail))
            self.write(pickle.REDUCE)
        else:
            self.write(pickle.GLOBAL + f"{node.module}\n{node.name}\n".encode())
        self.memoize(node)

    dispatch[Global] = save_global_node

    def save_call(self, node: Call) -> None:
        args = node.args
        if id(node) in self._unmade:
            # The object is in its own arguments: pickle builds the inner one completely, and uses
            # that. Sets, which are calls below protocol 4, are each built from a separate list.
            own = not node.shares
            args = tuple([list(arg) if own and type(arg) is list else arg for arg in args])
        self._unmade.add(id(node))
        if node.kwargs is None:
            self.save(node.function)
            self.save(args)
            self.write(pickle.NEWOBJ if node.new else pickle.REDUCE)
        else:
            # Protocol 2 has no NEWOBJ_EX either. This function does the same.
            self.save(_NEWOBJ_EX)
            self.save((node.function, args, node.kwargs))
            self.write(pickle.REDUCE)
        if id(node) in self.memo:
            self.write(pickle.POP + self.get(self.memo[id(node)][0]))
            return
        self.memoize(node)
        self._batch_appends(node.items)
        self._batch_setitems(node.entries)
        if node.setter is not None:
            for part in (node.setter, node, node.state):
                self.save(part)
            self.write(pickle.TUPLE2 + pickle.REDUCE + pickle.POP)
        elif node.state is not UNSET:
            self.save(node.state)
            self.write(pickle.BUILD)

    dispatch[Call] = save_call

    def save_ordered_dict(self, node: OrderedDict[Node, Node]) -> None:
        self.save(ORDERED_DICT)
        self.write(pickle.EMPTY_TUPLE + pickle.REDUCE)
        self.memoize(node)
        self._batch_setitems(list(node.items()))
        if vars(node):
            self.save(vars(node))
            self.write(pickle.BUILD)

    dispatch[OrderedDict] = save_ordered_dict


def _are_bytes(numbers: Sequence[int]) -> bool:
    return min(numbers) >= 0 and max(numbers) < 256
