"""Tensors of an opened checkpoint that are read when they are indexed."""

import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import DTypeLike, NDArray

from streamshard.engine.io.files import SourceReader
from streamshard.engine.numeric.cast import Cast, cast_between
from streamshard.engine.run.region import RegionFiller
from streamshard.engine.run.work import Region
from streamshard.errors import UsageError
from streamshard.layout.cutting import Segments, coalesce
from streamshard.layout.memory_plan import SCRATCH_BYTES, WINDOW_BYTES
from streamshard.layout.selection import Axis, Key, rows_whole, select, strides
from streamshard.model import ITEMSIZE
from streamshard.operations.source.source import Source

if TYPE_CHECKING:
    import torch

Array = NDArray[Any]

_NEAR_BYTES: Final = 64 << 10
"""How far apart may lie what is read in one go: a read of its own takes longer than that."""

_NUMPY: Final = {name: name for name in ITEMSIZE if not name.startswith(("bfloat", "float8", "q"))}
"""Dtypes that NumPy has, by torch's name for them."""
_EXACTLY: Final = {**_NUMPY, "bfloat16": "float32"}
"""What elements are delivered as: NumPy has no bfloat16, and float32 holds each of its values."""


class SourceAccess:
    """The files of an opened checkpoint; several threads take turns."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._reader = SourceReader(source.files, source.decoders)
        self._lock = threading.Lock()
        self._scratch = memoryview(b"")
        # Notebooks forget to close what they open.
        self._close = weakref.finalize(self, self._reader.close)

    @property
    def is_open(self) -> bool:
        """Whether it can still be read from."""
        return self._close.alive

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            self._close()

    def fill(self, out: Array, tensor: int, start: int, cast: Cast | None) -> None:
        """Fill an array, which lies in one piece, with elements of a tensor from `start` on.

        Raises
        ------
        UsageError
            The checkpoint has been closed.
        SourceError
            A file cannot be read, or is not what it was when the checkpoint was opened.
        IntegrityError
            Bytes of a store are not those that were recorded.
        """
        region = self._region(out, tensor, start, cast)
        with self._lock:
            if not self.is_open:
                message = f"{self._source.path}: has been closed; read inside the 'with' block"
                raise UsageError(message)
            if cast is not None and not len(self._scratch):
                self._scratch = memoryview(bytearray(SCRATCH_BYTES // 2))
            filler = RegionFiller(region, self._reader, self._scratch)
            filler.fill(out.reshape(-1).view(np.uint8).data)

    def _region(self, out: Array, tensor: int, start: int, cast: Cast | None) -> Region:
        itemsize = ITEMSIZE[self._source.checkpoint.tensors[tensor].dtype]
        numbers = (tensor, start, start + out.size, 0)
        segments = Segments(*(np.array([number], dtype=np.int64) for number in numbers))
        found = self._source.cutting.locate(segments, target_itemsize=out.itemsize)
        copies = coalesce(found, itemsize=itemsize, target_itemsize=out.itemsize)
        return Region(
            content_bytes=out.nbytes,
            copies=copies,
            source_itemsize=itemsize,
            target_itemsize=out.itemsize,
            cast=cast,
        )


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class LazyTensor(NDArrayOperatorsMixin):
    """A tensor of a checkpoint. Indexing reads it, from shards, stores and raw dumps alike.

    The index is made of integers, slices (of any step) and `...`, and means what it means to
    NumPy. The result is an array of its own: it never changes when the file does. Only what is
    asked for is read. But rows within 64 KiB of each other are read with what is between them, a
    MiB at a time; a store by the blocks of a MiB that have a checksum, a compressed one by whole
    chunks. Nothing is kept but the chunk that was read last.

    NumPy's functions and operators take it for the whole array, and read it each time anew:
    `np.linalg.norm(tensor)`, `tensor - other > 0`. Nothing can be written into it.
    """

    name: str
    """As the checkpoint has it."""
    state: str
    """`fp32`, `exp_avg`, …; `module` for what the module itself held."""
    dtype: str
    """By torch's name for it, such as `bfloat16`."""
    shape: tuple[int, ...]
    _number: int
    _reading: SourceAccess

    @property
    def ndim(self) -> int:
        """Count of dimensions."""
        return len(self.shape)

    @property
    def numel(self) -> int:
        """Count of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def size(self) -> int:
        """Count of elements, by NumPy's name for it."""
        return self.numel

    @property
    def nbytes(self) -> int:
        """Size in bytes, as it is kept."""
        return self.numel * ITEMSIZE[self.dtype]

    def __repr__(self) -> str:
        """Say what it is, reading nothing."""
        return f"<LazyTensor {self.name!r} {self.state} {self.dtype} {list(self.shape)}>"

    def __len__(self) -> int:
        """Return the length of the leading dimension."""
        if not self.shape:
            raise TypeError(f"{self.name}: len() of a tensor without dimensions")
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        """Read one row after the other."""
        return (self[row] for row in range(len(self)))

    def __getitem__(self, key: Key) -> Any:  # noqa: ANN401
        """Read elements into a NumPy array, or into a scalar if all indices are integers.

        bfloat16 comes as float32, which holds each of its values exactly; see `bits`.
        """
        found = self.numpy(key)
        dots = key is ... or (isinstance(key, tuple) and any(part is ... for part in key))
        return found if found.shape or dots else found[()]

    def numpy(self, key: Key = ...) -> Array:
        """Read elements, by default all, into a NumPy array; bfloat16 comes as float32.

        Raises
        ------
        TypeError
            NumPy has no such dtype (float8): use `bits` or `torch`.
        StreamshardError
            It cannot be read, or is damaged, or the checkpoint has been closed.
        """
        if self.dtype not in _EXACTLY:
            message = f"{self.name}: NumPy has no {self.dtype}; read it with .bits() or .torch()"
            raise TypeError(message)
        target = _EXACTLY[self.dtype]
        cast = cast_between(self.dtype, target)
        return self._read(key, np.dtype(target), cast)

    def bits(self, key: Key = ...) -> Array:
        """Read elements, by default all, as unsigned integers that have their bits.

        Raises
        ------
        TypeError
            There are no integers of that size (complex128).
        StreamshardError
            It cannot be read, or is damaged, or the checkpoint has been closed.
        """
        itemsize = ITEMSIZE[self.dtype]
        if itemsize > np.dtype(np.uint64).itemsize:
            message = f"{self.name}: NumPy has no integers of {itemsize} bytes; read {self.dtype}"
            raise TypeError(f"{message} with .numpy()")
        return self._read(key, np.dtype(f"u{itemsize}"), None)

    def torch(self, key: Key = ...) -> "torch.Tensor":
        """Read elements, by default all, into a tensor of the same dtype, bfloat16 included.

        Raises
        ------
        ImportError
            torch is not installed, which nothing else here needs.
        StreamshardError
            It cannot be read, or is damaged, or the checkpoint has been closed.
        """
        try:
            import torch
        except ImportError as error:
            message = "torch is not installed: pip install torch, or read with .numpy()"
            raise ImportError(message) from error
        has_name = self.dtype in _NUMPY
        found = self.numpy(key) if has_name else self.bits(key)
        if any(stride < 0 for stride in found.strides):
            found = found.copy()  # torch has none that run backwards
        made = torch.from_numpy(found)
        return made if has_name else made.view(getattr(torch, self.dtype))

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> Array:
        """Read all of it for NumPy: `np.asarray(tensor)`."""
        if copy is False:
            raise ValueError(f"{self.name}: is not in memory; leave copy=False out to have it read")
        found = self.numpy()
        return found if dtype is None else found.astype(dtype, copy=False)

    def __array_ufunc__(
        self,
        ufunc: np.ufunc,
        method: str,
        *inputs: Any,  # noqa: ANN401
        **options: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        """Read all of it for NumPy's arithmetic, whatever side of an operator it is on."""
        if any(isinstance(out, LazyTensor) for out in options.get("out", ())):
            message = f"{self.name}: a checkpoint is only read; give the result a name of its own"
            raise TypeError(message)
        read = (part.numpy() if isinstance(part, LazyTensor) else part for part in inputs)
        return getattr(ufunc, method)(*read, **options)

    def __hash__(self) -> int:
        """Tell it from others by what it is, as `==` compares elements."""
        return id(self)

    def _read(self, key: Key, dtype: np.dtype[Any], cast: Cast | None) -> Array:
        axes = select(key, self.shape)
        out = np.empty(tuple(axis.count for axis in axes), dtype=dtype)
        if out.size:
            _Reader(self, axes, cast).fill(out, 0, 0)
        shown: Array = out[(*map(_shown, axes), ...)]
        return shown


def _shown(axis: Axis) -> int | slice:
    """Say what of a dimension of what was read is returned: a view, whatever it is."""
    return 0 if axis.is_dropped else slice(None, None, -1 if axis.is_turned else None)


class _Reader:
    """Reads what one index asks for."""

    def __init__(self, tensor: LazyTensor, axes: tuple[Axis, ...], cast: Cast | None) -> None:
        self._tensor = tensor
        self._axes = axes
        self._cast = cast
        self._strides = strides(tensor.shape)
        self._whole = rows_whole(axes, tensor.shape)

    def fill(self, out: Array, at: int, dimension: int) -> None:
        """Fill what is asked for of one dimension and those after it.

        Parameters
        ----------
        at
            First element of the part of the tensor that these dimensions span.
        """
        if dimension >= self._whole:
            self._fetch(out, at)
            return
        axis, stride = self._axes[dimension], self._strides[dimension]
        at += axis.start * stride
        if dimension == self._whole - 1 and (axis.step == 1 or axis.count == 1):
            self._fetch(out, at)
            return
        step_bytes = axis.step * stride * ITEMSIZE[self._tensor.dtype]
        if axis.count == 1 or step_bytes > _NEAR_BYTES:
            for number in range(axis.count):
                part = out[number] if out.ndim > 1 else out[number : number + 1]
                self.fill(part, at + number * axis.step * stride, dimension + 1)
            return
        self._fill_together(out, at, dimension, WINDOW_BYTES // step_bytes)

    def _fill_together(self, out: Array, at: int, dimension: int, together: int) -> None:
        """Read a few rows at a time with what is between them, and pick from that."""
        axis, stride = self._axes[dimension], self._strides[dimension]
        after = self._axes[dimension + 1 :]
        inner = (slice(a.start, a.start + a.count * a.step, a.step) for a in after)
        picked = (slice(None, None, axis.step), *inner)
        for first in range(0, axis.count, together):
            count = min(together, axis.count - first)
            rows = (count - 1) * axis.step + 1
            read = np.empty((rows, *self._tensor.shape[dimension + 1 :]), dtype=out.dtype)
            self._fetch(read, at + first * axis.step * stride)
            out[first : first + count] = read[picked]

    def _fetch(self, out: Array, start: int) -> None:
        tensor = self._tensor
        tensor._reading.fill(out, tensor._number, start, self._cast)
