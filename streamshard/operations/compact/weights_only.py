"""Drops the optimizer states of an archive: makes an archive of only the weights in its place.

The archive of only the weights is made next to the full archive, under another name, and proved.
Then the receipt names it, and then the full archive is removed. So at any moment the archive that
the receipt names is complete, with the list of its checksums next to it. The chunks of kept tensors
are those of the full archive, so their files are linked; in one file they are written once more.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from streamshard.engine.run import resident_memory
from streamshard.errors import (
    CorruptFileError,
    IntegrityError,
    StreamshardError,
    TargetExistsError,
    raise_first,
)
from streamshard.formats.checkpoint import Checkpoint, Dropped
from streamshard.formats.zarr import store_state
from streamshard.formats.zarr.array_paths import ROOT_DOCUMENT, array_path
from streamshard.formats.zarr.store_index import StoredChunk, StoreIndex
from streamshard.formats.zarr.store_manifest import FileRecord, Manifest
from streamshard.io.changes import link_or_copy, remove, remove_file, rename, sync_path
from streamshard.io.entries import lexists
from streamshard.io.files import source_errors, target_errors
from streamshard.io.object_path import is_object
from streamshard.io.objects.buckets import for_each
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
from streamshard.operations.compact.run_context import RunContext
from streamshard.operations.compact.sharing import repeated_bytes
from streamshard.operations.convert.convert import store_output
from streamshard.operations.convert.store_targets import StoreTargets
from streamshard.operations.source.source import Source, open_source
from streamshard.operations.source.unfinished import has_journal
from streamshard.operations.transfer.byte_accounting import ByteCounts
from streamshard.operations.transfer.execution import Limits
from streamshard.operations.transfer.file_layout import FileLayout
from streamshard.operations.transfer.plan import plan_output
from streamshard.operations.transfer.report import Progress
from streamshard.operations.transfer.target import is_there, partial_of
from streamshard.sizes import counted, show_bytes
from streamshard.verb_options import ConvertOptions

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
    chunk_shapes: Mapping[str, tuple[int, ...]]
    """Path of the array of each kept tensor → shape of its chunks."""
    kept: Mapping[str, FileRecord]
    """Path → record of each file of a kept tensor, which stays as it is."""
    dropped_bytes: int
    """Bytes of the files of dropped tensors."""
    limits: Limits

    @classmethod
    def of(
        cls, store: Path, *, at: str, why: str, limits: Limits | None = None
    ) -> "WeightsOnlyStore":
        """Open a full store."""
        limits = limits or Limits(resident_memory.resident_bytes(), None, None)
        resident_memory.restart_peak()
        full = open_source(store)
        full.require_as_written()
        with source_errors(store):
            index = StoreIndex(full.path)
            raise_first(fault.error for fault in index.metadata_faults())
            manifest, _ = index.known()
        source = _without_states(full, at=at, why=why)
        arrays = {array.path: array for array in index.arrays}
        kept = [arrays.pop(array_path(tensor)) for tensor in source.checkpoint.tensors]
        dropped = (path for array in arrays.values() for path in array.paths())
        return cls(
            full,
            source,
            manifest,
            chunk_shapes={array.path: array.chunk for array in kept},
            kept={path: manifest.records[path] for array in kept for path in array.paths()},
            dropped_bytes=sum(manifest.records[path].nbytes for path in dropped),
            limits=limits,
        )

    def write(self, target: Path, progress: Progress | None = None) -> None:
        """Write the store as `convert` does, with the chunks of the full one."""
        manifest, limits = self.manifest, self.limits
        options = ConvertOptions(
            self.full.path,
            target,
            codec=manifest.codec,
            memory_limit=limits.memory_limit,
            workers=limits.workers,
        )
        output = store_output(
            self.source,
            verb="compact",
            options=options,
            known=manifest.health,
            chunk_shapes=[*self.chunk_shapes.values()],
        )
        if not output.packs:
            writer = _LinkedTargets(self, target)
            output = replace(output, writer=writer, codec_bytes=0, encode=None)
        plan_output(options, output, target, limits.floor_bytes).run(progress)


class _LinkedTargets(StoreTargets):
    """Links the files of kept tensors to those of the full store, and writes the few others.

    Objects have no links, so they are copied.
    """

    def __init__(self, store: WeightsOnlyStore, target: Path) -> None:
        shapes, manifest, health = store.chunk_shapes, store.manifest, store.manifest.health
        measured = health and {path: health[path] for path in shapes if path in health}
        measure = None if measured is None else lambda: measured
        super().__init__(store.source, [*shapes.values()], manifest.codec, measure)
        self._kept = store.kept
        self._kept_digests = {path: manifest.digests[path] for path in shapes}
        self._target = target

    def content(self) -> Iterator[FileLayout]:
        self._link()
        self._records.update(self._kept)
        yield from super().content()

    def _link(self) -> None:
        is_far, full = is_object(self._target), self._source.path
        place = self._target if is_far else partial_of(self._target)

        def link(path: str) -> None:
            link_or_copy(full / path, place / path)

        with target_errors(place):
            if is_far:
                for_each(self._kept, link)
            else:
                for path in self._kept:
                    link(path)

    def byte_counts(self) -> ByteCounts:
        """Count the bytes that are written: links take no room."""
        counts = super().byte_counts()
        if not is_object(self._target):
            for path in self._kept:
                del counts.sizes[path]
        return counts

    def _most_records(self) -> dict[str, FileRecord]:
        return super()._most_records() | dict(self._kept)

    def _documents(self) -> dict[str, bytes]:
        found = super()._documents().items()
        return {path: data for path, data in found if path not in self._kept}

    def _chunks(self) -> Iterator[tuple[int, StoredChunk]]:
        """Yield none: all are linked."""
        return iter(())

    def _tensor_digests(self) -> Mapping[str, str]:
        return self._kept_digests


def drop_states(context: RunContext, tag: str, *, is_dry_run: bool) -> CompactedTag:
    """Drop the states of an archive, or remove the rest of a full one; return the result."""
    receipt = context.archived(tag).require_receipt()
    full = context.archived(tag).full_of(receipt)
    result = CompactedTag.of(tag, compact_report.WEIGHTS_ONLY, "")
    nbytes = 0
    if receipt.state != WEIGHTS_ONLY:
        dropped_at = receipt.dropped or show_moment(context.now)
        store = WeightsOnlyStore.of(
            full.store, at=dropped_at, why=_WHY, limits=context.proofs.limits
        )
        checkpoint = store.full.checkpoint
        if checkpoint.uncut is not None or not _states_of(checkpoint):
            reason = "its archive holds no optimizer states"
            if checkpoint.uncut is not None:
                reason = "its optimizer has states that are kept in the files of the ranks"
            elif not checkpoint.layout.stage:
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
        with target_errors(weights.store):
            remove(partial_of(weights.store))  # of a run that was cut off
            is_complete = is_there(weights.store) and not has_journal(weights.store)
        if is_complete:
            # An earlier run completed this archive; if it is wrong, it is made again.
            with suppress(StreamshardError):
                return _proved(context, latest, store, CheckLog(log.checks))
            latest.write(full.receipt)  # it must not name the archive that is removed now
        with target_errors(weights.store):
            remove(weights.store)
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
    if not weights.is_packed:
        log.run("kept_files_same", lambda: _require_same_files(full, weights, store, sums))
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
    full: ArchivedTag, weights: ArchivedTag, store: WeightsOnlyStore, sums: Mapping[str, str]
) -> str:
    """Require that the kept files have the SHA-256 that is recorded of the full archive's."""
    recorded = full.read_sums()
    for path in store.kept:
        if path not in sums or sums[path] != recorded.get(path):
            raise IntegrityError(f"{weights.store / path}: not what {full.store} has there")
    return counted(len(store.kept), "file")


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
