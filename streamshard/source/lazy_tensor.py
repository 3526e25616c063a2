"""Tensors of an opened checkpoint that are read when they are indexed."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import DTypeLike, NDArray

from streamshard.engine.numeric.cast import Cast, cast_between
from streamshard.errors import UsageError
from streamshard.layout.memory_plan import WINDOW_BYTES
from streamshard.layout.selection import Axis, Key, rows_whole, select, strides
from streamshard.model import ITEMSIZE
from streamshard.source.source_access import SourceAccess

if TYPE_CHECKING:
    from torch import Tensor

Array = NDArray[Any]

_NEAR_BYTES: Final = 64 << 10
"""How far apart may lie what is read in one go: a read of its own takes longer than that."""

_NUMPY: Final = {name: name for name in ITEMSIZE if not name.startswith(("bfloat", "float8", "q"))}
"""Dtypes that NumPy has, by torch's name for them."""
_EXACTLY: Final = {**_NUMPY, "bfloat16": "float32"}
"""What elements are delivered as: NumPy has no bfloat16, and float32 holds each of its values."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class LazyTensor(NDArrayOperatorsMixin):
    """A tensor of a checkpoint. Indexing reads it, from shards, stores and raw dumps alike.

    The index is made of integers, slices (of any step) and `...`, and means what it means to
    NumPy. The result is an array of its own: it never changes when the file does. Only what is
    asked for is read. But rows within 64 KiB of each other are read with what is between them, a
    MiB at a time; a store by the blocks of a MiB that have a checksum, a compressed one by whole
    chunks. Nothing is kept but the chunk that was read last. Only `memmap` and `memmap_torch` give
    views of the file itself.

    NumPy's functions and operators take it for the whole array, and read it again each time:
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
        return self._read(key, self._integer(), None)

    def torch(self, key: Key = ...) -> "Tensor":
        """Read elements, by default all, into a tensor of the same dtype, bfloat16 included.

        Raises
        ------
        ImportError
            torch is not installed, which nothing else here needs.
        StreamshardError
            It cannot be read, or is damaged, or the checkpoint has been closed.
        """
        _require_torch()
        found = self.numpy(key) if self.dtype in _NUMPY else self.bits(key)
        if any(stride < 0 for stride in found.strides):
            found = found.copy()  # torch has none that run backwards
        return self._torch_view(found)

    def memmap(self, *, bits: bool = False, check: bool = True) -> Array:
        """Map all of it: a read-only NumPy array that *is* the file, of which nothing is copied.

        Only pages that are touched are read, and the system may forget them again. That needs a
        tensor that lies in one piece, uncompressed: all that one rank saved (and whatever of
        several ranks' is in one file), module weights, and stores with one chunk to a tensor.

        The array stays valid when the checkpoint is closed, and when the file is renamed, deleted
        or replaced by another. But it is not a copy: writing into the file itself changes the
        array, and if the file becomes shorter, touching what is gone **ends this process with
        SIGBUS**. Map what nobody writes to any more; else read with `[...]`. That the file is still
        what it was when the checkpoint was opened is required here, and not later.

        In files of torch's old format, from before the zip, elements may be unaligned: NumPy takes
        that (`array.flags.aligned` is False then), and copies for some operations.

        Parameters
        ----------
        bits
            Map the elements as unsigned integers that have their bits, as `bits` reads them:
            NumPy has no bfloat16.
        check
            Whether a store's tensor is read once, a MiB at a time, and compared with its recorded
            checksums before it is mapped. False makes mapping immediate, and damage unnoticed.
            Shards and dumps have no checksums.

        Raises
        ------
        TypeError
            NumPy has no such dtype; give `bits=True`.
        UsageError
            It is cut or compressed (the message says where the pieces are), or the checkpoint has
            been closed.
        StreamshardError
            It cannot be mapped, or is damaged.
        """
        if not bits and self.dtype not in _NUMPY:
            message = f"{self.name}: NumPy has no {self.dtype}, and a map converts nothing"
            ways = " or .numpy()" if self.dtype in _EXACTLY else ""
            raise TypeError(f"{message}; use .memmap(bits=True), .memmap_torch(){ways}")
        dtype = self._integer() if bits else np.dtype(_NUMPY[self.dtype])
        return self._map(dtype, is_private=False, is_checked=check)

    def memmap_torch(self, *, check: bool = True) -> "Tensor":
        """Map all of it into a torch tensor of the same dtype, of which nothing is copied.

        See `memmap`. torch has no read-only tensors, so this map is private, as those of
        `torch.load(mmap=True)`: what is written into the tensor stays in this process's memory, a
        page at a time, and never gets into the file. Every call makes a map of its own. Linux
        mostly refuses a private map that is larger than the machine's memory; `memmap` has no such
        limit.

        Raises
        ------
        ImportError
            torch is not installed.
        UsageError
            As of `memmap`; or its elements are unaligned, which torch does not take.
        StreamshardError
            It cannot be mapped, or is damaged.
        """
        _require_torch()
        dtype = np.dtype(_NUMPY[self.dtype]) if self.dtype in _NUMPY else self._integer()
        array = self._map(dtype, is_private=True, is_checked=check)
        if not array.flags.aligned:
            message = f"{self.name}: its elements of {dtype.itemsize} bytes are unaligned in a"
            message += " file of torch's old format, so torch cannot use a map of them"
            raise UsageError(f"{message}; use .torch(), which copies, or .memmap() for NumPy")
        return self._torch_view(array)

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> Array:
        """Read all of it for NumPy: `np.asarray(tensor)`."""
        if copy is False:
            message = f"{self.name}: is not in memory; leave copy=False out to have it read"
            raise ValueError(f"{message}, or take .memmap()")
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

    def _integer(self) -> np.dtype[Any]:
        """Return the unsigned integer of the size of an element."""
        itemsize = ITEMSIZE[self.dtype]
        if itemsize > np.dtype(np.uint64).itemsize:
            message = f"{self.name}: NumPy has no integers of {itemsize} bytes; read {self.dtype}"
            raise TypeError(f"{message} with .numpy()")
        return np.dtype(f"u{itemsize}")

    def _torch_view(self, array: Array) -> "Tensor":
        """Return a tensor of its own dtype that shares the memory of an array of its elements."""
        import torch

        made: Tensor = torch.from_numpy(array)
        return made if self.dtype in _NUMPY else made.view(dtype=getattr(torch, self.dtype))

    def _map(self, dtype: np.dtype[Any], *, is_private: bool, is_checked: bool) -> Array:
        view = memoryview(bytearray() if is_private else b"")
        if self.numel:
            label = f"{self.name}: {self.state}"
            view = self._reading.map(
                self._number, label, is_private=is_private, is_checked=is_checked
            )
        found: Array = np.frombuffer(view, dtype=dtype).reshape(self.shape)
        return found

    def _read(self, key: Key, dtype: np.dtype[Any], cast: Cast | None) -> Array:
        axes = select(key, self.shape)
        out = np.empty(tuple(axis.count for axis in axes), dtype=dtype)
        if out.size:
            _Reader(self, axes, cast).fill(out, 0, 0)
        shown: Array = out[(*map(_shown, axes), ...)]
        return shown


def _require_torch() -> None:
    try:
        import torch  # noqa: F401
    except ImportError as error:
        message = "torch is not installed: pip install torch, or read with .numpy()"
        raise ImportError(message) from error


def _shown(axis: Axis) -> int | slice:
    """Say what of a dimension of what was read is returned: a view, whatever it is."""
    return 0 if axis.is_scalar else slice(None, None, -1 if axis.is_reversed else None)


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

        `at`: first element of the part of the tensor that these dimensions span.
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
