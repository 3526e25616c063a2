"""Re-cuts the model of a source for other degrees, and checks the copies it takes for equal."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path

from streamshard.degrees.averaged_parameters import AVERAGE, require_averaged, with_means
from streamshard.degrees.copies_in_parts import (
    CopiesInParts,
    copies_in_parts,
)
from streamshard.degrees.layered import WithLayerTensors, layered, pair_of_copy
from streamshard.degrees.recut_checkpoint import recut_checkpoint
from streamshard.engine.run.phases import COMPARING
from streamshard.errors import DisagreementError, Option, UsageError
from streamshard.formats.deepspeed import names
from streamshard.formats.deepspeed.model_parallel.cut_rules import CutRules
from streamshard.formats.deepspeed.model_parallel.parallel_degrees import AS_SAVED, is_pipeline
from streamshard.formats.deepspeed.model_parallel.parts import ModelInParts, cuts_in
from streamshard.formats.deepspeed.model_parallel.pipeline_layers import LayerCopy
from streamshard.formats.pickle.inert import Node
from streamshard.formats.pickle.node_checks import of_file
from streamshard.formats.torch.tree_comparison import show_few
from streamshard.layout.memory_plan import MemoryPlan
from streamshard.model import ITEMSIZE
from streamshard.operations.compare.comparison import compare
from streamshard.operations.compare.pairing import Pair, SideElements
from streamshard.operations.source.degree_change import DegreeChange
from streamshard.operations.source.source import Source
from streamshard.operations.transfer.report import Progress


@dataclass(frozen=True, slots=True)
class _Copies:
    """What several parts of a checkpoint hold copies of, of which one is taken."""

    original: Source
    in_parts: CopiesInParts
    of_layers: Sequence[LayerCopy]
    """What the files of a pipeline's layers must have in common with others."""
    averaged: Sequence[str]
    """Parameters that are to be averaged."""

    def require_equal(self, memory: MemoryPlan, progress: Progress) -> None:
        """Compare the copies."""
        copies = self.in_parts
        first = replace(self.original, cutting=copies.cutting(0))
        for holder in range(1, max(copies.holders, default=1)):
            other = replace(self.original, cutting=copies.cutting(holder))
            holders = partial(self._holders, holder)
            self._require_equal(first, other, list(self._pairs(holder)), holders, memory, progress)
        for path, held in groupby(self.of_layers, key=lambda layer: layer.path):
            pairs, holders = list(map(pair_of_copy, held)), partial(_file_and_module, path)
            self._require_equal(self.original, self.original, pairs, holders, memory, progress)

    def _require_equal(
        self,
        left: Source,
        right: Source,
        pairs: Sequence[Pair],
        holders: Callable[[Pair], str],
        memory: MemoryPlan,
        progress: Progress,
    ) -> None:
        """Compare pairs; `holders` says whose copies a pair is made of."""
        compared = compare(left, right, pairs, memory, progress, phase=COMPARING).require_read()
        if found := compared.differences:
            pair = next(pair for pair in pairs if pair.name == found[0].name)
            where = f"{found[0].message}, between {holders(pair)}"
            message = f"{self.original.path}: {where}. Copies must be equal: they have drifted"
            message = f"{message} apart in training, and which is right is unknown"
            if pair.tensor is not None and pair.tensor.name in self.averaged:
                message = f"{message}. Its files list it as one to be averaged: with {AVERAGE},"
                message = f"{message} 'repartition', 'convert' and 'export' take the mean"
            raise DisagreementError(f"{message}. {AS_SAVED}")

    def _pairs(self, holder: int) -> Iterator[Pair]:
        """List the tensors that have as many copies."""
        for number, tensor in enumerate(self.in_parts.tensors):
            if self.in_parts.holders[number] > holder:
                side, size = SideElements(number, tensor.dtype), ITEMSIZE[tensor.dtype]
                name = f"{tensor.state} of {tensor.name}"
                yield Pair(name, side, side, tensor.numel, tensor.dtype, size, tensor)

    def _holders(self, holder: int, pair: Pair) -> str:
        """Name the parts of the model that hold the first copy of a tensor, and another one."""
        number = pair.left.tensor
        return " and ".join(show_few(self.in_parts.parts(number, one)) for one in (0, holder))


def _file_and_module(path: Path, pair: Pair) -> str:
    return f"{path.name} and the module that it is taken for a copy of"


def parts_of(
    opened: Source, rules: CutRules | None, *, keeps_shards: bool, average: bool
) -> tuple[WithLayerTensors, ModelInParts]:
    """Return a source with all that is needed of its parts, and these."""
    laid = WithLayerTensors(opened)
    if is_pipeline(opened.checkpoint) and not (keeps_shards and not opened.checkpoint.layers):
        laid = layered(opened)
    parts = ModelInParts(laid.source.checkpoint, rules, keeps_shards=keeps_shards)
    if not average:
        return laid, parts
    # Files of layers hold the copies that the means are made of.
    averaged = set(parts.averaged())
    copies = [copy for copy in laid.copies if copy.name not in averaged]
    return WithLayerTensors(with_means(laid.source, parts), copies), parts


def recut_source(laid: WithLayerTensors, parts: ModelInParts, like: ModelInParts) -> DegreeChange:
    """Cut a source into the parts of another job."""
    opened = laid.source
    with of_file(opened.path):
        source = recut_checkpoint(opened, parts, like)
        copies = copies_in_parts(opened, parts)
    averaged = parts.averaged()
    return DegreeChange(
        source=source,
        original=opened,
        parts=like.degrees.parts,
        averaged=averaged,
        check=_Copies(opened, copies, laid.copies, averaged).require_equal,
    )


def universal_info(opened: Source) -> Node:
    """Return what the first model file tells of how parameters are cut."""
    return opened.checkpoint.model_parts[0].model_state.get(names.UNIVERSAL_INFO)


def tells_cut(opened: Source) -> bool:
    """Tell whether the model files tell how parameters are cut."""
    info = universal_info(opened)
    with of_file(opened.path):
        return cuts_in(info) is not None


def require_unused(rules: CutRules | None, *, average: bool) -> None:
    if rules is not None:
        message = (
            f"{Option('cut_rules_file')}: no tensor is cut otherwise, or put together, in what is"
        )
        raise UsageError(f"{message} asked for; leave it out")
    if average:
        require_averaged(())
