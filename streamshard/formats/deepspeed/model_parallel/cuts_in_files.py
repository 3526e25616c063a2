"""How the model files of a job tell how tensor parallelism cut each parameter.

Categories are lists of patterns. AutoTP saves them next to its maps, and alone before 0.19.8. Jobs
that cut their layers themselves save them for DeepSpeed's universal checkpoint, whose converter has
the rules (`merge_tp_slices` of `deepspeed/checkpoint/ds_to_universal.py`, 0.19.8). One rule is not
followed: a vocabulary keeps its padding, since the rows that are added to it are trained as all
others are.

Affine maps are AutoTP's since 0.19.8. A map lists, for each tensor-parallel rank, the pieces of the
whole parameter that the rank holds, each as two views: where its elements lie in the whole, and
where in the rank's tensor (`deepspeed/checkpoint/affine.py`). All pieces that DeepSpeed makes are
boxes on both sides.
"""

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from streamshard.errors import CorruptFileError, DisagreementError, UnsupportedError
from streamshard.formats.deepspeed import names
from streamshard.formats.deepspeed.model_parallel.parallel_degrees import AS_SAVED
from streamshard.formats.deepspeed.model_parallel.stated_cuts import (
    NamePatterns,
    StatedCuts,
    cut_by_rule,
    even_widths,
    joined,
    replicated,
    split,
)
from streamshard.formats.pickle.inert import Node, show
from streamshard.formats.pickle.node_checks import (
    LIMIT_DIMENSIONS,
    is_size,
    require_shape,
    sizes_of,
)
from streamshard.layout.boxes import NotTiledError
from streamshard.layout.model_cut import ModelCut, Shape, segments_cut
from streamshard.layout.selection import strides

_REPLICATED: Final = "tp_replicated_parameter_patterns"
_AVERAGED: Final = "parameter_to_average_patterns"
_HALVES: Final = "parameter_with_2_sub_params_cat_dim_0"
_ROWS: Final = "parameter_with_row_parallelism_patterns"
_SUBS: Final = "parameter_with_sub_params"
_VOCABULARY: Final = "vocabulary_parameter_patterns"
_WIDTHS: Final = "sub_param_shard_widths"
"""Pattern → for each sub-parameter, the widths of the ranks' parts."""
_VERSION: Final = "universal_checkpoint_version"
_UNSUPPORTED: Final = "autotp_unsupported_parameter_patterns"
"""Patterns of the parameters that AutoTP cannot describe, each with the reason."""
_TOLD: Final = (_REPLICATED, _AVERAGED, _HALVES, _ROWS, _SUBS)
_NEWEST: Final = 0.4
_WITH_WIDTHS: Final = 0.4
"""The first version with the widths of each sub-parameter."""
_MOST_SUBS: Final = 1 << 12
"""More sub-parameters than any parameter has."""
_MAPS_VERSION: Final = 1
_MAPS: Final = "affine_map"


@dataclass(frozen=True, slots=True)
class _Subs:
    """Parameters that consist of several, each of which is cut by itself."""

    pattern: str
    shape: Sequence[Node]
    dimension: int


class CutsInFiles(StatedCuts):
    """Cuts that model files tell, in what they hold for DeepSpeed's universal checkpoint."""

    @abstractmethod
    def __init__(self, info: Mapping[str, Node]) -> None: ...

    @classmethod
    @abstractmethod
    def are_in(cls, info: Node) -> bool:
        """Tell whether a model file has them."""


