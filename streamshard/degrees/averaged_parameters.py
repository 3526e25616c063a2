"""Takes the mean of what tensor-parallel ranks hold of each parameter that is to be averaged.

A job may train such a parameter on every rank without keeping the copies equal, as some of
Megatron-DeepSpeed's did with norms and biases. It lists them for DeepSpeed's universal checkpoint,
which takes the mean of the weights and of each state (`merge_tp_slices` of
`deepspeed/checkpoint/ds_to_universal.py`, 0.19.8). They are small, so their means are computed when
the run is planned, and are in memory from then on.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from streamshard.engine.numeric.cast import cast_between, wider
from streamshard.errors import DisagreementError, Option, UnsupportedError, UsageError
from streamshard.formats.deepspeed.model_parallel.parallel_degrees import AS_SAVED
from streamshard.formats.deepspeed.model_parallel.parts import ModelInParts
from streamshard.model import BLOB, FILE, ITEMSIZE, MASTER, MODULE, Computed, Note
from streamshard.operations.source.source import Source
from streamshard.operations.source.source_access import SourceAccess
from streamshard.sizes import counted

AVERAGE: Final = Option("average", True)
_STEP_NUMEL: Final = 1 << 16
"""Elements of which the mean is computed together."""
_MOST_BYTES: Final = 256 << 20
"""Bytes of the means that are held. Norms and biases of a model of 175 billion have 30 MB."""
_ALIGNMENT: Final = 8
"""Bytes; the largest element."""

Bits = NDArray[Any]
"""Elements as unsigned integers."""


@dataclass(frozen=True, slots=True)
class Held(Computed):
    """Content that is held in memory."""

    content: bytes

    def fill(self, view: memoryview, offset: int, reader: object) -> None:
        view[:] = self.content[offset : offset + len(view)]


def with_means(source: Source, parts: ModelInParts) -> Source:
    """Return a checkpoint in which all ranks hold the mean of each parameter to be averaged.

    An element that is the same on all ranks stays as it is. Weights in 16 bits are cast from the
    mean of the master weights.
    """
    averaged = parts.averaged()
    require_averaged(averaged)
    means = _Means(source, parts)
    with closing(SourceAccess(source)) as access:
        for name in averaged:
            means.add(name, access)
    return means.source()


def require_averaged(averaged: Sequence[str]) -> None:
    """Refuse the option where no parameter is to be averaged."""
    if not averaged:
        message = f"{AVERAGE}: the files list no parameter as one to be averaged, or what is asked"
        raise UsageError(f"{message} for puts no parameter together; leave it out")


class _Means:
    """The means of parameters and of their states, one after the other."""

    def __init__(self, source: Source, parts: ModelInParts) -> None:
        self._source = source
        self._parts = parts
        self._index = source.checkpoint.tensor_index()
        self._states = sorted(
            {t.state for t in source.checkpoint.tensors} - {BLOB, FILE, MODULE, MASTER}
        )
        self._content = bytearray()
        self._places: list[tuple[int, int]] = []
        """A tensor, and the offset of its mean."""
        self._averaged = 0
        self._differing = 0
        """Master weights that are not the same on all ranks."""

    def add(self, name: str, access: SourceAccess) -> None:
        """Compute the means of a parameter and of its states."""
        for state in (MASTER, *self._states):
            ranks = [list(self._rows(state, name, rank)) for rank in self._ranks]
            if all(ranks):
                content, differing = self._mean(name, ranks, access)
                self._hold(chain.from_iterable(ranks), content)
                if state == MASTER:
                    self._differing += differing
                    self._add_module(name, ranks[0][0], content)
        self._averaged += 1

    def source(self) -> Source:
        source = self._source
        note = (
            f"Averaged: {counted(self._averaged, 'parameter')} became the mean of the copies on "
            f"{len(self._ranks)} tensor-parallel ranks, which differed in {self._differing:,} of "
            "the master weights. The job does not go on exactly as it would have without that."
        )
        checkpoint = replace(source.checkpoint, notes=(*source.checkpoint.notes, Note(note)))
        file = replace(source.files[0], decoder=Held(bytes(self._content)))
        rows, offsets = ([place[column] for place in self._places] for column in (0, 1))
        made = source.relocate(rows, file, offsets)
        return replace(made, checkpoint=checkpoint)

    @property
    def _ranks(self) -> range:
        return range(self._parts.degrees.tensor)

    def _rows(self, state: str, name: str, rank: int) -> Iterator[int]:
        """Yield the tensors of a tensor-parallel rank, one for each stage that has it."""
        model_parts = self._source.checkpoint.model_parts
        for number in self._parts.tensors[name].shapes:
            if number % len(self._ranks) == rank:
                row = self._index.get((model_parts[number].name, state, name))
                yield from () if row is None else (row,)

    def _mean(
        self, name: str, ranks: Sequence[Sequence[int]], access: SourceAccess
    ) -> tuple[Bits, int]:
        """Return the mean of the ranks' tensors, and how many elements are not alike."""
        tensors = self._source.checkpoint.tensors
        first = tensors[ranks[0][0]]
        for row in chain.from_iterable(ranks):
            if (tensors[row].dtype, tensors[row].shape) != (first.dtype, first.shape):
                message = f"{first.state} of '{name}' has another dtype or shape in each part"
                raise DisagreementError(message)
        size = ITEMSIZE[first.dtype]
        if len(self._content) + first.numel * size > _MOST_BYTES:
            message = f"{AVERAGE}: parameters to be averaged, '{name}' among them, have more than"
            raise UnsupportedError(f"{message} {_MOST_BYTES >> 20} MiB. {AS_SAVED}")
        mean, differing = np.empty(first.numel, dtype=f"u{size}"), 0
        for start in range(0, first.numel, _STEP_NUMEL):
            part = mean[start : start + _STEP_NUMEL]
            held = np.empty((len(ranks), len(part)), dtype=mean.dtype)
            for of_rank, rows in zip(held, ranks, strict=True):
                _fill(of_rank, rows, start, access, f"{first.state} of '{name}'")
            is_equal = (held == held[0]).all(axis=0)
            part[:] = held[0]
            if not is_equal.all():
                differing += int(np.count_nonzero(~is_equal))
                part[~is_equal] = _mean_of(held[:, ~is_equal], first.dtype, name)
        return mean, differing

    def _add_module(self, name: str, master: int, content: Bits) -> None:
        """Cast the mean of the master weights for the module."""
        tensors, model_parts = self._source.checkpoint.tensors, self._source.checkpoint.model_parts
        keys = ((model_part.name, MODULE, name) for model_part in model_parts)
        rows = [self._index[key] for key in keys if key in self._index]
        if rows:
            self._hold(rows, _cast(content, tensors[master].dtype, tensors[rows[0]].dtype))

    def _hold(self, tensors: Iterator[int] | Sequence[int], content: Bits) -> None:
        self._content += bytes(-len(self._content) % _ALIGNMENT)
        self._places += [(tensor, len(self._content)) for tensor in tensors]
        self._content += content.data


