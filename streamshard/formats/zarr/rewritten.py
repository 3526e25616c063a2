"""Arrays and documents of a store that another tool rewrote, such as zarr-python.

An array was rewritten if its zarr.json describes other chunks or codecs than streamshard wrote, and
the same tensor. Everything else that differs is damage, and is judged as in any store. zarr-python
decodes it. The sizes and checksums that the manifest records are those of files that are gone, but
the digest of a tensor depends on neither chunks nor codecs: no element is delivered before all
elements of its tensor have been read and compared with that digest.
"""

import json
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from streamshard.checksums import crc32, crc32c
from streamshard.errors import (
    CorruptFileError,
    IncompleteError,
    IntegrityError,
    StreamshardError,
    UnsupportedError,
)
from streamshard.formats import strict_json
from streamshard.formats.pickle.inert import show
from streamshard.formats.shapes import is_size, require_shape
from streamshard.formats.zarr.array_paths import ROOT_DOCUMENT, array_path
from streamshard.formats.zarr.chunks import serialize_checksum
from streamshard.formats.zarr.documents import (
    array_document,
    chunk_counts,
    forms,
    small_array_document,
)
from streamshard.formats.zarr.small_files import read_checked, read_small
from streamshard.formats.zarr.store_manifest import FileRecord, Manifest
from streamshard.io.entries import entries_below, examine, identify
from streamshard.io.files import require_regular
from streamshard.model import ITEMSIZE, LogicalTensor, Memory, SourceFile, StoredBytes
from streamshard.sizes import counted, some_of

if TYPE_CHECKING:
    from streamshard.formats.zarr.zarr_python import OpenArray

_PIECE_BYTES: Final = 1 << 20
"""Small chunks are decoded together up to this size."""
_SHOWN: Final = 3
"""How many missing chunks a message names."""
_DOCUMENT_BYTES: Final = 1 << 20
"""More bytes than the document of any array has."""
_SMALL_BYTES: Final = 1 << 24
"""So many bytes are fine for a small array, however few are stored of it."""
_MOST_PER_STORED_BYTE: Final = 24
"""Manifests and training states are not compressed further than that."""
_MOST_MISSING: Final = 1 << 18
"""More chunks than zarr-python leaves out of any tensor because all their elements are zero."""
_COMMON: Final = ("zarr_format", "node_type", "shape", "data_type", "fill_value", "attributes")
"""Keys of a document whose values must be ours, whoever wrote it."""
_MAY_BE_ADDED: Final = {"consolidated_metadata", "dimension_names"}
"""Keys that a document which another tool serialized again may have in addition to ours."""


