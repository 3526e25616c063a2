"""What is asked for ahead of the reader: what it will read, before it does, and not far ahead."""

from itertools import pairwise

import hypothesis.strategies as st
from hypothesis import given

from streamshard.engine.run.region import ReadAhead
from tests.engine.fakes import FakeReader, Row, copies_of

KIB, MIB = 1 << 10, 1 << 20
AHEAD = 4 * MIB

lengths = st.lists(st.integers(1, 9 * MIB) | st.integers(1, 64 * KIB), min_size=1, max_size=8)


def rows_of(sizes: list[int]) -> list[Row]:
    """Lay runs out one after another, each in a file of its own."""
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [(i, 7 * i, starts[i], size) for i, size in enumerate(sizes)]


@given(lengths, st.integers(1, MIB))
def test_what_is_asked_for_is_what_comes_next(sizes: list[int], window: int) -> None:
    rows, reader = rows_of(sizes), FakeReader([])
    ahead = ReadAhead([copies_of(rows)], reader)
    window = max(window, sum(sizes) // 400)  # small runs in small windows, large ones in large
    begun = 0
    for file, offset, start, size in rows:
        for at in range(0, size, window):
            before = len(reader.asked)
            ahead.advance(min(window, size - at))
            begun = start + at + min(window, size - at)
            for asked, place, count in reader.asked[before:]:
                where = rows[asked][2] + place - rows[asked][1]
                assert 0 <= place - rows[asked][1] <= sizes[asked] - count
                assert where + count > begun, f"of {file} at {offset}: is read already"
                assert where < begun + AHEAD
    places = [rows[file][2] + offset - rows[file][1] for file, offset, _ in reader.asked]
    ends = [at + count for at, (_, _, count) in zip(places, reader.asked, strict=True)]
    assert all(end <= start for end, (_, start) in zip(ends, pairwise(places), strict=False))


@given(st.integers(1, 40), st.integers(64 * KIB, MIB))
def test_everything_but_the_beginning_is_asked_for_before_it_is_read(
    mibs: int, window: int
) -> None:
    rows, reader = rows_of([mibs * MIB, MIB]), FakeReader([])
    ahead = ReadAhead([copies_of(rows[:1]), copies_of(rows[1:])], reader)
    total, done = (mibs + 1) * MIB, 0
    while done < total:
        asked = sum(count for _, _, count in reader.asked)
        # What the first window holds is read at once, in whatever pieces asking would have had.
        assert not done or asked >= min(done + window, total) - window - MIB
        ahead.advance(min(window, total - done))
        done += window
    assert sum(count for _, _, count in reader.asked) >= total - window - MIB