def _fill(out: Bits, rows: Sequence[int], start: int, access: SourceAccess, what: str) -> None:
    """Read a part of a rank's tensor, which all of its stages must hold alike."""
    access.fill(out, rows[0], start, None)
    for other in rows[1:]:
        copy = np.empty_like(out)
        access.fill(copy, other, start, None)
        if not np.array_equal(out, copy):
            message = f"{what} differs between stages of a pipeline, which hold copies of it"
            raise DisagreementError(f"{message}. {AS_SAVED}")


def _mean_of(held: Bits, dtype: str, name: str) -> Bits:
    """Return the mean over the first axis, added in the order of the ranks as DeepSpeed does."""
    between = wider(dtype, "float32")
    if between is None:
        raise UnsupportedError(f"'{name}' has a state of {dtype}, which has no mean. {AS_SAVED}")
    floats = [_cast(np.ascontiguousarray(row), dtype, between).view(between) for row in held]
    with np.errstate(all="ignore"):
        total = floats[0].copy()
        for other in floats[1:]:
            total += other
        total /= len(floats)
    return _cast(total.view(f"u{ITEMSIZE[between]}"), between, dtype)


def _cast(elements: Bits, source: str, target: str) -> Bits:
    cast = cast_between(source, target)
    if cast is None:
        return elements
    made = np.empty(len(elements), dtype=f"u{ITEMSIZE[target]}")
    cast(elements.view(np.uint8).data, made.view(np.uint8).data)
    return made