@dataclass(slots=True)
class RewrittenArray:
    """An array that another tool rewrote, in pieces that are decoded as a whole.

    A piece is a range of rows: indices of the first dimension. It has whole chunks only, so that
    each chunk is decoded once, and is one range of elements in C order.
    """

    directory: Path
    document: SourceFile
    """Its zarr.json."""
    described: Mapping[str, Any]
    """What its zarr.json says."""
    files: Mapping[str, SourceFile]
    """All files of the directory except zarr.json, by path relative to it."""
    shape: tuple[int, ...]
    dtype: str
    """The dtype as it is stored."""
    chunk: tuple[int, ...]
    """Shape of what one file holds: a chunk or a zarr shard."""
    steps: int
    """Count of codecs that take memory of their own, such as compressions."""
    digest: str = ""
    """Digest of all elements in the manifest."""
    missing: set[str] = field(default_factory=set)
    """Chunks that were missing when they were to be read; Zarr takes the fill value instead."""
    _sums: list[tuple[int, int]] = field(default_factory=list)
    """CRC-32 and CRC-32C of all elements up to the end of each piece, once they are compared."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave out the lock and what was read, so that it can be sent to another process."""
        named = (self.directory, self.document, self.described, self.files, self.shape, self.dtype)
        return RewrittenArray, (*named, self.chunk, self.steps, self.digest)

    @property
    def rows(self) -> int:
        chunk_rows = self.chunk[0] if self.chunk else 1
        row_bytes = math.prod(self.shape[1:]) * ITEMSIZE[self.dtype]
        return chunk_rows * max(1, _PIECE_BYTES // max(1, chunk_rows * row_bytes))

    @property
    def numel(self) -> int:
        """Elements of one piece; the last piece may have fewer."""
        return min(math.prod(self.shape), self.rows * math.prod(self.shape[1:]))

    @property
    def pieces(self) -> int:
        return -(-math.prod(self.shape) // max(1, self.numel))

    @property
    def chunks(self) -> int:
        """Count of chunks, whether stored or not."""
        return math.prod(chunk_counts(self.shape, self.chunk))

    @property
    def codec_bytes(self) -> int:
        """Memory that decoding a piece takes."""
        nbytes = math.prod(self.chunk) * ITEMSIZE[self.dtype]
        stored = max((file.nbytes for file in self.files.values()), default=0)
        # A codec holds what it reads, twice what it makes while that grows, and a copy. Around the
        # codecs are the file and the chunk, twice because the allocator keeps those before them.
        buffer_bytes = 2 * (nbytes + stored) + 5 * self.steps * nbytes
        return self.numel * ITEMSIZE[self.dtype] + buffer_bytes

    def piece_bytes(self, number: int) -> int:
        """Return the size of a piece's elements."""
        left = math.prod(self.shape) - number * self.numel
        return min(self.numel, left) * ITEMSIZE[self.dtype]

    def read(self, number: int, view: memoryview) -> None:
        """Decode a piece into the front of a view; its elements are compared with nothing."""
        first = number * self.rows
        lengths = (min(self.rows, self.shape[0] - first), *self.shape[1:]) if self.shape else ()
        out = np.frombuffer(view[: self.piece_bytes(number)], dtype=self.dtype).reshape(lengths)
        opened = _opened(self.described, self.files, self.document.path)
        for corner in product(*map(range, [0] * len(lengths), lengths, self.chunk)):
            ends = map(min, (a + n for a, n in zip(corner, self.chunk, strict=True)), lengths)
            here = tuple(slice(start, end) for start, end in zip(corner, ends, strict=True))
            there = tuple(slice(s.start + first, s.stop + first) for s in here[:1]) + here[1:]
            try:
                out[here] = opened.read(there)
            except (MemoryError, StreamshardError):
                raise
            except Exception as error:  # each codec has errors of its own
                if isinstance(error, OSError) and error.errno is not None:
                    raise
                where = ", ".join(f"{s.start}:{s.stop}" for s in there)
                message = f"damaged: elements [{where}] cannot be decoded ({_first_line(error)})"
                raise IntegrityError(message, path=self.directory) from error
        self.missing |= opened.missing

    def read_compared(self, number: int, view: memoryview) -> None:
        """Decode a piece, after all elements of the tensor were compared with their digest.

        `view`: as long as the first piece.
        """
        with self._lock:
            if not self._sums:
                self._compare(view)
        self.read(number, view)
        before = self._sums[number - 1] if number else (0, 0)
        if _extended(before, view[: self.piece_bytes(number)]) != self._sums[number]:
            message = "changed while it was being read. Stop what changes the"
            raise IntegrityError(f"{message} source, and run again", path=self.directory)

    def _compare(self, view: memoryview) -> None:
        sums, last = [], (0, 0)
        for number in range(self.pieces):
            self.read(number, view)
            last = _extended(last, view[: self.piece_bytes(number)])
            sums.append(last)
        found = f"{last[0]:08x}{last[1]:08x}"
        if found != self.digest:
            raise IntegrityError(self.difference(found))
        self._sums = sums

    def difference(self, found: str) -> str:
        """Say that the elements have another digest, and which chunks are missing."""
        message = (
            f"{self.directory}: rewritten by another tool, and not with the same elements: they "
            f"have the digest {found}, {self.digest:.40} was recorded"
        )
        return f"{message}{self.told_missing}"

    @property
    def told_missing(self) -> str:
        """What to add to a message about chunks that were missing; empty if none was."""
        names = sorted(self.missing)
        if not names:
            return ""
        shown = some_of(names, _SHOWN)
        return f". Missing or empty, so that Zarr takes the fill value for them: {shown}"

    def read_all(self) -> bytes:
        """Decode a small array."""
        data = bytearray(math.prod(self.shape) * ITEMSIZE[self.dtype])
        step = self.numel * ITEMSIZE[self.dtype]
        for number in range(self.pieces):
            start = number * step
            self.read(number, memoryview(data)[start : start + self.piece_bytes(number)])
        return bytes(data)


@dataclass(frozen=True, slots=True)
class RewrittenPiece:
    """A piece of a rewritten array, to be decoded as a whole."""

    array: RewrittenArray
    number: int
    is_compared: bool = True
    """Whether to compare the elements of the tensor with their digest first."""

    def decode(
        self, file: StoredBytes, stored: Memory, content: Memory, part: tuple[int, int] | None
    ) -> tuple[int, memoryview]:
        """Return the elements of the piece, all of them."""
        view = content(self.array.piece_bytes(0))
        read = self.array.read_compared if self.is_compared else self.array.read
        read(self.number, view)
        return 0, view[: self.array.piece_bytes(self.number)]


def _extended(sums: tuple[int, int], view: memoryview) -> tuple[int, int]:
    """Return the CRC-32 and the CRC-32C of bytes and the bytes after them."""
    return crc32(view, sums[0]), crc32c(view, sums[1])


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__} {str(error).splitlines()[0] if str(error) else ''}".strip()


def find_rewritten(
    root: Path, tensor: LogicalTensor, chunk: tuple[int, ...], manifest: Manifest
) -> RewrittenArray | None:
    """Return a tensor's array if another tool rewrote it; None if it is as streamshard wrote it.

    It was rewritten if its zarr.json is not of the recorded length, and describes other chunks or
    codecs. If anything else is wrong, it is not a rewritten array but a damaged one, and None.
    """
    path = array_path(tensor)
    record = manifest.records.get(f"{path}/{ROOT_DOCUMENT}")
    if record is None:
        return None
    # Most arrays are ours: their documents are only made to be compared.
    expect = partial(array_document, path, tensor, chunk, manifest.codec)
    found = _find(root, path, record.nbytes, expect)
    if found is None:
        return None
    digest = manifest.digests.get(path)
    if digest is None:
        message = "rewritten by another tool; the manifest has no digest"
        raise UnsupportedError(
            f"{message} with which its elements could be compared", path=found.document.path
        )
    found.digest = digest
    return found


def read_small_array(root: Path, path: str, manifest: Manifest | None = None) -> tuple[bytes, bool]:
    """Return the content of a small array, and whether another tool rewrote it.

    `manifest`: says what it has to hold then; None for the manifest itself.
    """
    try:
        return read_checked(root / path / "c/0"), False
    except (IncompleteError, IntegrityError):
        found = _find_small(root, path)
        if found is None:
            raise
    content = found.read_all()
    if manifest is not None:
        stored = content + serialize_checksum(crc32c(content))
        if not _is_recorded(stored, manifest.records.get(f"{path}/c/0")):
            message = "rewritten by another tool, and not with the same"
            message = f"{message} content: it is not what the manifest records"
            raise IntegrityError(f"{message}{found.told_missing}", path=found.directory)
    elif found.missing:
        raise IncompleteError(f"not whole{found.told_missing}", path=found.directory)
    return content, True


def _is_recorded(stored: bytes, record: FileRecord | None) -> bool:
    return (
        record is not None
        and len(stored) == record.nbytes
        and [crc32(stored)] == record.crc32s.tolist()
    )


def _find_small(root: Path, path: str) -> RewrittenArray | None:
    document = _parsed(root / path / ROOT_DOCUMENT)
    shape = document.get("shape") if document else None
    if not isinstance(shape, list) or len(shape) != 1 or not (is_size(shape[0]) and shape[0]):
        return None
    ours = small_array_document(shape[0])
    found = _find(root, path, len(ours), lambda: ours)
    if found is not None:
        stored = sum(file.nbytes for file in found.files.values())
        most = max(_SMALL_BYTES, _MOST_PER_STORED_BYTE * stored)
        if max(*found.shape, *found.chunk) > most:
            claimed = f"{found.shape[0]:,} bytes in chunks of {found.chunk[0]:,}"
            message = f"claims {claimed}, and its files have {stored:,}: {most:,} is most. Store it"
            raise CorruptFileError(f"{message} without compression", path=found.directory)
    return found


def _find(root: Path, path: str, nbytes: int, expect: Callable[[], bytes]) -> RewrittenArray | None:
    directory = root / path
    place = directory / ROOT_DOCUMENT
    try:
        status = examine(place, follows=False)
    except OSError:
        return None
    if status.nbytes == nbytes or not status.is_file:
        return None
    document = _parsed(place)
    if document is None or document.get("node_type") != "array":
        return None
    expected = json.loads(expect())
    if _is_stored_alike(document, expected):
        return None
    for key in _different(document, expected):
        message = f"rewritten with another {key}: {show(document.get(key))}, where"
        raise CorruptFileError(f"{message} {show(expected[key])} belongs", path=place)
    files = _files(directory, root)
    opened = _opened(document, files, place)
    found = RewrittenArray(
        directory,
        status.source_file(place),
        document,
        files,
        tuple(expected["shape"]),
        expected["data_type"],
        require_shape(opened.chunk),
        opened.steps,
    )
    missing = found.chunks - len(files)
    if missing > _MOST_MISSING:
        message = f"{counted(found.chunks, 'chunk')}, and {counted(len(files), 'file')} of them"
        raise IncompleteError(
            f"{message}. Is the copy whole? Else rewrite it in larger chunks", path=place
        )
    return found


def _opened(
    document: Mapping[str, Any], files: Mapping[str, SourceFile], place: Path
) -> "OpenArray":
    """Open an array with zarr-python, which is imported here for the first time."""
    from streamshard.formats.zarr.zarr_python import OpenArray

    try:
        return OpenArray(document, files)
    except UnsupportedError as error:
        raise UnsupportedError(str(error), path=place) from error
    except Exception as error:
        message = f"zarr-python cannot open this array: {_first_line(error)}"
        raise UnsupportedError(message, path=place) from error


def _parsed(place: Path) -> dict[str, Any] | None:
    """Read a document; None if it is not one that could be understood."""
    try:
        if examine(place, follows=False).nbytes > _DOCUMENT_BYTES:
            return None
        document = strict_json.parse(read_small(place))
    except (OSError, ValueError, StreamshardError):
        return None
    return document if isinstance(document, dict) else None


def _files(directory: Path, root: Path) -> dict[str, SourceFile]:
    found = {}
    for entry in entries_below(directory):
        if not entry.is_directory:
            require_regular(entry.path, root)
            found[entry.path.relative_to(directory).as_posix()] = identify(entry.path)
    found.pop(ROOT_DOCUMENT)
    return found


def _is_stored_alike(document: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Tell whether a document has the chunks and codecs of ours, as we write it or wrote it."""
    found = _storage(document, wanted["data_type"])
    return any(found == _storage(form, wanted["data_type"]) for form in forms(wanted))


def _storage(document: Mapping[str, Any], dtype: str) -> list[Any]:
    """Return what a document says of its chunks and codecs, in one form for all tools."""
    encoding = _named(document.get("chunk_key_encoding"))
    encoding["configuration"].setdefault("separator", "/")
    codecs = document.get("codecs")
    found = [_named(codec) for codec in (codecs if isinstance(codecs, list) else [codecs])]
    for codec in found:
        if codec["name"] == "bytes" and ITEMSIZE[dtype] == 1:
            codec["configuration"].pop("endian", None)
    return [_named(document.get("chunk_grid")), encoding, found]


def _named(extension: Any) -> dict[str, Any]:  # noqa: ANN401
    """Bring an extension point into its long form: a name alone means no configuration."""
    if not isinstance(extension, dict):
        return {"name": extension, "configuration": {}}
    configuration = extension.get("configuration")
    settings = dict(configuration) if isinstance(configuration, dict) else {}
    return {**extension, "name": extension.get("name"), "configuration": settings}


def is_serialized_again(found: bytes, expected: bytes) -> bool:
    """Tell whether a document differs from ours only in how a JSON library laid it out.

    A group's document may have consolidated metadata too.
    """
    try:
        document, wanted = strict_json.parse(found), strict_json.parse(expected)
    except ValueError:
        return False
    if not isinstance(document, dict) or not any(found == text for text in _layouts(document)):
        return False
    if document.keys() - wanted.keys() - _MAY_BE_ADDED or any(_different(document, wanted)):
        return False
    if document.get("storage_transformers") or document.get("dimension_names"):
        return False
    return wanted["node_type"] == "group" or _is_stored_alike(document, wanted)


def _different(document: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys whose values differ; a document may leave out empty attributes."""
    told = {"attributes": {}, **document}
    return (key for key in _COMMON if key in wanted and told.get(key) != wanted[key])


def _layouts(document: Mapping[str, Any]) -> Iterator[bytes]:
    """Serialize a document as JSON libraries do: indented, in one line, compact."""
    for is_ascii in (True, False):
        for indent in (2, None, 4, 1):
            yield json.dumps(document, indent=indent, ensure_ascii=is_ascii).encode()
        compact = json.dumps(document, separators=(",", ":"), ensure_ascii=is_ascii)
        yield compact.encode()


def remark(arrays: Sequence[str]) -> str:
    more = f" and {len(arrays) - 1:,} more were" if len(arrays) > 1 else " was"
    return (
        f"{arrays[0]}{more} rewritten by another tool, with other chunks or codecs. They are read "
        "through zarr-python, slower, and compared with the digests in the manifest."
    )
