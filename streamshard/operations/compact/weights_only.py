"""Drops the optimizer states of an archive: makes an archive of only the weights in its place.

The archive of only the weights is made next to the full archive, under another name, and proved.
Then the receipt names it, and then the full archive is removed. So at any moment the archive that
the receipt names is complete, with the list of its checksums next to it. No tensor is decoded: kept
tensors have the same chunks, and so the same files.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from streamshard.checksums import crc32
from streamshard.errors import (
    CorruptFileError,
    IntegrityError,
    StreamshardError,
    TargetExistsError,
    raise_first,
)
from streamshard.formats.checkpoint import Checkpoint, Dropped
from streamshard.formats.torch.zip_layout import directory_of
from streamshard.formats.zarr import store_manifest, store_state
from streamshard.formats.zarr.array_paths import ROOT_DOCUMENT, array_path
from streamshard.formats.zarr.documents import MANIFEST_PATH, STATE_PATH, store_documents
from streamshard.formats.zarr.packed_layout import PackedEntry
from streamshard.formats.zarr.packed_place import packed
from streamshard.formats.zarr.store_index import MANIFEST_FILES, StoredArray, StoreIndex
from streamshard.formats.zarr.store_manifest import FileRecord, Manifest
from streamshard.io.changes import (
    discard,
    link_or_copy,
    open_sink,
    remove,
    remove_file,
    rename,
    sync_path,
    sync_tree,
    write_new,
)
from streamshard.io.entries import ahead_of, lexists, listings_kept, open_readable
from streamshard.io.files import source_errors, target_errors
from streamshard.io.object_path import is_object, is_packed_name
from streamshard.io.objects.buckets import for_each
from streamshard.io.place import place_of
from streamshard.model import BLOB, FILE, MASTER, MODULE
from streamshard.operations.compact import compact_report, omissions
from streamshard.operations.compact.compact_report import CompactedTag
from streamshard.operations.compact.proof import content_equal, intact, prove, same_archive, sums_of
from streamshard.operations.compact.receipts import (
    DROPPING,
    WEIGHTS_ONLY,
    ArchivedTag,
    CheckLog,
    Receipt,
    TagEvent,
    show_moment,
)
from streamshard.operations.compact.run_context import ProofContext, RunContext
from streamshard.operations.compact.sharing import repeated_bytes
from streamshard.operations.convert.store_targets import record_of, small_array
from streamshard.operations.source.source import Source, open_source
from streamshard.operations.transfer.report import Progress, Silent
from streamshard.operations.transfer.target import is_there, partial_of, require_space
from streamshard.sizes import counted, show_bytes

_PIECE_BYTES: Final = 1 << 20


class PackedCopy:
    """Writes a store in one file from files that exist, one after another.

    The one file must not exist yet, and is no store before it is finished.

    `nbytes`: its size at most.
    `advance`: told of bytes that are copied.
    """

    def __init__(self, target: Path, nbytes: int, advance: Callable[[int], None]) -> None:
        self._sink = open_sink(target, is_new=True, nbytes=nbytes, is_last=True)
        self._advance = advance
        self._central: list[bytes] = []
        self._end = 0

    def copy(self, path: str, known: Path) -> None:
        """Add a file that is a copy of a known file."""
        piece = memoryview(bytearray(_PIECE_BYTES))
        with open_readable(known) as file:
            entry, offset, found = PackedEntry(path, self._end, file.nbytes), 0, 0
            self._write(entry.header())
            while count := file.read_into(piece, offset):
                self._write(piece[:count])
                offset, found = offset + count, crc32(piece[:count], found)
                self._advance(count)
                if file.takes_requests:
                    file.will_need(offset, ahead_of([known]).ahead)
        self._close_entry(entry, found)

    def write(self, path: str, data: bytes) -> None:
        """Add a small file."""
        entry = PackedEntry(path, self._end, len(data))
        self._write(entry.header() + data)
        self._close_entry(entry, crc32(data))

    def _close_entry(self, entry: PackedEntry, found: int) -> None:
        self._write(entry.descriptor(found))
        self._central.append(entry.central(found))
        if self._end != entry.end:
            raise CorruptFileError("changed its size while it was copied", path=Path(entry.path))

    def _write(self, data: bytes | memoryview) -> None:
        """Write what comes next: an object is uploaded from its beginning to its end."""
        self._sink.write(memoryview(data), self._end)
        self._end += len(data)

    def finish(self) -> None:
        """Write the zip's directory, and complete the file."""
        self._write(directory_of(self._central, self._end))
        self._sink.finish(None)

    def close(self) -> None:
        self._sink.close()


