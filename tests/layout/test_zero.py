"""ZeRO's cuts against lists that name the owner of every element."""

from itertools import groupby, product

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from streamshard.layout.zero import FlatGroup, alignment_unit, flat_group, shard_numel, sub_groups
from tests.layout.brute import Owner, flatten, rank_of_flat, shard

NUMELS = st.lists(st.integers(1, 12), max_size=8)
WORLDS = st.integers(1, 9)
UNITS = st.sampled_from([1, 2, 4, 8])


def slices_of(elements: list[Owner | None]) -> tuple[tuple[int, int, int], ...]:
    """Read (parameter, first position, count) off a list of owners, in order of parameter."""
    found = []
    position = 0
    for param, run in groupby(elements, key=lambda owner: None if owner is None else owner[0]):
        count = len(list(run))
        if param is not None:
            found.append((param, position, count))
        position += count
    return tuple(sorted(found))


@given(NUMELS, WORLDS, st.booleans(), UNITS)
def test_a_flat_group_is_cut_as_the_list_of_owners_says(
    numels: list[int], world_size: int, round_robin: bool, unit: int
) -> None:
    group = flat_group(numels, world_size=world_size, round_robin=round_robin, alignment=unit)
    used, owners = flatten(numels, world_size, round_robin=round_robin, unit=unit)
    assert group.numel == used
    assert group.partition_numel * world_size == len(owners)
    for rank in range(world_size):
        mine = rank_of_flat(owners, world_size, rank)
        behind = range(rank * len(mine), (rank + 1) * len(mine))
        assert group.padding(rank) == sum(position >= used for position in behind)
        assert group.slices(rank) == slices_of(mine)
        owned = tuple(dict.fromkeys(owner[0] for owner in mine if owner is not None))
        assert group.owned(rank) == owned
    assert group.padding_counted_last(world_size - 1) == len(owners) - used


@given(NUMELS, WORLDS, st.booleans(), UNITS)
def test_whole_blocks_are_cut_as_their_elements_are(
    counts: list[int], world_size: int, round_robin: bool, unit: int
) -> None:
    block = 8
    group = flat_group(
        [block * count for count in counts],
        world_size=world_size,
        round_robin=round_robin,
        alignment=unit,
    )
    assume(group.partition_numel % block == 0)
    blocks = group.in_blocks(block)
    for rank in range(world_size):
        assert blocks.padding(rank) * block == group.padding(rank)
        slices = [(index, start * block, n * block) for index, start, n in blocks.slices(rank)]
        assert slices == [*group.slices(rank)]
        assert blocks.owned(rank) == group.owned(rank)


def whole_numels(group: FlatGroup) -> list[int]:
    """Count the elements of all parameters that each rank owns a part of."""
    ranks = range(group.world_size)
    return [sum(int(group.numels[param]) for param in group.owned(rank)) for rank in ranks]


def test_whole_parameters_that_are_as_long_as_partitions_are_what_is_in_them() -> None:
    fits = 0
    for numels in (list(n) for count in range(1, 5) for n in product(range(1, 6), repeat=count)):
        for world_size in range(1, 5):
            group = flat_group(numels, world_size=world_size, round_robin=False, alignment=1)
            if {*whole_numels(group)} != {group.partition_numel}:
                continue
            fits += 1
            _, owners = flatten(numels, world_size, round_robin=False, unit=1)
            for rank in range(world_size):
                whole = [(p, element) for p in group.owned(rank) for element in range(numels[p])]
                assert rank_of_flat(owners, world_size, rank) == whole
    assert fits > 100


def test_gaps_can_make_whole_parameters_as_long_as_partitions_that_hold_others() -> None:
    group = flat_group([4, 6, 4], world_size=2, round_robin=False, alignment=8)
    assert whole_numels(group) == [group.partition_numel] * 2 == [10, 10]
    assert group.owned(0) == (0, 1)
    assert group.slices(0) == ((0, 0, 4), (1, 8, 2))


@pytest.mark.parametrize(("itemsize", "unit"), [(1, 16), (2, 8), (4, 4), (8, 2), (16, 1)])
def test_alignment_is_sixteen_bytes(itemsize: int, unit: int) -> None:
    assert alignment_unit(itemsize) == unit


@given(st.integers(0, 60), WORLDS)
def test_shards_tile_a_parameter(numel: int, world_size: int) -> None:
    shards = [shard(numel, world_size, rank) for rank in range(world_size)]
    assert {len(own) for own in shards} == {shard_numel(numel, world_size)}
    elements = [e for own in shards for e in own if e is not None]
    assert elements == list(range(numel))


def walk(groups: list[list[int]], world_size: int, size: int) -> list[list[tuple[int, int]]]:
    """Put (group, parameter) into sub-groups, one at a time."""
    done: list[list[tuple[int, int]]] = []
    for group, numels in enumerate(groups):
        bag: list[tuple[int, int]] = []
        held = 0
        for index, numel in enumerate(numels):
            bag.append((group, index))
            held += len(shard(numel, world_size, 0))
            if held >= size:
                done.append(bag)
                bag, held = [], 0
        if bag:
            done.append(bag)
    return done


@given(st.lists(NUMELS, max_size=4), WORLDS, st.integers(1, 30))
def test_sub_groups_are_those_of_a_walk(
    groups: list[list[int]], world_size: int, size: int
) -> None:
    found = sub_groups(groups, world_size=world_size, sub_group_size=size)
    members = [[(s.group, index) for index in range(s.first, s.stop)] for s in found]
    assert members == walk(groups, world_size, size)
    for unit in found:
        numels = groups[unit.group][unit.first : unit.stop]
        assert unit.numel == sum(len(shard(numel, world_size, 0)) for numel in numels)
