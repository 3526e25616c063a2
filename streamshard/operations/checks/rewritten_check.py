"""Checks arrays of a store that another tool rewrote: only the digests of their tensors hold."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from streamshard.errors import IntegrityError, SourceError, StreamshardError
from streamshard.formats.checkpoint import Checkpoint
from streamshard.formats.zarr import store_files
from streamshard.formats.zarr.documents import MANIFEST_PATH, STATE_PATH, array_path
from streamshard.formats.zarr.rewritten_array import RewrittenArray, RewrittenPiece
from streamshard.formats.zarr.rewritten_documents import (
    find_rewritten,
    is_serialized_anew,
    is_small_rewritten,
    read_small_array,
    remark,
)
from streamshard.formats.zarr.store_manifest import Manifest
from streamshard.formats.zarr.store_paths import read_small
from streamshard.formats.zarr.store_state import ChunkShapes
from streamshard.formats.zarr.zarr_writer import small_array_document
from streamshard.model import SourceFile
from streamshard.operations.checks import chunk_check
from streamshard.operations.checks.problems import DAMAGED, Findings
from streamshard.operations.checks.scan import Result, Unit


class RewrittenCheck:
    """The arrays and documents of a store that another tool rewrote.

    Parameters
    ----------
    files
        The pieces of rewritten arrays are added to these.
    """

    def __init__(self, root: Path, findings: Findings, files: list[SourceFile]) -> None:
        self.codec_bytes = 0
        self._root = root
        self._findings = findings
        self._files = files
        self._arrays: dict[str, tuple[int, RewrittenArray]] = {}
        """Path → number of the file that stands for its first piece, and the array."""
        self._places: set[str] = set()
        """Paths of all rewritten arrays, also of those that cannot be read."""
        self._expected: Mapping[str, bytes] = {}
        self._anew = 0
        """Count of documents that another tool serialized anew."""

    def find(
        self,
        manifest: Manifest,
        checkpoint: Checkpoint,
        shapes: ChunkShapes,
        documents: Mapping[str, bytes],
    ) -> None:
        """Find rewritten arrays; problems of those that cannot be read are added to the findings.

        Parameters
        ----------
        documents
            What streamshard writes as the documents of this store.
        """
        state = manifest.records.get(store_files.STATE_FILES[1])
        nbytes = 0 if state is None else store_files.content_bytes(state)
        state_document = {store_files.STATE_FILES[0]: small_array_document(nbytes)}
        self._expected = {**documents, **state_document}
        for path, record in ((MANIFEST_PATH, None), (STATE_PATH, manifest)):
            try:
                content = read_small_array(self._root, path, record)
                if is_small_rewritten(self._root, path, content):
                    self._places.add(path)
            except (SourceError, IntegrityError) as error:
                self._findings.add_error(error, self._root / path)
        for tensor, shape in zip(checkpoint.tensors, shapes, strict=True):
            path = array_path(tensor)
            try:
                array = find_rewritten(self._root, tensor, shape, manifest)
            except (SourceError, IntegrityError) as error:
                self._findings.add_error(error, self._root / path)
                self._places.add(path)
                continue
            if array is not None:
                self._add(path, array)
        if self._arrays:
            self._findings.notes.append(remark(sorted(self._arrays)))

    def _add(self, path: str, array: RewrittenArray) -> None:
        first = len(self._files)
        self._arrays[path] = first, array
        self._places.add(path)
        for number in range(array.pieces):
            piece = RewrittenPiece(array, number, is_compared=False)
            self._files.append(replace(array.document, decoder=piece))
        self._files += array.files.values()
        self.codec_bytes = max(self.codec_bytes, array.codec_bytes)

    def __contains__(self, path: str) -> bool:
        """Tell whether a path is a rewritten array, or a file of one."""
        if not self._places:
            return False
        return path in self._places or any(
            parent.as_posix() in self._places for parent in PurePosixPath(path).parents
        )

    def holds_document(self, path: str) -> bool:
        """Tell whether a document was serialized anew, and says the same as ours."""
        expected = self._expected.get(path)
        try:
            if expected is None or not is_serialized_anew(read_small(self._root / path), expected):
                return False
        except (OSError, SourceError):
            return False
        self._anew += 1
        return True

    def note_documents(self) -> None:
        """Add a note on the documents that were serialized anew."""
        if self._anew:
            message = f"{self._anew:,} zarr.json were serialized anew by another tool, and say the"
            self._findings.notes.append(f"{message} same.")

    @property
    def extra_files(self) -> int:
        """How often files are listed more than once, because several pieces are read from one."""
        return sum(max(0, array.pieces - 1) for _, array in self._arrays.values())

    def nbytes(self, path: str) -> int:
        """Return the size of a rewritten array's elements; 0 if the array cannot be read."""
        if path not in self._arrays:
            return 0
        _, array = self._arrays[path]
        return sum(map(array.piece_bytes, range(array.pieces)))

    def units(self, path: str) -> list[Unit]:
        """Return the unit that reads a rewritten array; none if the array cannot be read."""
        if path not in self._arrays:
            return []
        first, array = self._arrays[path]
        pieces = [
            chunk_check.whole_piece(first + number, array.piece_bytes(number))
            for number in range(array.pieces)
        ]

        def judge(results: Sequence[Result]) -> None:
            found = chunk_check.joined(results)
            if isinstance(found, StreamshardError):
                self._findings.add_error(found, array.directory)
                return
            self._findings.checked += 1
            self._findings.digests[path] = found.text
            if found.text == array.digest:
                self._findings.tensors += 1
            else:
                self._findings.add(DAMAGED, array.directory, array.difference(found.text))

        return [Unit(pieces, judge)]
