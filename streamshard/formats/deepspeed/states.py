"""The kinds of an optimizer's states: what a state is without ranks, and what a rank's file has.

Here are those that most optimizers have. `rare_states.py` has others; a new one is a class in its
list. What no kind reads stays in the files of the ranks, for as many ranks at the same stage.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Final

import numpy as np

from streamshard.formats.pickle.inert import Node, show
from streamshard.formats.torch.torch_tensor import Storage, make_tensor
from streamshard.layout.cutting import CuttingBuilder, Ints, Share, partition_segments
from streamshard.layout.zero import FlatGroup
from streamshard.model import ITEMSIZE, Literal, Repeat, Slot, SourceFile, ZeroLayout
from streamshard.registry import RARE_KINDS, load

FLAT: Final = "flat"
SCALAR: Final = "scalar"
PLAIN: Final = "plain"
"""Words that documents of states begin with."""
_MOST_SHOWN: Final = 16
_NUMBERS: Final = ("float32", "float64", "int32", "int64")


class State:
    """A state of a param group."""

    is_tensor: ClassVar[bool] = True
    """Whether files keep it in tensors, and not as a plain value."""

    @property
    def cut(self) -> "Elementwise | None":
        """The state itself, if it has a tensor for each parameter; None if it has one value."""
        return None

    def document(self) -> tuple[Node, ...]:
        """Return what stores keep of it: a word and plain nodes."""
        raise NotImplementedError

    def node(self) -> Node:
        """Return the one value, as each rank's file has it."""
        raise NotImplementedError

    def plain(self) -> Node:
        """Return the one value as far as it is plain, or the dtype of the tensors."""
        return self.node()

    def comparable(self) -> Node:
        """Return what is the same only if all bits of the one value are."""
        return self.plain()

    def number(self) -> int | float | None:
        """Return the one value if it is a number."""
        return None

    def __str__(self) -> str:
        return show(self.plain())


@dataclass(frozen=True)
class Elementwise(State):
    """A tensor for each parameter, with an element for each of the parameter's."""

    dtype: str
    block: int = 1
    """Elements of a parameter that one of its elements stands for."""
    is_whole: ClassVar[bool] = False
    """Whether ranks keep it whole for each parameter that they own a part of."""

    @property
    def cut(self) -> "Elementwise":
        return self

    def document(self) -> tuple[Node, ...]:
        return (FLAT, self.dtype, *[self.block] * (self.block > 1))

    def plain(self) -> Node:
        return self.dtype

    def shape(self, param: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of its tensor for a parameter of a shape."""
        return param if self.block == 1 else (math.prod(param) // self.block,)

    def objection(
        self, group: int, numels: Mapping[str, int], layout: ZeroLayout, ranks: int
    ) -> str | None:
        """Say why a layout cannot cut it, as `ParamGroup` does for a group that `ranks` share."""
        return None

    # In flat groups (stages 1 and 2), which count blocks where there are any

    def numel(self, flat: FlatGroup, rank: int) -> int:
        """Count the elements that a rank has."""
        return flat.partition_numel

    def numels(self, flat: FlatGroup, slot: Slot) -> list[int]:
        """Count the elements that each rank should have. `slot`: where those lie that it has."""
        return [self.numel(flat, rank) for rank in range(flat.world_size)]

    def place(
        self,
        flat: FlatGroup,
        slot: Slot,
        tensors: Ints,
        files: Sequence[SourceFile],
        builder: CuttingBuilder,
    ) -> Iterable[Repeat]:
        """Place its tensors, of which each rank's elements lie in a slot; returns further copies.

        `files`: those that the slot refers to.
        """
        first = builder.slot(slot)
        for tensor, start in zip(tensors.tolist(), flat.starts.tolist(), strict=True):
            builder.assign(tensor, first, piece_numel=flat.partition_numel, origin=start)
        return ()

    def share(self, flat: FlatGroup, rank: int, tensors: Ints) -> Share | None:
        """Return the elements that a rank's file has; None if it has no such state."""
        return Share(tensors, self.dtype, partial(partition_segments, flat, tensors=tensors), rank)


class Masters(Elementwise):
    """The master weights, which ranks save without the padding at the end."""

    def numel(self, flat: FlatGroup, rank: int) -> int:
        return flat.partition_numel - flat.padding(rank)

    def numels(self, flat: FlatGroup, slot: Slot) -> list[int]:
        """Count as ZeRO does, which saves `partition[: numel - padding]`.

        DeepSpeed before 0.16.4 counted all padding on the last rank, and saved the padding of the
        other ranks. If the padding was longer than that rank's partition, the end of the slice was
        negative, which Python counts from the back.
        """
        numel, ranks = flat.partition_numel, range(flat.world_size)
        old = [len(range(numel)[: numel - flat.padding_counted_last(rank)]) for rank in ranks]
        return old if slot.numels.tolist() == old else super().numels(flat, slot)


@dataclass(frozen=True)
class Scalar(State):
    """One small tensor for the group, such as `step`."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def document(self) -> tuple[Node, ...]:
        return SCALAR, self.dtype, self.shape, self.data.hex()

    def node(self) -> Node:
        """Build a tensor whose storage it shares with none: an optimizer advances each step."""
        numel = len(self.data) // ITEMSIZE[self.dtype]
        return make_tensor(Storage(self.dtype, numel, Literal(self.data)), self.shape)

    def plain(self) -> Node:
        elements = self._elements()
        if elements is None:
            return f"{self.dtype} {self.data.hex()}"
        if len(elements) > _MOST_SHOWN:
            return f"{self.dtype}{list(self.shape)}"
        return elements[0] if len(elements) == 1 else elements

    def comparable(self) -> Node:
        return f"{self._elements() or []} {self.dtype}{list(self.shape)} {self.data.hex()}"

    def _elements(self) -> list[Node] | None:
        """Return the elements; None if they are of a dtype that NumPy lacks, or incomplete."""
        try:
            elements: list[Node] = np.frombuffer(self.data, dtype=self.dtype).tolist()
        except (TypeError, ValueError):
            return None
        return elements

    def number(self) -> int | float | None:
        elements = (self._elements() or []) if self.dtype in _NUMBERS else []
        return elements[0] if len(elements) == 1 else None


@dataclass(frozen=True)
class Plain(State):
    """A value that is no tensor, for the group."""

    value: Node
    is_tensor: ClassVar[bool] = False

    def document(self) -> tuple[Node, ...]:
        return PLAIN, self.value

    def node(self) -> Node:
        return self.value

    def number(self) -> int | float | None:
        return self.value if type(self.value) in (int, float) else None


_COMMON: Final = frozenset({"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "sum", "square_avg"})
"""Keys of states that are of these kinds in all optimizers that have them."""


def rare_kinds(key: str) -> tuple[Any, ...]:
    """List the kinds besides these that a state with a key may be of, as `RareKind` says."""
    kinds: tuple[Any, ...] = () if key in _COMMON else load(RARE_KINDS)
    return kinds
