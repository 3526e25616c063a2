"""Decides whether rounding explains that copies of a trained tensor differ.

Parts of a model that share a tensor have it in other buckets of gradients, and where an all-reduce
has three terms or more, their order depends on the place in the bucket. So the sums differ in their
last bits, in the dtype of the module, and after each step the moments and the master weights do.

A sum of n terms is wrong by up to n roundings of the sum of their magnitudes, which is more than
the sum: it is taken to be up to `_CANCELLATION` times as much. Errors of steps add up like a random
walk, with the square root of their number. Engines of 3 and 4 ranks (DeepSpeed 0.19.8; bf16, fp16,
fp32; 1 to 400 steps) had at most 4.2 roundings, where this allows 24 after the first step.
"""

import math
from dataclasses import dataclass
from typing import Final, Self

from streamshard.formats.checkpoint import Checkpoint
from streamshard.operations.diff.diff_report import Totals

_PRECISION: Final = {"bfloat16": 8, "float16": 11, "float32": 24, "float64": 53}
"""Significant bits by dtype."""
_CANCELLATION: Final = 8
_MOST: Final = 1 / 8
"""Most that rounding explains after any number of steps: moments of two neighboring steps differ by
more."""


@dataclass(frozen=True, slots=True)
class Rounding:
    dtype: str
    """Dtype in which ranks sum gradients."""
    share: float
    """Most that it explains, as a share of a tensor's norm, and of its largest value."""

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Self:
        dtype, ranks = checkpoint.module_dtype, checkpoint.layout.world_size
        steps = checkpoint.model_parts[0].model_state.get("global_steps")
        walk = math.sqrt(steps) if isinstance(steps, int) and steps > 1 else 1.0
        # Two terms have one order.
        roundings = _CANCELLATION * ranks * walk if ranks > 2 else 0.0
        return cls(dtype, min(_MOST, math.ldexp(roundings, -_PRECISION[dtype])))

    def difference(self, totals: Totals) -> float:
        """Return the difference of two copies as a share of the first."""
        distance = totals.distance(are_numbers=True)
        if distance.relative_l2 is None or any((*distance.nan, *distance.inf)):
            return math.inf
        if not totals.largest:
            return 0.0  # zeros with other signs
        return max(distance.relative_l2, totals.largest / totals.peak if totals.peak else math.inf)

    def units(self, totals: Totals) -> float:
        """Return the largest difference in units in the last place of the largest value."""
        _, exponent = math.frexp(totals.peak)
        return totals.largest / math.ldexp(1.0, exponent - _PRECISION[self.dtype])
