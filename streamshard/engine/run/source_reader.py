"""Reads ranges of source files: checks recorded checksums, decodes, keeps a few files open."""

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from streamshard.checksums import crc32
from streamshard.engine.run.source_check import Ranges, ReadLog
from streamshard.errors import CorruptFileError, IntegrityError, SourceError
from streamshard.io import page_cache
from streamshard.io.entries import ahead_of, open_readable
from streamshard.io.files import require_same, source_errors
from streamshard.io.memory_map import LEAST_BYTES, MOST_BYTES, FileMap, map_to_read
from streamshard.io.readable import OpenedFile
from streamshard.io.retry import FROM_OUTSIDE, ignored, try_again
from streamshard.model import BlockDigests, Computed, Encoded, SourceFile

Checked = tuple[memoryview, int | None]
"""Bytes, and their CRC-32 if it was computed to check them."""


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
    `maps`: whether to look at files where they are mapped; call `settle` after each job then.
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
        maps: bool = False,
    ) -> None:
        self._log = log
        self._maps = maps
        self._reads_once = reads_once
        self._keeps_open = min(_OPEN_FILES, max(1, _OPEN_TOGETHER // workers))
        self._stop = stop
        computed = [file.decoder for file in files if isinstance(file.decoder, Computed)]
        self._firsts = computed[0].firsts if computed else (0,)
        self._last = [_Last() for _ in self._firsts]
        """One for each checkpoint among the files."""
        limits, sides = ahead_of(file.path for file in files), len(self._firsts)
        self.ahead = replace(limits, ahead=limits.ahead // sides, request=limits.request // sides)
        self._drops_behind = drops_behind
        self._files = files
        self._open: OrderedDict[int, OpenedFile] = OrderedDict()
        self._windows: dict[int, FileMap | None] = {}
        """Maps of open files; None for one that is to be read."""
        self._looked_at: set[int] = set()
        """Files that were looked at where they are mapped, since `settle`."""
        self._shown: int | None = None
        """The file of the window that is in use."""
        self._stored = ReusableBuffer()

    def close(self) -> None:
        self._looked_at.clear()
        for file in [*self._open]:
            self._forget(file)

    def settle(self) -> None:
        """Let go of what was returned, and refuse it if a file changed until now.

        A file that is cut off within a page reads as zeros past its end, where it is mapped.
        """
        self._release()
        while self._looked_at:
            self._require_unchanged(self._looked_at.pop())

    def read_into(self, file: int, offset: int, view: memoryview) -> int | None:
        """Fill a view from a byte offset of a file's content; returns its CRC-32 if noted."""
        try:
            return try_again(lambda: self._fill(file, offset, view), self._stop)
        except OSError as error:
            message = f"cannot be read ({error.strerror})"
            raise SourceError(message, path=self._files[file].path) from error

    def window(self, file: int, offset: int, nbytes: int) -> Checked | None:
        """Return a range of a file's content where it is mapped, checked as when it is read.

        It is valid until the next read. None if the range has to be read.
        """
        if not self._maps or not LEAST_BYTES <= nbytes <= MOST_BYTES:
            return None
        decoder = self._files[file].decoder
        if decoder is not None and not (
            isinstance(decoder, BlockDigests) and decoder.has_whole(offset, nbytes)
        ):
            return None
        view = None
        with ignored(FROM_OUTSIDE):  # a read tries again, and reports the error
            view = self._window(file, offset, nbytes)
        if view is None:
            return None
        if isinstance(decoder, BlockDigests):
            self._require_blocks(file, decoder, offset, view)
            return view, None
        return view, None if self._log is None else self._log.add(file, offset, view)

    def read_all(self, ranges: Ranges, buffer: memoryview) -> None:
        """Read ranges through a buffer, for nothing but the checksums that are noted."""
        for file, start, stop, _ in ranges.tolist():
            for at in range(start, stop, len(buffer)):
                self.read_into(file, at, buffer[: stop - at])

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

    def _fill(self, file: int, offset: int, view: memoryview) -> int | None:
        mapped = self.window(file, offset, len(view))
        if mapped is not None:
            # Other threads run while an array is copied, but not while a view is.
            np.copyto(np.frombuffer(view, np.uint8), np.frombuffer(mapped[0], np.uint8))
            return mapped[1]
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
            if self._shown == file:
                self._release()
            self._windows.pop(file, None)
            self._open.pop(file).close()

    def _window(self, file: int, offset: int, nbytes: int) -> memoryview | None:
        """Return a range where it is mapped, if it can be, and let go of the one before."""
        opened = self._opened(file)
        if file not in self._windows:
            self._windows[file] = map_to_read(opened.descriptor)
        windows, start = self._windows[file], opened.origin + offset
        if windows is None:
            return None
        if self._shown != file or (self._drops_behind and not windows.shows(start, nbytes)):
            self._release()
        self._looked_at.add(file)
        self._shown = file
        try:
            view = windows.window(start, nbytes)
        except OSError:  # an old system, or a file that was cut off: a read can tell
            self._windows[file] = None
            return None
        return view if len(view) == nbytes else None

    def _release(self) -> None:
        if self._shown is not None:
            file, self._shown = self._shown, None
            windows = self._windows.get(file)
            if windows is not None:
                self._drop_read(file, self._open[file].descriptor, *windows.release())

    def _require_unchanged(self, file: int) -> None:
        """Refuse an open file that changed after it was mapped: nobody knows what was seen."""
        source = self._files[file]
        if file in self._open:
            with source_errors(source.path):
                require_same(source, self._open[file].status())

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
        start = opened.origin + offset
        self._drop_read(file, opened.descriptor, start, start + len(view))

    def _drop_read(self, file: int, descriptor: int, start: int, stop: int) -> None:
        """Drop from the cache what this reader read; others may need the data before that."""
        if not self._drops_behind or stop - start < page_cache.LEAST_BYTES:
            return
        last = self._last_of(file)
        before, begin, end = last.run
        if (before, end) != (file, start):
            begin = start
        last.run = (file, begin, stop)
        page_cache.drop_behind(descriptor, begin, stop)

    def _read_checked(
        self, file: int, digests: BlockDigests, offset: int, view: memoryview
    ) -> None:
        end, step = offset + len(view), digests.block_bytes
        for block in range(offset // step, -(-end // step)):
            start = block * step
            stop = min(start + step, digests.nbytes)
            lower, upper = max(start, offset), min(stop, end)
            if (lower, upper) == (start, stop):
                content = view[start - offset : stop - offset]
                self._read(file, start, content)
                self._require_blocks(file, digests, start, content)
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
            self._require_blocks(file, digests, block * digests.block_bytes, content)
            last.block = (file, block, content)
        return content

    def _require_blocks(
        self, file: int, digests: BlockDigests, offset: int, content: memoryview
    ) -> None:
        step = digests.block_bytes
        for at in range(0, len(content), step):
            block, start = content[at : at + step], offset + at
            if crc32(block) != digests.crc32s[start // step]:
                message = f"bytes {start} to {start + len(block)} are damaged: they are not those"
                raise IntegrityError(f"{message} that were written", path=self._files[file].path)

    def _opened(self, file: int) -> OpenedFile:
        if file in self._open:
            self._open.move_to_end(file)
            return self._open[file]
        while len(self._open) >= self._keeps_open:
            oldest = next(iter(self._open))
            if oldest in self._looked_at:
                self._require_unchanged(oldest)
            self._forget(oldest)
        source = self._files[file]
        opened = open_readable(source.path, source)
        try:
            require_same(source, opened.status())
        except BaseException:
            opened.close()  # an open file would count as checked the next time
            raise
        self._open[file] = opened
        return opened
