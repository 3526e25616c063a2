"""Plans, run on disks made of byte arrays, against files written element by element."""

from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamshard.layout.cutting import CuttingBuilder, Segments, clip, coalesce, whole_segment
from streamshard.model import Copies, Slot
from tests.layout.simulate import HEADER, Chunks, Disk, Flat, Groups, Layout, Shards, apply, lay

WORLDS = st.integers(1, 9)
GROUPS = st.lists(st.lists(st.integers(1, 14), min_size=1, max_size=5), min_size=1, max_size=3)
ITEMSIZES = st.sampled_from([2, 4, 8])
FLAT = st.builds(Flat, WORLDS, st.booleans(), st.sampled_from([1, 4, 8]))
SHARDS = st.builds(Shards, WORLDS, st.sampled_from([1, 3, 7, 10**9]))
CHUNKS = st.builds(Chunks, st.integers(1, 20))
NATIVE = st.one_of(FLAT, SHARDS)
ANY = st.one_of(FLAT, SHARDS, CHUNKS)


def reshard(source: Layout, disk: Disk, target: Layout, groups: Groups, itemsize: int) -> Disk:
    """Plan and run, checking on the way that every byte is written once at most."""
    cutting = source.cut(groups, itemsize)
    files = []
    both = zip(target.segments(groups, itemsize), target.owners(groups), strict=True)
    for segments, owners in both:
        nbytes = len(owners) * itemsize
        found = cutting.locate(segments, target_itemsize=itemsize)
        merged = coalesce(found, target_itemsize=itemsize, itemsize=itemsize)
        plain, _ = apply(found, disk, nbytes)
        region, touched = apply(merged, disk, nbytes)
        assert region == plain
        wanted = np.repeat([owner is not None for owner in owners], itemsize)
        assert touched.tolist() == wanted.astype(int).tolist()
        files.append(b"\xee" * HEADER + region)
    return files


@given(GROUPS, ANY, ANY, ITEMSIZES)
def test_any_cutting_becomes_any_other(
    groups: Groups, source: Layout, target: Layout, itemsize: int
) -> None:
    disk = lay(source, groups, itemsize, padding=b"\xff")
    assert reshard(source, disk, target, groups, itemsize) == lay(target, groups, itemsize)


