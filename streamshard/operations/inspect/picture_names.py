"""Chooses which parameters have a colour of their own in a picture, and what they are called."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final, Self

import numpy as np

_MOST_UNITS: Final = 96
"""Colours that are told apart by where they are."""
_MOST_RUNS: Final = 2 * _MOST_UNITS
"""Parts of one param group that are drawn."""


@dataclass(frozen=True, slots=True)
class Named:
    """Which parameters are drawn together, and what they are called."""

    units: tuple[str, ...]
    unit_of: dict[str, int]
    is_single: bool
    """Whether every parameter has a colour of its own."""

    @classmethod
    def of(cls, params: Sequence[str]) -> Self:
        """Give each parameter a colour; if there are too many, those whose names begin alike."""
        if len(params) <= _MOST_UNITS:
            return cls(tuple(params), {name: i for i, name in enumerate(params)}, True)
        runs = _alike_by_name(params)
        which = np.repeat(np.arange(len(runs)), [count for _, count in runs]).tolist()
        units = tuple(key for key, _ in runs)
        return cls(units, dict(zip(params, which, strict=True)), False)

    def runs(self, names: Sequence[str]) -> list[tuple[int, list[str]]]:
        """Put together what follows each other and has one colour: (unit, its members here).

        Stored by turns, as round robin does, what is of one colour lies far apart. If that makes
        too many, neighbours are put together all the same, in the colour of the first.
        """
        found = [(u, list(same)) for u, same in groupby(names, key=self.unit_of.__getitem__)]
        if len(found) <= _MOST_RUNS:
            return found
        size = -(-len(found) // _MOST_RUNS)
        spans = (found[at : at + size] for at in range(0, len(found), size))
        return [(span[0][0], [name for _, some in span for name in some]) for span in spans]

    def title(self, unit: int, members: Sequence[str]) -> str:
        """Say what a run is, and of how many parameters."""
        if len(members) == 1:
            return members[0]
        is_one = all(self.unit_of[name] == unit for name in members)
        name = self.units[unit] if is_one else f"{members[0]} … {members[-1]}"
        return f"{name}: {len(members):,} parameters"


def _alike_by_name(params: Sequence[str]) -> list[tuple[str, int]]:
    """Put together parameters that follow each other: (name for all of them, how many).

    As deep into the names as there is room for. Where that leaves few, those of one step deeper
    are shared out: a model of a thousand layers is drawn as so many layers at a time.
    """
    parts = [name.split(".") for name in params]

    def runs(depth: int) -> list[tuple[str, int]]:
        keys = (".".join(part[:depth]) for part in parts)
        return [(key, len(list(same))) for key, same in groupby(keys)]

    depth = max(map(len, parts))
    while depth and len(runs(depth)) > _MOST_UNITS:
        depth -= 1
    found = runs(depth)
    if depth and len(found) * 4 >= _MOST_UNITS:
        return found
    finer = runs(depth + 1)
    size = -(-len(finer) // _MOST_UNITS)
    spans = (finer[at : at + size] for at in range(0, len(finer), size))
    return [(f"{span[0][0]} … {span[-1][0]}", sum(count for _, count in span)) for span in spans]