class Categories(CutsInFiles):
    """The cuts of all parameters, as a model file's lists of patterns tell them."""

    @classmethod
    def are_in(cls, info: Node) -> bool:
        return isinstance(info, dict) and any(info.get(key) for key in _TOLD)

    def __init__(self, info: Mapping[str, Node]) -> None:
        self._version = info.get(_VERSION, 0.0)
        if not isinstance(self._version, int | float) or self._version > _NEWEST:
            message = f"'{names.UNIVERSAL_INFO}' of version {show(self._version)}"
            raise UnsupportedError(f"{message}, not {_NEWEST} or earlier; use a newer streamshard")
        self._replicated, self._averaged, self._halves, self._rows, self._vocabulary = (
            NamePatterns([(pattern, True) for pattern in _listed(info, key)])
            for key in (_REPLICATED, _AVERAGED, _HALVES, _ROWS, _VOCABULARY)
        )
        self._subs = NamePatterns((subs.pattern, subs) for subs in _sub_params(info))
        self._widths = _by_pattern(info, _WIDTHS)
        self._refused = NamePatterns(_by_pattern(info, _UNSUPPORTED))

    def cut(self, name: str, shards: Mapping[int, Shape], ranks: int) -> ModelCut:
        reason = self._refused.find(name)
        if reason is not None:
            raise UnsupportedError(f"'{name}' cannot be re-cut: {show(reason)}")
        rule = f"'{names.UNIVERSAL_INFO}'"
        return cut_by_rule(name, shards, ranks, rule, partial(self._cut, name))

    def is_default(self, name: str) -> bool:
        """Tell whether a parameter is in no list, except perhaps that of rows."""
        return not any(
            patterns.find(name)
            for patterns in (self._replicated, self._averaged, self._halves, self._subs)
        )

    def is_averaged(self, name: str) -> bool:
        return bool(self._averaged.find(name))

    def is_vocabulary(self, name: str) -> bool:
        return bool(self._vocabulary.find(name))

    def _cut(self, name: str, shapes: Sequence[Shape]) -> ModelCut:
        if self._replicated.find(name) or self.is_averaged(name):
            return replicated(shapes)
        if self._halves.find(name):
            whole = joined(shapes, 0)
            widths = [shape[0] // 2 for shape in shapes]
            return segments_cut(whole, 0, [widths, widths])
        subs = self._subs.find(name)
        if subs is not None:
            return self._cut_subs(name, subs, shapes)
        return split(shapes, 1 if self._rows.find(name) else 0)

    def _cut_subs(self, name: str, subs: _Subs, shapes: Sequence[Shape]) -> ModelCut:
        """Cut a parameter of several in a row, in the shape that its list views it in."""
        widths = self._sub_widths(subs, shapes)
        sizes = [sum(_sizes(size)) if isinstance(size, tuple | list) else size
                 for size in subs.shape]  # fmt: skip
        sizes[subs.dimension] = sum(map(sum, widths))
        sizes_of([size for size in sizes if size != -1])
        numel, known = sum(map(math.prod, shapes)), math.prod(size for size in sizes if size != -1)
        if sizes.count(-1) > 1 or known < 1 or numel % known:
            message = f"'{name}' has {numel:,} elements, and not the shape {show(list(subs.shape))}"
            raise CorruptFileError(f"{message} that '{_SUBS}' has")
        shape = tuple(numel // known if size == -1 else size for size in sizes)
        return segments_cut(shape, subs.dimension, widths)

    def _sub_widths(self, subs: _Subs, shapes: Sequence[Shape]) -> Sequence[Sequence[int]]:
        """Return, for each sub-parameter, the width of each rank's part."""
        ranks, listed = len(shapes), subs.shape[subs.dimension]
        if self._version >= _WITH_WIDTHS:
            found = [_sizes(widths) for widths in self._widths.get(subs.pattern) or ()]
            if not found or any(len(widths) != ranks for widths in found):
                raise NotTiledError(f"'{_WIDTHS}' does not have its widths on {ranks} ranks")
            return found
        if isinstance(listed, int):
            # Early lists have the count of equal sub-parameters there.
            full = joined(shapes, subs.dimension)[subs.dimension]
            is_possible = 0 < listed <= _MOST_SUBS and full % listed == 0
            listed = [full // listed] * listed if is_possible else []
        return even_widths(_sizes(listed), ranks)


def _sizes(node: Node) -> Sequence[int]:
    is_list = isinstance(node, list | tuple) and len(node) <= _MOST_SUBS
    if not is_list or not all(map(is_size, node)):
        raise CorruptFileError(f"{show(node)} in '{_SUBS}' or '{_WIDTHS}' are not sizes")
    return node  # type: ignore[no-any-return]


def _by_pattern(info: Mapping[str, Node], key: str) -> Mapping[str, Node]:
    """Return what model files tell by pattern; nothing if they do not."""
    entries = info.get(key) or {}
    if not isinstance(entries, dict):
        raise CorruptFileError(f"'{key}' is {show(entries)}, not a dict by patterns")
    return entries


def _listed(info: Mapping[str, Node], key: str) -> Sequence[Node]:
    entries = info.get(key) or []
    if not isinstance(entries, list | tuple):
        raise CorruptFileError(f"'{key}' is {show(entries)}, not a list of patterns")
    return entries


def _sub_params(info: Mapping[str, Node]) -> Iterator[_Subs]:
    for entry in _listed(info, _SUBS):
        fields = entry if isinstance(entry, dict) else {}
        shape, dimension = fields.get("shape"), fields.get("partition_dim")
        if (
            not isinstance(shape, list | tuple)
            or len(shape) > LIMIT_DIMENSIONS
            or not isinstance(dimension, int)
            or not 0 <= dimension < len(shape)
        ):
            raise CorruptFileError(f"'{_SUBS}' has {show(entry)}: no shape and dimension of one")
        for pattern in _listed(fields, "patterns"):
            yield _Subs(str(pattern), shape, dimension)


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
        if maps.get("version") != _MAPS_VERSION:
            message = f"affine maps of version {show(maps.get('version'))}"
            raise UnsupportedError(f"{message}, not {_MAPS_VERSION}; use a newer streamshard")
        self._maps = NamePatterns[Node](maps["params"])
        self._refused = NamePatterns(_by_pattern(info, _UNSUPPORTED))

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
    corner, step, remainder = [0] * len(of), 1, offset
    for dimension in reversed(range(len(of))):
        if sizes[dimension] > 1 and strides[dimension] != step:
            message = f"a view with strides {list(strides)} in a tensor of {list(of)}"
            raise UnsupportedError(f"{message}, which is not a box of it: not supported")
        step *= of[dimension]
        corner[dimension] = remainder % of[dimension] if of[dimension] else 0
        remainder //= max(1, of[dimension])
    if remainder:
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
                "dest": [int(cut.local[row] @ own_strides), own_strides.tolist()],
                "locations": holders[keys[row]],
            }
            for row in np.flatnonzero(cut.rank == number).tolist()
        ]
        ranks[number] = {"shard_shape": list(shard or ()), "pieces": pieces}
    return {"logical_shape": list(cut.shape), "ranks": ranks}


_IN_FILES: Final[Sequence[type[CutsInFiles]]] = (AffineMaps, Categories)
"""What may tell cuts in model files, in the order in which it is asked."""


def cuts_in(info: Node) -> type[CutsInFiles] | None:
    """Return what tells cuts in a model file's entry for the universal checkpoint, if any does."""
    return next((kind for kind in _IN_FILES if kind.are_in(info)), None)