@given(GROUPS, NATIVE, NATIVE, st.sampled_from([(4, 2), (2, 4), (8, 2), (4, 4)]))
def test_a_change_of_item_size_moves_targets_only(
    groups: Groups, source: Layout, target: Layout, sizes: tuple[int, int]
) -> None:
    itemsize, target_itemsize = sizes
    disk = lay(source, groups, itemsize, padding=b"\xff")
    wanted = lay(target, groups, target_itemsize)
    cutting = source.cut(groups, itemsize)
    for segments, file in zip(target.segments(groups, target_itemsize), wanted, strict=True):
        found = cutting.locate(segments, target_itemsize=target_itemsize)
        region = np.zeros((len(file) - HEADER) // target_itemsize, f"<u{target_itemsize}")
        for copies in (found, coalesce(found, target_itemsize=target_itemsize, itemsize=itemsize)):
            region[:] = 0
            for which, at, to, nbytes in _rows(copies):
                piece = np.frombuffer(disk[which][at : at + nbytes], f"<u{itemsize}")
                first = to // target_itemsize
                region[first : first + len(piece)] += piece.astype(region.dtype)
            assert region.tobytes() == file[HEADER:]


def _rows(copies: Copies) -> list[tuple[int, int, int, int]]:
    columns = (copies.file, copies.source, copies.target, copies.nbytes)
    return list(zip(*(column.tolist() for column in columns), strict=True))


@st.composite
def disjoint_copies(draw: st.DrawFn) -> list[tuple[int, int, int, int]]:
    """Runs with disjoint targets, many of which follow each other in the source as well."""
    rows, target, source, file = [], 0, 0, 0
    for _ in range(draw(st.integers(0, 12))):
        if draw(st.booleans()):
            target += draw(st.integers(0, 3))
            source += draw(st.integers(0, 3))
            file = draw(st.integers(0, 2))
        nbytes = draw(st.integers(1, 5))
        rows.append((file, source, target, nbytes))
        target, source = target + nbytes, source + nbytes
    return rows


def from_rows(rows: list[tuple[int, int, int, int]]) -> Copies:
    columns = np.array(rows, np.int64).reshape(-1, 4).T
    return Copies(*columns)


def bytes_of(copies: Copies) -> dict[int, tuple[int, int]]:
    """Say for every target byte where it comes from."""
    found: dict[int, tuple[int, int]] = {}
    for file, source, target, nbytes in _rows(copies):
        for i in range(nbytes):
            assert target + i not in found
            found[target + i] = (file, source + i)
    return found


@given(disjoint_copies(), st.randoms(use_true_random=False))
def test_coalesce_covers_exactly_whatever_the_order(
    rows: list[tuple[int, int, int, int]], random: Random
) -> None:
    merged = coalesce(from_rows(rows), target_itemsize=1, itemsize=1)
    assert bytes_of(merged) == bytes_of(from_rows(rows))
    assert _rows(coalesce(merged, target_itemsize=1, itemsize=1)) == _rows(merged)
    shuffled = list(rows)
    random.shuffle(shuffled)
    assert _rows(coalesce(from_rows(shuffled), target_itemsize=1, itemsize=1)) == _rows(merged)


@given(disjoint_copies())
def test_coalesce_leaves_nothing_to_merge(rows: list[tuple[int, int, int, int]]) -> None:
    found = _rows(coalesce(from_rows(rows), target_itemsize=1, itemsize=1))
    assert [row[2] for row in found] == sorted(row[2] for row in found)
    for (file, source, target, nbytes), after in pairwise(found):
        assert after[:3] != (file, source + nbytes, target + nbytes)


@pytest.mark.parametrize("numel", [0, 3])
def test_whole_tensors_and_missing_ones(numel: int) -> None:
    builder = CuttingBuilder([4, 4])
    one = np.array([2], np.int64)
    builder.assign(1, builder.slot(Slot(one, one * 10, one)), piece_numel=numel)
    assert builder.missing().tolist() == [0]
    copies = builder.build().locate(whole_segment(1, numel), target_itemsize=4)
    assert _rows(copies) == ([(2, 20, 0, 12)] if numel else [])


def test_a_cutting_of_nothing() -> None:
    cutting = CuttingBuilder([]).build()
    nothing = Segments(*(np.zeros(0, np.int64) for _ in range(4)))
    copies = cutting.locate(nothing, target_itemsize=4)
    assert len(copies) == len(coalesce(copies, target_itemsize=4, itemsize=4)) == 0


@given(st.data())
def test_clipping_a_target_into_pieces_keeps_every_byte(data: st.DataObject) -> None:
    itemsize = data.draw(st.sampled_from([1, 2, 4, 8]))
    lengths = data.draw(st.lists(st.integers(0, 20), min_size=1, max_size=6))
    gaps = data.draw(st.lists(st.integers(0, 5), min_size=len(lengths), max_size=len(lengths)))
    starts = [int(n) for n in np.cumsum([0, *map(sum, zip(lengths, gaps, strict=True))])]
    numels = np.array(lengths, dtype=np.int64)
    first = np.array(gaps, dtype=np.int64) * 3
    targets = np.array(starts[:-1], dtype=np.int64) * itemsize
    whole = Segments(np.arange(len(lengths)), first, first + numels, targets)
    step = data.draw(st.integers(1, 30)) * itemsize
    end = starts[-1] * itemsize

    def elements(found: Segments, shift: int) -> list[tuple[int, int, int]]:
        columns = (found.tensor, found.start, found.stop, found.target)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return [
            (shift + target + (n - start) * itemsize, tensor, n)
            for tensor, start, stop, target in rows
            for n in range(start, stop)
        ]

    pieces = [
        element
        for at in range(0, end, step)
        for element in elements(clip(whole, at, min(at + step, end), itemsize=itemsize), at)
    ]
    assert pieces == sorted(elements(whole, 0))


@given(st.binary(max_size=200), st.integers(1, 40), st.sampled_from([1, 2, 4, 16]), st.data())
def test_parts_of_tensors_of_bytes_lie_where_their_bytes_do(
    content: bytes, piece: int, itemsize: int, data: st.DataObject
) -> None:
    """In several pieces only where none of them can end inside of an element."""
    disk = [content[at : at + piece] for at in range(0, len(content), piece)]
    builder = CuttingBuilder([1])
    files = np.arange(len(disk), dtype=np.int64)
    slot = builder.slot(Slot(files, np.zeros_like(files), np.full_like(files, piece)))
    builder.assign(0, slot, piece_numel=piece)
    numel = data.draw(st.integers(0, len(content) // itemsize))
    start = data.draw(st.integers(0, len(content) - numel * itemsize))
    part = [np.array([number]) for number in (0, start, numel, itemsize)]
    bounds = range(piece, len(content), piece)
    stop = start + numel * itemsize
    is_torn = any(start < bound < stop and (bound - start) % itemsize for bound in bounds)
    if builder.build().is_divided(*part)[0]:
        assert start // piece != (stop - 1) // piece
        return
    assert not is_torn
    cutting = builder.build().with_parts(*part)
    copies = cutting.locate(whole_segment(1, numel), target_itemsize=itemsize)
    found, _ = apply(copies, disk, numel * itemsize)
    assert found == content[start:stop]
