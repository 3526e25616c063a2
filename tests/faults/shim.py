"""The library that stands between a process and libc: compiled, and armed in a child."""

import ctypes
import enum
import errno
import mmap
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, Self

# The numbers below are those of shim.c.


class Side(enum.IntFlag):
    """What a call is on."""

    SOURCE = 1
    TARGET = 2


class Kind(enum.IntFlag):
    """What a call does; one call may be of several kinds."""

    READ = 1
    WRITE = 2
    LOOK = 4
    """Asks for attributes, names, or a descriptor to read with."""
    MAKE = 8
    DROP = 16
    CHANGE = 32
    """Changes attributes, or asks for a descriptor to write with."""
    SYNC = 64
    LOCK = 128
    HINT = 256
    RESERVE = 512
    """Takes space without content: fallocate, ftruncate."""
    CLOSE = 1024
    EXCHANGE = 2048
    """A rename in a way that not every file system knows."""
    NO_ATIME = 4096
    """Opens in a way that only a file's owner may."""


class Action(enum.IntEnum):
    """What happens at a call."""

    PASS = 0
    FAIL = 1
    SHORT = 2
    DIE_BEFORE = 3
    DIE_AFTER = 4
    KILL_BEFORE = 5
    KILL_AFTER = 6
    STOP = 7
    """The process is stopped before the call, as by Ctrl-Z, until it is sent on."""


class Option(enum.IntFlag):
    """What else is unlike a usual run."""

    HURRY = 1
    """Whatever waits waits for a small part of that time."""
    FOREIGN = 2
    """The target says that it lies on a network file system."""


NO_OPTION: Final = Option(0)
NO_KIND: Final = Kind(0)
DIED: Final = 99
"""Exit code of a process that died at a call without a signal."""

_RECORDS: Final = 1 << 15
_CONTENT_BYTES: Final = 32 << 20
_SOURCE: Final = Path(__file__).with_name("shim.c")


class _Header(ctypes.Structure):
    _fields_ = (
        ("count", ctypes.c_int64),
        ("fired", ctypes.c_int64),
        ("slept", ctypes.c_int64),
        ("failed", ctypes.c_int64),
        ("written", ctypes.c_int64),
        ("capacity", ctypes.c_int64),
    )


class _Record(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char * 24),
        ("side", ctypes.c_int32),
        ("kind", ctypes.c_int32),
        ("error", ctypes.c_int32),
        ("is_done", ctypes.c_int32),
        ("inode", ctypes.c_int64),
        ("offset", ctypes.c_int64),
        ("length", ctypes.c_int64),
        ("result", ctypes.c_int64),
        ("kept", ctypes.c_int64),
        ("made", ctypes.c_int64),
        ("mode", ctypes.c_int64),
        ("path", ctypes.c_char * 400),
        ("other", ctypes.c_char * 400),
    )


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a process to the file system, as it was recorded."""

    number: int
    name: str
    side: Side
    kind: Kind
    path: str
    other: str
    """Of a rename or a link what it made; else empty."""
    inode: int
    offset: int
    """Bytes; of an open its flags."""
    length: int
    """Bytes asked for."""
    result: int
    error: int
    is_done: bool
    """Whether it returned."""
    made: int = 0
    """Inode to which a name leads that was made or changed; like `content` only if asked for."""
    mode: int = 0
    """Mode of that."""
    content: str | None = None
    """What was written, in hexadecimal digits; None if it is not known."""

    def __str__(self) -> str:
        size = f", {self.length} at {self.offset}" if self.length else ""
        other = f" -> {self.other}" if self.other else ""
        if not self.is_done:
            told = "never returned"
        elif self.error and self.result < 0:
            told = errno.errorcode.get(self.error, str(self.error))
        else:
            told = str(self.result)
        return f"#{self.number} {self.name}({self.path}{other}{size}) = {told}"

    def to_list(self) -> list[str | int | bool | None]:
        """Spell all fields in order, for another process."""
        return [getattr(self, field.name) for field in fields(self)]

    @classmethod
    def of(cls, values: list[Any]) -> Self:
        """Read what another process has spelled."""
        call = dict(zip((field.name for field in fields(cls)), values, strict=True))
        call["side"], call["kind"] = Side(int(call["side"])), Kind(int(call["kind"]))
        return cls(**call)


@dataclass(frozen=True, slots=True)
class Arming:
    """Which call is to have what happen to it."""

    at: int
    """Number of the first call that may."""
    action: Action
    error: int
    kinds: Kind
    sides: Side
    onward: Kind
    """Kinds of the calls that fail as well from there on."""


NOTHING: Final = Arming(1 << 40, Action.PASS, 0, NO_KIND, Side(0), NO_KIND)


def compile_shim(directory: Path) -> Path:
    """Compile the library into a directory; returns it.

    Raises
    ------
    FileNotFoundError
        There is no C compiler.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise FileNotFoundError("no C compiler (cc) to make the library that injects faults")
    library = directory / "shim.so"
    options = ("-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC")
    command = [compiler, *options, "-o", str(library), str(_SOURCE), "-ldl"]
    subprocess.run(command, check=True)
    return library


