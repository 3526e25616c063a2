"""Looks at the files that a store's manifest and training state list, each file once.

What is wrong is yielded as errors: opening a store raises the first, and `verify` lists them all.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from streamshard.errors import (
    CorruptFileError,
    IncompleteError,
    IntegrityError,
    SourceError,
    SourceNotFoundError,
    StreamshardError,
    UnsupportedError,
    raise_first,
)
from streamshard.formats import strict_json
from streamshard.formats.checkpoint import Checkpoint
from streamshard.formats.pickle.inert import show
from streamshard.formats.zarr import store_manifest, store_state
from streamshard.formats.zarr.array_paths import ROOT_DOCUMENT, array_path
from streamshard.formats.zarr.chunks import CHECKSUM_BYTES, LIMIT_BYTES, BloscChunk, EncodedChunk
from streamshard.formats.zarr.documents import (
    MANIFEST_PATH,
    ROOT_KEY,
    STATE_PATH,
    VERSION_KEY,
    WEIGHTS_KEY,
    array_document,
    chunk_counts,
    chunk_keys,
    read_small,
    require_inside,
)
from streamshard.formats.zarr.packed_place import is_packed, packed
from streamshard.formats.zarr.rewritten_documents import read_small_array, rewritten_document
from streamshard.formats.zarr.store_manifest import BLOCK_BYTES, FileRecord, Manifest
from streamshard.io.entries import is_directory, is_file, resolve
from streamshard.io.relative_paths import examiner, inside_test, names_below
from streamshard.layout.cutting import Cutting, CuttingBuilder
from streamshard.model import ITEMSIZE, BlockDigests, Decoder, LogicalTensor, Slot, SourceFile
from streamshard.options import CODECS

if TYPE_CHECKING:
    from streamshard.formats.zarr.rewritten import RewrittenArray

MANIFEST_FILES: Final = (f"{MANIFEST_PATH}/zarr.json", f"{MANIFEST_PATH}/c/0")
"""Files that the manifest itself does not list."""
STATE_FILES: Final = (f"{STATE_PATH}/zarr.json", f"{STATE_PATH}/c/0")


class StoredChunk(NamedTuple):
    """A chunk as the training state describes it."""

    path: str
    start: int
    """First element."""
    stop: int
    """Element after the last; the chunk itself may reach past the tensor's end."""
    nbytes: int
    """Size of the content, including the part past the tensor's end."""


@dataclass(frozen=True, slots=True)
class StoredArray:
    """The array of a tensor as the training state describes it."""

    tensor: LogicalTensor
    path: str
    chunk: tuple[int, ...]
    """Shape of a chunk."""

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.tensor.dtype]

    @property
    def count(self) -> int:
        return math.prod(chunk_counts(self.tensor.shape, self.chunk))

    def chunks(self) -> Iterator[StoredChunk]:
        step, end, path = math.prod(self.chunk), self.tensor.numel, self.path
        nbytes = step * self.itemsize
        if end > 0 and self.chunk == self.tensor.shape:  # as of nearly all small tensors
            yield StoredChunk(f"{path}/c{'/0' * len(self.chunk)}", 0, end, nbytes)
            return
        keys = chunk_keys(chunk_counts(self.tensor.shape, self.chunk))
        for number, key in enumerate(keys):
            start = number * step
            yield StoredChunk(f"{path}/{key}", start, min(start + step, end), nbytes)

    def paths(self) -> Iterator[str]:
        yield f"{self.path}/{ROOT_DOCUMENT}"
        yield from (chunk.path for chunk in self.chunks())


def stored_arrays(checkpoint: Checkpoint, shapes: store_state.ChunkShapes) -> list[StoredArray]:
    both = zip(checkpoint.tensors, shapes, strict=True)
    return [StoredArray(tensor, array_path(tensor), shape) for tensor, shape in both]


