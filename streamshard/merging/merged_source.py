"""Makes one source of several: the weighted mean of their weights, and all else of the newest."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import PurePosixPath
from typing import Final

import numpy as np

from streamshard.compare.comparison import Pair, SideElements, compare
from streamshard.engine.run.phases import COMPARING, Progress
from streamshard.errors import DisagreementError, UnsupportedError
from streamshard.formats import pretrained
from streamshard.formats.checkpoint import Checkpoint
from streamshard.layout.memory_plan import MIB, MemoryPlan
from streamshard.merging.weighted_mean import SUMMING_BYTES, Summand, WeightedMean
from streamshard.model import BLOB, FILE, ITEMSIZE, MASTER, MODULE, LogicalTensor, Note
from streamshard.sizes import counted, some_of
from streamshard.source.narrowing import narrowed
from streamshard.source.source import Source

LINEAR_STATES: Final = ("exp_avg", "exp_avg_sq", "momentum_buffer")
"""Optimizer states that are sums over gradients or their squares, so that a mean has a meaning."""
_FLOATS: Final = ("float64", "float32", "bfloat16", "float16")
_BLOCK_BYTES: Final = MIB
"""Memory for a block of a checkpoint's file of which only a part is needed."""
_MOST_NAMED: Final = 3

_Key = tuple[int, str, str]
"""Model part, state and name of a tensor."""


