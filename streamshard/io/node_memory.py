"""Memory that processes of one machine fill and read together.

It has no name, neither in `/dev/shm` nor anywhere else: it is gone when the last process that has
it open ends, however that ends.
"""

import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from streamshard.io.memory_map import map_range
from streamshard.io.readable import read_into

_TOKEN_BYTES: Final = 16
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_PROCESSES: Final = Path("/proc/self/ns/pid")


@dataclass(frozen=True, slots=True)
class Offer:
    """What another process needs to open memory."""

    machine: tuple[object, ...]
    """Equal where processes see each other."""
    process: int
    descriptor: int
    token: bytes
    """What the memory begins with, as no other does."""


class NodeMemory:
    """Memory for some content, which as many parts fill as were agreed upon.

    Before the content stands a token, and for each part its place for the token once it is filled.
    So who opens other memory by mistake, or memory that others took for theirs, can tell.
    """

    def __init__(self, descriptor: int, token: bytes, parts: int) -> None:
        self._descriptor = descriptor
        self._token = token
        self._start = -(-(parts + 1) * _TOKEN_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE

    @classmethod
    def make(cls, parts: int, nbytes: int) -> Self:
        """Make memory; pages of it are taken when they are first touched."""
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no memory without a name")
        memory = cls(os.memfd_create("streamshard"), os.urandom(_TOKEN_BYTES), parts)
        try:
            os.truncate(memory._descriptor, memory._start + nbytes)
            os.pwrite(memory._descriptor, memory._token, 0)
        except OSError:  # the user's limit on the size of a file holds for memory too
            memory.close()
            raise
        return memory

    @classmethod
    def open(cls, offer: Offer, parts: int) -> Self:
        place = f"/proc/{offer.process}/fd/{offer.descriptor}"
        opened = cls(os.open(place, os.O_RDWR | os.O_CLOEXEC), offer.token, parts)
        try:
            opened._require_token(place)
        except OSError:
            opened.close()
            raise
        return opened

    def offer(self) -> Offer:
        machine = _BOOT.read_text(), os.uname().nodename, _PROCESSES.stat().st_ino, os.geteuid()
        return Offer(machine, os.getpid(), self._descriptor, self._token)

    def content(self) -> memoryview:
        return memoryview(mmap.mmap(self._descriptor, 0))[self._start :]

    def map(self, offset: int, nbytes: int) -> memoryview:
        """Map a range, to which a process may write what no other sees; see `map_range`."""
        return map_range(self._descriptor, self._start + offset, nbytes, is_private=True)

    def finish(self, part: int) -> None:
        os.pwrite(self._descriptor, self._token, (part + 1) * _TOKEN_BYTES)

    def has(self, parts: Iterable[int]) -> bool:
        return all(self._has_token(part + 1) for part in parts)

    def close(self) -> None:
        os.close(self._descriptor)

    def _require_token(self, place: str) -> None:
        if not self._has_token(0):
            raise OSError(f"{place} is not the memory that was offered")

    def _has_token(self, place: int) -> bool:
        found = memoryview(bytearray(_TOKEN_BYTES))
        read_into(self._descriptor, found, place * _TOKEN_BYTES)
        return found == self._token
