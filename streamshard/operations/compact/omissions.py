"""Leaves tensors out of an opened checkpoint: proved casts, sidecars, states of the optimizer."""

from dataclasses import replace
from typing import Final

from streamshard.compare.comparison import Pair, SideElements, compare
from streamshard.engine.numeric.cast import cast_between
from streamshard.engine.run.memory_limits import Limits
from streamshard.engine.run.phases import Progress
from streamshard.errors import UnsupportedError
from streamshard.formats.checkpoint import Checkpoint, Dropped
from streamshard.formats.zarr import store_state
from streamshard.formats.zarr.array_paths import array_path
from streamshard.model import BLOB, FILE, ITEMSIZE, MASTER, MODULE
from streamshard.source.narrowing import narrowed
from streamshard.source.source import Source

_KEPT: Final = (MASTER, MODULE, BLOB, FILE)


def cast_candidates(checkpoint: Checkpoint) -> dict[int, Pair]:
    """Return the module weights that may be casts of their master weights, each to compare so."""
    index, candidates = checkpoint.tensor_index(), dict[int, Pair]()
    for part in checkpoint.model_parts:
        for entry in part.module:
            master = index.get((part.name, MASTER, entry.name))
            weight = index.get((part.name, MODULE, entry.name))
            if entry.kind == "param" and master is not None and weight is not None:
                pair = _pair(checkpoint, master, weight, entry.dtype)
                candidates |= {weight: pair} if pair else {}
    return candidates


def _pair(checkpoint: Checkpoint, master: int, weight: int, dtype: str) -> Pair | None:
    """Return how to compare a weight with its master weight; None if it cannot be its cast."""
    left, right = checkpoint.tensors[master], checkpoint.tensors[weight]
    if (right.dtype, right.numel) != (dtype, left.numel):
        return None
    try:
        cast_between(left.dtype, right.dtype)
    except UnsupportedError:
        return None
    sides = SideElements(master, left.dtype), SideElements(weight, right.dtype)
    return Pair(array_path(right), *sides, right.numel, right.dtype, ITEMSIZE[right.dtype])


def exact_casts(source: Source, limits: Limits, progress: Progress) -> set[int]:
    """Compare all module weights with their master weights; return those that are exact casts."""
    candidates = cast_candidates(source.checkpoint)
    pairs = [*candidates.values()]
    found = compare(source, source, pairs, limits, progress, exactly=True).require_read()
    differing = {difference.name for difference in found.differences}
    return {number for number, pair in candidates.items() if pair.name not in differing}


def sidecars_beside(source: Source) -> set[int]:
    """List the sidecars that lie next to the tag."""
    tag = f"{source.checkpoint.tag}/"
    return {
        number
        for number, tensor in enumerate(source.checkpoint.tensors)
        if tensor.state == FILE and not tensor.name.startswith(tag)
    }


def tag_only(source: Source) -> Source:
    return narrowed(source, sidecars_beside(source))


def states_of(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Name the optimizer's states that are stored as tensors per parameter; others are small."""
    found = (tensor.state for tensor in checkpoint.tensors if tensor.state not in _KEPT)
    return tuple(dict.fromkeys(found))


def without_states(source: Source, *, at: str, why: str) -> Source:
    """Return a source without the optimizer's states of its parameters.

    Hyper-parameters stay, and so does all training state that is not the optimizer's.
    """
    checkpoint = source.checkpoint
    groups = [group for model_part in checkpoint.model_parts for group in model_part.groups]
    named = [*states_of(checkpoint), *(key for group in groups for key in group.states or ())]
    emptied = replace(
        checkpoint,
        model_parts=tuple(
            replace(model_part, groups=tuple(replace(g, states=None) for g in model_part.groups))
            for model_part in checkpoint.model_parts
        ),
        dropped=Dropped(at, why, tuple(dict.fromkeys(named))),
    )
    blobs = store_state.blobs_in(checkpoint) - store_state.blobs_in(emptied)
    numbers = {n for n, t in enumerate(checkpoint.tensors) if t.state not in _KEPT}
    return narrowed(replace(source, checkpoint=emptied), numbers | blobs)
