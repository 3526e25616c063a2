"""How a param group is distributed among ranks, as bands in rows of a picture.

A *unit* is a run of parameters, consecutive in stored order, that are drawn as one; in a small
model each parameter is a unit. A *row* is one rank, or several consecutive ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streamshard.layout.zero import FlatGroup, ceil_div, shard_numel, slices_within

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Row:
    """One rank, or several consecutive ranks."""

    first: int
    """Index of the first rank among the ranks that share the group."""
    stop: int
    """Index after the last rank."""
    numel: int
    """Elements of all these ranks together, padding included."""
    mean_of: int = 1
    """Divisor of all numbers of the row: the count of ranks that are drawn as their mean."""


@dataclass(frozen=True, slots=True)
class Band:
    """The part of one unit that a row holds; padding, if the unit is None."""

    row: int
    unit: int | None
    at: int
    """Elements from the beginning of the row."""
    numel: int
    start: int
    """First element of the unit in this band, counted across the unit's parameters in order."""


@dataclass(frozen=True, slots=True)
class Cut:
    """One way to cut a param group."""

    rows: tuple[Row, ...]
    bands: tuple[Band, ...]
    """Row by row, from left to right; together they fill the rows."""
    borders: tuple[tuple[int, int], ...] = ()
    """(row, elements from its beginning) where a rank, a sub-group or a chunk ends within a row."""
    is_exact: bool = True
    """Whether all ranks of a row hold equal amounts of each parameter, so that a mean is exact."""


def flat_cut(group: FlatGroup, units: Sequence[range], most_rows: int) -> Cut:
    """Draw a flat group (stages 1 and 2), with one rank per row, or more if there are many ranks.

    `units`: consecutive ranges of positions in stored order.
    """
    ranks_per_row = ceil_div(group.world_size, most_rows)
    length = group.partition_numel
    rows = tuple(
        Row(first, stop, (stop - first) * length)
        for first in range(0, group.world_size, ranks_per_row)
        for stop in [min(first + ranks_per_row, group.world_size)]
    )
    starts = group.starts[list(group.order)]
    bands = _bands_of_row(rows, starts, group.numels[list(group.order)], units)
    borders = [
        (number, k * length)
        for number, row in enumerate(rows)
        for k in range(1, row.stop - row.first)
    ]
    return Cut(rows, tuple(bands), tuple(borders))


def tape_cut(numels: Sequence[int], ends: Ints, units: Sequence[range], rows: int) -> Cut:
    """Draw parameters that are not cut among ranks, as a tape that is wrapped into rows.

    `ends`: element positions on the tape at which a chunk ends.
    """
    lengths = np.asarray(numels, dtype=np.int64)
    total = int(lengths.sum())
    length = max(1, ceil_div(total, rows))
    made = tuple(
        Row(first, min(first + length, total), min(first + length, total) - first)
        for first in range(0, total, length)
    )
    bands = _bands_of_row(made, np.cumsum(lengths) - lengths, lengths, units)
    borders = tuple((end // length, end % length) for end in ends.tolist() if end % length)
    return Cut(made, tuple(bands), borders)


def _bands_of_row(
    rows: Sequence[Row], starts: Ints, numels: Ints, units: Sequence[range]
) -> list[Band]:
    """Cut consecutive units at the ends of rows; gaps become padding."""
    first = np.array([starts[unit.start] for unit in units], dtype=np.int64)
    last = np.array([starts[u.stop - 1] + numels[u.stop - 1] for u in units], dtype=np.int64)
    found, begin = [], 0
    for number, row in enumerate(rows):
        at = 0
        for unit, start, numel in slices_within(first, last - first, begin, begin + row.numel):
            if start > at:
                found.append(Band(number, None, at, start - at, 0))
            found.append(Band(number, unit, start, numel, begin + start - int(first[unit])))
            at = start + numel
        if at < row.numel:
            found.append(Band(number, None, at, row.numel - at, 0))
        begin += row.numel
    return found


def shard_cut(
    numels: Sequence[int],
    units: Sequence[range],
    *,
    world_size: int,
    most_rows: int,
    ends: Sequence[int] = (),
) -> Cut:
    """Draw parameters that are each cut among all ranks (stage 3).

    If there are more ranks than rows, one row shows ranks with equal shares. If there are too many
    kinds of shares, one row shows the mean of several ranks.

    `ends`: indices of the parameters before which a sub-group ends.
    """
    lengths = np.asarray(numels, dtype=np.int64)
    shares = np.array([shard_numel(numel, world_size) for numel in numels], dtype=np.int64)
    each = int(shares.sum())
    kinds = _alike(lengths, shares, world_size)
    is_exact = world_size <= most_rows or len(kinds) <= most_rows
    if world_size <= most_rows:
        kinds = [(rank, rank + 1) for rank in range(world_size)]
    elif not is_exact:
        step = ceil_div(world_size, most_rows)
        kinds = [(at, min(at + step, world_size)) for at in range(0, world_size, step)]
    rows = tuple(Row(first, stop, (stop - first) * each, stop - first) for first, stop in kinds)
    bands: list[Band] = []
    for number, row in enumerate(rows):
        begin = np.minimum(row.first * shares, lengths)
        held = np.minimum(row.stop * shares, lengths) - begin
        at = 0
        for unit, members in enumerate(units):
            inside = slice(members.start, members.stop)
            numel, room = int(held[inside].sum()), int(shares[inside].sum()) * row.mean_of
            if numel:
                bands.append(Band(number, unit, at, numel, int(begin[inside].sum())))
            if room > numel:
                bands.append(Band(number, None, at + numel, room - numel, 0))
            at += room
    before = np.cumsum(shares) - shares
    borders = [
        (number, int(before[end]) * row.mean_of) for number, row in enumerate(rows) for end in ends
    ]
    return Cut(rows, tuple(bands), tuple(borders), is_exact)


def _alike(numels: Ints, shares: Ints, world_size: int) -> list[tuple[int, int]]:
    """Find runs of consecutive ranks that hold equal amounts of every parameter.

    The amount of a parameter changes after the last rank with a full share, and again after the
    rank with the remainder.
    """
    full = numels // np.maximum(shares, 1)
    changes = np.unique(np.concatenate([full, full + (numels > full * shares)]))
    firsts = [0, *changes[(changes > 0) & (changes < world_size)].tolist()]
    return list(zip(firsts, [*firsts[1:], world_size], strict=True))