@dataclass(frozen=True)
class Merging:
    """Checkpoints that become one."""

    sources: Sequence[Source]
    """In the order in which they are added."""
    weights: Sequence[float]
    newest: int
    """Which of them all else is taken of."""
    averages_states: bool
    copies: Sequence[Pair] = ()
    """What the files of a pipeline's layers must have in common with the newest's masters."""

    @property
    def base(self) -> Source:
        """The newest of the checkpoints."""
        return self.sources[self.newest]

    def source(self) -> Source:
        base, older_sources = self.base, [one for one in self.sources if one is not self.base]
        self._require_alike()
        source = replace(base, files=tuple(f for one in (base, *older_sources) for f in one.files))
        for dtype, members in self._groups:
            source = self._relocated(source, members, dtype, members)
            for copied, pairs in self._copies(members).items():
                masters, weights = zip(*pairs, strict=True)
                source = self._relocated(source, weights, copied, masters)
        decoding = len(self.sources) * max(one.codec_bytes for one in self.sources)
        return replace(
            source,
            checkpoint=_noted(source.checkpoint, self._note()),
            codec_bytes=SUMMING_BYTES + len(older_sources) * _BLOCK_BYTES + decoding,
        )

    def kept_differ(self, memory: MemoryPlan, progress: Progress) -> list[str]:
        """Compare what is not averaged, and describe the differences."""
        notes, base = [], self.base
        if self.copies:
            same = compare(base, base, self.copies, memory, progress, phase=COMPARING)
            for difference in same.require_read().differences:
                message = f"{difference.message}: the file of a layer is no copy of its module, so"
                raise DisagreementError(f"{message} what it holds is unknown", path=base.place)
        for source, index in zip(self.sources, self._indices, strict=True):
            if source is base:
                continue
            pairs, unlike = list(self._kept_pairs(source, index)), list(self._unlike(source, index))
            outcome = compare(base, source, pairs, memory, progress, phase=COMPARING).require_read()
            names = [difference.name for difference in outcome.differences]
            self._require_not_quantized(source, [p.tensor for p in pairs if p.name in names])
            if names := [*names, *unlike]:
                kinds = "values, dtypes or shapes" if unlike else "values"
                notes.append(
                    f"{source.place} has other {kinds} of {some_of(names, _MOST_NAMED)}: buffers "
                    f"and frozen weights are not averaged, and are those of {base.place}. "
                    "Statistics of activations, as BatchNorm keeps, have to be computed again."
                )
        return notes

    def _require_not_quantized(
        self, source: Source, differing: Sequence[LogicalTensor | None]
    ) -> None:
        """Refuse models with tables of integers of their own, which their scales belong to."""
        if any(self._tensor(row).state == MASTER for row in self.averaged):
            return
        for tensor in differing:
            if tensor is not None and len(tensor.shape) > 1 and tensor.dtype != "bool":
                message = f"has other values of '{tensor.name}', of {tensor.dtype}: quantized"
                message = f"{message} weights have no mean. Merge the checkpoints that they were"
                raise UnsupportedError(f"{message} made from, and quantize that", path=source.place)

    @cached_property
    def averaged(self) -> Sequence[int]:
        """Tensors of the newest checkpoint of which means are computed."""
        tensors = self.base.checkpoint.tensors
        states = {MASTER, *(LINEAR_STATES if self.averages_states else ())}
        found = [row for row, tensor in enumerate(tensors) if tensor.state in states]
        if any(tensors[row].state == MASTER for row in found):
            return found
        return [r for r, t in enumerate(tensors) if t.state == MODULE and "float" in t.dtype]

    @cached_property
    def _indices(self) -> Sequence[Mapping[_Key, int]]:
        return [dict(_keys(one.checkpoint)) for one in self.sources]

    @cached_property
    def _rows(self) -> Sequence[Mapping[int, int]]:
        """Of each checkpoint, tensor of the newest one → the same tensor here."""
        keys = {row: key for key, row in self._indices[self.newest].items()}
        return [{row: index[keys[row]] for row in self.averaged} for index in self._indices]

    @cached_property
    def _firsts(self) -> Sequence[int]:
        """Number of the first file of each checkpoint; those of the newest come first."""
        base, counts = self.base, [len(one.files) for one in self.sources]
        own = counts[self.newest]
        others = [0 if one is base else n for one, n in zip(self.sources, counts, strict=True)]
        ends = list(accumulate(others, initial=own))
        return [0 if one is base else end for one, end in zip(self.sources, ends, strict=False)]

    @cached_property
    def _groups(self) -> Sequence[tuple[str, Sequence[int]]]:
        """Return the tensors to average, those of the same dtypes in all checkpoints together."""
        groups: dict[tuple[str, ...], list[int]] = {}
        for row in self.averaged:
            both = zip(self.sources, self._rows, strict=True)
            dtypes = (one.checkpoint.tensors[rows[row]].dtype for one, rows in both)
            groups.setdefault((self._tensor(row).dtype, *dtypes), []).append(row)
        return [(key[0], rows) for key, rows in groups.items()]

    def _tensor(self, row: int) -> LogicalTensor:
        return self.base.checkpoint.tensors[row]

    def _copies(self, members: Sequence[int]) -> Mapping[str, Sequence[tuple[int, int]]]:
        """Return the module's copies of some master weights, by dtype, each after its original."""
        index, copies = self.base.checkpoint.tensor_index(), dict[str, list[tuple[int, int]]]()
        for row in members:
            master = self._tensor(row)
            copy = index.get((master.model_part, MODULE, master.name))
            if master.state == MASTER and copy is not None:
                copies.setdefault(self._tensor(copy).dtype, []).append((row, copy))
        return copies

    def _relocated(
        self, source: Source, rows: Sequence[int], dtype: str, originals: Sequence[int]
    ) -> Source:
        """Let tensors lie where the means of others are computed, as a dtype."""
        starts = np.cumsum([0, *(self._tensor(row).numel for row in originals)])
        names = [f"{t.state} of '{t.name}'" for t in map(self._tensor, originals)]
        mean = WeightedMean(
            summands=tuple(self._summand(n, originals) for n in range(len(self.sources))),
            names=tuple(names),
            starts=starts,
            dtype=dtype,
            firsts=tuple(sorted(self._firsts)),
        )
        return source.compute(rows, mean)

    def _summand(self, number: int, originals: Sequence[int]) -> Summand:
        source, rows = self.sources[number], self._rows[number]
        numbers = self._firsts[number] + np.arange(len(source.files))
        own = np.array([rows[row] for row in originals], dtype=np.int64)
        dtype = source.checkpoint.tensors[own[0]].dtype
        cutting = source.cutting.in_files(numbers).take(own)
        return Summand(source.place, self.weights[number], dtype, cutting)

    def _kept_pairs(self, source: Source, index: Mapping[_Key, int]) -> Iterator[Pair]:
        """Pair the tensors of the module that are not averaged with those of another checkpoint."""
        for row, source_row in self._kept(index):
            tensor = self._tensor(row)
            if _has_form(source.checkpoint.tensors[source_row], tensor):
                left, right = (SideElements(number, tensor.dtype) for number in (row, source_row))
                size, name = ITEMSIZE[tensor.dtype], f"'{tensor.name}'"
                yield Pair(name, left, right, tensor.numel, tensor.dtype, size, tensor)

    def _unlike(self, source: Source, index: Mapping[_Key, int]) -> Iterator[str]:
        """Yield the names of those that another checkpoint has in another dtype or shape."""
        for row, source_row in self._kept(index):
            tensor = self._tensor(row)
            if not _has_form(source.checkpoint.tensors[source_row], tensor):
                yield f"'{tensor.name}'"

    def _kept(self, index: Mapping[_Key, int]) -> Iterator[tuple[int, int]]:
        """Yield the tensors of the module that are not averaged, and the same of a checkpoint."""
        averaged = {*self.averaged, *(c for _, rows in self._groups for c in self._copied(rows))}
        for key, row in self._indices[self.newest].items():
            if self._tensor(row).state == MODULE and row not in averaged and key in index:
                yield row, index[key]

    def _copied(self, members: Sequence[int]) -> Iterator[int]:
        for pairs in self._copies(members).values():
            yield from (copy for _, copy in pairs)

    def _require_alike(self) -> None:
        """Refuse checkpoints whose tensors do not match, by names and shapes."""
        base, base_index = self.base, self._indices[self.newest]
        parts, averaged = len(base.checkpoint.model_parts), set(self.averaged)
        has_masters = any(self._tensor(row).state == MASTER for row in averaged)
        weights = MASTER if has_masters else MODULE
        for row in averaged:
            if self._tensor(row).dtype not in _FLOATS:
                message = f"'{self._tensor(row).name}' is of {self._tensor(row).dtype}, which has"
                raise UnsupportedError(f"{message} no mean", path=base.place)
        wanted = {key: row for key, row in base_index.items() if row in averaged}
        for one, index in zip(self.sources, self._indices, strict=True):
            place, newest = one.place, base.place
            if len(one.checkpoint.model_parts) != parts:
                message = f"{len(one.checkpoint.model_parts)} tensor or pipeline parallel parts, "
                message = f"{message}{newest} has {parts}: take one of them to the degrees of the"
                raise DisagreementError(
                    f"{message} other with 'streamshard repartition'", path=place
                )
            if lacks := [key for key in wanted if key not in index]:
                message = f"lacks {_listed(lacks)}, which {newest} has"
                raise DisagreementError(message, path=place)
            extra = [key for key in index if key[1] in (weights, MASTER) and key not in base_index]
            if extra:
                message = f"has {_listed(extra)}, which {newest} lacks"
                raise DisagreementError(message, path=place)
            for key, row in wanted.items():
                tensor, counterpart = self._tensor(row), one.checkpoint.tensors[index[key]]
                if not _is_alike(tensor, counterpart, base.checkpoint, one.checkpoint):
                    message = f"{_listed([key])} is {list(counterpart.shape)}, in {newest}"
                    raise DisagreementError(f"{message} {list(tensor.shape)}", path=place)
                if counterpart.dtype not in _FLOATS:
                    message = f"{_listed([key])} is of {counterpart.dtype}, which has no mean"
                    raise UnsupportedError(message, path=place)

    def _note(self) -> str:
        named = [one.checkpoint.tag for one in self.sources]
        if len({*named}) < len(named):  # of several runs
            ends = (one.place.parts[-2:] for one in self.sources)
            named = [str(PurePosixPath(*end)) for end in ends]
        both = zip(named, self.weights, strict=True)
        listed = ", ".join(f"{name} x {weight:.6g}" for name, weight in both)
        states = sorted({self._tensor(row).state for row in self.averaged} - {MASTER, MODULE})
        what = f"Weights and states ({', '.join(states)})" if states else "Weights"
        count = counted(len(self.sources), "checkpoint")
        text = f"{what} are the weighted sum of {count}: {listed}. All else is that of"
        return f"{text} {named[self.newest]}."


