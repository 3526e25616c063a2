"""Proves that a universal checkpoint has each parameter's elements in the parameter's own files.

DeepSpeed's ds_to_universal takes the parameters of a flat group to be stored in the group's own
order. With `round_robin_gradients` they are not, and files get elements of other parameters.
"""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from streamshard.engine.numeric.cast import cast_between
from streamshard.errors import UnsupportedError
from streamshard.formats.deepspeed.cut.part_cut import flat_groups
from streamshard.layout.zero import FlatGroup
from streamshard.model import ITEMSIZE, MASTER, MODULE
from streamshard.operations.source.source import Source
from streamshard.operations.source.source_access import SourceAccess

_MOST_NUMEL: Final = 1024
_MISPLACED: Final = (
    "made of a checkpoint with round_robin_gradients, of which DeepSpeed's ds_to_universal puts "
    "parameters into each other's places. Give the checkpoint that it was made from"
)


def require_own_places(source: Source, place: Path) -> None:
    """Compare beginnings of master weights with the module's weights, until one decides."""
    checkpoint, index = source.checkpoint, source.checkpoint.tensor_index()
    part, dtype = checkpoint.model_parts[0], checkpoint.module_dtype
    is_moved = False
    with closing(SourceAccess(source)) as access:

        def read(state: str, name: str, start: int, numel: int) -> NDArray[Any]:
            row = index.get((part.name, state, name))
            if row is None:
                raise UnsupportedError(_MISPLACED, path=place)
            elements = np.empty(numel, dtype=f"u{ITEMSIZE[dtype]}")
            cast = cast_between(checkpoint.tensors[row].dtype, dtype)
            access.fill(elements, row, start, cast)
            return elements

        flats = flat_groups(checkpoint, part, checkpoint.layout, dtype)
        for group, flat in zip(part.groups, flats, strict=True):
            for param, taken, start, numel in _moves(flat):
                is_moved, name = True, group.params[param]
                weights = read(MODULE, name, 0, numel)
                if not np.array_equal(read(MASTER, name, 0, numel), weights):
                    raise UnsupportedError(_MISPLACED, path=place)
                if not np.array_equal(read(MODULE, group.params[taken], start, numel), weights):
                    return
    if is_moved:
        raise UnsupportedError(_MISPLACED, path=place)


def _moves(flat: FlatGroup) -> Iterator[tuple[int, int, int, int]]:
    """Yield each parameter whose files get elements of another one from ds_to_universal.

    With it come that other one, the first of these elements in it, and how many are compared.
    """
    stops = flat.starts + flat.numels
    for param, at in enumerate((np.cumsum(flat.numels) - flat.numels).tolist()):
        for taken in np.flatnonzero((flat.starts <= at) & (at < stops)).tolist():
            numel = min(int(flat.numels[param]), int(stops[taken]) - at, _MOST_NUMEL)
            if taken != param and numel:
                yield param, taken, at - int(flat.starts[taken]), numel
