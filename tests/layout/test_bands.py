"""What a picture shows of a cut, held against the cut by which bytes are moved."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from streamshard.layout.bands import Cut, flat_cut, shard_cut, tape_cut
from streamshard.layout.cutting import partition_segments, shard_segments
from streamshard.layout.zero import flat_group

numels_of_groups = st.lists(st.integers(1, 60), min_size=1, max_size=8)
world_sizes = st.integers(1, 12)


def single(count: int) -> list[range]:
    return [range(i, i + 1) for i in range(count)]


def require_tiled(cut: Cut) -> None:
    """Require the bands of every row to be the whole row, each beginning where one ends."""
    for number, row in enumerate(cut.rows):
        at = 0
        for band in (band for band in cut.bands if band.row == number):
            assert band.at == at
            assert band.numel > 0
            at += band.numel
        assert at == row.numel


def held(cut: Cut) -> list[tuple[int, int, int, int]]:
    """List (row, parameter, first element, numel) of all that is not padding."""
    return sorted((b.row, b.unit, b.start, b.numel) for b in cut.bands if b.unit is not None)


@given(numels_of_groups, world_sizes, st.booleans(), st.sampled_from([1, 8]))
def test_rows_of_flat_groups_hold_what_the_ranks_are_given(
    numels: list[int], world_size: int, round_robin: bool, alignment: int
) -> None:
    group = flat_group(numels, world_size=world_size, round_robin=round_robin, alignment=alignment)
    cut = flat_cut(group, single(len(numels)), world_size)
    require_tiled(cut)
    position = {index: stored for stored, index in enumerate(group.order)}
    wanted = []
    for rank in range(world_size):
        moved = partition_segments(group, rank, np.arange(len(numels)), itemsize=1)
        columns = zip(moved.tensor, moved.start, moved.stop, strict=True)
        wanted += [(rank, position[int(t)], int(a), int(b - a)) for t, a, b in columns]
    assert held(cut) == sorted(wanted)


@given(numels_of_groups, world_sizes)
def test_rows_of_shards_hold_what_the_ranks_are_given(numels: list[int], world_size: int) -> None:
    cut = shard_cut(numels, single(len(numels)), world_size=world_size, most_rows=world_size)
    require_tiled(cut)
    wanted = []
    for rank in range(world_size):
        every = np.arange(len(numels))
        moved = shard_segments(np.asarray(numels), world_size, rank, every, itemsize=1)
        columns = zip(moved.tensor, moved.start, moved.stop, strict=True)
        wanted += [(rank, int(t), int(a), int(b - a)) for t, a, b in columns if b > a]
    assert held(cut) == sorted(wanted)


@given(numels_of_groups, world_sizes, st.integers(1, 4), st.integers(1, 3))
def test_nothing_is_lost_where_ranks_and_parameters_are_put_together(
    numels: list[int], world_size: int, most_rows: int, together: int
) -> None:
    units = [range(at, min(at + together, len(numels))) for at in range(0, len(numels), together)]
    group = flat_group(numels, world_size=world_size, round_robin=False, alignment=1)
    chunks = np.arange(7, sum(numels), 7)
    cuts = [
        flat_cut(group, units, most_rows),
        shard_cut(numels, units, world_size=world_size, most_rows=most_rows),
        tape_cut(numels, chunks, units, most_rows),
    ]
    for cut in cuts:
        require_tiled(cut)
        assert len(cut.rows) <= most_rows
        for unit, members in enumerate(units):
            bands = [band.numel for band in cut.bands if band.unit == unit]
            assert sum(bands) == sum(numels[members.start : members.stop])
    assert [row.first for row in cuts[1].rows[1:]] == [row.stop for row in cuts[1].rows[:-1]]
    length = cuts[2].rows[0].numel
    assert [row * length + at for row, at in cuts[2].borders] == [
        end for end in chunks.tolist() if end % length
    ]


def test_ranks_that_hold_alike_are_one_row() -> None:
    cut = shard_cut([1000, 10], single(2), world_size=100, most_rows=5)
    assert [(row.first, row.stop) for row in cut.rows] == [(0, 10), (10, 100)]
    first, second, padding = (b for b in cut.bands if b.row == 0 or b.unit is None)
    assert (first.numel / 10, second.numel / 10, padding.numel / 90) == (10, 1, 1)
    assert cut.is_exact


def test_ranks_that_hold_other_amounts_are_their_mean_where_there_are_too_many_kinds() -> None:
    cut = shard_cut([*range(1, 41)], single(40), world_size=40, most_rows=4)
    assert [(row.first, row.stop) for row in cut.rows] == [(0, 10), (10, 20), (20, 30), (30, 40)]
    assert not cut.is_exact
    # Of the parameter with 15 elements the first 15 of 40 ranks have one each.
    assert [(b.row, b.numel) for b in cut.bands if b.unit == 14] == [(0, 10), (1, 5)]


def test_a_flat_row_of_several_ranks_says_where_each_ends() -> None:
    group = flat_group([50, 30], world_size=10, round_robin=False, alignment=1)
    cut = flat_cut(group, single(2), 4)
    assert [(row.first, row.stop, row.numel) for row in cut.rows] == [
        (0, 3, 24), (3, 6, 24), (6, 9, 24), (9, 10, 8)
    ]  # fmt: skip
    assert cut.borders == ((0, 8), (0, 16), (1, 8), (1, 16), (2, 8), (2, 16))