def without_weight_files(source: Source) -> Source:
    """Leave out the files next to the shards that hold weights, as HF Trainer saves them."""
    checkpoint = source.checkpoint
    weight_files = {
        row: tensor.name
        for row, tensor in enumerate(checkpoint.tensors)
        if tensor.state == FILE and pretrained.holds_weights(PurePosixPath(tensor.name).name)
    }
    if not weight_files:
        return source
    named = some_of(sorted(weight_files.values()), _MOST_NAMED)
    less = narrowed(source, weight_files.keys())
    note = f"Left out, as they hold weights of {checkpoint.tag} alone: {named}."
    return replace(less, checkpoint=_noted(less.checkpoint, note))


def _noted(checkpoint: Checkpoint, note: str) -> Checkpoint:
    return replace(checkpoint, notes=(*checkpoint.notes, Note(note)))


def _keys(checkpoint: Checkpoint) -> Iterator[tuple[_Key, int]]:
    numbers = {part.name: number for number, part in enumerate(checkpoint.model_parts)}
    for row, tensor in enumerate(checkpoint.tensors):
        if tensor.state not in (BLOB, FILE):
            yield (numbers[tensor.model_part], tensor.state, tensor.name), row


def _is_alike(
    one: LogicalTensor, other: LogicalTensor, own: Checkpoint, theirs: Checkpoint
) -> bool:
    """Tell whether tensors have one shape; BF16_Optimizer records only how many elements."""
    is_flat = own.layout.bf16_optimizer or theirs.layout.bf16_optimizer
    both = {one.shape, other.shape}
    return len(both) == 1 or (is_flat and one.numel == other.numel and (one.numel,) in both)


def _has_form(tensor: LogicalTensor, wanted: LogicalTensor) -> bool:
    return (tensor.dtype, tensor.shape) == (wanted.dtype, wanted.shape)


def _listed(keys: Sequence[_Key]) -> str:
    return some_of([f"{state} of '{name}'" for _, state, name in keys], _MOST_NAMED)
