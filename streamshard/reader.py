"""What a package needs to teach streamshard another format; docs/readers.md shows how.

A `FormatReader` tells where the tensors of a checkpoint lie. It reads no tensor data itself:
streamshard reads the bytes when it needs them, checks them, and keeps within its memory.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, Self

from streamshard.errors import (
    CorruptFileError,
    DisagreementError,
    IncompleteError,
    SourceError,
    UnsupportedError,
)
from streamshard.formats import safetensors_file, strict_json
from streamshard.formats.pickle.inert import show
from streamshard.formats.pickle.node_checks import of_file, require_unrolled
from streamshard.formats.torch import torch_file
from streamshard.formats.torch.torch_tensor import tensor_of
from streamshard.io.entries import (
    examine,
    is_directory,
    is_file,
    names_in,
    open_readable,
    read_document,
)

__all__ = [
    "VERSION",
    "Contents",
    "CorruptFileError",
    "DisagreementError",
    "FormatReader",
    "IncompleteError",
    "ParamStates",
    "RecordedSum",
    "SourceError",
    "StoredBox",
    "StoredTensor",
    "UnsupportedError",
    "is_directory",
    "is_file",
    "names_in",
    "read_at",
    "read_document",
    "read_json",
    "read_safetensors",
    "read_torch",
    "show",
    "size_of",
]

VERSION: Final = 1
"""Version of this protocol. It changes when readers that were written for it would not work."""


@dataclass(frozen=True, slots=True)
class StoredBox:
    """A box of a tensor; its elements lie in a file in row-major order, without gaps."""

    path: Path
    offset: int
    """Byte offset of the first element in the file."""
    start: tuple[int, ...]
    """Index in the tensor of the first element, one number for each dimension."""
    shape: tuple[int, ...]
    """Lengths of the box, one for each dimension."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor, and where its elements lie: little-endian, not compressed."""

    dtype: str
    """torch's name, without `torch.`, such as `bfloat16`."""
    shape: tuple[int, ...]
    boxes: Sequence[StoredBox]
    """They cover each element exactly once."""

    @classmethod
    def whole(cls, dtype: str, shape: Sequence[int], path: Path, offset: int) -> Self:
        """Return a tensor that lies in one box, from a byte offset of a file on."""
        lengths = tuple(shape)
        return cls(dtype, lengths, [StoredBox(path, offset, (0,) * len(lengths), lengths)])


@dataclass(frozen=True, slots=True)
class ParamStates:
    """A param group of the optimizer: parameters that share options and kinds of states."""

    params: Sequence[str]
    """Names of weights, in the optimizer's order."""
    options: Mapping[str, Any]
    """`lr`, `betas`, …: numbers, texts, flags, None, or short lists of these."""
    states: Mapping[str, Mapping[str, StoredTensor]]
    """State, such as `exp_avg`, → parameter → a tensor of the parameter's shape."""
    values: Mapping[str, float]
    """State with one number for the group, such as `step`, → the number."""


@dataclass(frozen=True, slots=True)
class RecordedSum:
    """The CRC-32 that a checkpoint records of a range of a file's bytes."""

    path: Path
    start: int
    stop: int
    crc32: int


@dataclass(frozen=True, slots=True)
class Contents:
    """What a checkpoint holds."""

    weights: Mapping[str, StoredTensor]
    """Parameters and buffers by name, in the order of the model."""
    groups: Sequence[ParamStates] = ()
    """Empty without an optimizer. Weights in no group are frozen weights or buffers."""
    sums: Sequence[RecordedSum] = ()
    """Every command that reads such a range compares its bytes with its checksum."""
    notes: Sequence[str] = ()
    """What the user should know, such as what is not read."""
    ranks: int = 1
    """Count of the ranks that saved it, for reports."""


class FormatReader(ABC):
    """Reads one format. A package lists an instance in the entry point group streamshard.readers.

    Files are read by the functions of `streamshard.reader` alone: they take paths on a disk and in
    a bucket alike. A `SourceError`, such as a `CorruptFileError`, tells the user what is wrong.
    """

    version: ClassVar[int]
    """The `VERSION` that the reader was written for."""
    name: ClassVar[str]
    """What reports call the format: a word of its own, such as `npy`."""
    title: ClassVar[str]
    """What text calls a checkpoint of it, such as `directory of npy files`."""

    @abstractmethod
    def recognizes(self, directory: Path) -> bool:
        """Tell by the names in a directory, or by the first bytes of a file, whether it is one."""

    @abstractmethod
    def read(self, directory: Path) -> Contents:
        """Read the headers of a checkpoint. Names and numbers in them are checked afterwards."""

    def problems(self, directory: Path) -> Iterable[str]:
        """Yield what `verify` should report apart from what reading and checksums show."""
        return ()


def size_of(path: Path) -> int:
    """Return the size of a file in bytes."""
    return examine(path).nbytes


def read_at(path: Path, offset: int, nbytes: int) -> bytes:
    """Read a range of a file; what is past its end is a `CorruptFileError`."""
    with open_readable(path) as file:
        if nbytes < 0 or not 0 <= offset <= file.nbytes - nbytes:
            message = f"{nbytes:,} bytes at {offset:,} are not in it: it has {file.nbytes:,}"
            raise CorruptFileError(message, path=path)
        return file.read_at(offset, nbytes)


def read_json(path: Path) -> Any:  # noqa: ANN401
    """Read a small file of JSON; keys that occur twice and NaN are a `CorruptFileError`."""
    try:
        return strict_json.parse(read_document(path))
    except ValueError as error:
        raise CorruptFileError(f"no JSON that can be read ({error})", path=path) from error


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file by name."""
    return {
        stored.tensor.name: StoredTensor.whole(
            stored.tensor.dtype, stored.tensor.shape, path, stored.offset
        )
        for stored in safetensors_file.read(path)
    }


def read_torch(path: Path) -> Any:  # noqa: ANN401
    """Return what `torch.save` wrote, with a `StoredTensor` for each tensor. Nothing of it runs.

    Dicts, lists, tuples, texts and numbers are themselves. Any other object is a stand-in without
    behavior.
    """
    with of_file(path):
        root = torch_file.read(path, 0).root
        require_unrolled((root,))
        return _with_tensors(root, path)


def _with_tensors(node: Any, path: Path) -> Any:  # noqa: ANN401
    tensor = tensor_of(node)
    if tensor is not None:
        tensor.require_contiguous(f"a tensor of {list(tensor.shape)}")
        return StoredTensor.whole(tensor.dtype, tensor.shape, path, tensor.offset)
    if isinstance(node, dict):
        return {key: _with_tensors(value, path) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return type(node)([_with_tensors(item, path) for item in node])
    return node
