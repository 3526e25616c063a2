"""Tensors and storages in a torch pickle: interprets their nodes, and makes such nodes."""

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from streamshard.checksums import crc32, difference
from streamshard.errors import CorruptFileError, IntegrityError, UnsupportedError
from streamshard.formats.pickle.inert import Call, Global, Node, nodes_below, show
from streamshard.formats.pickle.node_checks import (
    LIMIT_DIMENSIONS,
    LIMIT_NUMEL,
    is_size,
    require_shape,
)
from streamshard.layout.cutting import Share
from streamshard.model import ITEMSIZE, Literal, Whole

_STORAGE_DTYPES: Final[Mapping[str, str]] = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
    "QInt8Storage": "qint8",
    "QUInt8Storage": "quint8",
    "QInt32Storage": "qint32",
}
"""Legacy storage classes by which torch.save names a storage's dtype (`torch/__init__.py`)."""

_STORAGE_CLASSES: Final = {dtype: Global("torch", name) for name, dtype in _STORAGE_DTYPES.items()}
_UNTYPED: Final = Global("torch.storage", "UntypedStorage")

_REBUILD_V2: Final = Global("torch._utils", "_rebuild_tensor_v2")
_REBUILD_V3: Final = Global("torch._utils", "_rebuild_tensor_v3")
_REBUILD_FROM_TYPE: Final = Global("torch._tensor", "_rebuild_from_type_v2")
_REBUILD_PARAMETER: Final = Global("torch._utils", "_rebuild_parameter")
_TENSOR: Final = Global("torch", "Tensor")
_TENSOR_CLASS: Final = Global("torch._tensor", "Tensor")
SIZE: Final = Global("torch", "Size")
"""torch's class of shapes."""


Content = Literal | Whole | Share
"""What fills a storage of a target file."""


@dataclass(eq=False, slots=True)
class Storage:
    """A storage that a pickle refers to by a persistent id; compared by identity.

    A storage read from a file has an `offset`; a storage made for a file has `content`.
    """

    dtype: str
    numel: int
    content: Content | None = None
    file: int = -1
    """Index of the source file that the storage was read from."""
    offset: int = -1
    """Byte offset of its first element in that file."""
    path: Path | None = None
    """The source file itself."""
    crc32: int | None = None
    """CRC-32 of the bytes, recorded in the file or computed later; None if neither."""
    data: bytes | None = None
    """Its bytes, if it is small and they were read with the header."""

    @property
    def nbytes(self) -> int:
        return self.numel * ITEMSIZE[self.dtype]

    @property
    def blob(self) -> int:
        """The logical tensor that holds its bytes, if it belongs to a checkpoint's state."""
        if not isinstance(self.content, Whole):
            raise CorruptFileError("a storage of the training state is not a blob")
        return self.content.tensor

    def require_intact(self, data: bytes) -> None:
        """Refuse bytes of the whole storage that are not those that were saved."""
        if self.crc32 is not None and crc32(data) != self.crc32:
            name = f"at byte {self.offset:,}"
            message = difference(name, len(data), crc32(data), self.crc32)
            raise IntegrityError(message, path=self.path)

    def require_like(self, other: "Storage", key: str) -> "Storage":
        """Return the storage itself if another mention of its key describes the same one."""
        if (self.dtype, self.numel) != (other.dtype, other.numel):
            raise CorruptFileError(f"storage {key} is described in two ways")
        return self


def storage_from_id(identifier: Node) -> tuple[Storage, str]:
    """Read torch.save's persistent id; return the storage and its key in the file."""
    if not (isinstance(identifier, tuple) and len(identifier) == 5 and identifier[0] == "storage"):
        raise CorruptFileError("a persistent id does not describe a storage")
    _, kind, key, _location, numel = identifier
    dtype = _STORAGE_DTYPES.get(kind.name) if isinstance(kind, Global) else None
    if kind == _UNTYPED:
        dtype = "uint8"
    if dtype is None or not isinstance(key, str) or not isinstance(numel, int) or numel < 0:
        raise UnsupportedError(f"storage of type {show(kind)} is not known")
    if numel * ITEMSIZE[dtype] > LIMIT_NUMEL:
        raise CorruptFileError(f"storage {show(key)} is said to have {show(numel)} elements")
    return Storage(dtype, numel), key


