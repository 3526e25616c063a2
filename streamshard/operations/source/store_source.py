"""Reads a store, which may be damaged."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from streamshard.errors import SourceNotFoundError, UnsupportedError, UsageError
from streamshard.formats.pickle.inert import show
from streamshard.formats.zarr import store_manifest
from streamshard.formats.zarr.array_paths import array_path
from streamshard.formats.zarr.documents import MANIFEST_PATH
from streamshard.formats.zarr.packed_place import is_packed, packed
from streamshard.formats.zarr.rewritten_documents import read_small_array
from streamshard.formats.zarr.store_index import StoreIndex, is_hierarchy, is_store, may_be_store
from streamshard.formats.zarr.store_manifest import Manifest
from streamshard.health import MEASURED, TensorHealth
from streamshard.io.entries import list_ahead
from streamshard.io.files import source_errors
from streamshard.model import BLOB, FILE, LogicalTensor
from streamshard.operations.checks.problems import Findings
from streamshard.operations.checks.store_check import StoreCheck, check_packed, has_directory
from streamshard.operations.checks.structure import CheckedStructure
from streamshard.operations.source.directory_content import DirectoryContent
from streamshard.operations.source.reader import Reader
from streamshard.operations.source.source import Request, Source


class _StoreReader(Reader):
    kind = "store"
    title = "Zarr store"

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
        return _source(StoreIndex.opened(place), request.tag)

    def check_structure(
        self, place: Path, request: Request, findings: Findings
    ) -> CheckedStructure:
        list_ahead(place)
        if not has_directory(place, findings):
            return CheckedStructure(self.kind, None)
        index = StoreIndex(place)
        errors = [*index.version_errors()]
        for error in errors:
            if isinstance(error, SourceNotFoundError) and not may_be_store(place):
                raise error
            if isinstance(error, UnsupportedError):
                findings.add_error(error, place)
                return CheckedStructure(self.kind, None)
        unread = index.list_present()
        for fault in (*index.metadata_faults(), *index.array_faults()):
            findings.add_error(fault.error, fault.path)
        if not findings.problems:
            errors = errors or [*index.version_errors()]
        if not (findings.problems or errors):
            opened = _source(index, request.tag)
            replace(opened, like=request.checkpoint_like).require_use_of_like()
        check = StoreCheck(index, unread, findings)
        check_packed(index, findings)
        for error in errors:
            findings.add_unexplained(error, place)
        tag = index.checkpoint.tag if index.checkpoint and index.is_described else None
        return CheckedStructure(self.kind, tag, check.files, check.units, index.codec_bytes)


def recorded_health(store: Path) -> Mapping[str, TensorHealth] | None:
    """Return which numbers the tensors of a store hold, as measured when it was made, if at all."""
    with source_errors(store):
        content = _manifest_content(store)
        # Most stores have none, and to read the records of thousands of files takes long.
        return store_manifest.read(content).health if b'"health": ' in content else None


def is_measured(tensor: LogicalTensor) -> bool:
    """Tell whether a tensor is one of floats, and a weight, a buffer or an optimizer's state."""
    return tensor.dtype in MEASURED and tensor.state not in (BLOB, FILE)


def known_of_all(
    source: Source, known: Mapping[str, TensorHealth]
) -> dict[str, TensorHealth] | None:
    """Return what is known of the tensors of floats; None unless it is known of each."""
    floats = {array_path(t): t.numel for t in source.checkpoint.tensors if is_measured(t)}
    found = {name: known[name] for name in floats if name in known}
    is_whole = {name: one.numel for name, one in found.items()} == floats
    return found if is_whole else None


def known_health(source: Source) -> dict[str, TensorHealth] | None:
    """Return what was measured of a source when it was made; None unless it is of each tensor."""
    known = recorded_health(source.path) if source.kind == "store" else None
    return None if known is None else known_of_all(source, known)


def recorded_manifest(store: Path) -> Manifest:
    with source_errors(store):
        return store_manifest.read(_manifest_content(store))


def _manifest_content(store: Path) -> bytes:
    return read_small_array(packed(store), MANIFEST_PATH)[0]


def _source(index: StoreIndex, tag: str | None) -> Source:
    """Return what a store without faults holds."""
    _, checkpoint = index.known()
    if tag is not None and tag != checkpoint.tag:
        message = f"holds tag '{checkpoint.tag}', not {show(tag)}"
        raise UsageError(message, path=index.root)
    return Source(
        checkpoint, index.cutting(), tuple(index.files), path=index.root, kind="store",
        codec_bytes=index.codec_bytes, rewritten=tuple(index.rewritten), documents=index.documents,
    )  # fmt: skip


READER: Final = _StoreReader()
