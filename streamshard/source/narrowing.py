"""Leaves tensors out of a source."""

from collections.abc import Collection

from streamshard.formats.zarr import store_state
from streamshard.model import FILE
from streamshard.source.source import Source


def narrowed(source: Source, left_out: Collection[int]) -> Source:
    """Return a source without some tensors, and without the sidecars among them."""
    if not left_out:
        return source
    kept = [number for number in range(len(source.checkpoint.tensors)) if number not in left_out]
    checkpoint = store_state.without(source.checkpoint, left_out)
    return source.take(kept, checkpoint, _sidecars(source, left_out))


def _sidecars(source: Source, left_out: Collection[int]) -> set[int]:
    """Return the numbers of the files that are sidecars left out."""
    if not source.kind.is_tag:
        return set()
    first, tensors = source.cutting.first_piece, source.checkpoint.tensors
    return {
        int(source.cutting.file[first[number]])
        for number in left_out
        if tensors[number].state == FILE
    }
