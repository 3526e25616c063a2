"""Checks a store: the list of its files, every chunk, and the digests of its tensors."""

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np

from streamshard.checks.problems import DAMAGED, EXTRA, MALFORMED, UNREADABLE, Findings
from streamshard.checks.scan import Result, ScanPiece, Unit
from streamshard.checksums import crc32, join_crc32
from streamshard.engine.numeric import digests
from streamshard.engine.scan.probe import Probe
from streamshard.errors import IntegrityError, SourceError, StreamshardError
from streamshard.formats import strict_json
from streamshard.formats.checkpoint import Checkpoint
from streamshard.formats.deepspeed.names import OWN_PREFIX
from streamshard.formats.zarr.array_paths import ROOT_DOCUMENT
from streamshard.formats.zarr.chunks import CHECKSUM_BYTES, serialize_checksum
from streamshard.formats.zarr.documents import (
    MANIFEST_PATH,
    STATE_PATH,
    forms,
    read_small,
    small_array_document,
    store_documents,
)
from streamshard.formats.zarr.rewritten_documents import is_serialized_again, remark
from streamshard.formats.zarr.store_index import (
    MANIFEST_FILES,
    STATE_FILES,
    StoredArray,
    StoreIndex,
)
from streamshard.formats.zarr.store_manifest import BLOCK_BYTES, FileRecord, Manifest
from streamshard.io.object_path import as_path
from streamshard.model import BlockDigests, Digest, SourceFile

if TYPE_CHECKING:
    from streamshard.formats.zarr.rewritten import RewrittenArray

_PIECE_BYTES: Final = 16 << 20
"""Bytes that a worker reads at once, whatever the size of the file, so that a run can be
interrupted."""
_LIMIT_AGAIN: Final = 4
"""How many times longer a document may be than streamshard writes it."""
_FREE_BYTES: Final = 1 << 16
_TOLD_TWICE: Final = ("node_type", "shape", "data_type", "chunk_grid", "codecs")
"""Keys of an array's document whose values the training state determines as well."""


@dataclass(frozen=True, slots=True)
class _ChunkCheck:
    """A chunk that exists and has the recorded length."""

    path: Path
    file: int
    """Number among the files that are read."""
    record: FileRecord
    nbytes: int
    """Size of the content, including the part past the tensor's end."""
    own_bytes: int
    """Size of the content that belongs to the tensor."""
    is_encoded: bool

    def piece(self) -> ScanPiece:
        return ScanPiece(self.record.nbytes, self._read)

    def _read(self, probe: Probe) -> Result:
        if self.is_encoded:
            try:
                return probe.digests(self.file, [0, self.own_bytes]), b""
            except (RuntimeError, ValueError) as error:
                raise IntegrityError(f"cannot be decompressed ({error})", path=self.path) from error
        # Cut where blocks end, and where the tensor ends.
        cuts = sorted({*range(0, self.nbytes, BLOCK_BYTES), self.own_bytes, self.nbytes})
        found = probe.digests(self.file, cuts)
        return found, probe.read(self.file, self.nbytes, self.nbytes + CHECKSUM_BYTES)

    def problems(self, result: Result) -> list[str]:
        pieces, trailer = result
        if self.is_encoded:
            return []  # the decoder has compared it
        crc32s = self._block_crcs(pieces)
        if len(crc32s) != len(self.record.crc32s):
            message = f"{self.path}: the manifest lists {len(self.record.crc32s)} checksums for"
            return [f"{message} {len(crc32s)} blocks"]
        damaged = np.flatnonzero(np.array(crc32s, dtype=np.uint32) != self.record.crc32s)
        wrong = [self._damage(run) for run in _runs(damaged.tolist())]
        if not wrong and trailer != serialize_checksum(digests.joined(pieces).crc32c):
            wrong.append(f"{self.path}: its content does not match the checksum at its end")
        return wrong

    def _block_crcs(self, pieces: Sequence[Digest]) -> list[int]:
        crc32s: list[int] = []
        at = 0
        for piece in pieces:
            if at % BLOCK_BYTES == 0:
                crc32s.append(0)
            crc32s[-1] = join_crc32(crc32s[-1], piece.crc32, piece.nbytes)
            at += piece.nbytes
        return crc32s

    def _damage(self, blocks: range) -> str:
        start, stop = blocks.start * BLOCK_BYTES, blocks.stop * BLOCK_BYTES
        stop = min(stop, self.nbytes)
        return f"{self.path}: bytes {start} to {stop} are damaged: not those that were written"

    def content(self, result: Result) -> Digest:
        """Return the digest of the tensor's part of a chunk that has no problems."""
        pieces: list[Digest] = result[0]
        if self.is_encoded:
            return pieces[0]
        parts: list[Digest] = []
        bytes_left = self.own_bytes
        for piece in pieces:
            if bytes_left > 0:
                parts.append(piece)
            bytes_left -= piece.nbytes
        return digests.joined(parts)


