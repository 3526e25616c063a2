"""Reads a store, which may be damaged."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from streamshard.checks.packed_check import check_packed, has_directory
from streamshard.checks.problems import Findings
from streamshard.checks.store_check import StoreCheck
from streamshard.errors import SourceNotFoundError, UnsupportedError, UsageError
from streamshard.formats.pickle.inert import show
from streamshard.formats.zarr import store_manifest
from streamshard.formats.zarr.array_paths import ROOT_DOCUMENT
from streamshard.formats.zarr.chunks import EncodedChunk
from streamshard.formats.zarr.documents import MANIFEST_PATH, STATE_PATH, group_paths
from streamshard.formats.zarr.packed_place import is_packed, packed
from streamshard.formats.zarr.rewritten_documents import read_small_array, remark
from streamshard.formats.zarr.store_index import (
    MANIFEST_FILES,
    STATE_FILES,
    StoreIndex,
    is_hierarchy,
    is_store,
    may_be_store,
)
from streamshard.health import TensorHealth
from streamshard.io.entries import examine, is_listed, list_ahead
from streamshard.io.files import source_errors
from streamshard.io.relative_paths import examiner, names_below
from streamshard.model import MODULE
from streamshard.source.base_reader import Reader
from streamshard.source.directory_content import DirectoryContent
from streamshard.source.source import Request, Source
from streamshard.source.structure import CheckedStructure


@dataclass(frozen=True, slots=True)
class StoreDetails:
    """What is known of the arrays of a store."""

    rewritten: Sequence[str]
    """Paths of those that another tool rewrote."""
    documents: Mapping[str, int | None]
    """Path → size of the document of each; None where it is not as written."""


class _StoreReader(Reader):
    name = "store"
    title = "Zarr store"
    is_store = True
    changes_degrees = True

    def holds(self, directory: Path) -> bool:
        return is_hierarchy(directory)

    def recognizes(self, request: Request) -> Path | None:
        root = packed(request.root)
        is_ours = is_packed(root) or self.holds(root) or may_be_store(root)
        return root if is_ours else None

    def is_alone_in(self, content: DirectoryContent) -> bool | None:
        return is_store(content.root) if self.holds(content.root) else None

    def open(self, place: Path, request: Request) -> Source:
        list_ahead(place)
        return self._source(StoreIndex.opened(place), request.tag)

    def check_structure(
        self, place: Path, request: Request, findings: Findings
    ) -> CheckedStructure:
        list_ahead(place)
        if not has_directory(place, findings):
            return CheckedStructure(self, None)
        index = StoreIndex(place)
        errors = [*index.version_errors()]
        for error in errors:
            if isinstance(error, SourceNotFoundError) and not may_be_store(place):
                raise error
            if isinstance(error, UnsupportedError):
                findings.add_error(error, place)
                return CheckedStructure(self, None)
        unread = index.list_present()
        for error in (*index.metadata_faults(), *index.array_faults()):
            findings.add_error(error, place)
        if not findings.problems:
            errors = errors or [*index.version_errors()]
        if not (findings.problems or errors):
            opened = self._source(index, request.tag)
            replace(opened, reference=request.like).require_use_of_like()
        check = StoreCheck(index, unread, findings)
        check_packed(place, findings)
        for error in errors:
            findings.add_unexplained(error, place)
        tag = index.checkpoint.tag if index.checkpoint and index.is_described else None
        return CheckedStructure(self, tag, check.files, check.units, index.codec_bytes)

    def is_shard(self, path: Path) -> bool:
        return False

    def rewritten(self, source: Source) -> Sequence[str]:
        known: StoreDetails = source.details
        return known.rewritten

    def codec(self, source: Source) -> str | None:
        """Return the codec of the chunks, read from the first one."""
        decoder = next((file.decoder for file in source.files if file.decoder is not None), None)
        return "zstd" if isinstance(decoder, EncodedChunk) else None

    def remarks(self, source: Source) -> Sequence[str]:
        rewritten = self.rewritten(source)
        return [remark(rewritten)] if rewritten else []

    def health(self, source: Source) -> Mapping[str, TensorHealth] | None:
        """Return which numbers the tensors hold, as measured when it was made, if at all."""
        with source_errors(source.path):
            content = read_small_array(packed(source.path), MANIFEST_PATH)[0]
            # Most stores have none, and to read the records of thousands of files takes long.
            return store_manifest.read(content).health if b'"health": ' in content else None

    def other_files(self, source: Source) -> Iterable[tuple[str, int]]:
        return _other_files(source)

    def pattern_of(self, path: str) -> str:
        """Name a store's directory of all arrays of one state, or the pattern of group documents.

        >>> READER.pattern_of("state/fp32/a/c/0"), READER.pattern_of("mp_rank_01/module/a/c/0")
        ('state/fp32/**', 'mp_rank_01/module/**')
        >>> READER.pattern_of("zarr.json"), READER.pattern_of("state/zarr.json")
        ('**/zarr.json', '**/zarr.json')
        """
        parts = path.split("/", 3)  # deeper ones make no difference
        depth = 1 + parts[0].startswith("mp_rank_")
        depth += parts[min(depth, len(parts)) - 1] not in (MODULE, "blob", "file", "meta")
        return "/".join([*parts[:depth], "**"]) if len(parts) > depth else f"**/{parts[-1]}"

    def _source(self, index: StoreIndex, tag: str | None) -> Source:
        """Return what a store without faults holds."""
        _, checkpoint = index.known()
        if tag is not None and tag != checkpoint.tag:
            message = f"holds tag '{checkpoint.tag}', not {show(tag)}"
            raise UsageError(message, path=index.root)
        return Source(
            checkpoint, index.cutting(), tuple(index.files), path=index.root, kind=self,
            codec_bytes=index.codec_bytes,
            details=StoreDetails(tuple(index.rewritten), index.documents),
        )  # fmt: skip


def _other_files(source: Source) -> Iterator[tuple[str, int]]:
    """Yield path and size of what belongs to a store and holds no tensors."""
    if not is_listed(source.path):
        return
    examined = examiner(source.path)
    documents: Mapping[str, int | None] = source.details.documents
    groups = group_paths(path.removesuffix(f"/{ROOT_DOCUMENT}") for path in documents)
    others = [path for path, nbytes in documents.items() if nbytes is None]
    yield from ((path, nbytes) for path, nbytes in documents.items() if nbytes is not None)
    # Another tool may have cut the manifest and the state into several chunks.
    for path in (*_chunks_of(source.path), MANIFEST_FILES[0], STATE_FILES[0], *groups, *others):
        try:
            status = examined(path)
            yield path, examine(source.path / path).nbytes if status.is_link else status.nbytes
        except (FileNotFoundError, NotADirectoryError):
            continue


def _chunks_of(store: Path) -> Iterator[str]:
    for array in (MANIFEST_PATH, STATE_PATH):
        chunks = f"{array}/c"
        with suppress(FileNotFoundError, NotADirectoryError):
            yield from (f"{chunks}/{name}" for name in names_below(store / chunks))


READER: Final = _StoreReader()
