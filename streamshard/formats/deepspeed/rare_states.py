"""Kinds of states that few optimizers have: blocks of 8 bits, whole parameters."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ClassVar, Final

import numpy as np

from streamshard.errors import CorruptFileError, DisagreementError, UnsupportedError
from streamshard.formats.checkpoint import Checkpoint
from streamshard.formats.deepspeed import names
from streamshard.formats.deepspeed.read.state_of_ranks import StateOfRanks
from streamshard.formats.deepspeed.states import FLAT, Elementwise, State
from streamshard.formats.pickle.inert import Node, show
from streamshard.io.entries import open_readable
from streamshard.layout.cutting import CuttingBuilder, Ints, Segments, Share
from streamshard.layout.zero import FlatGroup, ceil_div, flat_group, shard_numel
from streamshard.model import ITEMSIZE, Repeat, Slot, SourceFile, ZeroLayout
from streamshard.sizes import some_of

STEP_SETTING: Final = "step"
"""Count of steps that `FusedAdam` keeps among a param group's settings; without it, it begins at 1
(`deepspeed/ops/adam/fused_adam.py`, 0.19.8)."""
CHANGED_SETTINGS: Final = frozenset(
    {"d", "d_max", "d_hat", "d_numerator", "k", "weight_sum", "lr_max"}
)
"""Settings that Prodigy, D-Adaptation and schedule-free optimizers change as they train."""
MADE_AT_START: Final = frozenset({"sum"})
"""States that are there before the first step: Adagrad's (`initialize_optimizer_states` of
`deepspeed/runtime/zero/stage_1_and_2.py`, 0.19.8)."""


class RareKind(Elementwise):
    """A kind of state. It overrides what is otherwise in it."""

    @classmethod
    def read(cls, values: StateOfRanks) -> State | None:
        """Return the state that ranks hold; None if it is of another kind."""
        return None

    @classmethod
    def restored(cls, word: Node, values: Sequence[Node]) -> State | None:
        """Read the document of a state; None if it is of another kind."""
        return None

    @classmethod
    def kept(
        cls, key: str, state: Elementwise, options: Mapping[str, Node], layout: ZeroLayout
    ) -> Elementwise:
        """Return a cut state as ranks of a layout keep it; `options`: its hyper-parameters."""
        return state

    @classmethod
    def may_be_missing(cls, options: Mapping[str, Node]) -> bool:
        """Tell whether a rank that owns no parameter of a param group has no states of it."""
        return False


_BLOCKS: Final = (64, 128, 256, 512, 1024, 2048, 4096)
"""Block sizes that bitsandbytes has, in elements; its optimizers had 2048 before 256."""
_CODE_VALUES: Final = 256
_IN_BLOCKS: Final = [tuple(f"{part}{n}" for part in ("state", "absmax", "qmap")) for n in (1, 2)]


class Blocks(RareKind):
    """A scale for each block of a state in 8 bits, the codes of which are elementwise.

    Such states are those of bitsandbytes (0.50.2: `Optimizer2State.init_state`, and
    `optimizer_update_8bit_blockwise` of `backends/cpu/ops.py`). A rank's flat tensor is cut into
    blocks of 256 elements, the last of which may be shorter. Element e has the value
    `qmap1[state1[e]] * absmax1[e // 256]`. A tensor below `min_8bit_size` is kept in 32 bits, and
    loads at any size in either form.

    No block may hold elements of two parameters, or of two ranks. If each parameter, and what each
    rank has of it, is whole blocks, then so is all padding: zeros with a scale of 0, as
    bitsandbytes makes new states.
    """

    @classmethod
    def read(cls, values: StateOfRanks) -> State | None:
        """Read scales, and the codes and the table of values that belong to them."""
        for keys in _IN_BLOCKS:
            unit = values.unit
            if values.key in keys and all(key in unit and unit[key].tensors for key in keys):
                return (_codes, cls._scales, _table)[keys.index(values.key)](values)
        return None

    @classmethod
    def _scales(cls, values: StateOfRanks) -> State:
        sizes: set[int] = set()
        for rank, tensor in values.tensors.items():
            numel = values.numels[rank]
            fitting = [block for block in _BLOCKS if tensor.shape == (ceil_div(numel, block),)]
            sizes.update(fitting)
            if tensor.dtype != "float32" or len(fitting) != 1 or len(sizes) != 1:
                message = f"has shape {tensor.shape} for {numel} elements of 8 bits"
                message = f"{message}, which does not tell one size of a block"
                raise values.refusal(rank, message)
            values.require_contiguous(rank)
        return cls("float32", sizes.pop())

    @classmethod
    def restored(cls, word: Node, values: Sequence[Node]) -> State | None:
        if word != FLAT or len(values) != 2:
            return None
        dtype, block = values
        if dtype != "float32" or type(block) is not int or block < 1:
            raise CorruptFileError(f"{show(dtype)} for each {show(block)} elements is no scale")
        return cls(dtype, block)

    def objection(
        self, group: int, numels: Mapping[str, int], layout: ZeroLayout, ranks: int
    ) -> str | None:
        has = {f"'{name}' has {numel:,} elements": numel for name, numel in numels.items()}
        on_each = f"each of {ranks} ranks has"
        if layout.stage == 3:
            parts = {name: shard_numel(numel, ranks) for name, numel in numels.items()}
            has |= {
                f"{on_each} {part:,} elements of '{name}'": part for name, part in parts.items()
            }
        else:
            flat = flat_group([*numels.values()], world_size=ranks, round_robin=False, alignment=1)
            part = flat.partition_numel
            has[f"{on_each} {part:,} elements of group {group}"] = part
        for what, numel in has.items():
            if numel % self.block:
                return (
                    "the optimizer keeps 8 bits of each element and a scale for each block of "
                    f"{self.block}, but {what}. Parts of blocks would have to be quantised again, "
                    "with a loss"
                )
        return None


_MOST_RANKS: Final = 1024


def uncuttable(
    objection: str, checkpoint: Checkpoint, layout: ZeroLayout, path: Path
) -> UnsupportedError:
    """Return the error of a layout that cannot cut the states of what is at a path."""
    step = checkpoint.expert_parallel
    layouts = (replace(layout, world_size=n) for n in range(step, _MOST_RANKS + 1, step))
    fitting = [f"{fit.world_size}" for fit in layouts if checkpoint.objection(fit) is None]
    ranks = some_of(fitting, 12) if fitting else "no number of"
    return UnsupportedError(
        f"{objection}. At ZeRO stage {layout.stage} it can be cut for {ranks} "
        "data-parallel ranks. Or start the optimizer again from the weights that 'streamshard "
        "export' writes",
        path=path,
    )


def _codes(values: StateOfRanks) -> State:
    for rank, tensor in values.tensors.items():
        if tensor.dtype != "uint8" or not values.is_flat(rank):
            raise values.not_understood(rank)
        values.require_contiguous(rank)
    return Elementwise("uint8")


def _table(values: StateOfRanks) -> State:
    for rank, tensor in values.tensors.items():
        if (tensor.dtype, tensor.shape) != ("float32", (_CODE_VALUES,)):
            raise values.not_understood(rank)
    return values.scalar()


class WholeMomentum(RareKind):
    """Muon's momentum at stages 1 and 2: a rank keeps it whole of each parameter it has a part of.

    A rank's momentum holds all parameters of which the rank owns a part, in stored order and
    without gaps. Ranks that own parts of the same parameter keep copies of its momentum, computed
    from the same gradient. The first rank's copy is read. Of the other copies only both ends are
    compared with it: with small partitions, reading them all would read most of the momentum twice.

    A momentum that is cut like any other state can have these lengths on all ranks too; then both
    layouts are the same. For rank r, let p be the sum of the padding and of the gaps in its
    partition. A momentum that is cut has as many elements as the partition. If the whole parameters
    have as many elements, then other ranks own p elements of r's parameters. Without
    `parameter_alignment` there are no gaps, and padding is on the last ranks that hold anything. If
    r shares a parameter with r + 1, r has no padding, so p = 0, so r shares no parameter. Hence no
    parameter is shared, and ranks that own parameters have no padding: in both layouts a rank has
    its parameters one after the other, and nothing else. Only with gaps can the lengths agree while
    the contents differ; then the config says which layout it is.
    """

    is_whole: ClassVar[bool] = True

    @classmethod
    def read(cls, values: StateOfRanks) -> State | None:
        """Read it as it is without ranks. Its element count on each is checked as it is placed."""
        is_momentum = values.key == names.MOMENTUM and cls.may_be_missing(values.options)
        return values.flat() if is_momentum and values.tensors else None

    @classmethod
    def kept(
        cls, key: str, state: Elementwise, options: Mapping[str, Node], layout: ZeroLayout
    ) -> Elementwise:
        is_whole = layout.whole_momentum and cls.may_be_missing(options)
        return cls(state.dtype) if is_whole and key == names.MOMENTUM else state

    @classmethod
    def may_be_missing(cls, options: Mapping[str, Node]) -> bool:
        return options.get(names.IS_MUON) is True

    def numel(self, flat: FlatGroup, rank: int) -> int:
        return int(flat.numels[[*flat.owned(rank)]].sum())

    def place(
        self,
        flat: FlatGroup,
        slot: Slot,
        tensors: Ints,
        files: Sequence[SourceFile],
        builder: CuttingBuilder,
    ) -> Iterator[Repeat]:
        first: dict[int, tuple[SourceFile, int]] = {}
        for rank in range(flat.world_size):
            number, offset = int(slot.files[rank]), int(slot.offsets[rank])
            for param in flat.owned(rank):
                numel = int(flat.numels[param])
                nbytes = numel * ITEMSIZE[self.dtype]
                if param in first:
                    repeat = first[param], (files[number], offset), nbytes, _MOMENTUM
                    span = min(nbytes, _SAMPLE_BYTES)
                    for start in {0, nbytes - span}:
                        require_alike(repeat, start, span)
                    yield repeat
                else:
                    first[param] = files[number], offset
                    builder.place(int(tensors[param]), number, offset, numel)
                offset += nbytes

    def share(self, flat: FlatGroup, rank: int, tensors: Ints) -> Share | None:
        owned = tensors[[*flat.owned(rank)]]
        segments = partial(_owned_segments, flat, tensors=tensors)
        return Share(owned, self.dtype, segments, rank, is_cut=False) if len(owned) else None


def _owned_segments(group: FlatGroup, rank: int, tensors: Ints, *, itemsize: int) -> Segments:
    """Return the segments of a state that a rank keeps whole for each parameter it owns a part of.

    `tensors`: logical tensor of each parameter, in the param group's own order.
    """
    owned = np.asarray(group.owned(rank), dtype=np.int64)
    numels = group.numels[owned]
    return Segments(
        tensors[owned], np.zeros_like(numels), numels, (np.cumsum(numels) - numels) * itemsize
    )


_MOMENTUM: Final = "the momentum of a parameter"
_SAMPLE_BYTES: Final = 4096
"""Bytes at each end of two copies that are compared."""


def require_alike(repeat: Repeat, start: int, nbytes: int) -> None:
    """Compare some bytes of two copies."""
    read, copied, _, what = repeat
    contents = [_read(file, offset + start, nbytes) for file, offset in (read, copied)]
    if contents[0] != contents[1]:
        message = f"disagrees with {copied[0].path} about {what} that both ranks hold: they are not"
        message = f"{message} of one step of one run"
        raise DisagreementError(message, path=read[0].path)


def _read(file: SourceFile, offset: int, nbytes: int) -> bytes:
    with open_readable(file.path) as opened:
        data = opened.read_at(offset, nbytes)
    if len(data) != nbytes:
        raise CorruptFileError(f"ends before byte {offset + nbytes}", path=file.path)
    return data


KINDS: Final[tuple[type[RareKind], ...]] = (Blocks, WholeMomentum)
"""The first that reads a state has it."""
