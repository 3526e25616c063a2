"""Finds what several parts of a model hold copies of; each copy can be read in its turn."""

from collections.abc import Sequence
from dataclasses import dataclass

from streamshard.degrees.recut_checkpoint import MadeTensor, cutting_of
from streamshard.formats.checkpoint import Reading
from streamshard.formats.deepspeed.model_parallel.parts import ModelInParts
from streamshard.layout.cutting import Cutting
from streamshard.layout.model_cut import recut, whole_cut
from streamshard.model import BLOB, FILE, LogicalTensor


@dataclass(frozen=True, slots=True)
class CopiesInParts:
    """The tensors that several parts of the model hold copies of, which must be equal."""

    tensors: Sequence[LogicalTensor]
    """Whole."""
    holders: Sequence[int]
    """Count of the parts that hold each."""
    source: Reading
    made: Sequence[Sequence[MadeTensor]]
    """Of each tensor: how it is made of each holder's in turn."""

    def cutting(self, holder: int) -> Cutting:
        """Return where the elements lie in the files of one holder, or the last where fewer do."""
        return cutting_of(
            [each[min(holder, len(each) - 1)] for each in self.made], self.source.cutting
        )

    def parts(self, number: int, holder: int) -> Sequence[str]:
        """Name the parts of the model that a holder's copy of a tensor is in."""
        tensors = self.source.checkpoint.tensors
        rows = self.made[number][min(holder, self.holders[number] - 1)].rows
        return sorted({tensors[row].model_part for row in rows})


def copies_in_parts(source: Reading, parts: ModelInParts) -> CopiesInParts:
    """Find all tensors that several parts of the model hold, with all their states."""
    checkpoint, index = source.checkpoint, source.checkpoint.tensor_index()
    states = sorted({t.state for t in checkpoint.tensors if t.state not in (BLOB, FILE)})
    tensors, holders, made = [], [], []
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
            dtype = checkpoint.tensors[rows[0][0]].dtype
            tensor = LogicalTensor(state, name, dtype, cut.shape)
            tensors.append(tensor)
            holders.append(count)
            made.append(
                [MadeTensor(tensor, each, row) for each, row in zip(recuts, rows, strict=True)]
            )
    return CopiesInParts(tensors, holders, source, made)
