"""Reads how AutoTP cut each parameter: the affine maps that model files hold since 0.19.8.

A map lists, for each tensor-parallel rank, the pieces of the whole parameter that the rank holds,
each as two views: where its elements lie in the whole, and where in the rank's tensor
(`deepspeed/checkpoint/affine.py`). All pieces that DeepSpeed makes are boxes on both sides.
"""

import math
from collections.abc import Mapping
from typing import Final

import numpy as np

from streamshard.errors import CorruptFileError, DisagreementError, UnsupportedError
from streamshard.formats.deepspeed import names
from streamshard.formats.deepspeed.model_parallel.categories import UNSUPPORTED, by_pattern
from streamshard.formats.deepspeed.model_parallel.parallel_degrees import AS_SAVED
from streamshard.formats.deepspeed.model_parallel.stated_cuts import CutsInFiles, NamePatterns
from streamshard.formats.pickle.inert import Node, show
from streamshard.formats.shapes import is_size, require_shape, sizes_of
from streamshard.layout.boxes import NotTiledError
from streamshard.layout.model_cut import ModelCut, Shape
from streamshard.layout.selection import strides

_VERSION: Final = 1
_MAPS: Final = "affine_map"


class AffineMaps(CutsInFiles):
    """The cuts of all parameters, as a model file of AutoTP tells them since 0.19.8."""

    @classmethod
    def are_in(cls, info: Node) -> bool:
        saved = info.get(_MAPS) if isinstance(info, dict) else None
        if saved is None or saved == {}:
            return False
        maps = saved.get("params") if isinstance(saved, dict) else saved
        if not isinstance(maps, dict):
            message = f"'{_MAPS}' in '{names.UNIVERSAL_INFO}' has {show(maps)} in place of maps"
            raise CorruptFileError(message)
        return True

    def __init__(self, info: Mapping[str, Node]) -> None:
        maps = info[_MAPS]
        if maps.get("version") != _VERSION:
            message = f"affine maps of version {show(maps.get('version'))}"
            raise UnsupportedError(f"{message}, not {_VERSION}; use a newer streamshard")
        self._maps = NamePatterns[Node](maps["params"])
        self._refused = NamePatterns(by_pattern(info, UNSUPPORTED))

    def cut(self, name: str, shards: Mapping[int, Shape], ranks: int) -> ModelCut:
        reason, entry = self._refused.find(name), self._maps.find(name)
        if reason is not None:
            raise UnsupportedError(f"'{name}' cannot be re-cut: {show(reason)}")
        if entry is None:
            raise UnsupportedError(f"no map tells how '{name}' is cut among the ranks")
        try:
            return _cut(name, entry, ranks)
        except (AttributeError, LookupError, TypeError, ValueError, NotTiledError) as error:
            why = show(error.args[0]) if isinstance(error, KeyError) else str(error)
            message = f"the map of '{name}' is not one of its elements"
            raise CorruptFileError(f"{message} ({type(error).__name__}: {why})") from error


def _cut(name: str, entry: Mapping[str, Node], ranks: int) -> ModelCut:
    shape = require_shape(entry["logical_shape"])
    of_rank = {int(rank): value for rank, value in entry["ranks"].items()}
    if sorted(of_rank) != list(range(ranks)):
        raise DisagreementError(f"the map of '{name}' is of other ranks than 0 to {ranks - 1}")
    shards = tuple(require_shape(of_rank[rank]["shard_shape"]) for rank in range(ranks))
    rows: list[tuple[int, list[int], list[int], tuple[int, ...]]] = []
    for rank, shard in enumerate(shards):
        pieces = of_rank[rank]["pieces"]
        for piece in pieces:
            if piece.get("scale", 1.0) != 1.0:
                message = f"'{name}' is held multiplied by {show(piece['scale'])} on rank {rank}"
                raise UnsupportedError(
                    f"{message}: with another factor the optimizer would need another learning "
                    f"rate for it. {AS_SAVED}"
                )
            sizes = require_shape(piece["shape"])
            if math.prod(sizes):
                whole = _corner(piece["source"], sizes, shape)
                rows.append((rank, whole, _corner(piece["dest"], sizes, shard), sizes))
    dimensions = len(shape)

    def column(at: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        return np.array([row[at] for row in rows], np.int64).reshape(len(rows), dimensions)

    numbers = np.array([row[0] for row in rows], np.int64)
    return ModelCut(shape, shards, numbers, column(1), column(2), column(3))


def _corner(view: Node, sizes: tuple[int, ...], of: tuple[int, ...]) -> list[int]:
    """Return where a view, an offset and strides, begins in a tensor that it is a box of."""
    offset, strides = view[0], sizes_of(view[1])
    if not is_size(offset):
        raise CorruptFileError(f"{show(offset)} is no offset")
    if len(sizes) != len(of) or len(strides) != len(of):
        raise UnsupportedError(f"a view of {list(sizes)} in a tensor of {list(of)}: not supported")
    corner, step, left = [0] * len(of), 1, offset
    for dimension in reversed(range(len(of))):
        if sizes[dimension] > 1 and strides[dimension] != step:
            message = f"a view with strides {list(strides)} in a tensor of {list(of)}"
            raise UnsupportedError(f"{message}, which is not a box of it: not supported")
        step *= of[dimension]
        corner[dimension] = left % of[dimension] if of[dimension] else 0
        left //= max(1, of[dimension])
    if left:
        raise CorruptFileError(f"offset {offset} in a tensor of {list(of)}")
    return corner


def map_of(cut: ModelCut) -> dict[str, Node]:
    """Return the map of a cut, as DeepSpeed saves it (`ParamAffineMap.to_dict`)."""
    whole_strides = np.array(strides(cut.shape), np.int64)
    holders: dict[bytes, list[int]] = {}
    keys = [key.tobytes() for key in np.hstack([cut.whole, cut.sizes])]
    for key, rank in zip(keys, cut.rank.tolist(), strict=True):
        holders.setdefault(key, []).append(rank)
    ranks: dict[int, dict[str, Node]] = {}
    for number, shard in enumerate(cut.shards):
        own_strides = np.array(strides(shard or ()), np.int64)
        pieces = [
            {
                "shape": cut.sizes[row].tolist(),
                "source": [int(cut.whole[row] @ whole_strides), whole_strides.tolist()],
                "dest": [int(cut.own[row] @ own_strides), own_strides.tolist()],
                "locations": holders[keys[row]],
            }
            for row in np.flatnonzero(cut.rank == number).tolist()
        ]
        ranks[number] = {"shard_shape": list(shard or ()), "pieces": pieces}
    return {"logical_shape": list(cut.shape), "ranks": ranks}