class StoreCheck:
    """A store whose structure is checked, ready to be read.

    The constructor adds all problems that show without reading chunks to the findings, after the
    index has yielded those of the manifest and the training state. `unread`: why directories could
    not be listed.
    """

    def __init__(self, index: StoreIndex, unread: Sequence[OSError], findings: Findings) -> None:
        self._index = index
        self._root = index.root
        self._findings = findings
        self._documents: dict[str, bytes] = {}
        """What streamshard writes as the documents of this store."""
        self._chunks = {chunk.path for array in index.arrays for chunk in array.chunks()}
        for error in unread:
            place = as_path(error.filename or self._root)
            findings.add(UNREADABLE, place, f"{place}: cannot be read ({error.strerror})")
        if index.manifest is None:
            # No list of files is known: all that may be chunks have a checksum of their own.
            for path in sorted(index.present - {*MANIFEST_FILES}):
                if not (path.endswith(ROOT_DOCUMENT) or _is_mark(path)):
                    self._add_file(path, None)
            return
        self._check_manifest_document()
        if index.is_described:
            self._note_state(*index.known())
        self._add_others(index.manifest)
        if index.is_described:
            self._compare_lists(index.manifest)

    @property
    def files(self) -> Sequence[SourceFile]:
        """All files that exist and have the right length, as they are read here."""
        rewritten = {array.document.path for array in self._index.rewritten.values()}
        return [_checking(file, rewritten) for file in self._index.files]

    # Structure -----------------------------------------------------------------------------------

    def _check_manifest_document(self) -> None:
        if MANIFEST_PATH in self._index.not_ours:
            return
        document, nbytes = self._root / MANIFEST_FILES[0], self._index.content_bytes[MANIFEST_PATH]
        try:
            content, expected = read_small(document), small_array_document(nbytes)
        except SourceError as error:
            self._findings.add_error(error, document)
            return
        if content != expected and not is_serialized_again(content, expected):
            message = f"{document}: not the document of a manifest of {nbytes} bytes"
            self._findings.add(MALFORMED, document, message)

    def _note_state(self, manifest: Manifest, checkpoint: Checkpoint) -> None:
        """Note what the training state tells, and what the store's documents must be."""
        self._documents = store_documents(checkpoint, self._index.shapes, manifest.codec)
        state = small_array_document(self._index.content_bytes[STATE_PATH])
        self._documents[STATE_FILES[0]] = state
        if self._index.rewritten:
            self._findings.notes.append(remark(sorted(self._index.rewritten)))
        self._findings.notes += (*checkpoint.unread, *checkpoint.warnings)

    def _add_others(self, manifest: Manifest) -> None:
        """Add the files that are listed and are no chunks, and tell of those not listed."""
        for path in sorted(self._index.present - manifest.records.keys() - {*MANIFEST_FILES}):
            if not (_is_mark(path) or self._is_rewritten(path)):
                full = self._root / path
                self._findings.add(EXTRA, full, f"{full}: is not a part of the store")
        rewritten = 0
        for path, record in manifest.records.items():
            if path not in self._chunks and not self._is_rewritten(path):
                rewritten += self._add_file(path, record.nbytes)
        if rewritten:
            message = f"{rewritten:,} zarr.json were serialized again by another tool, and say the"
            self._findings.notes.append(f"{message} same.")

    def _add_file(self, path: str, nbytes: int | None) -> bool:
        """Add a file, or what is wrong with it; tells whether it was serialized again instead."""
        fault = self._index.add_file(path, nbytes)
        if fault is None:
            return False
        if isinstance(fault, IntegrityError) and self._is_serialized_again(path):
            return True
        self._findings.add_error(fault, self._root)
        return False

    def _is_serialized_again(self, path: str) -> bool:
        """Tell whether a document of another length says the same as ours."""
        try:
            found = read_small(self._root / path) if path in self._documents else b""
        except (OSError, SourceError):
            return False
        return bool(found) and is_serialized_again(found, self._documents[path])

    def _is_rewritten(self, path: str) -> bool:
        """Tell whether a path is a file of an array that another tool rewrote."""
        places = self._index.not_ours
        return bool(places) and any(
            parent.as_posix() in places for parent in PurePosixPath(path).parents
        )

    def _compare_lists(self, manifest: Manifest) -> None:
        place = self._root / MANIFEST_FILES[1]
        arrays = {array.path for array in self._index.arrays}
        for what, listed, expected in (
            ("", manifest.records.keys(), {*self._documents, *STATE_FILES, *self._chunks}),
            ("the digest of ", manifest.digests.keys(), arrays),
        ):
            for path in sorted(expected - listed):
                self._findings.add(MALFORMED, place, f"{place}: does not list {what}{path}")
            for path in sorted(listed - expected):
                message = f"{place}: lists {what}{path}, which the training state does not know"
                self._findings.add(MALFORMED, place, message)

    # Content -------------------------------------------------------------------------------------

    def units(self) -> Iterator[Unit]:
        numbers, manifest, rewritten = (
            self._index.numbers,
            self._index.manifest,
            self._index.rewritten,
        )
        # A rewritten array's document stands for each of its pieces.
        again = sum(max(0, array.pieces - 1) for array in rewritten.values())
        self._findings.files += len(self._index.files) - again
        if manifest is None:
            yield from map(self._unlisted_unit, numbers)
            return
        for path in numbers:
            if path not in self._chunks:
                yield self._single_unit(manifest, path)
        for array in self._index.arrays:
            if array.path in rewritten:
                yield self._rewritten_unit(array.path, rewritten[array.path])
            elif array.path not in self._index.not_ours:
                yield self._array_unit(manifest, array)

    def _unlisted_unit(self, path: str) -> Unit:
        number = self._index.numbers[path]
        full, nbytes = self._index.files[number].path, self._index.files[number].nbytes
        content_bytes = max(0, nbytes - CHECKSUM_BYTES)

        def problems_of(results: Result) -> list[str]:
            is_so = results[-1] == serialize_checksum(digests.joined(results[:-1]).crc32c)
            message = f"{full}: damaged: its bytes do not match the checksum at its end"
            return [] if is_so else [message]

        def judge(results: Sequence[Result]) -> None:
            self._take(full, results, problems_of)

        end = _bytes_piece(number, content_bytes, nbytes)
        return Unit([*_digest_pieces(number, content_bytes), end], judge, self._failed(full))

    def _single_unit(self, manifest: Manifest, path: str) -> Unit:
        """Check a document, the training state, or a chunk that only the manifest lists."""
        number = self._index.numbers[path]
        full = self._index.files[number].path
        record, document = manifest.records[path], self._documents.get(path)
        problems_of: Callable[[Result], list[str]]
        if document is not None and record.nbytes > _LIMIT_AGAIN * len(document) + _FREE_BYTES:
            message = f"{full}: {record.nbytes:,} bytes, where the document of an array belongs"
            self._findings.add(MALFORMED, full, message)
            document = None
        if document is not None:
            piece = _bytes_piece(number, 0, record.nbytes)
            problems_of = partial(_document_problems, full, record, document)
        elif path.endswith(ROOT_DOCUMENT) or path in STATE_FILES or manifest.codec != "none":
            return self._whole_unit(number, full, record)
        else:
            content = max(0, record.nbytes - CHECKSUM_BYTES)
            check = _ChunkCheck(full, number, record, content, content, is_encoded=False)
            piece, problems_of = check.piece(), check.problems

        def judge(results: Sequence[Result]) -> None:
            self._take(full, results[0], problems_of)

        return Unit([piece], judge)

    def _whole_unit(self, number: int, full: Path, record: FileRecord) -> Unit:
        def problems_of(found: Digest) -> list[str]:
            return _whole_file(full, record, found.crc32)

        def judge(results: Sequence[Result]) -> None:
            self._take(full, digests.joined(results), problems_of)

        pieces = _digest_pieces(number, record.nbytes)
        return Unit(pieces, judge, self._failed(full))

    def _array_unit(self, manifest: Manifest, array: StoredArray) -> Unit:
        numbers, files = self._index.numbers, self._index.files
        checks = [
            _ChunkCheck(
                files[numbers[chunk.path]].path,
                numbers[chunk.path],
                manifest.records[chunk.path],
                chunk.nbytes,
                (chunk.stop - chunk.start) * array.itemsize,
                is_encoded=manifest.codec != "none",
            )
            for chunk in array.chunks()
            if chunk.path in numbers
        ]

        def judge(results: Sequence[Result]) -> None:
            before = len(self._findings.problems)
            for check, result in zip(checks, results, strict=True):
                self._take(check.path, result, check.problems)
            if len(checks) == array.count and len(self._findings.problems) == before:
                pieces = [c.content(r) for c, r in zip(checks, results, strict=True)]
                self._compare_digest(manifest, array.path, digests.joined(pieces).text)

        return Unit([check.piece() for check in checks], judge)

    def _rewritten_unit(self, path: str, array: "RewrittenArray") -> Unit:
        """Compare all elements of a rewritten array with their digest, and nothing else."""
        first = self._index.first[path]
        pieces = [
            _digest_piece(first + number, 0, array.piece_bytes(number))
            for number in range(array.pieces)
        ]

        def judge(results: Sequence[Result]) -> None:
            digest = digests.joined(results)
            self._findings.checked += 1
            self._findings.digests[path] = digest.text
            if digest.text == array.digest:
                self._findings.tensors += 1
            else:
                self._findings.add(DAMAGED, array.directory, array.difference(digest.text))

        return Unit(pieces, judge, self._failed(array.directory))

    def _failed(self, place: Path) -> Callable[[StreamshardError], None]:
        return partial(self._findings.add_error, place=place)

    def _compare_digest(self, manifest: Manifest, array: str, digest: str) -> None:
        self._findings.digests[array] = digest
        recorded = manifest.digests.get(array)
        if recorded == digest:
            self._findings.tensors += 1
        elif recorded is not None:
            place = self._root / array
            message = f"{place}: its elements have the digest {digest}, {recorded:.40} was recorded"
            self._findings.add(DAMAGED, place, message)

    def _take(self, path: Path, result: Result, problems_of: Callable[[Result], list[str]]) -> None:
        """Add the problems of a file that was read, or the error if it could not be read."""
        if isinstance(result, StreamshardError):
            self._findings.add_error(result, path)
            return
        self._findings.checked += 1
        for problem in problems_of(result):
            self._findings.add(DAMAGED, path, problem)


