"""Chooses which parameters share a colour in a picture, and their names."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final, Self

import numpy as np

_MOST_UNITS: Final = 96
"""Most colours in a picture; similar ones differ by their places."""
_MOST_RUNS: Final = 2 * _MOST_UNITS
"""Most parts of one param group that are drawn."""


@dataclass(frozen=True, slots=True)
class Named:
    """The parameters that are drawn together, and their names."""

    units: tuple[str, ...]
    unit_of: dict[str, int]
    is_single: bool
    """Whether every parameter has a colour of its own."""

    @classmethod
    def of(cls, params: Sequence[str]) -> Self:
        """Give each parameter a colour; if there are too many, one to those of a common prefix."""
        if len(params) <= _MOST_UNITS:
            return cls(tuple(params), {name: i for i, name in enumerate(params)}, True)
        runs = _alike_by_name(params)
        which = np.repeat(np.arange(len(runs)), [count for _, count in runs]).tolist()
        units = tuple(key for key, _ in runs)
        return cls(units, dict(zip(params, which, strict=True)), False)

    def runs(self, names: Sequence[str]) -> list[tuple[int, list[str]]]:
        """Group consecutive parameters of the same colour: (unit, its members here).

        In round-robin order, parameters of one colour lie far apart. If there are too many groups,
        neighbours of different colours are merged, in the colour of the first.
        """
        found = [(u, list(same)) for u, same in groupby(names, key=self.unit_of.__getitem__)]
        if len(found) <= _MOST_RUNS:
            return found
        size = -(-len(found) // _MOST_RUNS)
        spans = (found[at : at + size] for at in range(0, len(found), size))
        return [(span[0][0], [name for _, some in span for name in some]) for span in spans]

    def title(self, unit: int, members: Sequence[str]) -> str:
        """Return the title of a run, with the count of its parameters."""
        if len(members) == 1:
            return members[0]
        is_one = all(self.unit_of[name] == unit for name in members)
        name = self.units[unit] if is_one else f"{members[0]} … {members[-1]}"
        return f"{name}: {len(members):,} parameters"


def _alike_by_name(params: Sequence[str]) -> list[tuple[str, int]]:
    """Group consecutive parameters by their names: (name of the group, count of parameters).

    Names are compared to the greatest depth that gives no more groups than there are colours. If
    that gives too few groups, the groups of the next depth are merged in equal numbers: a model of
    a thousand layers is drawn some layers at a time.
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
