"""Requires that copies of a tensor in a checkpoint are equal, except for rounding.

Parts of a model that share a tensor have it in other buckets of gradients, and where an all-reduce
has three terms or more, their order depends on the place in the bucket. So the sums differ in their
last bits, in the dtype of the module, and after each step the moments and the master weights do.

A sum of n terms is wrong by up to n roundings of the sum of their magnitudes, which is more than
the sum: it is taken to be up to `_CANCELLATION` times as much. Errors of steps add up like a random
walk, with the square root of their number. Engines of 3 and 4 ranks (DeepSpeed 0.19.8; bf16, fp16,
fp32; 1 to 400 steps) had at most 4.2 roundings, where this allows 24 after the first step.
"""

import math
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Final, Self

from streamshard.compare.comparison import Pair, Runs, SideElements, compare
from streamshard.degrees.layered import WithLayerTensors, pair_of_copy
from streamshard.degrees.recut_checkpoint import MadeTensor, cutting_of
from streamshard.engine.run.phases import COMPARING, Progress
from streamshard.engine.scan.distance import BLOCK_NUMEL
from streamshard.errors import DisagreementError
from streamshard.formats.checkpoint import Checkpoint
from streamshard.formats.deepspeed.model_parallel.parallel_degrees import AS_SAVED
from streamshard.formats.deepspeed.model_parallel.parts import ModelInParts
from streamshard.formats.deepspeed.model_parallel.pipeline_layers import LayerCopy
from streamshard.formats.pickle.inert import show_few
from streamshard.layout.memory_plan import MemoryPlan
from streamshard.layout.model_cut import recut, whole_cut
from streamshard.model import BLOB, FILE, ITEMSIZE, MASTER, LogicalTensor
from streamshard.operations.diff.diff import measured
from streamshard.operations.diff.diff_report import Totals
from streamshard.sizes import counted
from streamshard.source.source import Source

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