class StoreIndex:
    """A store, of which more is known with each method that yields what is wrong with it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.manifest: Manifest | None = None
        self.checkpoint: Checkpoint | None = None
        self.shapes: store_state.ChunkShapes = ()
        self.content_bytes: dict[str, int] = {}
        """Size of the manifest and of the training state by the path of their arrays."""
        self.is_described = False
        """Whether the arrays are known: the manifest, the training state and the codec are."""
        self.arrays: Sequence[StoredArray] = ()
        self.files: list[SourceFile] = []
        self.codec_bytes = 0
        """Memory that decoding one file takes."""
        self.numbers: dict[str, int] = {}
        """Path → number of each file that is there with its recorded length."""
        self.first: dict[str, int] = {}
        """Path of an array → number of the file of its first chunk or piece; the others follow."""
        self.rewritten: dict[str, RewrittenArray] = {}
        self.not_ours: set[str] = set()
        """Paths of all arrays that another tool rewrote, also of those that cannot be read."""
        self.documents: dict[str, int | None] = {}
        """Path → size of the document of each array; None where it is not as it was written."""
        self.present: set[str] = set()
        """Paths of all entries except directories, if they were listed: no link leads to them."""
        self._resolved = resolve(root)
        self._examine = examiner(root)
        self._leads_inside = inside_test(root)
        self._inside = ""
        """The last directory that is known to lie in the store, with symbolic links resolved."""

    @classmethod
    def opened(cls, root: Path) -> "StoreIndex":
        index = cls(root)
        raise_first(index.version_errors())
        raise_first(index.metadata_faults())
        raise_first(index.version_errors())
        raise_first(index.array_faults())
        return index

    def list_present(self) -> list[OSError]:
        """List all that is there; returns why directories cannot be listed."""
        unread: list[OSError] = []

        def skip(error: OSError) -> bool:
            unread.append(error)
            return True

        self.present = set(names_below(self.root, skips=skip))
        return unread

    def known(self) -> tuple[Manifest, Checkpoint]:
        if self.manifest is None or self.checkpoint is None:
            raise IncompleteError("neither manifest nor training state was read", path=self.root)
        return self.manifest, self.checkpoint

    def version_errors(self) -> Iterator[StreamshardError]:
        """Compare the root's document with what is known of the store."""
        try:
            require_inside(self.root / ROOT_DOCUMENT, self.root)
            entries = _described(self.root)
        except SourceError as error:
            yield error
            return
        if entries is None:
            message = "a Zarr hierarchy, but not one that streamshard wrote"
            yield SourceNotFoundError(message, path=self.root)
        elif entries[VERSION_KEY] != store_state.VERSION:
            version, known = show(entries[VERSION_KEY]), store_state.VERSION
            message = f"store format {version}; this streamshard reads {known}: use"
            yield UnsupportedError(f"{message} the one that wrote it", path=self.root)
        elif self.checkpoint and (WEIGHTS_KEY in entries) != (self.checkpoint.dropped is not None):
            message = "does not tell as the training state does"
            yield CorruptFileError(
                f"{message} whether the store holds weights only", path=self.root / ROOT_DOCUMENT
            )

    def metadata_faults(self) -> Iterator[StreamshardError]:
        """Read the manifest, then the training state, which needs it."""
        try:
            self.manifest = self._read_manifest()
        except (SourceError, IntegrityError) as error:
            yield error
            return
        try:
            self.checkpoint, self.shapes = self._read_state(self.manifest)
        except (SourceError, IntegrityError) as error:
            yield error
            return
        if self.manifest.codec in CODECS:
            self.arrays = stored_arrays(self.checkpoint, self.shapes)
            self.is_described = True
            return
        place = self.root / MANIFEST_FILES[1]
        message = f"compressed with {show(self.manifest.codec)}, which is not known"
        yield UnsupportedError(message, path=place)

    def array_faults(self) -> Iterator[StreamshardError]:
        """Look at the chunks of all arrays. Zarr would read a missing chunk as zeros."""
        if self.manifest is None:
            return
        for array in self.arrays:
            self.first[array.path] = len(self.files)
            if self._has_its_document(array, self.manifest):
                yield from self._chunk_faults(array, self.manifest)
                continue
            try:
                is_rewritten = self._add_rewritten(array, self.manifest)
            except (SourceError, IntegrityError) as error:
                self.not_ours.add(array.path)
                yield error
                continue
            if not is_rewritten:
                yield from self._chunk_faults(array, self.manifest)

    def cutting(self) -> Cutting:
        """Say where the elements of all tensors lie in a store without faults."""
        found = [self.rewritten.get(array.path) for array in self.arrays]
        both = [*zip(self.arrays, found, strict=True)]
        counts = np.array([a.count if r is None else r.pieces for a, r in both], dtype=np.int64)
        numels = [math.prod(a.chunk) if r is None else r.numel for a, r in both]
        first = np.array([self.first[array.path] for array in self.arrays], dtype=np.int64)
        starts = np.cumsum(counts) - counts
        files = np.repeat(first - starts, counts) + np.arange(counts.sum())
        builder = CuttingBuilder([array.itemsize for array in self.arrays])
        pieces = np.repeat(np.array(numels, dtype=np.int64), counts)
        builder.slot(Slot(files, np.zeros_like(files), pieces))
        for index, (start, numel) in enumerate(zip(starts.tolist(), numels, strict=True)):
            builder.assign(index, start, piece_numel=numel)
        return builder.build()

    def add_file(
        self,
        path: str,
        nbytes: int | None,
        decoder: Decoder | None = None,
        full: Path | None = None,
    ) -> StreamshardError | None:
        """Add a regular file of this length; returns what is wrong with any other."""
        full = full or self.root / path
        try:
            if path not in self.present:
                self._require_inside(path.rpartition("/")[0])
            status = self._examine(path)
        except (FileNotFoundError, NotADirectoryError):
            return IncompleteError(f"missing; {nbytes} bytes were written", path=full)
        except OSError as failed:
            return SourceError(f"cannot be read ({failed.strerror})", path=full)
        except SourceError as outside:
            return outside
        if not status.is_file:
            message = "not a regular file; copy the store with 'cp -rL'"
            return CorruptFileError(message, path=full)
        if nbytes not in (None, status.nbytes):
            message = f"{status.nbytes} bytes, {nbytes} were written"
            return IntegrityError(message, path=full)
        self.numbers[path] = len(self.files)
        self.files.append(status.source_file(full, decoder))
        return None

    def _require_inside(self, directory: str) -> None:
        """Refuse a directory to which symbolic links lead out of the store."""
        if directory == self._inside:
            return
        if not self._leads_inside(directory):
            full = self.root / directory
            if not resolve(full).is_relative_to(self._resolved):
                require_inside(full, self.root)
        self._inside = directory

    def _has_its_document(self, array: StoredArray, manifest: Manifest) -> bool:
        """Tell whether an array's document is as long as it was written; a rewritten one is not."""
        path = f"{array.path}/{ROOT_DOCUMENT}"
        record = manifest.records.get(path)
        self.documents[path] = None
        try:
            status = self._examine(path)
        except OSError:
            return False
        if record is None or not status.is_file or status.nbytes != record.nbytes:
            return False
        self.documents[path] = record.nbytes
        return True

    def _read_manifest(self) -> Manifest:
        for path in MANIFEST_FILES:
            require_inside(self.root / path, self.root)
        content = self._read_small(MANIFEST_PATH)
        try:
            return store_manifest.read(content)
        except CorruptFileError as error:
            raise CorruptFileError(f"{error}", path=self.root / MANIFEST_FILES[1]) from error

    def _read_state(self, manifest: Manifest) -> tuple[Checkpoint, store_state.ChunkShapes]:
        """Read the training state, whose tensors have no more chunks than the manifest lists."""
        place = self.root / STATE_FILES[1]
        require_inside(place, self.root)
        content = self._read_small(STATE_PATH, manifest)
        try:
            checkpoint, shapes = store_state.load(content)
            _require_listed(checkpoint, shapes, manifest)
        except (CorruptFileError, UnsupportedError, ValueError) as error:
            kind = UnsupportedError if isinstance(error, UnsupportedError) else CorruptFileError
            raise kind(str(error), path=place) from error
        return checkpoint, shapes

    def _read_small(self, path: str, manifest: Manifest | None = None) -> bytes:
        content, is_rewritten = read_small_array(self.root, path, manifest)
        self.content_bytes[path] = len(content)
        if is_rewritten:
            self.not_ours.add(path)
        return content

    def _chunk_faults(self, array: StoredArray, manifest: Manifest) -> Iterator[StreamshardError]:
        codec = None if manifest.codec == "none" else BloscChunk(array.itemsize)
        for chunk in array.chunks():
            record = manifest.records.get(chunk.path)
            if record is None:
                place = self.root / MANIFEST_FILES[1]
                yield CorruptFileError(f"does not list {chunk.path}", path=place)
                continue
            full = self.root / chunk.path
            decoder = self._decoder(full, chunk, record, codec)
            wrong = decoder if isinstance(decoder, CorruptFileError) else None
            known = None if isinstance(decoder, CorruptFileError) else decoder
            fault = self.add_file(chunk.path, record.nbytes, known, full)
            if fault is None and wrong is not None:
                del self.numbers[chunk.path]
                fault = wrong
            if fault is not None:
                yield fault

    def _decoder(
        self, path: Path, chunk: StoredChunk, record: FileRecord, codec: BloscChunk | None
    ) -> Decoder | CorruptFileError:
        crc32s = record.crc32s
        blocks = -(-chunk.nbytes // BLOCK_BYTES) if codec is None else 1
        if codec is None and record.nbytes != chunk.nbytes + CHECKSUM_BYTES:
            message = f"{record.nbytes} bytes for {chunk.nbytes} of content"
            return CorruptFileError(message, path=path)
        if len(crc32s) != blocks:
            message = f"the manifest lists {len(crc32s)} checksums where {blocks} belong"
            return CorruptFileError(message, path=path)
        if codec is None:
            return BlockDigests(chunk.nbytes, BLOCK_BYTES, crc32s)
        # Twice, because the allocator keeps the memory of the previous chunk.
        self.codec_bytes = max(self.codec_bytes, 2 * (chunk.nbytes + record.nbytes))
        return EncodedChunk(
            path,
            codec,
            stored_bytes=record.nbytes,
            stored_crc32=int(crc32s[0]),
            content_bytes=chunk.nbytes,
        )

    def _add_rewritten(self, array: StoredArray, manifest: Manifest) -> bool:
        """Add an array if another tool rewrote it, in pieces that are not its chunks."""
        path = array.path
        if f"{path}/{ROOT_DOCUMENT}" not in manifest.records:
            return False
        ours = array_document(path, array.tensor, array.chunk, manifest.codec)
        document = rewritten_document(self.root / path / ROOT_DOCUMENT, ours)
        if document is None:
            return False
        # Only here and for small arrays, because it loads zarr-python.
        from streamshard.formats.zarr.rewritten import RewrittenPiece, open_rewritten

        rewrite = open_rewritten(self.root, path, document, manifest.digests.get(path))
        self.not_ours.add(path)
        self.rewritten[path] = rewrite
        for number in range(rewrite.pieces):
            self.files.append(replace(rewrite.document, decoder=RewrittenPiece(rewrite, number)))
        # Nothing is read from these; the run ends with an error if one of them changes.
        self.files += rewrite.files.values()
        self.codec_bytes = max(self.codec_bytes, rewrite.codec_bytes)
        return True


def is_hierarchy(root: Path) -> bool:
    """Tell whether a path is the root of a Zarr hierarchy, whatever tool wrote it."""
    place = packed(root)
    try:
        return is_file(place / ROOT_DOCUMENT)
    except SourceError:  # opening it tells what is wrong with it
        return is_packed(place)


def is_store(root: Path) -> bool:
    """Tell whether a Zarr hierarchy is one of streamshard's stores, of any version."""
    return _described(packed(root)) is not None


def may_be_store(root: Path) -> bool:
    """Tell whether a directory looks like a store, which may be damaged."""
    # In a bucket the first question is answered by a listing that is at hand.
    return is_directory((root / MANIFEST_PATH).parent) and any(
        is_file(root / path) for path in (MANIFEST_FILES[1], STATE_FILES[1])
    )


def _described(root: Path) -> Mapping[str, Any] | None:
    """Return what the root's document tells of a store; None if it is no store's."""
    try:
        document: Any = strict_json.parse(read_small(root / ROOT_DOCUMENT))
        found = document["attributes"][ROOT_KEY]
    except (KeyError, TypeError, ValueError):
        return None
    return found if isinstance(found, dict) and VERSION_KEY in found else None


def _require_listed(
    checkpoint: Checkpoint, shapes: store_state.ChunkShapes, manifest: Manifest
) -> None:
    """Refuse chunks that are too many or too large before anything is made for each of them."""
    files, chunks = len(manifest.records), 0
    for tensor, shape in zip(checkpoint.tensors, shapes, strict=True):
        if len(shape) != len(tensor.shape) or not math.prod(shape):
            message = f"chunks of {show(shape)} for {tensor.name} of {show(tensor.shape)}"
            raise CorruptFileError(message)
        chunks += math.prod(chunk_counts(tensor.shape, shape))
        if chunks > files:
            message = f"{chunks:,} chunks up to {show(tensor.name)}, where the manifest lists"
            raise CorruptFileError(f"{message} {files:,} files")
        nbytes = math.prod(shape) * ITEMSIZE[tensor.dtype]
        if manifest.codec != "none" and nbytes > LIMIT_BYTES:
            message = f"chunks of {nbytes:,} bytes of {show(tensor.name)}, which is more than can"
            raise CorruptFileError(f"{message} be compressed")