_WHY: Final = "by compact, which was to keep only the weights after a time"

_KEPT = (MASTER, MODULE, BLOB, FILE)


def _states_of(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Name the optimizer's states that are stored as tensors per parameter; others are small."""
    found = (tensor.state for tensor in checkpoint.tensors if tensor.state not in _KEPT)
    return tuple(dict.fromkeys(found))


def _without_states(source: Source, *, at: str, why: str) -> Source:
    """Return a source without the optimizer's states of its parameters.

    Hyper-parameters stay, and so does all training state that is not the optimizer's.
    """
    checkpoint = source.checkpoint
    groups = [group for model_part in checkpoint.model_parts for group in model_part.groups]
    named = [*_states_of(checkpoint), *(key for group in groups for key in group.states or ())]
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
class WeightsOnlyStore:
    """What is left of a full store without the optimizer's states, and how to write it."""

    full: Source
    source: Source
    """The rest, read from the full store."""
    manifest: Manifest
    """Manifest of the full store."""
    arrays: Sequence[StoredArray]
    """Arrays of all tensors of the full store."""

    @classmethod
    def of(cls, store: Path, *, at: str, why: str) -> "WeightsOnlyStore":
        """Open a full store."""
        full = open_source(store)
        full.require_as_written()
        with source_errors(store):
            index = StoreIndex(full.path)
            raise_first(fault.error for fault in index.metadata_faults())
            manifest, _ = index.known()
        return cls(full, _without_states(full, at=at, why=why), manifest, index.arrays)

    def kept(self) -> dict[str, FileRecord]:
        """Return the files of the full store that are kept as they are: those of kept tensors."""
        return self._records(are_kept=True)

    @property
    def full_bytes(self) -> int:
        """Bytes of the files of the full store, more than those of what is kept of it."""
        return sum(record.nbytes for record in self.manifest.records.values())

    @property
    def dropped_bytes(self) -> int:
        """Bytes of the files of dropped tensors."""
        return sum(record.nbytes for record in self._records(are_kept=False).values())

    def _records(self, *, are_kept: bool) -> dict[str, FileRecord]:
        kept = {array_path(tensor) for tensor in self.source.checkpoint.tensors}
        arrays = [array for array in self.arrays if (array.path in kept) == are_kept]
        return {path: self.manifest.records[path] for array in arrays for path in array.paths()}

    def write(self, target: Path, progress: Progress | None = None) -> None:
        """Write the store durably; the partial store of an earlier run is removed first.

        In a bucket, where nothing can be renamed, its root document comes last: before that, it is
        no store.
        """
        partial = target if is_object(target) else partial_of(target)
        with target_errors(partial):
            remove(partial)
            try:
                if is_packed_name(target):
                    self._pack(partial, progress or Silent())
                else:
                    self._fill(partial)
            except OSError:
                discard(partial)  # it would keep a full disk full
                raise
            if partial != target:
                rename(partial, target)
            sync_path(target.parent)

    def _fill(self, partial: Path) -> None:
        def keep(path: str) -> None:
            link_or_copy(self.full.path / path, partial / path)

        if is_object(partial):
            for_each(self.kept(), keep)
        else:
            for path in self.kept():
                keep(path)
        documents = dict(self._documents())
        root = documents.pop(ROOT_DOCUMENT)
        for path, data in documents.items():
            write_new(partial / path, data)
        write_new(partial / ROOT_DOCUMENT, root)
        sync_tree(partial)

    def _pack(self, partial: Path, progress: Progress) -> None:
        """Write one file, in the order of such stores: the manifest and the root come last."""
        documents, kept = dict(self._documents()), self.kept()
        last = [*MANIFEST_FILES, ROOT_DOCUMENT]
        nbytes = sum(record.nbytes for record in kept.values())
        require_space(partial, nbytes + sum(map(len, documents.values())))
        progress.start(nbytes)
        try:
            place_of(partial).abort_uploads(partial)  # of a run that was killed
            most = self.full_bytes if is_object(partial) else 0
            with listings_kept(), closing(PackedCopy(partial, most, progress.advance)) as copy:
                for path in (path for path in documents if path not in last):
                    copy.write(path, documents[path])
                for path in kept:
                    copy.copy(path, self.full.path / path)
                for path in last:
                    copy.write(path, documents[path])
                copy.finish()
        finally:
            progress.stop()
        sync_path(partial)

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
        health = self.manifest.health
        if health is not None:
            health = {array: health[array] for array in arrays if array in health}
        manifest = store_manifest.serialize(dict(sorted(records.items())), codec, digests, health)
        return {**written, **small_array(MANIFEST_PATH, manifest)}


def drop_states(context: RunContext, tag: str, *, is_dry_run: bool) -> CompactedTag:
    """Drop the states of an archive, or remove the rest of a full one; return the result."""
    receipt = context.archived(tag).require_receipt()
    full = context.archived(tag).full_of(receipt)
    result = CompactedTag.of(tag, compact_report.WEIGHTS_ONLY, "")
    nbytes = 0
    if receipt.state != WEIGHTS_ONLY:
        dropped_at = receipt.dropped or show_moment(context.now)
        store = WeightsOnlyStore.of(full.store, at=dropped_at, why=_WHY)
        if not _states_of(store.full.checkpoint):
            reason = "its archive holds no optimizer states"
            if not store.full.checkpoint.layout.stage:
                reason = "saved without ZeRO (stage 0), whose states cannot be distinguished"
            return replace(result, action=compact_report.KEPT, reason=reason)
        nbytes = store.dropped_bytes
        if is_dry_run:
            _require_original_gone(context, receipt)
        else:
            receipt = _make(context, receipt, store)
    if not is_dry_run:
        _remove_full(context, full)
    if receipt.full_bytes:
        nbytes = receipt.full_bytes - receipt.archive_bytes
    return replace(
        result.with_sizes(receipt),
        reason=f"no job can resume from it; {show_bytes(nbytes)} of optimizer states dropped",
        archive_bytes=receipt.archive_bytes - (0 if receipt.full_bytes else nbytes),
        dropped_bytes=nbytes,
    )


def _make(context: RunContext, receipt: Receipt, store: WeightsOnlyStore) -> Receipt:
    """Make and prove the archive of weights, and let the receipt name it."""
    full = context.archived(receipt.tag).full_of(receipt)
    weights = replace(full, of_weights=True)
    log = CheckLog(check for check in receipt.checks if check.holds)
    latest = receipt
    try:
        log.run("original_gone", lambda: _require_original_gone(context, receipt))
        if receipt.sums_sha256:
            log.run("same_archive", lambda: same_archive(receipt, full))
        log.run("full_archive_bytes", lambda: intact(full, context.proofs))
        if receipt.state != DROPPING:
            _require_free(weights)
        # From now on, files under the names of the archive of weights are ours.
        dropped = store.source.checkpoint.dropped
        latest = full.record(receipt, TagEvent.DROP, dropped=dropped.at if dropped else "")
        if is_there(weights.store):
            # An earlier run completed this archive; if it is wrong, it is made again.
            with suppress(StreamshardError):
                return _proved(context, latest, store, CheckLog(log.checks))
            latest.write(full.receipt)  # it must not name the archive that is removed now
            with target_errors(weights.store):
                remove(weights.store)
        if weights.is_packed:  # its parts are held in memory until they are sent
            upload_bytes = place_of(weights.store).writing_bytes(store.full_bytes)
            context.proofs.limits.fit(0, store.full.files, upload_bytes)
        store.write(weights.store, context.proofs.progress)
        return _proved(context, latest, store, log)
    except StreamshardError:
        replace(latest, checks=log.checks).write(full.receipt)
        raise


def _require_free(weights: ArchivedTag) -> None:
    """Require that nothing lies under the names of the archive of weights."""
    for path in (weights.store, partial_of(weights.store), weights.sums):
        if is_there(path):
            message = f"{path}: is there, and no receipt says that compact made it"
            raise TargetExistsError(f"{message}; move it away")


def _proved(
    context: RunContext, receipt: Receipt, store: WeightsOnlyStore, log: CheckLog
) -> Receipt:
    """Prove the archive of weights, and let the receipt name it."""
    full, proofs = context.archived(receipt.tag).full_of(receipt), context.proofs
    weights = replace(full, of_weights=True)
    statuses = weights.statuses()
    with source_errors(weights.store):
        sums = sums_of(weights, proofs)
    log.run("kept_files_same", lambda: _require_same_files(full, weights, store, sums, proofs))
    weights.write_sums(sums)
    etags = weights.etags()
    archive = prove(store.source, weights, proofs, log)
    log.run("content_equal", lambda: content_equal(archive, store.source, proofs))
    log.run("original_still_gone", lambda: _require_original_gone(context, receipt))
    dropped = store.source.checkpoint.dropped
    # The full archive has one link to a kept file, and this archive another.
    shared = [stat.nbytes for stat in statuses.values() if stat.links > 2]
    return weights.record(
        receipt,
        TagEvent.DROPPED,
        dropped_states=dropped.states if dropped else (),
        full_bytes=receipt.archive_bytes,
        archive_bytes=sum(stat.nbytes for stat in statuses.values()),
        shared_files=len(shared),
        shared_bytes=sum(shared),
        repeated_bytes=repeated_bytes(weights, ()) if weights.is_packed else 0,
        sums_sha256=weights.sums_sha256(),
        etags=etags,
        checks=log.checks,
    )


def _require_same_files(
    full: ArchivedTag,
    weights: ArchivedTag,
    store: WeightsOnlyStore,
    sums: Mapping[str, str],
    proofs: ProofContext,
) -> str:
    """Require that the kept files have their recorded SHA-256; in one file, that of the full one's.

    That the full one is as recorded was found before.
    """
    kept, recorded = store.kept(), full.read_sums()
    if full.is_packed:
        recorded, sums = (_digests_in(one.store, [*kept], proofs) for one in (full, weights))
    for path in kept:
        if path not in sums or sums[path] != recorded.get(path):
            raise IntegrityError(f"{weights.store / path}: not what {full.store} has there")
    return counted(len(kept), "file")


def _digests_in(store: Path, paths: Sequence[str], proofs: ProofContext) -> dict[str, str]:
    """Return the SHA-256 of files in a store that is one file."""
    with source_errors(store):
        root = packed(store)
        return dict(zip(paths, proofs.hash_all([root / path for path in paths]), strict=True))


def _require_original_gone(context: RunContext, receipt: Receipt) -> str:
    """Require that the run directory is the archived one, and that the original is gone."""
    context.require_same_directory(receipt)
    for path in context.originals(receipt.tag):
        raise CorruptFileError(f"{path}: is there, and its receipt says that it is gone")
    return ""


def _remove_full(context: RunContext, full: ArchivedTag) -> None:
    """Remove a full archive, after the archive of weights was checked once more."""
    intact(replace(full, of_weights=True), context.proofs)
    store, going, sums = full.leftovers
    with target_errors(going):
        remove(going)
        # A partly removed archive must not have the archive's name, or be no store.
        if is_object(store):
            remove_file(store / ROOT_DOCUMENT, missing_ok=True)
            remove(store)
        elif lexists(store):
            rename(store, going)
        sync_path(full.directory)
        remove_file(sums, missing_ok=True)
        remove(going)
        sync_path(full.directory)
