"""Cuts among model-parallel ranks, against NumPy's own slices, composed with ZeRO's cut."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from streamshard.layout.boxes import NotTiledError
from streamshard.layout.cutting import CuttingBuilder, Segments, whole_segment
from streamshard.layout.model_cut import ModelCut, Recut, recut, segments_cut, split_cut, whole_cut
from streamshard.model import Slot
from tests.layout.simulate import HEADER, apply

Values = NDArray[np.int64]


@dataclass(frozen=True)
class Parts:
    """A cut, and what its ranks have of a tensor of numbered elements."""

    cut: ModelCut
    parts: tuple[Values | None, ...]


@st.composite
def widths(draw: st.DrawFn, size: int, ranks: int) -> list[int]:
    """Shares of `size`, not all alike, some of them empty."""
    edges = sorted(draw(st.lists(st.integers(0, size), min_size=ranks - 1, max_size=ranks - 1)))
    return [int(width) for width in np.diff([0, *edges, size])]


@st.composite
def cuts(draw: st.DrawFn, whole: Values, sub_sizes: list[int], axis: int) -> Parts:
    """Cut a tensor that consists of sub-tensors along `axis` among some ranks and stages."""
    ranks = draw(st.integers(1, 4))
    segments: list[list[int] | int] = []
    parts: list[list[Values]] = [[] for _ in range(ranks)]
    for size, sub in zip(
        sub_sizes, np.split(whole, np.cumsum(sub_sizes)[:-1].tolist(), axis), strict=True
    ):
        if draw(st.booleans()):
            segments.append(size)
            shares = [sub] * ranks
        else:
            shared = draw(widths(size, ranks))
            segments.append(shared)
            shares = np.split(sub, np.cumsum(shared)[:-1].tolist(), axis)
        for rank, share in enumerate(shares):
            parts[rank].append(share)
    cut = segments_cut(whole.shape, axis, segments)
    if all(isinstance(one, int) for one in segments):
        parts = parts[:1]
    held = [np.concatenate(own, axis) for own in parts]
    assert cut.shards == tuple(own.shape for own in held)
    stages = draw(st.lists(st.booleans(), min_size=1, max_size=3))
    stages[draw(st.integers(0, len(stages) - 1))] = True
    over = [rank if has else None for has in stages for rank in range(len(held))]
    return Parts(cut.spread(over), tuple(None if one is None else held[one] for one in over))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Values, Parts, Parts]:
    axis = draw(st.integers(0, 2))
    sub_sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    shape = [draw(st.integers(1, 3)) for _ in range(3)]
    shape[axis] = sum(sub_sizes)
    whole = 1000 + np.arange(math.prod(shape)).reshape(shape)
    return whole, draw(cuts(whole, sub_sizes, axis)), draw(cuts(whole, sub_sizes, axis))


def moved(source: Parts, target: ModelCut, world_size: int, holder: int = 0) -> Parts:
    """Take a source's parts, each cut among `world_size` files, to those of a target."""
    inner = CuttingBuilder([8] * len(source.parts))
    disk: list[bytes] = []
    for rank, part in enumerate(source.parts):
        numel = 0 if part is None else part.size
        share = max(1, -(-numel // world_size))
        content = b"" if part is None else np.ascontiguousarray(part).tobytes()
        first = len(disk)
        disk += [
            b"\xee" * HEADER + content[8 * at : 8 * (at + share)]
            for at in range(0, share * world_size, share)
        ]
        files = np.arange(first, first + world_size)
        offsets = np.full(world_size, HEADER)
        slot = inner.slot(Slot(files, offsets, np.zeros(world_size, np.int64)))
        inner.assign(rank, slot, piece_numel=share)
    outer, found = CuttingBuilder([8] * len(target.shards)), dict[int, Recut]()
    for rank in range(len(target.shards)):
        one = recut(target, rank, source.cut, holder=holder)
        if one is not None:
            found[rank] = one
            zeros = np.zeros_like(one.ranks)
            outer.place_boxes(rank, outer.slot(Slot(one.ranks, zeros, zeros)), one.grid)
    cutting = outer.build(inner.build())
    parts: list[Values | None] = []
    for rank, shard in enumerate(target.shards):
        numel = 0 if shard is None else math.prod(shard)
        halves = [(0, numel // 3), (numel // 3, numel)]
        rows = [(rank, low, high, 8 * low) for low, high in halves]
        for segments in (whole_segment(rank, numel), Segments(*np.array(rows, np.int64).T)):
            region, touched = apply(cutting.locate(segments, target_itemsize=8), disk, 8 * numel)
            assert touched.tolist() == [1] * 8 * numel
        values = np.frombuffer(region, np.int64)
        parts.append(None if shard is None else values.reshape(shard))
    return Parts(target, tuple(parts))


def require_equal(one: Parts, other: Parts) -> None:
    for mine, theirs in zip(one.parts, other.parts, strict=True):
        # A rank without the tensor, and one with none of its elements, are alike.
        left, right = (None if p is None or not p.size else p.tolist() for p in (mine, theirs))
        assert left == right


@given(pairs(), st.integers(1, 3), st.integers(1, 3))
def test_there_and_back_again(
    pair: tuple[Values, Parts, Parts], world_size: int, other_size: int
) -> None:
    """T → T' → T and P → P' → P, each with another cut among the data-parallel ranks."""
    _, source, target = pair
    there = moved(source, target.cut, world_size)
    require_equal(there, target)
    require_equal(moved(there, source.cut, other_size), source)


@given(pairs(), st.integers(1, 3))
def test_each_holder_of_a_copy_is_read_in_its_turn(
    pair: tuple[Values, Parts, Parts], holder: int
) -> None:
    """A wrong copy shows once its rank is chosen, and never otherwise."""
    whole, source, _ = pair
    one = whole_cut(whole.shape, [True])
    clean = Parts(one, (whole,))
    found = [moved(source, one, 1, n) for n in range(source.cut.most_holders)]
    for each in found:
        require_equal(each, clean)
    drifted = [n for n, part in enumerate(source.parts) if part is not None and part.size]
    rank = drifted[holder % len(drifted)]
    parts = tuple(
        part + 1 if part is not None and number == rank else part
        for number, part in enumerate(source.parts)
    )
    wrong = [moved(Parts(source.cut, parts), one, 1, n) for n in range(source.cut.most_holders)]
    seen: set[int] = set()
    for each in wrong:
        (values,) = each.parts
        assert values is not None
        seen |= set(np.flatnonzero(values != whole).tolist())
    own = parts[rank]
    assert own is not None
    assert sorted(seen) == sorted(own.reshape(-1) - 1 - 1000)


def test_a_view_of_a_whole_tensor_is_cut_in_the_other_s_shape() -> None:
    fused = split_cut((3, 4, 2), 1, [3, 1])
    whole = whole_cut((12, 2), [True])
    values = np.arange(24).reshape(3, 4, 2)
    source = Parts(whole, (values.reshape(12, 2),))
    target = moved(source, fused, 2)
    require_equal(target, Parts(fused, (values[:, :3], values[:, 3:])))
    (back,) = moved(target, whole, 1).parts
    assert back is not None
    assert back.reshape(-1).tolist() == list(range(24))
    with pytest.raises(NotTiledError, match=r"cut in the shape \[3, 4, 2\], not in \[12, 2\]"):
        recut(split_cut((12, 2), 0, [6, 6]), 0, fused)


def test_cuts_that_lose_or_double_elements_are_refused() -> None:
    good = split_cut((4, 2), 0, [3, 1])
    parts = good.shards, good.rank, good.whole, good.local, good.sizes
    with pytest.raises(NotTiledError, match=r"no box holds its element \[3, 0\]"):
        ModelCut(good.shape, (good.shards[0], None), *(part[:1] for part in parts[1:]))
    longer = good.sizes + np.array([[0, 0], [1, 0]])
    lower = good.whole - np.array([[0, 0], [1, 0]])
    with pytest.raises(NotTiledError, match="overlap"):
        ModelCut(good.shape, ((3, 2), (2, 2)), good.rank, lower, good.local, longer)
    with pytest.raises(NotTiledError, match="reaches out"):
        ModelCut(good.shape, ((3, 2), (1, 1)), *parts[1:])
    with pytest.raises(NotTiledError, match="parts of 3 in a dimension of 4"):
        split_cut((4, 2), 0, [2, 1])