class Shim:
    """The library in a process that it was preloaded into, and memory shared with children."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(os.environ["LD_PRELOAD"])
        size = ctypes.sizeof(_Header) + _RECORDS * ctypes.sizeof(_Record)
        self._memory = mmap.mmap(-1, size)
        self._header = _Header.from_buffer(self._memory)
        self._records = (_Record * _RECORDS).from_buffer(self._memory, ctypes.sizeof(_Header))
        address = ctypes.addressof(self._header)
        self._library.shim_share(ctypes.c_void_p(address), ctypes.c_int64(_RECORDS))
        self._content = mmap.mmap(-1, _CONTENT_BYTES)

    def keep(self) -> None:
        """Keep what this process will write, once it is armed."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._content))
        self._library.shim_keep(ctypes.c_void_p(address), ctypes.c_int64(_CONTENT_BYTES))

    def reset(self) -> None:
        """Forget the last child's calls."""
        self._header.count, self._header.fired, self._header.slept = 0, -1, 0
        self._header.failed, self._header.written = 0, 0

    def arm(self, source: Path, target: Path, arming: Arming, options: Option) -> None:
        """Count this process's calls from here on; there is no way back."""
        self._library.shim_arm(
            os.fsencode(source),
            os.fsencode(target),
            ctypes.c_int64(arming.at),
            int(arming.action),
            arming.error,
            int(arming.kinds),
            int(arming.sides),
            int(arming.onward),
            int(options),
        )

    def set_only(self, options: Option) -> None:
        """Be unlike a usual run, where that takes no counting of calls."""
        self._library.shim_set(int(options))

    def set_clock(self, ahead_seconds: float) -> None:
        """Let this process's clock be ahead, or behind; there is no way back."""
        self._library.shim_clock(ctypes.c_int64(int(ahead_seconds * 1e9)))

    @property
    def count(self) -> int:
        """Calls of the last child that was armed."""
        return int(self._header.count)

    @property
    def slept(self) -> float:
        """Seconds that it asked to wait."""
        return float(self._header.slept) / 1e9

    @property
    def failed(self) -> Kind:
        """Kinds of all the calls that were made to fail."""
        return Kind(self._header.failed)

    @property
    def written(self) -> int:
        """Bytes that went into files of the target."""
        return int(self._header.written)

    @property
    def fired(self) -> Call | None:
        """The call at which it happened, if it did."""
        number = int(self._header.fired)
        if number >= _RECORDS:
            raise OverflowError(f"call {number}, and room for {_RECORDS}")
        return self._call(number) if number >= 0 else None

    def calls(self) -> Iterator[Call]:
        """Yield all calls of the last child, in the order in which they began."""
        if self.count > _RECORDS:
            raise OverflowError(f"{self.count} calls, and room for {_RECORDS}")
        yield from map(self._call, range(self.count))

    def _call(self, number: int) -> Call:
        record = self._records[number]
        return Call(
            number=number,
            name=record.name.decode(),
            side=Side(record.side),
            kind=Kind(record.kind),
            path=os.fsdecode(record.path),
            other=os.fsdecode(record.other),
            inode=record.inode,
            offset=record.offset,
            length=record.length,
            result=record.result,
            error=record.error,
            is_done=bool(record.is_done),
            made=record.made,
            mode=record.mode,
            content=None if record.kept < 0 else self._written(record.kept, record.result),
        )

    def _written(self, start: int, nbytes: int) -> str:
        return self._content[start : start + nbytes].hex()
