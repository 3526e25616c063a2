"""The data classes that all subpackages share. They are frozen and import nothing of streamshard.

A checkpoint is a set of *logical tensors* (a parameter's master weights, one of its optimizer
states, a buffer, a file) that each layout cuts into fragments in its own way. The classes here
describe the tensors and ZeRO's settings. The arithmetic of the cut is in ``layout``; file names
and keys are in ``formats``.
"""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from string import Formatter
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

MASTER: Final = "fp32"
"""State name of the master weights, whatever their dtype."""
MODULE: Final = "module"
"""State name of the module's own tensors: 16-bit weights, buffers, frozen weights."""
BLOB: Final = "blob"
"""State name of storages in training state that belong to no parameter (raw bytes)."""
FILE: Final = "file"
"""State name of the other files of a checkpoint directory (raw bytes)."""

ITEMSIZE: Final[Mapping[str, int]] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
    "qint8": 1,
    "quint8": 1,
    "qint32": 4,
}
"""Bytes per element of every supported dtype, by torch's name for it. Quantised dtypes are
supported only in training state, as raw bytes."""


class NoteKind(StrEnum):
    """What a note is about. Decisions go by it, never by the note's words."""

    FACT = "fact"
    """The user should know it; nothing is decided by it."""
    LEFT_OUT = "left out"
    """Some files have content that is not kept: removing them would lose it."""
    UNREAD = "unread"
    """The optimizer's state is there, and is not read: it is not kept, nor compared."""
    ASSUMED = "assumed"
    """A setting was assumed that the files do not tell."""
    MIXED = "mixed"
    """Files may be of two saves: a job that goes on from them may go wrong."""
    COPIES = "copies"
    """Ranks have different copies of what should be the same."""


@dataclass(frozen=True, slots=True)
class Note:
    """A fact about a checkpoint that the user should know."""

    text: str
    kind: NoteKind = NoteKind.FACT


@dataclass(frozen=True, slots=True)
class LogicalTensor:
    """One tensor as the training job sees it, however many ranks hold parts of it."""

    state: str
    """`fp32`, `exp_avg`, … for optimizer state; `module`, `blob` or `file` for the rest."""
    name: str
    """Parameter or buffer name, unique in its model part; for `file` the path relative to the run
    directory."""
    dtype: str
    shape: tuple[int, ...]
    model_part: str = ""
    """The model-parallel part that owns it, where tensor or pipeline parallelism makes several."""

    @property
    def numel(self) -> int:
        """Count of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes, without any padding."""
        return self.numel * ITEMSIZE[self.dtype]

    def dtype_in(self, dtype: str) -> str:
        """Return as what it is copied to a file of a dtype: a blob is bytes, whatever the file's.

        >>> LogicalTensor(BLOB, "0", "uint8", (8,)).dtype_in("int64")
        'uint8'
        """
        return self.dtype if self.state == BLOB else dtype


@dataclass(frozen=True, slots=True)
class Digest:
    """Length and two different checksums of a run of bytes, to recognize the bytes later."""

    nbytes: int
    crc32: int
    crc32c: int

    @property
    def text(self) -> str:
        """Both checksums in hexadecimal, CRC-32 first."""
        return f"{self.crc32:08x}{self.crc32c:08x}"