@dataclass(frozen=True, slots=True)
class EqualCopies:
    """The tensors of which a checkpoint holds copies, which must be equal up to rounding."""

    original: Source
    in_parts: Sequence[Sequence[MadeTensor]]
    """Tensors that several parts of the model hold, each made whole of each holder's parts."""
    of_layers: Sequence[LayerCopy]
    """What the files of a pipeline's layers must have in common with others."""
    averaged: Sequence[str]
    """Parameters that are to be averaged."""
    summed: Set[str]
    """Trained parameters of which any copy counts, as all were updated by the same sums."""
    rounding: Rounding
    """How far these may differ."""

    @classmethod
    def of(cls, laid: WithLayerTensors, parts: ModelInParts) -> Self:
        """Find the copies in a source."""
        found, averaged = list(_copies_in_parts(laid.source, parts)), parts.averaged()
        trained = {name for name, tensor in parts.tensors.items() if tensor.group is not None}
        rounding = Rounding.of(laid.source.checkpoint)
        return cls(laid.source, found, laid.copies, averaged, trained - {*averaged}, rounding)

    @classmethod
    def in_files(cls, laid: WithLayerTensors) -> Self:
        """Find the copies in the files of a pipeline's layers alone."""
        checkpoint = laid.source.checkpoint
        trained = {tensor.name for tensor in checkpoint.tensors if tensor.state == MASTER}
        return cls(laid.source, [], laid.copies, (), trained, Rounding.of(checkpoint))

    def require_equal(self, memory: MemoryPlan, progress: Progress) -> Sequence[str]:
        """Refuse copies that differ by more than rounding explains; returns a note on others."""
        first, apart, shown = self._held_by(0), list[tuple[float, str]](), (memory, progress)
        for holder in range(1, max(map(len, self.in_parts), default=1)):
            pairs, holders = list(self._pairs(holder)), partial(self._holders, holder)
            apart += self._rounded(first, self._held_by(holder), pairs, holders, *shown)
        for path, copies in groupby(self.of_layers, key=lambda layer: layer.path):
            pairs, holders = list(map(pair_of_copy, copies)), partial(_file_and_module, path)
            apart += self._rounded(self.original, self.original, pairs, holders, *shown)
        if not apart:
            return []
        (units, most), count = max(apart), counted(len({name for _, name in apart}), "tensor")
        note = (
            f"Copies of {count} in {self.original.path} differ by rounding, as ranks add gradients "
            "in another order on each stage or rank: the first copy is taken. Their largest "
            f"difference, in {most}, is {units:.2g} units in the last place of "
            f"{self.rounding.dtype} at its largest value."
        )
        return [note]

    def _rounded(
        self,
        left: Source,
        right: Source,
        pairs: Sequence[Pair],
        holders: Callable[[Pair], str],
        memory: MemoryPlan,
        progress: Progress,
    ) -> Iterator[tuple[float, str]]:
        """Compare pairs; `holders` says whose copies a pair is made of.

        Yields what differs by rounding, each after its units in the last place.
        """
        compared = compare(left, right, pairs, memory, progress, phase=COMPARING).require_read()
        messages = {found.name: found.message for found in compared.differences}
        apart = {pair: messages[pair.name] for pair in pairs if pair.name in messages}
        summed = [p for p in apart if p.tensor is not None and p.tensor.name in self.summed]
        runs = Runs(left, right, summed, block_numel=BLOCK_NUMEL)
        progress.start(2 * runs.nbytes, COMPARING)
        totals = measured(runs, memory, progress.advance)
        for pair, message in apart.items():
            share = self.rounding.difference(totals[pair]) if pair in totals else None
            if share is not None and share <= self.rounding.share:
                yield self.rounding.units(totals[pair]), pair.name
                continue
            message = f"{self.original.path}: {message}, between {holders(pair)}. Copies must be"
            message = f"{message} equal: they have drifted apart in training"
            if share is not None:
                message = f"{message} by {share:.2g} of their size, of which rounding explains"
                message = f"{message} {self.rounding.share:.2g}"
            message = f"{message}, and which is right is unknown"
            if pair.tensor is not None and pair.tensor.name in self.averaged:
                message = f"{message}. Its files list it as one whose mean counts"
            raise DisagreementError(f"{message}. {AS_SAVED}")

    def _held_by(self, holder: int) -> Source:
        """Return the tensors in the files of one holder, or the last of those that have fewer."""
        made = [_of_holder(each, holder) for each in self.in_parts]
        return replace(self.original, cutting=cutting_of(made, self.original.cutting))

    def _pairs(self, holder: int) -> Iterator[Pair]:
        """List the tensors that have as many copies."""
        for number, each in enumerate(self.in_parts):
            if len(each) > holder:
                tensor = each[holder].tensor
                side, size = SideElements(number, tensor.dtype), ITEMSIZE[tensor.dtype]
                name = f"{tensor.state} of {tensor.name}"
                yield Pair(name, side, side, tensor.numel, tensor.dtype, size, tensor)

    def _holders(self, holder: int, pair: Pair) -> str:
        """Name the parts of the model that hold the first copy of a tensor, and another one."""
        made, tensors = self.in_parts[pair.left.tensor], self.original.checkpoint.tensors
        rows = (_of_holder(made, one).rows for one in (0, holder))
        parts = (sorted({tensors[row].model_part for row in each}) for each in rows)
        return " and ".join(map(show_few, parts))


def _of_holder(made: Sequence[MadeTensor], holder: int) -> MadeTensor:
    return made[min(holder, len(made) - 1)]


def _file_and_module(path: Path, pair: Pair) -> str:
    return f"{path.name} and the module that it is taken for a copy of"


def _copies_in_parts(source: Source, parts: ModelInParts) -> Iterator[list[MadeTensor]]:
    """Find all tensors that several parts hold, with all their states."""
    checkpoint, index = source.checkpoint, source.checkpoint.tensor_index()
    states = sorted({t.state for t in checkpoint.tensors if t.state not in (BLOB, FILE)})
    for name in parts.tensors:
        cut = parts.cut(name)
        count = cut.most_holders
        if count == 1:
            continue
        one = whole_cut(cut.shape, [True])
        recuts = [recut(one, 0, cut, holder=holder) for holder in range(count)]
        for state in states:
            keys = [
                [(checkpoint.model_parts[m].name, state, name) for m in each.ranks.tolist()]
                for each in recuts
                if each is not None
            ]
            # Of a pipeline's weights in 16 bits one stage's are enough; see `pipeline_layers`.
            if not keys or not all(key in index for each in keys for key in each):
                continue
            rows = [[index[key] for key in each] for each in keys]
            tensor = LogicalTensor(state, name, checkpoint.tensors[rows[0][0]].dtype, cut.shape)
            yield [MadeTensor(tensor, *both) for both in zip(recuts, rows, strict=True)]
