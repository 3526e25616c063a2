"""Leaves tensors out of an opened checkpoint, such as module weights proved to be casts."""

from collections.abc import Collection
from dataclasses import dataclass

from streamshard.engine.numeric.cast import cast_between
from streamshard.errors import UnsupportedError
from streamshard.formats.checkpoint import Checkpoint, ModelPart
from streamshard.formats.zarr import store_state
from streamshard.formats.zarr.documents import array_path
from streamshard.model import FILE, ITEMSIZE, MASTER, MODULE
from streamshard.operations.compare.comparison import compare
from streamshard.operations.compare.pairing import Pair, SideElements
from streamshard.operations.source.source import Source
from streamshard.operations.transfer.execution import Limits
from streamshard.operations.transfer.report import Progress


@dataclass(frozen=True, slots=True)
class Candidate:
    """A tensor that may be a cast of another."""

    number: int
    pair: Pair


def may_follow(checkpoint: Checkpoint) -> list[Candidate]:
    """List the module weights that may be casts of their master weights."""
    index = checkpoint.tensor_index()
    return [
        found
        for model_part in checkpoint.model_parts
        for entry in model_part.module
        if entry.kind == "param"
        and (found := _candidate(checkpoint, model_part, entry.name, entry.dtype, index))
        is not None
    ]


def _candidate(
    checkpoint: Checkpoint,
    model_part: ModelPart,
    name: str,
    dtype: str,
    index: dict[tuple[str, str, str], int],
) -> Candidate | None:
    numbers = [index.get((model_part.name, state, name)) for state in (MASTER, MODULE)]
    if numbers[0] is None or numbers[1] is None:
        return None
    master, weight = (checkpoint.tensors[number] for number in numbers if number is not None)
    if (weight.dtype, weight.numel) != (dtype, master.numel):
        return None
    try:
        cast_between(master.dtype, weight.dtype)
    except UnsupportedError:
        return None
    halves = SideElements(numbers[0], master.dtype), SideElements(numbers[1], weight.dtype)
    size = ITEMSIZE[weight.dtype]
    pair = Pair(array_path(weight), *halves, weight.numel, weight.dtype, size)
    return Candidate(numbers[1], pair)


def that_follow(source: Source, limits: Limits, progress: Progress) -> set[int]:
    """Compare all module weights with their master weights; return those that are exact casts."""
    candidates = may_follow(source.checkpoint)
    pairs = [candidate.pair for candidate in candidates]
    found = compare(source, source, pairs, limits, progress, exactly=True).require_read()
    differing = {difference.name for difference in found.differences}
    return {c.number for c in candidates if c.pair.name not in differing}


def beside(source: Source) -> set[int]:
    """List the sidecars that lie beside the tag."""
    tag = f"{source.checkpoint.tag}/"
    return {
        number
        for number, tensor in enumerate(source.checkpoint.tensors)
        if tensor.state == FILE and not tensor.name.startswith(tag)
    }


def tag_only(source: Source) -> Source:
    """Return a source without the sidecars that lie beside the tag."""
    return narrowed(source, beside(source))


def narrowed(source: Source, left_out: Collection[int]) -> Source:
    """Return a source without some tensors, and without the sidecars among them."""
    kept = [number for number in range(len(source.checkpoint.tensors)) if number not in left_out]
    checkpoint = store_state.without(source.checkpoint, left_out)
    return source.take(kept, checkpoint, _alone(source, left_out))


def _alone(source: Source, left_out: Collection[int]) -> set[int]:
    """List the source's files that are sidecars and are left out."""
    if source.kind != "native":
        return set()
    first, tensors = source.cutting.first_piece, source.checkpoint.tensors
    return {
        int(source.cutting.file[first[number]])
        for number in left_out
        if tensors[number].state == FILE
    }
