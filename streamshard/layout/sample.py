"""Shares work out among nights: which part of it is one night's."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Sample:
    """One of so many parts, counted from 1."""

    part: int
    parts: int

    def __str__(self) -> str:
        return f"{self.part}/{self.parts}"

    def holds(self, start: int, stop: int, total: int) -> bool:
        """Tell whether a unit is in this part: over all parts, each unit is in exactly one.

        The parts are equal shares of a total of bytes; a unit that takes the bytes from `start` to
        `stop` of it is where its middle is.

        >>> [Sample(part, 4).holds(10, 20, 40) for part in (1, 2, 3, 4)]
        [False, True, False, False]
        """
        place = (start + stop) * self.parts // max(1, 2 * total)
        return min(place, self.parts - 1) == self.part - 1


EVERYTHING: Final = Sample(1, 1)
