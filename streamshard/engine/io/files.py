"""The one place that reads from sources and writes to targets."""

import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Protocol

from streamshard.engine.io import page_cache
from streamshard.engine.io.buffers import ReusableBuffer
from streamshard.engine.io.direct_io import BLOCK_BYTES, LEAST_BYTES
from streamshard.engine.io.memory_map import map_range
from streamshard.engine.io.retry import try_again
from streamshard.engine.numeric.checksums import crc32
from streamshard.errors import (
    CorruptFileError,
    IntegrityError,
    NoSpaceError,
    SourceError,
    TargetError,
)
from streamshard.model import BlockDigests, Memory, SourceFile
from streamshard.posix import open_to_read, read_into

_OPEN_FILES: Final = 64
"""Sources that one worker keeps open. A run has more sources than a process may have files."""
_OPEN_TOGETHER: Final = 512
"""Sources that all workers keep open: half of the files that a process mostly may have."""


class Encoded(Protocol):
    """A file that holds its content in another form, all of it or nothing."""

    def decode(self, descriptor: int, stored: Memory, content: Memory) -> memoryview:
        """Return the content, checked against what was recorded of it.

        Parameters
        ----------
        stored, content
            Give memory for what is in the file, and for what it holds.
        """


Decoder = BlockDigests | Encoded