def _is_mark(path: str) -> bool:
    """Tell whether a path is that of a file that streamshard keeps for itself."""
    return path.startswith(OWN_PREFIX) or path[path.rfind("/") :].startswith(f"/{OWN_PREFIX}")


def _document_problems(path: Path, record: FileRecord, expected: bytes, found: bytes) -> list[str]:
    problems = _whole_file(path, record, crc32(found))
    if not problems and not _is_same_array(found, expected):
        return [f"{path}: describes another array than the training state does"]
    return problems


def _is_same_array(document: bytes, expected: bytes) -> bool:
    if document == expected:
        return True
    try:
        said: Any = strict_json.parse(document)
        wanted = strict_json.parse(expected)
        shown = [said.get(key) for key in _TOLD_TWICE]
    except (AttributeError, ValueError):
        return False
    known = forms(wanted) if "codecs" in wanted else [wanted]  # without codecs, a group's
    return any(shown == [form.get(key) for key in _TOLD_TWICE] for form in known)


def _checking(file: SourceFile, rewritten: Container[Path]) -> SourceFile:
    """Return how a file is read whose checksums are compared here, block by block."""
    if file.path in rewritten:
        return replace(file, decoder=replace(cast(Any, file.decoder), is_compared=False))
    if isinstance(file.decoder, BlockDigests):
        return SourceFile(file.path, file.nbytes, file.version, file.file_id)
    return file


def _runs(numbers: Sequence[int]) -> list[range]:
    """Join consecutive numbers into ranges."""
    ranges: list[range] = []
    for number in numbers:
        if ranges and ranges[-1].stop == number:
            ranges[-1] = range(ranges[-1].start, number + 1)
        else:
            ranges.append(range(number, number + 1))
    return ranges


def _digest_pieces(file: int, nbytes: int) -> list[ScanPiece]:
    """Return small pieces that compute the digest of a file's first bytes, without decoding."""
    cuts = [*range(0, nbytes, _PIECE_BYTES), nbytes] if nbytes else [0, 0]
    return [_digest_piece(file, start, stop) for start, stop in pairwise(cuts)]


def _digest_piece(file: int, start: int, stop: int) -> ScanPiece:
    return ScanPiece(stop - start, partial(Probe.digest, file=file, start=start, stop=stop))


def _bytes_piece(file: int, start: int, stop: int) -> ScanPiece:
    return ScanPiece(stop - start, partial(Probe.read, file=file, start=start, stop=stop))


def _whole_file(path: Path, record: FileRecord, found: int) -> list[str]:
    if len(record.crc32s) == 1 and found == record.crc32s[0]:
        return []
    return [f"{path}: damaged: its bytes are not those in the manifest"]
