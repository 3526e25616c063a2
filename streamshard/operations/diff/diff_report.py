"""The result of `diff`, and the sums from which it is computed."""

import math
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from streamshard.checks.problems import Difference
from streamshard.engine.scan.distance import COUNTS, SUMS, Measured

TRAINING: Final = "training"
"""Used as the state of tensors in the training state, such as that of a random generator."""


@dataclass(frozen=True, slots=True)
class Distance:
    """The difference between the elements of both sides.

    An element counts as changed if its bits differ: -0.0 is not 0.0. The measures are computed in
    float64 from the elements that are finite on both sides. They are None if there are no such
    elements, or if the elements are not numbers.
    """

    numel: int
    changed: int
    """Elements whose bits differ; if the dtypes differ, elements whose values differ."""
    fraction_changed: float
    max_abs: float | None
    """Largest absolute difference."""
    mean_abs: float | None
    """Mean absolute difference."""
    relative_l2: float | None
    """Norm of the difference, divided by the norm of the left side; None also where the left side
    is zero and the right side is not."""
    cosine: float | None
    """Cosine of the angle between both sides; None also where either side is zero."""
    nan: tuple[int, int]
    """Elements that are NaN on the left and on the right side."""
    inf: tuple[int, int]
    """Elements that are infinite on the left and on the right side."""


@dataclass(frozen=True, slots=True)
class TensorDiff:
    """The difference between one tensor of both sides."""

    name: str
    """Name of the array in a store, or a place in the training state."""
    state: str
    """`fp32`, `exp_avg`, …, `module`; `file`, or `training` for a tensor of the training state."""
    dtypes: tuple[str, str]
    """On the left and on the right side; where a cast is compared, the dtype before the cast.
    `8-byte` or the like where only the size of an element is known."""
    shape: tuple[int, ...]
    distance: Distance


@dataclass(frozen=True, slots=True)
class StateDiff:
    """The difference between all tensors of one state of both sides, taken together."""

    state: str
    tensors: int
    changed_tensors: int
    distance: Distance


@dataclass(frozen=True, slots=True)
class DiffReport:
    """The differences between two checkpoints, as `verify` finds them, with measures."""

    left: str
    right: str
    kinds: tuple[str, str]
    """`native` for shards, `store` for a Zarr store, `dumps` for raw per-rank dumps."""
    tags: tuple[str, str]
    tensors: tuple[TensorDiff, ...]
    """All tensors that both sides have and that could be compared, equal ones included."""
    states: tuple[StateDiff, ...]
    differences: tuple[Difference, ...]
    """All other differences: training state, shapes, dtypes, tensors that only one side has."""
    notes: tuple[str, ...]
    bytes_read: int
    floor_bytes: int
    """Resident memory before anything was opened."""
    limit_bytes: int
    """Memory allowed above the floor."""
    projected_bytes: int
    """Most resident memory that the plan allows the run, floor included."""
    peak_bytes: int
    """Highest resident memory that was measured."""
    seconds: float

    @property
    def changed(self) -> tuple[TensorDiff, ...]:
        """The tensors that are not equal."""
        return tuple(tensor for tensor in self.tensors if tensor.distance.changed)

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs."""
        return not self.changed and not self.differences


@dataclass(slots=True)
class Totals:
    """Counts and sums of one tensor, or of several, so far."""

    numel: int = 0
    counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(len(COUNTS), dtype=np.int64))
    sums: NDArray[np.float64] = field(default_factory=lambda: np.zeros(len(SUMS)))
    largest: float = 0.0
    peak: float = 0.0

    def add(self, measurement: Measured) -> None:
        """Add the next result, block by block in order, so that the sums are reproducible."""
        self.counts += measurement.counts
        with np.errstate(over="ignore", invalid="ignore"):
            self.sums = np.add.accumulate([self.sums, *measurement.sums])[-1]
        self.largest = max(self.largest, measurement.largest)
        self.peak = max(self.peak, measurement.peak)

    def join(self, other: "Totals") -> None:
        """Add the totals of another tensor."""
        self.numel += other.numel
        self.add(Measured(other.counts, other.sums[np.newaxis], other.largest, other.peak))

    def distance(self, *, are_numbers: bool) -> Distance:
        """Compute the measures from the totals."""
        changed, *not_finite, finite = map(int, self.counts)
        finite = finite if are_numbers else 0
        apart, squared, left, right, product = map(float, self.sums)
        norms = math.sqrt(left) * math.sqrt(right)
        cosine = product / norms if norms else None
        if not squared:
            cosine = 1.0 if left else None
        relative = math.sqrt(squared) / math.sqrt(left) if left else None if squared else 0.0
        return Distance(
            numel=self.numel,
            changed=changed,
            fraction_changed=changed / self.numel if self.numel else 0.0,
            max_abs=_finite(self.largest) if finite else None,
            mean_abs=_finite(apart / finite) if finite else None,
            relative_l2=_finite(relative) if finite else None,
            cosine=_cosine(cosine) if finite else None,
            nan=(not_finite[0], not_finite[1]),
            inf=(not_finite[2], not_finite[3]),
        )


def _finite(value: float | None) -> float | None:
    """Return None for a value that float64 cannot hold."""
    return value if value is not None and math.isfinite(value) else None


def _cosine(value: float | None) -> float | None:
    """Limit a cosine to [-1, 1], which rounding may exceed."""
    return None if _finite(value) is None or value is None else max(-1.0, min(1.0, value))
