"""What a picture shows of a cut, held against the cut by which bytes are moved."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from streamshard.layout.bands import Bands, Rows
from streamshard.layout.cutting import Segments, partition_segments, shard_segments
from streamshard.layout.zero import flat_group

numels_of_groups = st.lists(st.integers(0, 60), min_size=1, max_size=8)
world_sizes = st.integers(1, 12)
Part = tuple[int, int, int, int]
"""Row, parameter, first element and element after the last."""


def parts(bands: Bands) -> list[Part]:
    """List what each row holds."""
    columns = bands.row, bands.stop, bands.param, bands.start, bands.numel
    return [
        (row + k, param, start + k * numel, start + (k + 1) * numel)
        for row, stop, param, start, numel in zip(*(c.tolist() for c in columns), strict=True)
        for k in range(stop - row)
    ]


def require_apart(rows: Rows) -> None:
    """Require the same parts row by row, from left to right, none of which covers another."""
    bands = rows.bands().apart()
    assert (bands.stop == bands.row + 1).all()
    assert sorted(parts(bands)) == sorted(parts(rows.bands()))
    place = bands.row * rows.length + bands.at
    assert (place[1:] >= (place + bands.numel)[:-1]).all()
    assert (bands.at + bands.numel <= rows.length).all()
    assert (bands.numel > 0).all()


def moved(row: int, segments: Segments) -> list[Part]:
    columns = (c.tolist() for c in (segments.tensor, segments.start, segments.stop))
    return [(row, tensor, a, b) for tensor, a, b in zip(*columns, strict=True) if b > a]


@given(numels_of_groups, world_sizes, st.booleans(), st.sampled_from([1, 8]))
def test_rows_of_flat_groups_hold_what_the_ranks_are_given(
    numels: list[int], world_size: int, round_robin: bool, alignment: int
) -> None:
    group = flat_group(numels, world_size=world_size, round_robin=round_robin, alignment=alignment)
    piece = np.full(len(numels), max(1, group.partition_numel))
    zeros = np.zeros_like(piece)
    rows = Rows(world_size, group.partition_numel, group.numels, group.starts, piece, zeros)
    require_apart(rows)
    every = np.arange(len(numels))
    wanted = [
        part
        for rank in range(world_size)
        for part in moved(rank, partition_segments(group, rank, every, itemsize=1))
    ]
    assert sorted(parts(rows.bands())) == sorted(wanted)


@given(numels_of_groups, world_sizes)
def test_rows_of_shards_hold_what_the_ranks_are_given(numels: list[int], world_size: int) -> None:
    held = np.array(numels)
    shares = -(-held // world_size)
    at, piece = np.cumsum(shares) - shares, np.maximum(shares, 1)
    rows = Rows(world_size, int(shares.sum()), held, np.zeros_like(held), piece, at)
    require_apart(rows)
    every = np.arange(len(numels))
    wanted = [
        part
        for rank in range(world_size)
        for part in moved(rank, shard_segments(held, world_size, rank, every, itemsize=1))
    ]
    assert sorted(parts(rows.bands())) == sorted(wanted)


def test_ranks_that_hold_alike_are_one_band() -> None:
    numels = np.array([1000, 15])
    rows = Rows(100, 11, numels, np.array([0, 0]), np.array([10, 4]), np.array([0, 10]))
    bands = rows.bands()
    columns = bands.param, bands.row, bands.stop, bands.at, bands.numel, bands.start
    assert list(zip(*(c.tolist() for c in columns), strict=True)) == [
        (0, 0, 100, 0, 10, 0), (1, 0, 3, 10, 4, 0), (1, 3, 4, 10, 3, 12)
    ]  # fmt: skip
