"""Divides work into equal parts, for example one part per night."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Sample:
    """One of several equal parts, counted from 1."""

    part: int
    parts: int

    def __str__(self) -> str:
        return f"{self.part}/{self.parts}"

    def holds(self, start: int, stop: int, total: int) -> bool:
        """Tell whether a unit is in this part; each unit is in exactly one of all parts.

        The parts are equal shares of `total` bytes. A unit with the bytes `[start, stop)` of them
        is in the part that contains its middle.

        >>> [Sample(part, 4).holds(10, 20, 40) for part in (1, 2, 3, 4)]
        [False, True, False, False]
        """
        middle = (start + stop) * self.parts // max(1, 2 * total)
        return min(middle, self.parts - 1) == self.part - 1


EVERYTHING: Final = Sample(1, 1)
