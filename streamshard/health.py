"""The health of a tensor: whether its numbers are some that a job can go on with."""

import math
from dataclasses import dataclass
from typing import Final

MEASURED: Final = frozenset({"float64", "float32", "float16", "bfloat16"})
"""Dtypes whose elements are counted; integers are always finite."""

_MOST_NUMEL: Final = 1 << 63


@dataclass(frozen=True, slots=True)
class TensorHealth:
    """Which numbers a tensor holds."""

    numel: int
    """Count of its elements."""
    nans: int
    """Count of those that are NaN."""
    infinities: int
    zeros: int
    largest: float
    """Largest magnitude of the finite elements; 0 if there are none."""
    rms: float
    """Root mean square of the finite elements; 0 if there are none."""

    def require_possible(self) -> None:
        """Refuse, with a `ValueError`, numbers that no tensor has, as a record may hold them."""
        counts, sizes = (self.nans, self.infinities, self.zeros), (self.largest, self.rms)
        is_possible = min(counts) >= 0 and sum(counts) <= self.numel < _MOST_NUMEL
        if not is_possible or not all(0 <= size < math.inf for size in sizes):
            raise ValueError("a tensor's health that cannot be")

    @property
    def is_good(self) -> bool:
        """Whether all elements are finite."""
        return not (self.nans or self.infinities)

    @property
    def is_zero(self) -> bool:
        """Whether there are elements, and all are zero."""
        return 0 < self.numel == self.zeros

    def __str__(self) -> str:
        """Say which elements are not finite."""
        wrong = [(self.nans, "NaN"), (self.infinities, "infinite")]
        counts = " and ".join(f"{count:,} {what}" for count, what in wrong if count)
        return f"{counts or 'none'} of {self.numel:,} elements"


def root_mean_square(squares: float, count: int) -> float:
    """Return the root of a mean, from the sum of some squares and their count."""
    return math.sqrt(squares / count) if count else 0.0
