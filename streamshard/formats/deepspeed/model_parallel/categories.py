"""Reads how a job cut each parameter from lists of patterns: its categories.

AutoTP saves them next to its maps, and alone before 0.19.8. Jobs that cut their layers themselves
save them for DeepSpeed's universal checkpoint, whose converter has the rules (`merge_tp_slices` of
`deepspeed/checkpoint/ds_to_universal.py`, 0.19.8). One rule is not followed: a vocabulary keeps its
padding, since the rows that are added to it are trained as all others are.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from streamshard.errors import CorruptFileError, UnsupportedError
from streamshard.formats.deepspeed import names
from streamshard.formats.deepspeed.model_parallel.stated_cuts import (
    CutsInFiles,
    NamePatterns,
    cut_by_rule,
    even_widths,
    joined,
    replicated,
    split,
)
from streamshard.formats.pickle.inert import Node, show
from streamshard.formats.shapes import LIMIT_DIMENSIONS, is_size, sizes_of
from streamshard.layout.boxes import NotTiledError
from streamshard.layout.model_cut import ModelCut, Shape, segments_cut

_REPLICATED: Final = "tp_replicated_parameter_patterns"
_AVERAGED: Final = "parameter_to_average_patterns"
_HALVES: Final = "parameter_with_2_sub_params_cat_dim_0"
_ROWS: Final = "parameter_with_row_parallelism_patterns"
_SUBS: Final = "parameter_with_sub_params"
_VOCABULARY: Final = "vocabulary_parameter_patterns"
_WIDTHS: Final = "sub_param_shard_widths"
"""Pattern → for each sub-parameter, the widths of the ranks' parts."""
_VERSION: Final = "universal_checkpoint_version"
UNSUPPORTED: Final = "autotp_unsupported_parameter_patterns"
"""Patterns of the parameters that AutoTP cannot describe, each with the reason."""

_TOLD: Final = (_REPLICATED, _AVERAGED, _HALVES, _ROWS, _SUBS)
_NEWEST: Final = 0.4
_WITH_WIDTHS: Final = 0.4
"""The first version with the widths of each sub-parameter."""
_MOST_SUBS: Final = 1 << 12
"""More sub-parameters than any parameter has."""


@dataclass(frozen=True, slots=True)
class _Subs:
    """Parameters that consist of several, each of which is cut by itself."""

    pattern: str
    shape: Sequence[Node]
    dimension: int


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
        self._widths = by_pattern(info, _WIDTHS)
        self._refused = NamePatterns(by_pattern(info, UNSUPPORTED))

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
                raise NotTiledError(f"'{_WIDTHS}' has not its widths on {ranks} ranks")
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


def by_pattern(info: Mapping[str, Node], key: str) -> Mapping[str, Node]:
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
