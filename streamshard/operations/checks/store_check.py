"""Checks a store: the list of its files, every chunk, and the digests of its tensors."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from streamshard.defaults import CODECS
from streamshard.engine.numeric import digests
from streamshard.engine.numeric.checksums import crc32
from streamshard.engine.run.source_reader import Encoded
from streamshard.errors import IntegrityError, SourceError, StreamshardError
from streamshard.formats.checkpoint import Checkpoint
from streamshard.formats.deepspeed.names import OWN_PREFIX
from streamshard.formats.pickle.inert import show
from streamshard.formats.zarr import store_files
from streamshard.formats.zarr.chunks import BloscChunk, EncodedChunk
from streamshard.formats.zarr.documents import array_path
from streamshard.formats.zarr.store_files import MANIFEST_FILES, ChunkPlace
from streamshard.formats.zarr.store_manifest import FileRecord, Manifest
from streamshard.formats.zarr.store_paths import require_inside
from streamshard.formats.zarr.store_state import ChunkShapes
from streamshard.io.entries import entries_below, examine
from streamshard.io.objects.object_path import as_path
from streamshard.layout.sample import Sample
from streamshard.model import ITEMSIZE, SourceFile
from streamshard.operations.checks import chunk_check
from streamshard.operations.checks.problems import (
    DAMAGED,
    EXTRA,
    MALFORMED,
    MISSING,
    UNREADABLE,
    UNSUPPORTED,
    Findings,
)
from streamshard.operations.checks.rewritten_check import RewrittenCheck
from streamshard.operations.checks.scan import Result, Unit

_LIMIT_AGAIN: Final = 4
"""How many times longer a document may be than streamshard writes it."""
_FREE_BYTES: Final = 1 << 16
_State = tuple[Checkpoint, ChunkShapes]


class StoreCheck:
    """A store whose structure is checked, ready to be read.

    The constructor adds all problems that show without reading chunks to the findings.
    """

    def __init__(self, root: Path, findings: Findings, sample: Sample) -> None:
        self.files: list[SourceFile] = []
        self.decoders: dict[int, Encoded] = {}
        self.codec_bytes = 0
        self.tag: str | None = None
        self._root = root
        self._findings = findings
        self._sample = sample
        self._index: dict[str, int] = {}
        """Path → number of every file that exists and has the right length."""
        self._documents: Mapping[str, bytes] = {}
        self._arrays: list[tuple[str, list[ChunkPlace]]] = []
        self._rewritten = RewrittenCheck(root, findings, self.files, self.decoders)
        self._directories: set[Path] = set()
        """Directories that are known to lie in the store, with symbolic links resolved."""
        self._manifest = self._read_manifest()
        present = self._present()
        if self._manifest is None:
            self._take_unlisted(present)
        else:
            state = self._load_state(self._manifest)
            if not isinstance(state, StreamshardError) and self._manifest.codec in CODECS:
                self._documents = store_files.documents(*state, self._manifest.codec)
                self._rewritten.find(self._manifest, *state, self._documents)
                self.codec_bytes = self._rewritten.codec_bytes
            self._take_listed(self._manifest, present)
            self._compare_state(self._manifest, state)

    @property
    def nbytes(self) -> int:
        """Bytes of all files that exist and have the right length."""
        return sum(file.nbytes for file in self.files)

    # Structure -----------------------------------------------------------------------------------

    def _read_manifest(self) -> Manifest | None:
        try:
            return store_files.read_manifest(self._root)
        except (SourceError, IntegrityError) as error:
            self._findings.add_error(error, self._root)
            return None

    def _present(self) -> set[str]:
        """List all entries except directories and streamshard's own marks."""
        present = {
            entry.path.relative_to(self._root)
            for entry in entries_below(self._root, skips=self._note_unread)
            if not entry.is_directory
        }
        return {
            path.as_posix()
            for path in present
            if not (path.name.startswith(OWN_PREFIX) or path.parts[0].startswith(OWN_PREFIX))
        }

    def _note_unread(self, error: OSError) -> bool:
        place = as_path(error.filename or self._root)
        self._findings.add(UNREADABLE, place, f"{place}: cannot be read ({error.strerror})")
        return True

    def _take_unlisted(self, present: set[str]) -> None:
        """Add every file that looks like a chunk: without a manifest no list of files is known."""
        for path in sorted(present - {*MANIFEST_FILES}):
            if not path.endswith("zarr.json"):
                self._add_file(path, None)

    def _take_listed(self, manifest: Manifest, present: set[str]) -> None:
        for path in sorted(present - manifest.records.keys() - {*MANIFEST_FILES}):
            if path not in self._rewritten:
                full = self._root / path
                self._findings.add(EXTRA, full, f"{full}: is not a part of the store")
        for path, record in manifest.records.items():
            if path not in self._rewritten:
                self._add_file(path, record.nbytes)
        self._rewritten.note_documents()

    def _add_file(self, path: str, nbytes: int | None) -> None:
        """Add a file if it is a regular file in the store and has the right length."""
        full = self._root / path
        try:
            if full.parent not in self._directories:
                require_inside(full.parent, self._root)
                self._directories.add(full.parent)
            stat = examine(full, follows=False)
        except (FileNotFoundError, NotADirectoryError):
            message = f"{full}: missing; {nbytes} bytes were written"
            self._findings.add(MISSING, full, message)
        except OSError as error:
            message = f"{full}: cannot be read ({error.strerror})"
            self._findings.add(UNREADABLE, full, message)
        except SourceError as error:
            self._findings.add_error(error, full.parent)
        else:
            if not stat.is_file:
                message = f"{full}: not a regular file; copy the store with 'cp -rL'"
                self._findings.add(MALFORMED, full, message)
            elif nbytes not in (None, stat.nbytes) and not self._rewritten.holds_document(path):
                message = f"{full}: {stat.nbytes} bytes, {nbytes} were written"
                self._findings.add(DAMAGED, full, message)
            elif nbytes in (None, stat.nbytes):
                self._index[path] = len(self.files)
                self.files.append(stat.source_file(full))

    def _load_state(self, manifest: Manifest) -> _State | StreamshardError:
        try:
            return store_files.read_state(self._root, manifest)
        except (SourceError, IntegrityError) as error:
            return error

    def _compare_state(self, manifest: Manifest, state: _State | StreamshardError) -> None:
        """Compare the tensors in the training state with the manifest."""
        if isinstance(state, StreamshardError):
            self._findings.add_error(state, self._root)
            return
        checkpoint, shapes = state
        if manifest.codec not in CODECS:
            place = self._root / MANIFEST_FILES[1]
            message = f"{place}: compressed with {show(manifest.codec)}, which is not known"
            self._findings.add(UNSUPPORTED, place, message)
            return
        self.tag = checkpoint.tag
        if checkpoint.dropped is not None:
            self._findings.notes.append(checkpoint.remarks[0])
        self._findings.notes += checkpoint.warnings
        self._arrays = list(store_files.places(checkpoint, shapes))
        itemsizes = {array_path(t): ITEMSIZE[t.dtype] for t in checkpoint.tensors}
        for array, chunks in self._arrays:
            for chunk in chunks:
                record = manifest.records.get(chunk.path)
                if record is not None and chunk.path in self._index and manifest.codec != "none":
                    self._add_decoder(chunk, record, BloscChunk(manifest.codec, itemsizes[array]))
        self._compare_lists(manifest)

    def _compare_lists(self, manifest: Manifest) -> None:
        place = self._root / MANIFEST_FILES[1]
        chunks = {chunk.path for _, chunks in self._arrays for chunk in chunks}
        wanted = {*self._documents, *store_files.STATE_FILES, *chunks}
        expected_arrays = {array for array, _ in self._arrays}
        for what, found, expected in (
            ("", manifest.records.keys(), wanted),
            ("the digest of ", manifest.digests.keys(), expected_arrays),
        ):
            for path in sorted(expected - found):
                self._findings.add(MALFORMED, place, f"{place}: does not list {what}{path}")
            for path in sorted(found - expected):
                message = f"{place}: lists {what}{path}, which the training state does not know"
                self._findings.add(MALFORMED, place, message)

    def _add_decoder(self, chunk: ChunkPlace, record: FileRecord, codec: BloscChunk) -> None:
        self.decoders[self._index[chunk.path]] = EncodedChunk(
            self._root / chunk.path,
            codec,
            stored_bytes=record.nbytes,
            stored_crc32=int(record.crc32s[0]) if len(record.crc32s) == 1 else -1,
            content_bytes=chunk.nbytes,
        )
        # Twice, because the allocator keeps the memory of the previous chunk.
        self.codec_bytes = max(self.codec_bytes, 2 * (chunk.nbytes + record.nbytes))

    # Content -------------------------------------------------------------------------------------

    def units(self) -> Iterator[Unit]:
        """Yield the units to read: small files always, arrays only if they are in the sample."""
        self._findings.files += len(self.files) - self._rewritten.extra_files
        if self._manifest is None:
            yield from (self._unlisted_unit(path) for path in self._index)
            return
        known = {chunk.path for _, chunks in self._arrays for chunk in chunks}
        for path in self._index:
            if path not in known:
                yield self._single_unit(self._manifest, path)
        total, at = sum(self._array_bytes(array, chunks) for array, chunks in self._arrays), 0
        for array, chunks in self._arrays:
            start, at = at, at + self._array_bytes(array, chunks)
            if not self._sample.holds(start, at, total):
                continue
            if array in self._rewritten:
                yield from self._rewritten.units(array)
            else:
                yield self._array_unit(self._manifest, array, chunks)

    def _array_bytes(self, array: str, chunks: Sequence[ChunkPlace]) -> int:
        if array in self._rewritten:
            return self._rewritten.nbytes(array)
        held = [self._index[chunk.path] for chunk in chunks if chunk.path in self._index]
        return sum(self.files[number].nbytes for number in held)

    def _unlisted_unit(self, path: str) -> Unit:
        number = self._index[path]
        full = self.files[number].path

        def judge(results: Sequence[Result]) -> None:
            found, end = chunk_check.joined(results[:-1]), results[-1]
            found = end if isinstance(end, StreamshardError) else found
            self._take(full, found, partial(chunk_check.own_checksum, full, end))

        return Unit(chunk_check.own_checksum_pieces(number, self.files[number].nbytes), judge)

    def _single_unit(self, manifest: Manifest, path: str) -> Unit:
        """Check a document, the training state, or a chunk that only the manifest lists."""
        number, full, record = self._index[path], self._root / path, manifest.records[path]
        look: Callable[[Result], list[str]]
        is_document = path.endswith("zarr.json")
        is_known = path in self._documents
        if is_known and record.nbytes > self._limit_of(path):
            message = f"{full}: {record.nbytes:,} bytes, where the document of an array belongs"
            self._findings.add(MALFORMED, full, message)
            is_known = False
        if is_known:
            piece = chunk_check.bytes_piece(number, record.nbytes)
            look = partial(self._look_at_document, full, record, self._documents[path])
        elif is_document or path in store_files.STATE_FILES or manifest.codec != "none":
            return self._whole_unit(number, full, record)
        else:
            content = store_files.content_bytes(record)
            place = ChunkPlace(path, content, content)
            check = chunk_check.ChunkCheck(full, number, record, place, is_encoded=False)
            piece, look = check.piece(), check.problems

        def judge(results: Sequence[Result]) -> None:
            self._take(full, results[0], look)

        return Unit([piece], judge)

    def _whole_unit(self, number: int, full: Path, record: FileRecord) -> Unit:
        look = partial(chunk_check.whole_digest, full, record)

        def judge(results: Sequence[Result]) -> None:
            self._take(full, chunk_check.joined(results), look)

        return Unit(chunk_check.digest_pieces(number, record.nbytes), judge)

    def _limit_of(self, path: str) -> int:
        """Return the largest size of a document that is read into memory."""
        return _LIMIT_AGAIN * len(self._documents[path]) + _FREE_BYTES

    def _look_at_document(
        self, path: Path, record: FileRecord, expected: bytes, found: bytes
    ) -> list[str]:
        problems = chunk_check.whole_file(path, record, crc32(found))
        if not problems and expected and not store_files.is_same_array(found, expected):
            return [f"{path}: describes another array than the training state does"]
        return problems

    def _array_unit(self, manifest: Manifest, array: str, chunks: Sequence[ChunkPlace]) -> Unit:
        present = [chunk for chunk in chunks if chunk.path in self._index]
        checks = [
            chunk_check.ChunkCheck(
                self._root / chunk.path,
                self._index[chunk.path],
                manifest.records[chunk.path],
                chunk,
                is_encoded=self._index[chunk.path] in self.decoders,
            )
            for chunk in present
        ]

        def judge(results: Sequence[Result]) -> None:
            before = len(self._findings.problems)
            for check, result in zip(checks, results, strict=True):
                self._take(check.path, result, check.problems)
            if len(present) == len(chunks) and len(self._findings.problems) == before:
                pieces = [c.content(r) for c, r in zip(checks, results, strict=True)]
                self._compare_digest(manifest, array, digests.joined(pieces).text)

        return Unit([check.piece() for check in checks], judge)

    def _compare_digest(self, manifest: Manifest, array: str, found: str) -> None:
        self._findings.digests[array] = found
        recorded = manifest.digests.get(array)
        if recorded == found:
            self._findings.tensors += 1
        elif recorded is not None:
            place = self._root / array
            message = f"{place}: its elements have the digest {found}, {recorded:.40} was recorded"
            self._findings.add(DAMAGED, place, message)

    def _take(self, path: Path, result: Result, look: Callable[[Result], list[str]]) -> None:
        """Add the problems of a file that was read, or the error if it could not be read."""
        if isinstance(result, StreamshardError):
            self._findings.add_error(result, path)
            return
        self._findings.checked += 1
        for problem in look(result):
            self._findings.add(DAMAGED, path, problem)
