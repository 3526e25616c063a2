"""Leaves the optimizer's states out of an opened store, and writes a store of the rest.

No tensor is decoded: kept tensors have the same chunks, and so the same files.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from streamshard.errors import raise_first
from streamshard.formats.checkpoint import Checkpoint, Dropped
from streamshard.formats.zarr import store_manifest, store_state
from streamshard.formats.zarr.documents import (
    MANIFEST_PATH,
    ROOT_DOCUMENT,
    STATE_PATH,
    array_path,
    store_documents,
)
from streamshard.formats.zarr.store_index import StoredArray, StoreIndex
from streamshard.formats.zarr.store_manifest import FileRecord, Manifest
from streamshard.io.changes import (
    discard,
    link_or_copy,
    remove,
    rename,
    sync_path,
    sync_tree,
    write_new,
)
from streamshard.io.files import source_errors, target_errors
from streamshard.io.object_path import is_object
from streamshard.io.objects.object_changes import for_each
from streamshard.model import BLOB, FILE, MASTER, MODULE
from streamshard.operations.compact.archive import omissions
from streamshard.operations.convert.store_targets import record_of, small_array
from streamshard.operations.source.source import Source, open_source
from streamshard.operations.transfer.target import partial_of

_KEPT = (MASTER, MODULE, BLOB, FILE)


def states_of(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Name the optimizer's states that are stored as tensors per parameter; others are small."""
    found = (tensor.state for tensor in checkpoint.tensors if tensor.state not in _KEPT)
    return tuple(dict.fromkeys(found))


def without_states(source: Source, *, at: str, why: str) -> Source:
    """Return a source without the optimizer's states of its parameters.

    Hyper-parameters stay, and so does all training state that is not the optimizer's.
    """
    checkpoint = source.checkpoint
    groups = [group for model_part in checkpoint.model_parts for group in model_part.groups]
    named = [*states_of(checkpoint), *(key for group in groups for key in group.states or ())]
    emptied = replace(
        checkpoint,
        model_parts=tuple(
            replace(model_part, groups=tuple(replace(g, states=None) for g in model_part.groups))
            for model_part in checkpoint.model_parts
        ),
        dropped=Dropped(at, why, tuple(dict.fromkeys(named))),
    )
    blobs = store_state.blobs_in(checkpoint) - store_state.blobs_in(emptied)
    numbers = {n for n, t in enumerate(checkpoint.tensors) if t.state not in _KEPT}
    return omissions.narrowed(replace(source, checkpoint=emptied), numbers | blobs)


@dataclass(frozen=True, slots=True)
class Remainder:
    """The part of a store that is left without the optimizer's states."""

    full: Source
    source: Source
    """The rest, read from the full store."""
    manifest: Manifest
    """Manifest of the full store."""
    arrays: Sequence[StoredArray]
    """Arrays of all tensors of the full store."""

    @classmethod
    def of(cls, store: Path, *, at: str, why: str) -> "Remainder":
        """Open a full store."""
        full = open_source(store)
        full.require_as_written()
        with source_errors(store):
            index = StoreIndex(store)
            raise_first(fault.error for fault in index.metadata_faults())
            manifest, _ = index.known()
        return cls(full, without_states(full, at=at, why=why), manifest, index.arrays)

    def kept(self) -> dict[str, FileRecord]:
        """Return the files of the full store that are kept as they are: those of kept tensors."""
        return self._records(are_kept=True)

    @property
    def dropped_bytes(self) -> int:
        """Bytes of the files of dropped tensors."""
        return sum(record.nbytes for record in self._records(are_kept=False).values())

    def _records(self, *, are_kept: bool) -> dict[str, FileRecord]:
        kept = {array_path(tensor) for tensor in self.source.checkpoint.tensors}
        arrays = [array for array in self.arrays if (array.path in kept) == are_kept]
        return {path: self.manifest.records[path] for array in arrays for path in array.paths()}

    def write(self, target: Path) -> None:
        """Write the store durably; the partial store of an earlier run is removed first.

        In a bucket, where nothing can be renamed, its root document comes last: before that, it is
        no store.
        """
        partial = target if is_object(target) else partial_of(target)
        with target_errors(partial):
            remove(partial)
            try:
                self._fill(partial)
            except OSError:
                discard(partial)  # it would keep a full disk full
                raise
            if partial != target:
                rename(partial, target)
            sync_path(target.parent)

    def _fill(self, partial: Path) -> None:
        def take(path: str) -> None:
            link_or_copy(self.full.path / path, partial / path)

        if is_object(partial):
            for_each(self.kept(), take)
        else:
            for path in self.kept():
                take(path)
        documents = dict(self._documents())
        root = documents.pop(ROOT_DOCUMENT)
        for path, data in documents.items():
            write_new(partial / path, data)
        write_new(partial / ROOT_DOCUMENT, root)
        sync_tree(partial)

    def _documents(self) -> Mapping[str, bytes]:
        """Serialize the files that do not belong to kept tensors, by path."""
        small, kept, codec = self.source.checkpoint, self.kept(), self.manifest.codec
        known = {array.path: array.chunk for array in self.arrays}
        arrays = [array_path(tensor) for tensor in small.tensors]
        shapes = [known[array] for array in arrays]
        written = {
            **store_documents(small, shapes, codec),
            **small_array(STATE_PATH, store_state.dump(small, shapes)),
        }
        written = {path: data for path, data in written.items() if path not in kept}
        records = {**kept, **{path: record_of(data) for path, data in written.items()}}
        digests = {array: self.manifest.digests[array] for array in arrays}
        manifest = store_manifest.serialize(dict(sorted(records.items())), codec, digests)
        return {**written, **small_array(MANIFEST_PATH, manifest)}
