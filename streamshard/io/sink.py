"""Files that are being written. All errors are OSError.

Files of local directories can be written at any offset; objects only grow at their end, and exist
when they are complete.
"""

import errno
import os
from abc import ABC, abstractmethod
from pathlib import Path

from streamshard.io.writable import (
    BLOCK_BYTES,
    LEAST_BYTES,
    create,
    open_direct,
    open_to_write,
    write_all,
)


class Sink(ABC):
    """A file that is being written, perhaps by several workers at a time."""

    version = ""
    """Etag of a complete object; empty for a local file."""
    only_grows = False
    """Whether bytes can only be written after those before them."""
    has_zeros = False
    """Whether zeros are read where nothing is written."""
    block_bytes = 1
    """Divisor by which a view in memory should be as far from a boundary as in the file."""
    descriptor = -1
    """Descriptor, for hints about the page cache; -1 if the file is not local."""

    @property
    def takes_any_view(self) -> bool:
        """Whether a local file is written from anywhere as well as from a buffer."""
        return self.block_bytes == 1 and self.descriptor >= 0

    @abstractmethod
    def write(self, view: memoryview, offset: int) -> None:
        """Write all of a view at an offset; once more does no harm."""

    def finish(self, mode: int | None) -> None:  # noqa: B027
        """Complete the file, with permission bits where they matter; a part needs nothing."""

    def close(self) -> None:  # noqa: B027
        """Stop writing, unless that is done; what is not complete is of no use to readers."""


class LocalSink(Sink):
    """A local file, written at any offset; large writes go past the page cache if they can."""

    has_zeros = True

    def __init__(self, descriptor: int, direct: int = -1) -> None:
        self.descriptor = descriptor
        self.block_bytes = BLOCK_BYTES if direct >= 0 else 1
        self._direct = direct

    def write(self, view: memoryview, offset: int) -> None:
        write_blocks(self.descriptor, self._direct, view, offset)

    def sync(self) -> None:
        os.fsync(self.descriptor)

    def finish(self, mode: int | None) -> None:
        if mode is not None:
            os.fchmod(self.descriptor, mode)
        self.close()

    def close(self) -> None:
        # Forgotten first: a descriptor is closed even if that reports an error.
        both, self.descriptor, self._direct = (self.descriptor, self._direct), -1, -1
        for descriptor in both:
            if descriptor >= 0:
                os.close(descriptor)


def open_to_fill(path: Path, *, is_direct: bool) -> LocalSink:
    descriptor = open_to_write(path, os.O_RDWR)
    return LocalSink(descriptor, open_direct(path, descriptor) if is_direct else -1)


class InnerPages(Sink):
    """Writes only the whole pages of a part of a new file, and keeps the bytes at its ends.

    The page between two parts would have two writers. Over NFS, a machine may write back a page of
    which it changed a part, as a whole and with what the rest was before.

    `start` and `stop`: the part of the file.
    `page_bytes`: largest page of all machines that write.
    """

    has_zeros = True

    def __init__(self, sink: LocalSink, start: int, stop: int, page_bytes: int) -> None:
        self._sink = sink
        self.block_bytes, self.descriptor = sink.block_bytes, sink.descriptor
        self._start = -(-start // page_bytes) * page_bytes
        self._stop = stop // page_bytes * page_bytes
        if self._start >= self._stop:
            self._start = self._stop = stop
        self.ends: list[tuple[int, bytes]] = []
        """(byte offset, bytes) of what is left to write."""

    def write(self, view: memoryview, offset: int) -> None:
        """Write what is in whole pages of a view, and keep the rest; once more does no harm."""
        end = offset + len(view)
        start, stop = max(offset, self._start), min(end, self._stop)
        if start < stop:
            self._sink.write(view[start - offset : stop - offset], start)
        for first, last in ((offset, min(end, self._start)), (max(offset, self._stop), end)):
            if first < last:
                self.ends.append((first, bytes(view[first - offset : last - offset])))

    def close(self) -> None:
        self.descriptor = -1
        self._sink.close()


def open_target(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    return create(path, os.O_RDWR)


def write_blocks(descriptor: int, direct: int, view: memoryview, offset: int) -> None:
    """Write all of a view at a byte offset; enough whole blocks are written past the page cache.

    `direct`: descriptor from `open_direct`; -1 if there is none.
    `view`: its distance in memory from a block boundary equals that of the offset in the file.
    """
    start = -offset % BLOCK_BYTES
    stop = max(start, len(view) - (offset + len(view)) % BLOCK_BYTES)
    if direct < 0 or stop - start < LEAST_BYTES:
        write_all(descriptor, view, offset)
        return
    write_all(descriptor, view[:start], offset)
    try:
        write_all(direct, view[start:stop], offset + start)
    except OSError as error:
        # The disk may need larger blocks, or a short write may have ended within a block.
        if error.errno != errno.EINVAL:
            raise
        write_all(descriptor, view[start:stop], offset + start)
    write_all(descriptor, view[stop:], offset + stop)


class AppendedFile:
    """A file that exists and grows at its end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = -1

    def open(self) -> None:
        """Open the file; before that, nothing can be appended."""
        self._descriptor = open_to_write(self._path, os.O_WRONLY | os.O_APPEND)

    def append(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._descriptor, data) :]

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
