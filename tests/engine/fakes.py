"""Sources in memory and on disk, and the regions that are made of them."""

import ctypes
import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st

from streamshard.engine.journals.journal import Journal
from streamshard.engine.run.phases import Silent
from streamshard.engine.run.source_reader import SourceReader
from streamshard.engine.run.staged_files import Partial
from streamshard.io.entries import identify
from streamshard.model import Copies, SourceFile

JOURNAL = ".journal"
Row = tuple[int, int, int, int]
"""(file, source offset, target offset, bytes)."""


class FakeReader(SourceReader):
    """Reads from memory and remembers what it was asked for."""

    def __init__(self, contents: Sequence[bytes]) -> None:
        super().__init__(())
        self.contents = contents
        self.calls: list[tuple[int, int, int]] = []
        """(file, offset, bytes) of each read."""

    def read_into(self, file: int, offset: int, view: memoryview) -> None:
        self.calls.append((file, offset, len(view)))
        piece = self.contents[file][offset : offset + len(view)]
        assert len(piece) == len(view)
        view[:] = piece


class Told(Silent):
    def __init__(self) -> None:
        self.kept = 0

    def keep(self, nbytes: int) -> None:
        self.kept += nbytes


def on_disk(directory: Path, contents: Sequence[bytes]) -> tuple[SourceFile, ...]:
    """Write source files and describe them as a plan would."""
    found = []
    for number, content in enumerate(contents):
        path = directory / f"source-{number}"
        path.write_bytes(content)
        found.append(identify(path))
    return tuple(found)


@contextmanager
def opened(path: Path) -> Iterator[Partial]:
    """Begin a directory of targets, or go on with one."""
    path.mkdir(parents=True, exist_ok=True)
    journal = Journal(path / JOURNAL)
    if journal.header is None:
        journal.begin({"about": "a test"})
    else:
        journal.proceed()
    try:
        yield Partial(path, journal)
    finally:
        journal.close()


def copies_of(rows: Sequence[Row]) -> Copies:
    return Copies(*np.array(rows, np.int64).reshape(-1, 4).T)


def expected(contents: Sequence[bytes], rows: Sequence[Row], nbytes: int) -> bytes:
    """Fill a region byte by byte."""
    region = bytearray(nbytes)
    for file, source, target, count in rows:
        for i in range(count):
            region[target + i] = contents[file][source + i]
    return bytes(region)


def is_cached(path: Path, offset: int = 0) -> bool:
    """Tell whether the page of a byte of a file is in memory; to try to read it would fetch it."""
    return bool(_cached_pages(path)[offset // mmap.PAGESIZE])


def is_mostly_cached(path: Path) -> bool:
    """Tell whether most pages are in memory: the system may keep a few, whatever is dropped."""
    pages = _cached_pages(path)
    return sum(pages) > len(pages) / 2


def _cached_pages(path: Path) -> list[int]:
    found = (ctypes.c_ubyte * -(-path.stat().st_size // mmap.PAGESIZE))()
    nbytes = ctypes.c_size_t(len(found) * mmap.PAGESIZE)
    with path.open("r+b") as stream, mmap.mmap(stream.fileno(), 0) as mapped:
        start = ctypes.byref(ctypes.c_char.from_buffer(mapped))
        if ctypes.CDLL(None).mincore(start, nbytes, found) != 0:
            pytest.skip("this system does not tell what it has in memory")
        del start
    return [page & 1 for page in found]


def contents() -> st.SearchStrategy[list[bytes]]:
    """Draw a few source files whose bytes all differ from zero."""
    return st.lists(st.integers(1, 250), min_size=1, max_size=3).map(
        lambda seeds: [bytes(1 + (seed * 7 + i * 11) % 255 for i in range(64)) for seed in seeds]
    )


@st.composite
def regions(draw: st.DrawFn, itemsize: int = 1) -> tuple[list[bytes], list[Row], int]:
    """Draw sources, runs in order of target with gaps between them, and the region's length."""
    sources = draw(contents())
    rows: list[Row] = []
    target = 0
    for _ in range(draw(st.integers(0, 6))):
        target += itemsize * draw(st.integers(0, 9))
        count = itemsize * draw(st.integers(1, 32 // itemsize))
        source = draw(st.integers(0, 64 - count))
        rows.append((draw(st.integers(0, len(sources) - 1)), source, target, count))
        target += count
    return sources, rows, target + itemsize * draw(st.integers(0, 9))
