"""Re-cuts the model of a source for other degrees."""

from streamshard.degrees.averaged_parameters import require_averaged, with_means
from streamshard.degrees.equal_copies import EqualCopies
from streamshard.degrees.layered import WithLayerTensors, layered
from streamshard.degrees.recut_checkpoint import recut_checkpoint
from streamshard.errors import Option, UsageError
from streamshard.formats.deepspeed import names
from streamshard.formats.deepspeed.model_parallel.cut_rules import CutRules
from streamshard.formats.deepspeed.model_parallel.parallel_degrees import is_pipeline
from streamshard.formats.deepspeed.model_parallel.parts import ModelInParts, cuts_in
from streamshard.formats.pickle.inert import Node
from streamshard.formats.pickle.node_checks import of_file
from streamshard.operations.source.degree_change import DegreeChange
from streamshard.operations.source.source import Source


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
        copies = EqualCopies.of(laid, parts)
    return DegreeChange(
        source=source,
        original=opened,
        parts=like.degrees.parts,
        averaged=copies.averaged,
        check=copies.require_equal,
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
