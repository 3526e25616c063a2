"""Runs streamshard as if it looked at maps of its sources, where it reads them into a buffer.

    python -m benchmarks._mapped_commands map verify RUN

What `verify` takes checksums of, and both sides of a comparison, are then the pages of the page
cache: put in place window by window (MADV_POPULATE_READ), and let go of (MADV_DONTNEED) at the next
window. What is cast, joined of short ranges, checked by blocks or decoded is read as ever. With
`read` in place of `map` nothing is changed, but the same modules are loaded.

Nobody should use it on files that others write to: who cuts off a file after its pages were put in
place, and before they are looked at, ends the program with SIGBUS.
"""

import ctypes
import mmap
import sys
import threading
from collections.abc import Iterator
from typing import Final

import numpy as np

from streamshard.cli.main import main
from streamshard.engine.run.region import ReadAhead, RegionFiller
from streamshard.engine.run.source_reader import SourceReader
from streamshard.engine.run.work import Region
from streamshard.engine.scan.probe import Probe
from streamshard.engine.scan.region_pair import Next, PairReader
from streamshard.io.file_system import last_error, libc

POPULATE_READ: Final = 22
"""By madvise(2), since Linux 5.14: fails with EFAULT behind the end of a file, where touching the
page would end the process. Python has no name for it."""
_LEAST_BYTES: Final = 1 << 17
"""Shorter ranges are read: to map them takes longer than to copy them."""
_AROUND_BYTES: Final = 1 << 16
"""The system puts so many pages around a touched one in place, also some that were let go of."""
_madvise = libc("madvise", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
"""Python's own keeps other threads of Python waiting while it waits for the disk."""


def advise(address: int, nbytes: int, advice: int) -> None:
    """Call madvise(2) for the pages that these bytes lie in."""
    begin = address // mmap.PAGESIZE * mmap.PAGESIZE
    if _madvise is None or _madvise(begin, address + nbytes - begin, advice) != 0:
        raise last_error("madvise")


class Maps:
    """Maps of whole files, of which one window is in memory."""

    def __init__(self, reader: SourceReader) -> None:
        self._reader = reader
        self._maps: dict[int, tuple[memoryview, int]] = {}
        self._last = 0, 0

    def window(self, file: int, offset: int, nbytes: int) -> memoryview | None:
        """Return a range of a file; None if it has to be read."""
        source = self._reader._files[file]
        if source.decoder is not None or nbytes < _LEAST_BYTES:
            return None
        if file not in self._maps:
            whole = self._reader.map(file, 0, source.nbytes, is_private=False, is_checked=False)
            self._maps[file] = whole, int(np.frombuffer(whole, dtype=np.uint8).ctypes.data)
        if self._last[1]:
            advise(*self._last, mmap.MADV_DONTNEED)
        whole, address = self._maps[file]
        before = min(offset, _AROUND_BYTES)
        self._last = address + offset - before, nbytes + before
        advise(address + offset, nbytes, POPULATE_READ)
        return whole[offset : offset + nbytes]


_kept = threading.local()


def _maps_of(reader: SourceReader) -> Maps:
    known: dict[SourceReader, Maps] = _kept.__dict__.setdefault("maps", {})
    return known.setdefault(reader, Maps(reader))


def _windows(self: Probe, file: int, start: int, stop: int) -> Iterator[memoryview]:
    for at in range(start, stop, len(self._window)):
        nbytes = min(len(self._window), stop - at)
        view = _maps_of(self._reader).window(file, at, nbytes)
        if view is None:
            view = self._window[:nbytes]
            self._reader.read_into(file, at, view)
        if self.hashes is not None and self._files[file].is_plain:
            self.hashes.add(file, at, view)
        self._progress(nbytes)
        yield view


def _mapped(filler: RegionFiller, nbytes: int) -> memoryview | None:
    """Return a region's next bytes, if they are one range that is not cast."""
    copies, number = filler._copies, filler._next
    if filler._region.cast is not None or number == len(copies):
        return None
    is_here = filler._used or int(copies.target[number]) == filler._at
    left = int(copies.nbytes[number]) - filler._used
    if not is_here or left < nbytes:
        return None
    offset = int(copies.source[number]) + filler._used
    view = _maps_of(filler._reader).window(int(copies.file[number]), offset, nbytes)
    if view is not None:
        filler._ahead.advance(nbytes)
        is_last = left == nbytes
        filler._next, filler._used = number + is_last, 0 if is_last else filler._used + nbytes
        filler._at += nbytes
    return view


def _begin(self: PairReader, left: Region, right: Region) -> Next:
    fillers = [
        RegionFiller(region, reader, self._scratch, ReadAhead([region.copies], reader, readers=2))
        for region, reader in zip((left, right), self._readers, strict=True)
    ]

    def read(nbytes: int) -> tuple[memoryview, memoryview]:
        views = []
        for filler, window in zip(fillers, self._windows, strict=True):
            view = _mapped(filler, nbytes)
            if view is None:
                view = window[:nbytes]
                filler.fill(view)
            views.append(view)
        self._progress(2 * nbytes)
        return views[0], views[1]

    return read


if __name__ == "__main__":
    if sys.argv.pop(1) == "map":
        Probe._windows = _windows  # type: ignore[method-assign]
        PairReader.begin = _begin  # type: ignore[method-assign]
    sys.exit(main())
