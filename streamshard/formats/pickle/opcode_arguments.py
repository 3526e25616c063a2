"""Reads the arguments of pickle opcodes from untrusted bytes."""

import re
import struct
from typing import Final

from streamshard.errors import CorruptFileError, UnsupportedError

_LIMIT_INTEGER_BYTES: Final = 1024
"""Python refuses to print much larger integers, and some of its operations on them are slow."""
_LIMIT_LINE: Final = 4096
"""Most digits or letters of a name or a number that is written as a line of text."""
_UNSIGNED_32: Final = struct.Struct("<I").unpack_from
_ESCAPE: Final = re.compile(r"\\(x[0-9a-fA-F]{2}|.?)", re.DOTALL)
_ESCAPED: Final = {"\\": "\\", "'": "'", '"': '"', "n": "\n", "r": "\r", "t": "\t"}


class EndedTooEarlyError(CorruptFileError):
    """The bytes end before their content is complete."""


class PickleBytes:
    """A position in a pickle's bytes.

    The position moves before a number is read. If too few bytes are left, the position is then
    past the end, which distinguishes a truncated pickle from an invalid one.
    """

    def __init__(self, data: bytes, start: int) -> None:
        self.data = data
        self.at = start
        """Offset of the next byte to read."""

    def byte(self) -> int:
        """Read an unsigned number of one byte."""
        at = self.at
        self.at = at + 1
        return self.data[at]

    def number(self) -> int:
        """Read an unsigned number of four bytes."""
        at = self.at
        self.at = at + 4
        found: int = _UNSIGNED_32(self.data, at)[0]
        return found

    def long_number(self) -> int:
        """Read an unsigned number of eight bytes."""
        return int.from_bytes(self.take(8), "little")

    def take(self, count: int) -> bytes:
        at = self.at
        end = at + count
        if end > len(self.data):
            message = f"pickle asks for {count} bytes where {max(len(self.data) - at, 0)} are left"
            raise EndedTooEarlyError(message)
        self.at = end
        return self.data[at:end]

    def integer(self, count: int) -> int:
        """Read a signed number of any width."""
        if count > _LIMIT_INTEGER_BYTES:
            raise UnsupportedError(f"pickle holds an integer of {count:,} bytes")
        return int.from_bytes(self.take(count), "little", signed=True)

    def real(self) -> float:
        found: float = struct.unpack(">d", self.take(8))[0]
        return found

    def text(self, count: int) -> str:
        return self.take(count).decode("utf-8", "surrogatepass")

    def raw_line(self) -> bytes:
        """Read up to the end of the line."""
        end = self.data.find(b"\n", self.at)
        if end < 0:
            raise EndedTooEarlyError("pickle has a line without an end")
        text = self.data[self.at : end]
        self.at = end + 1
        return text

    def line(self) -> str:
        """Read a name or a number that is written as text."""
        text = self.raw_line()
        if len(text) > _LIMIT_LINE:
            raise UnsupportedError(f"pickle has a name or number of {len(text):,} letters")
        return text.decode()

    def line_integer(self) -> int | bool:
        """Read an integer of protocol 0, which writes booleans as the integers 00 and 01."""
        text = self.line()
        return {"00": False, "01": True}[text] if text in ("00", "01") else int(text)

    def line_index(self) -> int:
        text = self.line()
        if not text.isdecimal():
            raise CorruptFileError(f"pickle numbers its memo by {text!r:.20}")
        return int(text)

    def quoted(self) -> str:
        """Read a quoted string of Python 2 as text."""
        text = self.raw_line().decode("latin1").strip()
        if len(text) < 2 or text[0] != text[-1] or text[0] not in "'\"":
            raise CorruptFileError("pickle holds an unquoted string")
        return _ESCAPE.sub(_unescape, text[1:-1])

    def frame(self) -> None:
        if self.long_number() > len(self.data) - self.at:
            raise EndedTooEarlyError("pickle frame reaches past the end")

    def protocol(self) -> None:
        version = self.byte()
        if version > 5:
            raise CorruptFileError(f"pickle protocol {version} is newer than 5")


def _unescape(match: re.Match[str]) -> str:
    text = match[1]
    if text in _ESCAPED:
        return _ESCAPED[text]
    if len(text) < 3:
        raise CorruptFileError(f"pickle holds a string with {match[0]!r} in it")
    return chr(int(text[1:], 16))