class SourceReader:
    """Reads ranges of the source's files; one per worker, so that nothing is shared.

    Parameters
    ----------
    drops_behind
        Whether the system is to forget what was read, rather than what others have read.
    workers
        How many there are; the more, the fewer files each keeps open.
    stop
        Tells that there is no use in trying again.
    """

    def __init__(
        self,
        files: Sequence[SourceFile],
        decoders: Mapping[int, Decoder],
        *,
        drops_behind: bool = False,
        workers: int = 1,
        stop: threading.Event | None = None,
    ) -> None:
        self._keeps_open = min(_OPEN_FILES, max(1, _OPEN_TOGETHER // workers))
        self._stop = stop
        self._drops_behind = drops_behind
        self._files = files
        self._decoders = decoders
        self._open: OrderedDict[int, int] = OrderedDict()
        self._decoded: tuple[int, memoryview] = (-1, memoryview(b""))
        """File that was decoded last, and its content: the next read likely wants more of it."""
        self._stored, self._content = ReusableBuffer(), ReusableBuffer()
        self._run = (-1, 0, 0)
        """File and range of the last reads that followed each other."""
        self._kept: tuple[int, int, memoryview] = (-1, -1, memoryview(b""))
        """File and number of the block that was checked last without being wanted whole."""

    def close(self) -> None:
        """Close all files."""
        while self._open:
            os.close(self._open.popitem()[1])

    def read_into(self, file: int, offset: int, view: memoryview) -> None:
        """Fill a view from a byte offset of a file's content.

        Raises
        ------
        CorruptFileError
            The file ends too early, or is not the one that the plan was made for.
        IntegrityError
            The bytes are not those that were recorded.
        """
        try:
            try_again(lambda: self._fill(file, offset, view), self._stop)
        except OSError as error:
            message = f"{self._files[file].path}: cannot be read ({error.strerror})"
            raise SourceError(message) from error

    def map(
        self, file: int, offset: int, nbytes: int, *, is_private: bool, is_checked: bool
    ) -> memoryview:
        """Map a range of a file that holds its content as it is; see `map_range`.

        Parameters
        ----------
        is_checked
            Whether the range is read first and compared with what was recorded of it, if anything
            was. No change after that is noticed.

        Raises
        ------
        CorruptFileError
            The file is not the one that the plan was made for.
        IntegrityError
            The bytes are not those that were recorded.
        """
        digests = self._decoders.get(file)
        if is_checked and isinstance(digests, BlockDigests):
            buffer = memoryview(bytearray(min(nbytes, digests.block_bytes)))
            for start in range(offset, offset + nbytes, digests.block_bytes):
                self.read_into(file, start, buffer[: offset + nbytes - start])
        try:
            return try_again(lambda: self._map(file, offset, nbytes, is_private), self._stop)
        except OSError as error:
            message = f"{self._files[file].path}: cannot be mapped ({error.strerror})"
            raise SourceError(message) from error

    def will_need(self, file: int, offset: int, nbytes: int) -> None:
        """Have the system begin to read what will be asked for soon; a hint, which never fails.

        Raises
        ------
        CorruptFileError
            The file is not the one that the plan was made for.
        """
        with suppress(OSError):  # whoever reads it tries again, and says what is wrong
            page_cache.read_ahead(self._descriptor(file), offset, nbytes)

    def _map(self, file: int, offset: int, nbytes: int, is_private: bool) -> memoryview:
        try:
            descriptor = self._descriptor(file)
            # It may have been open for long, and a map that leaves the file ends the process.
            _require_same(self._files[file], os.fstat(descriptor))
            return map_range(descriptor, offset, nbytes, is_private=is_private)
        except OSError:
            self._forget(file)
            raise

    def _fill(self, file: int, offset: int, view: memoryview) -> None:
        decoder = self._decoders.get(file)
        try:
            if decoder is None:
                self._read(file, offset, view)
            elif isinstance(decoder, BlockDigests):
                self._read_checked(file, decoder, offset, view)
            else:
                if self._decoded[0] != file:
                    self._decoded = (-1, memoryview(b""))  # if decoding fails it is lost
                    self._decoded = (file, self._decode(file, decoder))
                view[:] = self._decoded[1][offset : offset + len(view)]
        except OSError:
            self._forget(file)
            raise

    def _forget(self, file: int) -> None:
        """Close a file: a server may not know any more what is open, however often one asks."""
        if file in self._open:
            os.close(self._open.pop(file))

    def _decode(self, file: int, decoder: Encoded) -> memoryview:
        return decoder.decode(self._descriptor(file), self._stored, self._content)

    def _read(self, file: int, offset: int, view: memoryview) -> None:
        descriptor = self._descriptor(file)
        done = read_into(descriptor, view, offset)
        if done < len(view):
            source = self._files[file]
            message = (
                f"{source.path}: ends at byte {offset + done}; it had {source.nbytes} bytes "
                "when the run began. Something is changing the source: stop that and run again"
            )
            raise CorruptFileError(message)
        if self._drops_behind and len(view) >= page_cache.LEAST_BYTES:
            self._drop_read(file, descriptor, offset, offset + len(view))

    def _drop_read(self, file: int, descriptor: int, offset: int, end: int) -> None:
        """Forget what was read, as far as this reader read it: others may want what lies before."""
        last, begin, stop = self._run
        if (last, stop) != (file, offset):
            begin = offset
        self._run = (file, begin, end)
        page_cache.drop_behind(descriptor, begin, end)

    def _read_checked(
        self, file: int, digests: BlockDigests, offset: int, view: memoryview
    ) -> None:
        """Read a range by whole blocks, and hold each against its checksum."""
        end, step = offset + len(view), digests.block_bytes
        for block in range(offset // step, -(-end // step)):
            start = block * step
            stop = min(start + step, digests.nbytes)
            lower, upper = max(start, offset), min(stop, end)
            if (lower, upper) == (start, stop):
                content = view[start - offset : stop - offset]
                self._read(file, start, content)
                self._require_intact(file, digests, block, content)
            else:
                content = self._block(file, digests, block, stop - start)
                view[lower - offset : upper - offset] = content[lower - start : upper - start]

    def _block(self, file: int, digests: BlockDigests, block: int, nbytes: int) -> memoryview:
        """Return a checked block of which only a part is wanted; the next read wants the rest."""
        if self._kept[:2] != (file, block):
            content = (
                self._kept[2] if len(self._kept[2]) == nbytes else memoryview(bytearray(nbytes))
            )
            self._kept = (-1, -1, content)
            self._read(file, block * digests.block_bytes, content)
            self._require_intact(file, digests, block, content)
            self._kept = (file, block, content)
        return self._kept[2]

    def _require_intact(
        self, file: int, digests: BlockDigests, block: int, content: memoryview
    ) -> None:
        if crc32(content) != digests.crc32s[block]:
            start = block * digests.block_bytes
            message = f"{self._files[file].path}: bytes {start} to {start + len(content)} are"
            raise IntegrityError(f"{message} damaged: they are not those that were written")

    def _descriptor(self, file: int) -> int:
        if file in self._open:
            self._open.move_to_end(file)
            return self._open[file]
        while len(self._open) >= self._keeps_open:
            os.close(self._open.popitem(last=False)[1])
        source = self._files[file]
        descriptor = open_to_read(source.path)
        try:
            _require_same(source, os.fstat(descriptor))
        except BaseException:
            os.close(descriptor)  # kept, it would pass for checked the next time
            raise
        self._open[file] = descriptor
        return descriptor


def require_unchanged(source: SourceFile) -> None:
    """Refuse a source file that is no longer what it was when the plan was made.

    Raises
    ------
    SourceError
        It is gone, or has another size or time of change.
    """
    try:
        stat = source.path.stat()
    except OSError as error:
        raise SourceError(f"{source.path}: gone during the run ({error.strerror})") from error
    _require_same(source, stat)


def _require_same(source: SourceFile, stat: os.stat_result) -> None:
    if (stat.st_size, stat.st_mtime_ns) != (source.nbytes, source.mtime_ns):
        message = (
            f"{source.path}: changed while it was being read ({source.nbytes} bytes when the run "
            f"began, {stat.st_size} now). Is the job still saving? Run again when it has finished"
        )
        raise CorruptFileError(message)


@contextmanager
def source_errors(path: Path) -> Iterator[None]:
    """Turn the system's refusal to read a source into an error that names it."""
    try:
        yield
    except OSError as error:
        place = error.filename or path
        raise SourceError(f"{place}: cannot be read ({error.strerror})") from error


@contextmanager
def target_errors(path: Path) -> Iterator[None]:
    """Turn the system's refusal to write a target into an error that names it."""
    try:
        yield
    except OSError as error:
        place = error.filename or path
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            message = f"{place}: no space left on the target's file system ({error.strerror})"
            raise NoSpaceError(f"{message}; free some and run the same command again") from error
        raise TargetError(f"{place}: cannot be written ({error.strerror})") from error


def open_target(path: Path, *, is_new: bool) -> int:
    """Open a file for writing at any offset; one that is new must not be there."""
    flags = os.O_RDWR | os.O_CLOEXEC
    if is_new:
        path.parent.mkdir(parents=True, exist_ok=True)
        flags |= os.O_CREAT | os.O_EXCL
    return os.open(path, flags, 0o666)


def write_all(descriptor: int, view: memoryview, offset: int) -> None:
    """Write all of a view at a byte offset."""
    while len(view):
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count


def write_blocks(descriptor: int, direct: int, view: memoryview, offset: int) -> None:
    """Write all of a view at a byte offset, whole blocks past the page cache if there are enough.

    Parameters
    ----------
    direct
        The file as `open_direct` has it; -1 if it has not.
    view
        Begins in memory as far behind a block's beginning as the offset is in the file.
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
        # A disk may take larger blocks only; so may the rest of what was cut short.
        if error.errno != errno.EINVAL:
            raise
        write_all(descriptor, view[start:stop], offset + start)
    write_all(descriptor, view[stop:], offset + stop)
