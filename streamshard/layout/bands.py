"""How a param group is distributed among ranks, as bands in rows of a picture."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Rows:
    """A way to cut parameters into rows of equal length; a row is a rank, or a piece of a tape.

    Parameter i, whose first element is element `origin` of a sequence that is cut every `piece`
    elements, has its part in row k at `at`, or further right in the row where it begins.
    """

    count: int
    length: int
    """Elements of a row, padding included."""
    numel: Ints
    origin: Ints
    piece: Ints
    at: Ints

    def bands(self) -> "Bands":
        """Return for each parameter where it begins, the rows that it fills, and where it ends."""
        origin, piece, end = self.origin, self.piece, self.origin + self.numel
        first, last, full, after = (
            origin // piece,
            (end - 1) // piece,
            -(-origin // piece),
            end // piece,
        )
        whole = np.maximum(after, full)
        head, tail = (first < full) & (self.numel > 0), (last >= whole) & (self.numel > 0)
        param = np.arange(len(origin))
        found = [
            (param[head], first[head], first[head] + 1),
            (param[whole > full], full[whole > full], whole[whole > full]),
            (param[tail], last[tail], last[tail] + 1),
        ]
        which, row, stop = (np.concatenate(columns) for columns in zip(*found, strict=True))
        begin = row * piece[which] - origin[which]
        start = np.maximum(begin, 0)
        numel = np.minimum(begin + piece[which], self.numel[which]) - start
        order = np.lexsort((self.at[which] + start - begin, row))
        columns = which, row, stop, self.at[which] + start - begin, numel, start
        return Bands(*(column[order] for column in columns))


@dataclass(frozen=True, slots=True)
class Bands:
    """Parts of parameters, in order of rows and from left to right; parallel arrays."""

    param: Ints
    row: Ints
    stop: Ints
    """After the last row that it fills in the same way."""
    at: Ints
    """Elements from the beginning of the row."""
    numel: Ints
    """Elements in each of these rows."""
    start: Ints
    """First element of the parameter in the first of these rows."""

    def apart(self) -> "Bands":
        rows = self.stop - self.row
        each = np.repeat(np.arange(len(rows)), rows)
        step = np.arange(len(each)) - np.repeat(np.cumsum(rows) - rows, rows)
        row = self.row[each] + step
        order = np.lexsort((self.at[each], row))
        numel = self.numel[each]
        columns = (
            self.param[each],
            row,
            row + 1,
            self.at[each],
            numel,
            self.start[each] + step * numel,
        )
        return Bands(*(column[order] for column in columns))