@dataclass(frozen=True, slots=True)
class ZeroLayout:
    """Settings by which a ZeRO engine cuts its optimizer state."""

    stage: int
    """0 without ZeRO: then nothing is cut, and every rank has the whole state."""
    world_size: int
    """Size of the (sequence-)data-parallel group; it is the same in every model part."""
    round_robin: bool = False
    """`round_robin_gradients`; stages 1 and 2 only."""
    parameter_alignment: bool = False
    """Stages 1 and 2 only: every parameter starts at a multiple of 16 bytes of module weights."""
    sub_group_size: int = 1_000_000_000
    """Stage 3 only: elements per rank after which a sub-group is closed."""
    bf16_optimizer: bool = False
    """Stage 1 with `BF16_Optimizer`: the usual cut, but masters are saved with their padding."""
    data_before_experts: bool = False
    """`use_data_before_expert_parallelism`: ranks with the same experts are neighbours."""
    offload: bool = False
    """`offload_optimizer`: the optimizer's states are not on the device that computes."""

    @property
    def whole_momentum(self) -> bool:
        """Whether a rank keeps Muon's whole momentum of each parameter that it owns a part of.

        Otherwise the momentum is cut like any other state. By `get_flat_partition` and
        `_apply_muon_updates_cpu_offload` of `deepspeed/runtime/zero/stage_1_and_2.py` (0.19.8).
        """
        return self.stage < 3 and not self.bf16_optimizer and not self.offload

    def expert_place(self, rank: int, expert_parallel: int) -> tuple[int, int]:
        """Return a data-parallel rank's expert rank, and its index among ranks with these experts.

        By `_get_expert_parallel_ranks` of `deepspeed/utils/groups.py` (0.19.8).
        """
        sharing = self.world_size // expert_parallel
        if self.data_before_experts:
            return rank // sharing, rank % sharing
        return rank % expert_parallel, rank // expert_parallel

    def sharing_ranks(self, expert_parallel: int, expert_rank: int) -> range:
        """Return the data-parallel ranks that have the same experts, in their order."""
        sharing = self.world_size // expert_parallel
        if self.data_before_experts:
            return range(sharing * expert_rank, sharing * (expert_rank + 1))
        return range(expert_rank, sharing * expert_parallel, expert_parallel)


@dataclass(frozen=True, slots=True)
class SubGroup:
    """Consecutive parameters of one param group that ZeRO-3 flattens together."""

    group: int
    first: int
    """Index in the param group of the first parameter."""
    stop: int
    """Index in the param group after the last parameter."""
    numel: int
    """Elements that each rank holds, padding included."""


@dataclass(frozen=True, slots=True)
class Literal:
    """Bytes that are known before anything is read."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Whole:
    """All elements of one logical tensor."""

    tensor: int


@dataclass(frozen=True, slots=True)
class Copies:
    """Byte runs to copy, ordered by target offset; parallel arrays.

    Where source and target dtypes differ in size, `nbytes` counts source bytes.
    """

    file: NDArray[np.int64]
    """Index into the source's files."""
    source: NDArray[np.int64]
    """Byte offset in the source file."""
    target: NDArray[np.int64]
    """Byte offset in the target region."""
    nbytes: NDArray[np.int64]

    def __len__(self) -> int:
        """Count the runs."""
        return len(self.file)


Memory = Callable[[int], memoryview]
"""Returns a buffer of the requested size in bytes. The next call invalidates its content."""


class StoredBytes(Protocol):
    """The bytes of an open file, as a decoder reads them."""

    @property
    def takes_requests(self) -> bool:
        """Whether each reading takes a request to a service, which takes long."""

    def will_need(self, offset: int, nbytes: int) -> None:
        """Start reading a range that is needed soon, without waiting."""

    def read_into(self, view: memoryview, offset: int) -> int:
        """Fill a view from an offset; returns the bytes read, fewer only at the file's end."""


class Encoded(Protocol):
    """How to decode content that can only be read as a whole."""

    def decode(
        self, file: StoredBytes, stored: Memory, content: Memory, part: tuple[int, int] | None
    ) -> tuple[int, memoryview]:
        """Return content, checked against its recorded checksums, and where it begins.

        `stored` and `content` provide memory for the file's bytes, and for the decoded content.
        `part`: start and end of what is wanted, so that the rest may be left out; None for all.
        """


@dataclass(frozen=True, slots=True)
class BlockDigests:
    """Recorded checksums of a file that begins with its content, uncompressed."""

    nbytes: int
    """Length of the content."""
    block_bytes: int
    crc32s: NDArray[np.uint32]
    """One per block; the last block may be shorter."""

    def has_whole(self, offset: int, nbytes: int) -> bool:
        """Tell whether a range is whole blocks."""
        stop = offset + nbytes
        return offset % self.block_bytes == 0 and (
            stop % self.block_bytes == 0 or stop == self.nbytes
        )


