"""The parts that a job of AutoTP has at another degree, by the rule that cut the source's.

AutoTP decides by name which tensors it cuts, and along which dimension; the degree has no part in
that. It has in the widths: `get_shard_size` of `deepspeed/module_inject/tp_shard.py` (0.19.8) has
two rules for them, and which one it takes depends on names that files do not keep. So a rule counts
only if it gives the source's widths, and those that count must agree on the target's.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from streamshard.formats.deepspeed import names
from streamshard.formats.deepspeed.model_parallel.affine_maps import MAPS, map_of
from streamshard.formats.deepspeed.model_parallel.categories import WIDTHS, by_pattern
from streamshard.formats.deepspeed.model_parallel.parallel_degrees import TENSOR_PARALLEL
from streamshard.formats.deepspeed.model_parallel.parts import ModelInParts, made_parts, own_shape
from streamshard.formats.pickle.inert import Node
from streamshard.layout.boxes import NotTiledError
from streamshard.layout.model_cut import ModelCut, segments_cut, whole_cut

Widths = Sequence[int]


@dataclass(frozen=True, slots=True)
class WidthRule:
    """How wide the parts of a tensor are on each tensor-parallel rank."""

    degree: int
    kv_heads: int | None
    """Count of key and value heads of the model; None if that is not known."""
    grain: int = 1
    """`tp_grain_size` of the config."""

    def widths(self, given: Widths) -> Widths | None:
        """Return the widths at the degree; None if they are not known.

        `given`: the widths of the same tensor at another degree.

        Examples
        --------
        >>> WidthRule(2, None).widths([3, 3, 3, 3])  # equal ones stay equal by either rule
        [6, 6]
        >>> WidthRule(3, None).widths([6, 6]), WidthRule(3, 4).widths([7, 6])
        (None, [5, 4, 4])
        """
        size, ranks = sum(given), len(given)
        if len(set(given)) == 1 and ranks % self.degree == 0:
            return [size // self.degree] * self.degree
        if self.kv_heads is None:
            return None
        found = [
            at_degree
            for before, at_degree in zip(
                self._by_rules(size, ranks), self._by_rules(size, self.degree), strict=True
            )
            if before == list(given)
        ]
        return found[0] if found and all(widths == found[0] for widths in found) else None

    def _by_rules(self, size: int, ranks: int) -> list[Widths]:
        grain = self.grain if size >= self.grain else 1
        count, rest = divmod(size, grain)
        by_grains = [width * grain for width in _even(count, ranks)]
        by_grains[-1] += rest
        if not self.kv_heads or size % self.kv_heads:
            return [by_grains]
        head = size // self.kv_heads
        return [by_grains, [width * head for width in _even(self.kv_heads, ranks)]]


def _even(count: int, ranks: int) -> list[int]:
    return [count // ranks + (rank < count % ranks) for rank in range(ranks)]


def at_degree(parts: ModelInParts, rule: WidthRule) -> ModelInParts | None:
    """Return the parts of a job with AutoTP's affine maps at another tensor parallel degree.

    It is above 1. None if it is not known how that job cuts some tensor.
    """
    cuts, widths = {}, {}
    for name in parts.tensors:
        cut = parts.cut(name)
        if cut.is_whole:
            cuts[name] = whole_cut(cut.shape, [True] * rule.degree)
            continue
        dimension, given = _segments(cut)
        found = [rule.widths(each) for each in given]
        if not found or not all(found):
            return None
        widths[name] = [list(each) for each in found if each is not None]
        cuts[name] = segments_cut(cut.shape, dimension, widths[name])
    shards = {
        name: [own_shape(name, shard or (), own) for shard in cuts[name].shards]
        for name in cuts
        for own in [next(iter(parts.tensors[name].shapes.values()))]
    }
    first = parts.checkpoint.model_parts[0]
    info = _info(first.model_state[names.UNIVERSAL_INFO], cuts, widths)
    return None if info is None else made_parts(parts.checkpoint, first, shards, info)


def _segments(cut: ModelCut) -> tuple[int, list[Widths]]:
    """Return the dimension along which a tensor is cut, and the widths of each sub-tensor's parts.

    No sub-tensor is returned if it is not cut like that.
    """
    nothing: tuple[int, list[Widths]] = (0, [])
    along = np.flatnonzero((cut.sizes != np.array(cut.shape)).any(axis=0))
    ranks = len(cut.shards)
    counts = np.bincount(cut.rank, minlength=ranks)
    if len(along) != 1 or len(set(counts.tolist())) > 1:
        return nothing
    dimension = int(along[0])
    order = np.lexsort((cut.whole[:, dimension], cut.rank))
    widths = cut.sizes[order, dimension].reshape(ranks, -1).T.tolist()
    try:
        again = segments_cut(cut.shape, dimension, widths)
    except NotTiledError:
        return nothing
    is_same = all(
        np.array_equal(one[order], other)
        for one, other in (
            (cut.rank, again.rank),
            (cut.whole, again.whole),
            (cut.own, again.own),
            (cut.sizes, again.sizes),
        )
    )
    return (dimension, widths) if is_same else nothing


def _info(
    info: Mapping[str, Node],
    cuts: Mapping[str, ModelCut],
    widths: Mapping[str, Sequence[Widths]],
) -> Mapping[str, Node] | None:
    """Return what model files tell of the cuts, in the order of the source; None if it has more."""
    patterns = {f"^{re.escape(name)}$": name for name in cuts}
    maps, of_subs = info[MAPS]["params"], by_pattern(info, WIDTHS)
    if not patterns.keys() >= {*maps, *of_subs} or any(
        patterns[pattern] not in widths for pattern in of_subs
    ):
        return None
    made = {pattern: map_of(cuts[patterns[pattern]]) for pattern in maps}
    stated: dict[str, Node] = {MAPS: {**info[MAPS], "params": made}}
    if WIDTHS in info:
        stated[WIDTHS] = {pattern: widths[patterns[pattern]] for pattern in of_subs}
    return {**info, **stated}


def grain_of(config: Mapping[str, Node]) -> int:
    """Return `tp_grain_size` of a DeepSpeed config."""
    section = config.get(TENSOR_PARALLEL)
    inner = section.get("tp") if isinstance(section, dict) else None
    grain = inner.get("tp_grain_size", 1) if isinstance(inner, dict) else 1
    return grain if isinstance(grain, int) and grain > 0 else 1
