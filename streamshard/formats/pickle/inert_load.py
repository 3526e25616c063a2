"""Reads pickles into inert nodes: the opcodes of protocols 0-5, with effects on our own stack only.

Nothing is imported or called: a `Global` or a `Call` records what the pickle would import or call.
The pickle's size bounds memory: each byte makes some 80 bytes at most.
"""

import struct
from collections.abc import Callable
from typing import Final

from streamshard.errors import CorruptFileError, SourceError
from streamshard.formats.pickle.inert import FROZENSET, SET, Call, Node
from streamshard.formats.pickle.machine import PersistentLoad, PickleMachine
from streamshard.formats.pickle.opcode_arguments import EndedTooEarlyError


def load(data: bytes, persistent_load: PersistentLoad) -> Node:
    """Read one pickle into inert nodes. Bytes after it are ignored."""
    return run(PickleMachine(data, 0, persistent_load))


def run(machine: PickleMachine) -> Node:
    """Run a pickle to its end and return the node that it builds."""
    try:
        return _run(machine)
    except SourceError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError, struct.error) as error:
        if machine.at >= len(machine.data):
            raise EndedTooEarlyError("pickle has no end") from error
        message = f"not a readable pickle ({type(error).__name__} before byte {machine.at})"
        raise CorruptFileError(message) from error


def _run(machine: PickleMachine) -> Node:
    data, end, table = machine.data, len(machine.data), _TABLE
    while True:
        at = machine.at
        if at >= end:
            raise EndedTooEarlyError("pickle has no end")
        machine.at = at + 1
        code = data[at]
        if code == _STOP:
            result = machine.stack.pop()
            if machine.stack or machine.below:
                raise CorruptFileError("pickle leaves values behind")
            return result
        table[code](machine)


def _refuse(machine: PickleMachine) -> None:
    at = machine.at - 1
    code = machine.data[at : at + 1]
    raise CorruptFileError(f"pickle opcode {code!r} at byte {at} is not accepted")


_STOP: Final = ord(".")
_OPCODES: Final[dict[str, Callable[[PickleMachine], None]]] = {
    "\x80": PickleMachine.protocol,
    "\x95": PickleMachine.frame,
    "(": PickleMachine.mark,
    "0": PickleMachine.drop,
    "1": PickleMachine.drop_mark,
    "2": lambda m: m.push(m.stack[-1]),
    "N": lambda m: m.push(None),
    "\x88": lambda m: m.push(True),
    "\x89": lambda m: m.push(False),
    "I": lambda m: m.push(m.line_integer()),
    "J": lambda m: m.push(m.integer(4)),
    "K": PickleMachine.small_integers,
    "M": lambda m: m.stack.append(m.byte() | m.byte() << 8),
    "L": lambda m: m.push(int(m.line().rstrip("L"))),
    "\x8a": lambda m: m.push(m.integer(m.byte())),
    "\x8b": lambda m: m.push(m.integer(m.number())),
    "F": lambda m: m.push(float(m.line())),
    "G": lambda m: m.push(m.real()),
    "S": lambda m: m.push(m.quoted()),
    "T": lambda m: m.push(m.take(m.number()).decode("latin1")),
    "U": lambda m: m.push(m.take(m.byte()).decode("latin1")),
    "V": lambda m: m.push(m.raw_line().decode("raw_unicode_escape")),
    "X": lambda m: m.stack.append(m.text(m.number())),
    "\x8c": lambda m: m.stack.append(m.text(m.byte())),
    "\x8d": lambda m: m.push(m.text(m.long_number())),
    "B": lambda m: m.push(m.take(m.number())),
    "C": lambda m: m.push(m.take(m.byte())),
    "\x8e": lambda m: m.push(m.take(m.long_number())),
    "\x96": lambda m: m.push(bytearray(m.take(m.long_number()))),
    ")": lambda m: m.stack.append(()),
    "t": lambda m: m.push_tuple(tuple(m.pop_mark())),
    "\x85": lambda m: m.small_tuple(1),
    "\x86": lambda m: m.small_tuple(2),
    "\x87": lambda m: m.small_tuple(3),
    "]": lambda m: m.push([]),
    "l": lambda m: m.push(m.pop_mark()),
    "a": lambda m: m.append([m.stack.pop()]),
    "e": lambda m: m.append(m.pop_mark()),
    "}": lambda m: m.push({}),
    "d": PickleMachine.dictionary,
    "s": lambda m: m.set_items([m.stack.pop(), m.stack.pop()][::-1]),
    "u": lambda m: m.set_items(m.pop_mark()),
    "\x8f": lambda m: m.push(Call(SET, ([],))),
    "\x90": PickleMachine.add,
    "\x91": lambda m: m.push(Call(FROZENSET, (m.pop_mark(),))),
    "c": lambda m: m.name(m.line(), m.line()),
    "\x93": PickleMachine.stack_name,
    "R": lambda m: m.call(),
    "\x81": lambda m: m.call(new=True),
    "\x92": lambda m: m.call(new=True, kwargs=m.stack.pop()),
    "i": PickleMachine.named_instance,
    "o": lambda m: m.instance(m.pop_mark()),
    "b": PickleMachine.build,
    "P": lambda m: m.push(m.persistent_load(m.line())),
    "Q": lambda m: m.push(m.persistent_load(m.stack.pop())),
    "g": lambda m: m.get(m.line_index()),
    "h": lambda m: m.get(m.byte()),
    "j": lambda m: m.get(m.number()),
    "p": lambda m: m.put(m.line_index()),
    "q": lambda m: m.put(m.byte()),
    "r": lambda m: m.put(m.number()),
    "\x94": PickleMachine.memoize,
}
"""All opcodes but STOP. Those for the extension registry and out-of-band buffers are refused."""
_TABLE: Final = [_OPCODES.get(chr(code), _refuse) for code in range(256)]