class Computed(ABC):
    """Content that is computed from the source's files, when the run is planned or when it runs."""

    __slots__ = ()
    firsts: tuple[int, ...] = (0,)
    """Number of the first file of each checkpoint that it is computed of; they are read in turn."""

    @abstractmethod
    def fill(self, view: memoryview, offset: int, reader: Any) -> None:  # noqa: ANN401
        """Fill a view with content from an offset on; `reader` reads the source's files."""

    def located(self, offset: int, nbytes: int) -> Iterable[tuple[int, int, int]]:
        """Return file, byte offset and length of all that a range is read from when it runs."""
        return ()


Decoder = BlockDigests | Computed | Encoded


@dataclass(frozen=True, slots=True, eq=False)
class RecordCrcs:
    """The CRC-32s that a file records of runs of its bytes; parallel, in the order of the runs."""

    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    crc32s: NDArray[np.uint32]
    names: Sequence[str] = ()
    """What to call each run in messages; empty if they have no names."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file to read from: how it is read, and its size and identity when the plan was made.

    Only the place that the file belongs to knows what its identity means; see `io.entries`.
    """

    path: Path
    nbytes: int
    version: str
    """Changes whenever the content does."""
    file_id: str
    """Tells the file from another one at its path; "0" where the place has nothing like it."""
    decoder: Decoder | None = field(default=None, compare=False, repr=False)
    """How its content is made of its bytes; None if these are the content."""
    changed_ns: int = field(default=0, compare=False, repr=False)
    """See `Status`. Another link changes it too, so only a run that is continued compares it."""
    recorded: RecordCrcs | None = field(default=None, compare=False, repr=False)
    """Checksums to compare with what is read of it; None if it records none, or checks itself."""

    @property
    def is_plain(self) -> bool:
        """Whether the file holds its content as it is."""
        return self.decoder is None or isinstance(self.decoder, BlockDigests)


Repeat = tuple[tuple[SourceFile, int], tuple[SourceFile, int], int, str]
"""A copy in another file, which was not compared byte by byte: (file, offset) of the one that is
read, of the other one, their bytes, and what they are."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Places of consecutive pieces: `files[k]` at byte `offsets[k]` holds piece k."""

    files: NDArray[np.int64]
    """Indices into the source's list of files."""
    offsets: NDArray[np.int64]
    """Byte offsets in those files."""
    numels: NDArray[np.int64]
    """Recorded elements of each piece, to be checked against the arithmetic."""


@dataclass(frozen=True, slots=True)
class Template:
    """Files in one directory whose names differ only in the rank: ``optimizer.{rank:02d}.pt``."""

    directory: Path
    name: str

    def file_name(self, rank: int) -> str:
        """Return the name of one rank's file.

        >>> Template(Path("."), "optimizer.{rank:02d}.pt").file_name(3)
        'optimizer.03.pt'
        """
        return self.name.format(rank=rank)

    def rank_of(self, file_name: str) -> int | None:
        """Return the rank in a file name; None if the name does not fit the template.

        >>> Template(Path("."), "optimizer.{rank:02d}.pt").rank_of("optimizer.12.pt")
        12
        """
        before, after = (re.escape(text) for text in self.around)
        match = re.fullmatch(f"{before}([0-9]+){after}", file_name)
        if match is None or self.file_name(int(match[1])) != file_name:
            return None
        return int(match[1])

    @property
    def around(self) -> tuple[str, str]:
        """The text before and after the rank."""
        texts = ["", ""]
        after = 0
        for literal, field_name, _, _ in Formatter().parse(self.name):
            texts[after] += literal
            if field_name is not None:
                after = 1
        return texts[0], texts[1]
