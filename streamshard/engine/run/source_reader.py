"""Reads ranges of source files: checks recorded checksums, decodes, keeps a few files open."""

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from streamshard.checksums import crc32
from streamshard.engine.run.source_check import Ranges, ReadLog
from streamshard.errors import CorruptFileError, IntegrityError, SourceError
from streamshard.io import page_cache
from streamshard.io.entries import ahead_of, open_readable
from streamshard.io.files import require_same
from streamshard.io.memory_map import map_range
from streamshard.io.readable import OpenedFile
from streamshard.io.retry import FROM_OUTSIDE, ignored, try_again
from streamshard.model import BlockDigests, Computed, Encoded, SourceFile


class ReusableBuffer:
    """A buffer that grows to the largest requested size, in place of a new buffer each time.

    The system has to clear new memory, which can take longer than reading data into it.
    """

    def __init__(self) -> None:
        self._buffer = memoryview(b"")

    def __call__(self, nbytes: int) -> memoryview:
        """Return `nbytes` of memory with any content; memory returned before becomes invalid."""
        if len(self._buffer) < nbytes:
            self._buffer = memoryview(b"")  # free the old buffer before allocating a larger one
            self._buffer = memoryview(bytearray(nbytes + nbytes // 8))  # the next may be larger
        return self._buffer[:nbytes]


_OPEN_FILES: Final = 64
"""Source files that one worker keeps open. A run may have more sources than a process may open."""
_OPEN_TOGETHER: Final = 512
"""Source files that all workers keep open: half of the usual limit of a process."""


@dataclass(slots=True)
class _Last:
    """What was read last of a checkpoint's files, as the next read is likely from there too."""

    decoded: tuple[int, int, memoryview] = (-1, 0, memoryview(b""))
    """File that was decoded last, and what of its content, from which byte on."""
    content: ReusableBuffer = field(default_factory=ReusableBuffer)
    run: tuple[int, int, int] = (-1, 0, 0)
    """File, start and stop of the last consecutive reads."""
    block: tuple[int, int, memoryview] = (-1, -1, memoryview(b""))
    """File, number and content of the last block that was checked but only partly needed."""


class SourceReader:
    """Reads ranges of the source's files; each worker has its own reader.

    `drops_behind`: whether to drop data from the page cache after reading it, so that other
    programs keep their cached data.
    `workers`: number of workers; the more there are, the fewer files each keeps open.
    `stop`: if set, failed reads are not retried.
    `reads_once`: whether what is not read at once is not read at all; then it is not decoded.
    `log`: notes the checksums of what is read.
    """

    def __init__(
        self,
        files: Sequence[SourceFile],
        *,
        drops_behind: bool = False,
        workers: int = 1,
        stop: threading.Event | None = None,
        reads_once: bool = False,
        log: ReadLog | None = None,
    ) -> None:
        self._log = log
        self._reads_once = reads_once
        self._keeps_open = min(_OPEN_FILES, max(1, _OPEN_TOGETHER // workers))
        self._stop = stop
        computed = [file.decoder for file in files if isinstance(file.decoder, Computed)]
        self._firsts = computed[0].firsts if computed else (0,)
        self._last = [_Last() for _ in self._firsts]
        """One for each checkpoint among the files."""
        limits, sides = ahead_of(file.path for file in files), len(self._firsts)
        self.ahead = replace(limits, ahead=limits.ahead // sides, request=limits.request // sides)
        """How far to read ahead."""
        self._drops_behind = drops_behind
        self._files = files
        self._open: OrderedDict[int, OpenedFile] = OrderedDict()
        self._stored = ReusableBuffer()

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()

    def read_into(self, file: int, offset: int, view: memoryview) -> int | None:
        """Fill a view from a byte offset of a file's content; returns its CRC-32 if noted."""
        try:
            return try_again(lambda: self._fill(file, offset, view), self._stop)
        except OSError as error:
            message = f"cannot be read ({error.strerror})"
            raise SourceError(message, path=self._files[file].path) from error

    def read_all(self, ranges: Ranges, buffer: memoryview) -> None:
        """Read ranges through a buffer, for nothing but the checksums that are noted."""
        for file, start, stop, _ in ranges.tolist():
            for at in range(start, stop, len(buffer)):
                self.read_into(file, at, buffer[: stop - at])

    def map(
        self, file: int, offset: int, nbytes: int, *, is_private: bool, is_checked: bool
    ) -> memoryview:
        """Map a range of a file that holds its content as it is; see `map_range`.

        `is_checked`: whether the range is read first and compared with what was recorded of it, if
        anything was. No change after that is noticed.
        """
        digests = self._files[file].decoder
        if is_checked and isinstance(digests, BlockDigests):
            buffer = memoryview(bytearray(min(nbytes, digests.block_bytes)))
            for start in range(offset, offset + nbytes, digests.block_bytes):
                self.read_into(file, start, buffer[: offset + nbytes - start])
        try:
            return try_again(lambda: self._map(file, offset, nbytes, is_private), self._stop)
        except OSError as error:
            message = f"cannot be mapped ({error.strerror})"
            raise SourceError(message, path=self._files[file].path) from error

    def require_unchanged(self, file: int) -> None:
        """Open a file, without reading from it."""
        try:
            try_again(lambda: self._opened(file), self._stop)
        except OSError as error:
            message = f"cannot be opened ({error.strerror})"
            raise SourceError(message, path=self._files[file].path) from error

    def will_need(self, file: int, offset: int, nbytes: int) -> None:
        """Have the system read a range that is needed soon; its errors are ignored."""
        decoder = self._files[file].decoder
        if isinstance(decoder, Computed):
            for place in decoder.located(offset, nbytes):
                self.will_need(*place)
            return
        with ignored(FROM_OUTSIDE):  # the actual read retries, and reports the error
            self._opened(file).will_need(offset, nbytes)

    def _map(self, file: int, offset: int, nbytes: int, is_private: bool) -> memoryview:
        try:
            opened = self._opened(file)
            # It may have been open for long, and a map that leaves the file ends the process.
            require_same(self._files[file], opened.status())
            start = opened.origin + offset
            view = map_range(opened.descriptor, start, nbytes, is_private=is_private)
        except OSError:
            self._forget(file)
            raise
        if self._log is not None:
            self._log.add(file, offset, view)
        return view

    def _fill(self, file: int, offset: int, view: memoryview) -> int | None:
        decoder, checksum = self._files[file].decoder, None
        try:
            if decoder is None:
                self._read(file, offset, view)
                if self._log is not None:
                    checksum = self._log.add(file, offset, view)
            elif isinstance(decoder, BlockDigests):
                self._read_checked(file, decoder, offset, view)
            elif isinstance(decoder, Computed):
                decoder.fill(view, offset, self)
            else:
                self._decode(file, decoder, offset, view)
        except OSError:
            self._forget(file)
            raise
        return checksum

    def _decode(self, file: int, decoder: Encoded, offset: int, view: memoryview) -> None:
        """Fill a view with decoded content: where it lies, if that is just what is wanted."""
        last, end = self._last_of(file), offset + len(view)
        number, first, content = last.decoded
        if number != file or not first <= offset <= end <= first + len(content):
            last.decoded = (-1, 0, memoryview(b""))  # decoding overwrites the content
            first, content = decoder.decode(
                self._opened(file),
                self._stored,
                lambda nbytes: view if nbytes == len(view) else last.content(nbytes),
                (offset, end) if self._reads_once else None,
            )
            if content.obj is view.obj:
                return
            last.decoded = (file, first, content)
        view[:] = content[offset - first : end - first]

    def _forget(self, file: int) -> None:
        """Close a file: its server may no longer know it, so the next try opens it again."""
        if file in self._open:
            self._open.pop(file).close()

    def _last_of(self, file: int) -> _Last:
        return self._last[bisect_right(self._firsts, file) - 1]

    def _read(self, file: int, offset: int, view: memoryview) -> None:
        opened = self._opened(file)
        done = opened.read_into(view, offset)
        if done < len(view):
            source = self._files[file]
            message = (
                f"ends at byte {offset + done}; it had {source.nbytes} bytes "
                "when the run began. Something is changing the source: stop that and run again"
            )
            raise CorruptFileError(message, path=source.path)
        if self._drops_behind and len(view) >= page_cache.LEAST_BYTES:
            start = opened.origin + offset
            self._drop_read(file, opened.descriptor, start, start + len(view))

    def _drop_read(self, file: int, descriptor: int, offset: int, end: int) -> None:
        """Drop from the cache what this reader read; others may need the data before that."""
        last = self._last_of(file)
        before, begin, stop = last.run
        if (before, stop) != (file, offset):
            begin = offset
        last.run = (file, begin, end)
        page_cache.drop_behind(descriptor, begin, end)

    def _read_checked(
        self, file: int, digests: BlockDigests, offset: int, view: memoryview
    ) -> None:
        """Read a range in whole blocks, and check each against its checksum."""
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
        """Return a checked block that is only partly needed; the next read may need the rest."""
        last = self._last_of(file)
        content = last.block[2]
        if last.block[:2] != (file, block):
            content = content if len(content) == nbytes else memoryview(bytearray(nbytes))
            last.block = (-1, -1, content)
            self._read(file, block * digests.block_bytes, content)
            self._require_intact(file, digests, block, content)
            last.block = (file, block, content)
        return content

    def _require_intact(
        self, file: int, digests: BlockDigests, block: int, content: memoryview
    ) -> None:
        if crc32(content) != digests.crc32s[block]:
            start = block * digests.block_bytes
            message = f"bytes {start} to {start + len(content)} are damaged: they are not those"
            raise IntegrityError(f"{message} that were written", path=self._files[file].path)

    def _opened(self, file: int) -> OpenedFile:
        if file in self._open:
            self._open.move_to_end(file)
            return self._open[file]
        while len(self._open) >= self._keeps_open:
            self._open.popitem(last=False)[1].close()
        source = self._files[file]
        opened = open_readable(source.path, source)
        try:
            require_same(source, opened.status())
        except BaseException:
            opened.close()  # an open file would count as checked the next time
            raise
        self._open[file] = opened
        return opened
