"""Bytes that can be read at any offset, whatever holds them."""

import os
from typing import Protocol

from streamshard.io.posix import read_into


class Readable(Protocol):
    """A file's bytes."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""

    def read_at(self, offset: int, count: int) -> bytes:
        """Read bytes from an offset; fewer than requested only at the end of the file."""


class ReadableFile:
    """The bytes of an open file."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.nbytes = os.fstat(descriptor).st_size
        """Size in bytes."""

    def read_at(self, offset: int, count: int) -> bytes:
        """Read bytes from an offset; fewer than requested only at the end of the file."""
        data = bytearray(max(0, min(count, self.nbytes - offset)))
        done = read_into(self._descriptor, memoryview(data), offset)
        return bytes(data[:done])
