"""Memory whose pages are taken before it is filled: all of it, and none that is not asked for."""

import ctypes
import mmap
import resource
import time
from itertools import accumulate
from pathlib import Path

import pytest

from streamshard.io.new_memory import HugePages, populate, windows

HUGE_BYTES = 1 << 21
needs_huge_pages = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="no huge pages here"
)


def address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(view)) if len(view) else 0


def new_memory(nbytes: int) -> memoryview:
    """Return memory that begins with a huge page."""
    mapped = mmap.mmap(-1, nbytes + HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -address(memoryview(mapped)) % HUGE_BYTES
    return memoryview(mapped)[start : start + nbytes]


def wanted_bytes(view: memoryview) -> int:
    """Return how much of a view the system was told to put into huge pages."""
    found, inside = 0, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if not first.endswith(":"):
            start, stop = (int(bound, 16) for bound in first.split("-"))
            inside = min(stop, address(view) + len(view)) - max(start, address(view))
        elif first == "VmFlags:" and "hg" in rest.split():
            found += max(0, inside)
    return found


@pytest.mark.parametrize(("start", "stop"), [(0, 1 << 22), (5, (1 << 22) - 7), (1 << 20, 1 << 21)])
def test_pages_are_there_before_they_are_touched(start: int, stop: int) -> None:
    view = memoryview(mmap.mmap(-1, 1 << 22))[start:stop]
    view[:3] = view[-3:] = b"end"
    populate(view)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    view[3:-3:512] = b"x" * len(view[3:-3:512])
    touched = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert touched < len(view) // mmap.PAGESIZE // 4  # other threads touch some meanwhile
    assert bytes(view[:3]) == bytes(view[-3:]) == b"end"


def test_less_than_a_page_is_left_as_it_is() -> None:
    view = memoryview(bytearray(b"few"))
    populate(view)
    assert bytes(view) == b"few"


@needs_huge_pages
@pytest.mark.parametrize(
    ("huge", "pages"),
    [([4] * 5, 5), ([5] * 5, 5), ([6, 1, 1], 1), ([1, 1, 1, 10, 1], 5), ([1, 1, 11, 1], 3)],
)
def test_huge_pages_are_taken_while_they_save_time(
    monkeypatch: pytest.MonkeyPatch, huge: list[int], pages: int
) -> None:
    """Six are whole. The first is taken small, which costs 5 here."""
    ticks = accumulate([0, 5, *(each for seconds in huge for each in (0, seconds))])
    view = new_memory(8 * HUGE_BYTES)
    taken = HugePages()
    monkeypatch.setattr(time, "thread_time", lambda: next(ticks))
    for part in windows(view[7:-1], 2 * HUGE_BYTES):
        taken.take(part)
    assert wanted_bytes(view) == pages * HUGE_BYTES


@needs_huge_pages
def test_what_is_in_memory_stays() -> None:
    view = new_memory(3 * HUGE_BYTES)
    content = bytes(range(256)) * (len(view) // 256)
    view[:] = content
    HugePages().take(view)
    assert view == content


@pytest.mark.parametrize("nbytes", [0, 100, HUGE_BYTES, 5 * HUGE_BYTES + 3])
@pytest.mark.parametrize("start", [0, 5, HUGE_BYTES - 1])
def test_windows_cut_no_huge_page(start: int, nbytes: int) -> None:
    view = new_memory(8 * HUGE_BYTES)[start : start + nbytes]
    parts = [*windows(view, 2 * HUGE_BYTES)]
    starts = [address(part) for part in parts]
    assert not any(place % HUGE_BYTES for place in starts[1:])
    assert all(0 < len(part) <= 2 * HUGE_BYTES for part in parts)
    lengths = [0, *map(len, parts)]
    assert starts == [address(view) + at for at in accumulate(lengths)][:-1]
    assert sum(lengths) == nbytes
