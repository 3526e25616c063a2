"""How ZeRO cuts parameters among ranks, as arithmetic.

Checked against DeepSpeed 0.19.8: `DeepSpeedZeroOptimizer.__init__` (`runtime/zero/
stage_1_and_2.py`) for flat groups, `_create_fp16_sub_groups` (`runtime/zero/stage3.py`) and
`partition_parameters.py` for stage 3. All numbers count elements.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from streamshard.model import SubGroup

_START_ALIGNMENT: Final = 2
"""`nccl_start_alignment_factor`: a flat group is padded to this many elements per rank."""


def ceil_div(value: int, divisor: int) -> int:
    """Divide, rounding up."""
    return -(-value // divisor)


def round_robin_order(count: int, world_size: int) -> list[int]:
    """Order in which `round_robin_gradients` stores a group's parameters.

    >>> round_robin_order(5, 2)
    [0, 2, 4, 1, 3]
    """
    return [i for rank in range(world_size) for i in range(rank, count, world_size)]


def alignment_unit(itemsize: int) -> int:
    """Return the unit, in elements of the module's dtype, of `parameter_alignment`.

    >>> alignment_unit(2), alignment_unit(4)
    (8, 4)
    """
    return max(1, 16 // itemsize)


Slices = tuple[tuple[int, int, int], ...]
"""(index in the param group, start in a rank's partition, numel) of each."""


@dataclass(frozen=True, slots=True)
class FlatGroup:
    """A param group of stages 1 and 2, flattened and cut into equal partitions.

    ::

        flat   | p0   | p1 |a| p2          |pad|      a: alignment, pad: to 2 x world size
        ranks  |   0      |    1     |    2    |
    """

    order: tuple[int, ...]
    """Indices into the param group, in the order in which the parameters are stored."""
    numels: NDArray[np.int64]
    """Element count of each tensor, in the param group's own order."""
    starts: NDArray[np.int64]
    """First flat element of each tensor, in the param group's own order."""
    lasts: NDArray[np.int64]
    """The last tensor of each parameter, in the param group's own order; most have one."""
    alignments: tuple[int, ...]
    """Alignment padding after each parameter, in stored order."""
    numel: int
    """Elements up to the end of the last parameter, alignment included."""
    partition_numel: int
    world_size: int

    def padding(self, rank: int) -> int:
        """Count the elements at the end of a rank's partition that belong to no parameter."""
        stop = (rank + 1) * self.partition_numel
        return min(max(stop - self.numel, 0), self.partition_numel)

    def padding_counted_last(self, rank: int) -> int:
        """Count all of a group's padding on the last rank, even if other ranks hold it.

        So does `BF16_Optimizer`, and so did DeepSpeed before 0.16.4. The count may exceed the
        length of that rank's partition.
        """
        last = rank == self.world_size - 1
        return self.world_size * self.partition_numel - self.numel if last else 0

    def slices(self, rank: int) -> Slices:
        """Return the tensors that a rank owns a part of, in the param group's own order."""
        return self._slices_within(self.starts, self.numels, rank)

    def recorded(self, rank: int) -> Slices:
        """Return a rank's slices of parameters as DeepSpeed records them."""
        ends, numels = ends_and_numels(self.numels, self.lasts)
        if any(self.alignments):
            ends = self.starts[self.lasts] + self.numels[self.lasts]
        # Else `_create_param_mapping` (0.19.8) computes offsets as if the parameters were stored in
        # the group's own order. Only with alignment padding does it get the real offsets.
        return self._slices_within(ends - numels, numels, rank)

    def _slices_within(
        self, starts: NDArray[np.int64], numels: NDArray[np.int64], rank: int
    ) -> Slices:
        """Cut consecutive items to a rank's partition."""
        lower = rank * self.partition_numel
        upper = lower + self.partition_numel
        first, stop = np.maximum(starts, lower), np.minimum(starts + numels, upper)
        owned = np.flatnonzero(stop > first)
        return tuple((int(i), int(first[i] - lower), int(stop[i] - first[i])) for i in owned)

    def in_blocks(self, block: int) -> "FlatGroup":
        """Return the cut of what has one element per block; no block is cut."""
        if block == 1:
            return self
        return replace(
            self,
            numels=self.numels // block,
            starts=self.starts // block,
            numel=self.numel // block,
            partition_numel=self.partition_numel // block,
        )

    def owned(self, rank: int) -> tuple[int, ...]:
        """List the tensors that a rank owns a part of, in stored order."""
        owned = (index for index, _, _ in self.slices(rank))
        return tuple(sorted(owned, key=lambda index: int(self.starts[index])))


def ends_and_numels(
    numels: NDArray[np.int64], lasts: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return of each parameter its end in the group's own order, and its element count.

    `numels`: of tensors; `lasts`: the last tensor of each parameter.
    """
    ends = np.cumsum(numels)[lasts]
    return ends, np.diff(ends, prepend=0)


def flat_group(
    numels: Sequence[int],
    *,
    world_size: int,
    round_robin: bool,
    alignment: int,
    counts: Sequence[int] = (),
) -> FlatGroup:
    """Lay out a param group for stages 1 and 2.

    `numels`: element counts of tensors in the param group's own order.
    `alignment`: unit of `parameter_alignment` in elements; 1 where it is off.
    `counts`: how many tensors next to each other each parameter is; by default each is one.
    """
    numel_array = np.asarray(numels, dtype=np.int64)
    lasts = np.cumsum(counts or [1] * len(numels), dtype=np.int64) - 1
    ends, sizes = ends_and_numels(numel_array, lasts)
    count = len(lasts)
    order = round_robin_order(count, world_size) if round_robin else list(range(count))
    moved = np.zeros(count, dtype=np.int64)
    alignments: list[int] = []
    end = 0
    for position, index in enumerate(order):
        moved[index] = end + sizes[index] - ends[index]
        end += int(sizes[index])
        gap = 0 if position == count - 1 else -end % alignment
        alignments.append(gap)
        end += gap
    unit = _START_ALIGNMENT * world_size
    return FlatGroup(
        order=tuple(order),
        numels=numel_array,
        starts=np.cumsum(numel_array) - numel_array + np.repeat(moved, np.diff(lasts, prepend=-1)),
        lasts=lasts,
        alignments=tuple(alignments),
        numel=end,
        partition_numel=ceil_div(end, unit) * unit // world_size,
        world_size=world_size,
    )


def shard_numel(numel: int, world_size: int) -> int:
    """Return the elements of one parameter that each rank holds in stage 3, padding included."""
    return ceil_div(numel, world_size)


def sub_groups(
    groups: Sequence[Sequence[int]],
    *,
    world_size: int,
    sub_group_size: int,
    sharers: Sequence[int] = (),
) -> tuple[SubGroup, ...]:
    """Split param groups into stage 3's sub-groups, numbered across all groups.

    A sub-group is closed by the parameter that brings a rank's share to `sub_group_size`.
    `sharers`: count of the ranks that share each group; by default all do.

    >>> [(s.first, s.stop) for s in sub_groups([[4, 4, 4]], world_size=2, sub_group_size=3)]
    [(0, 2), (2, 3)]
    """
    sub_groups: list[SubGroup] = []
    for group, numels in enumerate(groups):
        ranks = sharers[group] if sharers else world_size
        shares = [shard_numel(numel, ranks) for numel in numels]
        first = filled = 0
        for index, share in enumerate(shares):
            filled += share
            if filled >= sub_group_size or index == len(shares) - 1:
                sub_groups.append(SubGroup(group, first, index + 1, filled))
                first, filled = index + 1, 0
    return tuple(sub_groups)