def storage_id(storage: Storage, key: str) -> Node:
    """Build the persistent id by which torch.load finds a storage, always on the CPU."""
    kind = _STORAGE_CLASSES.get(storage.dtype, _UNTYPED)
    numel = storage.nbytes if kind == _UNTYPED else storage.numel
    return ("storage", kind, key, "cpu", numel)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor that a pickle node describes."""

    storage: Storage
    start: int
    """Index of the first element in the storage."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    requires_grad: bool
    attributes: Mapping[str, Node]
    """Python attributes saved with the tensor, such as ZeRO-3's `ds_id`."""
    lazy: tuple[str, ...] = ()
    """What torch has yet to do to the elements: `x.conj()` has those of `x`, and a mark."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def offset(self) -> int:
        """Byte offset of the first element in the source file."""
        return self.storage.offset + self.start * ITEMSIZE[self.dtype]

    @property
    def location(self) -> tuple[int, int]:
        """(file, byte offset): equal for two tensors that began at one address in memory."""
        return self.storage.file, self.offset

    def alone(self) -> Storage:
        """Return a storage of its elements only, which lie in a row."""
        storage = self.storage
        if self.start == 0 and self.numel * ITEMSIZE[self.dtype] == storage.nbytes:
            return storage
        return Storage(self.dtype, self.numel, offset=self.offset, path=storage.path)

    @property
    def is_dense(self) -> bool:
        """Whether its elements lie in a row, as they are."""
        each = zip(self.shape, self.stride, _strides(self.shape), strict=True)
        is_row = self.numel <= 1 or all(n == 1 or step == wanted for n, step, wanted in each)
        return is_row and not self.lazy

    @property
    def order(self) -> str:
        """How its elements lie, for a message."""
        lazy = "".join(f", of which resolve_{mark}() is due" for mark in self.lazy)
        return f"{self.shape}, stride {self.stride}{lazy}"

    def require_contiguous(self, what: str) -> "Tensor":
        """Return the tensor itself if it is contiguous and inside its storage; else refuse it."""
        if not self.is_dense:
            raise UnsupportedError(f"{what} is not contiguous: {self.order}")
        end = (self.start + self.numel) * ITEMSIZE[self.dtype]
        if self.start < 0 or end > self.storage.nbytes:
            message = f"{what} reaches to byte {end} of a storage of {self.storage.nbytes} bytes"
            raise CorruptFileError(message)
        return self


def tensor_of(node: Node) -> Tensor | None:
    """Interpret a node as a tensor; None if it is not one."""
    function, args, attributes = _rebuilding(node)
    if function not in (_REBUILD_V2, _REBUILD_V3) or len(args) < 6:
        return None
    storage, start, shape, stride, requires_grad = args[:5]
    if not isinstance(storage, Storage):
        return None
    dtype = storage.dtype
    if dtype.startswith("q"):
        raise CorruptFileError(f"a tensor of dtype {dtype} without what it is quantised by")
    if function == _REBUILD_V3:
        named = args[6] if len(args) > 6 else None
        dtype = named.name if isinstance(named, Global) else ""
        if dtype not in ITEMSIZE:
            raise UnsupportedError(f"tensors of dtype {show(named)} are not supported")
    start, shape, stride = _numbers(start, shape, stride)
    lazy = _lazy(args[7 if function == _REBUILD_V3 else 6 :])
    tensor = Tensor(storage, start, shape, stride, dtype, requires_grad is True, attributes, lazy)
    steps = sum((length - 1) * step for length, step in zip(shape, stride, strict=True))
    end = (start + steps + 1) * ITEMSIZE[dtype]
    if 0 not in shape and end > storage.nbytes:
        message = f"tensor with shape {show(shape)}, stride {show(stride)}, start {start} reaches"
        raise CorruptFileError(f"{message} to byte {end} of a storage of {storage.nbytes} bytes")
    return tensor


def _lazy(metadata: tuple[Node, ...]) -> tuple[str, ...]:
    """Read the marks in torch's metadata of a tensor, its last argument if there is any."""
    marks = metadata[0] if metadata else None
    return tuple(mark for mark in ("conj", "neg") if isinstance(marks, dict) and marks.get(mark))


def _rebuilding(node: Node) -> tuple[Node, tuple[Node, ...], Mapping[str, Node]]:
    """Unwrap the call that rebuilds a plain tensor: return function, arguments, attributes."""
    if not isinstance(node, Call):
        return None, (), {}
    function, args, attributes = node.function, node.args, {}
    if function == _REBUILD_PARAMETER and args and isinstance(args[0], Call):
        function, args = args[0].function, args[0].args
    if function == _REBUILD_FROM_TYPE and len(args) == 4 and isinstance(args[2], tuple):
        if args[1] not in (_TENSOR, _TENSOR_CLASS):
            return None, (), {}
        attributes = dict(args[3]) if isinstance(args[3], dict) else {}
        function, args = args[0], args[2]
    return function, args, attributes


def _numbers(
    start: Node, shape: Node, stride: Node
) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Check that the start, shape and stride of a tensor are possible, and return them."""
    shape = shape.args[0] if isinstance(shape, Call) and shape.function == SIZE else shape
    sound = (
        isinstance(shape, (tuple, list))
        and isinstance(stride, (tuple, list))
        and len(shape) == len(stride) <= LIMIT_DIMENSIONS
        and all(map(is_size, (start, *shape, *stride)))
    )
    if not sound:
        message = f"tensor with shape {show(shape)}, stride {show(stride)}, start {show(start)}"
        raise CorruptFileError(message)
    return start, tuple(shape), tuple(stride)


def make_tensor(
    storage: Storage,
    shape: tuple[int, ...],
    *,
    requires_grad: bool = False,
    attributes: Mapping[str, Node] | None = None,
) -> Call:
    """Make the node of a contiguous tensor that begins at its storage's first element."""
    args: tuple[Node, ...] = (storage, 0, shape, _strides(shape), requires_grad, OrderedDict())
    rebuild = _REBUILD_V2
    if storage.dtype not in _STORAGE_CLASSES:
        rebuild, args = _REBUILD_V3, (*args, Global("torch", storage.dtype))
    if attributes:
        return Call(_REBUILD_FROM_TYPE, (rebuild, _TENSOR, args, dict(attributes)))
    return Call(rebuild, args)


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor as torch has them, also of one without elements."""
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


def shape_of(node: Node) -> tuple[int, ...]:
    """Read a torch.Size, or the tuple or list that some programs write in its place."""
    if isinstance(node, Call) and node.function == SIZE and len(node.args) == 1:
        node = node.args[0]
    return require_shape(node)


def make_size(shape: tuple[int, ...]) -> Call:
    return Call(SIZE, (shape,))


_HOLDERS: Final = Storage | Call | dict | list | tuple


def storages_in(node: Node) -> Iterator[Storage]:
    """Yield every storage below a node once, in the order in which torch.save would visit them."""
    seen: set[int] = set()
    stack = [node]
    while stack:
        node = stack.pop()
        if id(node) in seen or not isinstance(node, _HOLDERS):
            continue
        seen.add(id(node))
        if isinstance(node, Storage):
            yield node
        else:
            stack.extend(reversed(nodes_below(node)))
