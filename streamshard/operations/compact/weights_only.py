"""Drops the optimizer states of an archive: makes an archive of only the weights in its place.

The archive of only the weights is made next to the full archive, under another name, and proved.
Then the receipt names it, and then the full archive is removed. So at any moment the archive that
the receipt names is complete, with the list of its checksums next to it. The chunks of kept tensors
are those of the full archive, so their files are linked; in one file they are written once more.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from streamshard.engine.run import resident_memory
from streamshard.engine.run.memory_limits import Limits
from streamshard.engine.run.phases import Progress
from streamshard.errors import CorruptFileError, StreamshardError, TargetExistsError, raise_first
from streamshard.formats.zarr.array_paths import ROOT_DOCUMENT, array_path
from streamshard.formats.zarr.store_index import StoreIndex
from streamshard.io.changes import remove, remove_file, rename, sync_path
from streamshard.io.entries import lexists
from streamshard.io.files import source_errors, target_errors
from streamshard.io.object_path import is_object
from streamshard.operations.compact import compact_report, omissions
from streamshard.operations.compact.compact_report import CompactedTag
from streamshard.operations.compact.proof import (
    content_equal,
    intact,
    prove,
    require_as_written,
    same_archive,
    sums_of,
)
from streamshard.operations.compact.receipts import (
    DROPPING,
    WEIGHTS_ONLY,
    ArchivedTag,
    CheckLog,
    Receipt,
    show_moment,
)
from streamshard.operations.compact.run_context import RunContext
from streamshard.operations.convert.convert import store_output
from streamshard.operations.convert.store_targets import KeptArrays
from streamshard.source.source import Source, open_source
from streamshard.transfer.plan import plan_output
from streamshard.transfer.target import is_there, partial_of
from streamshard.verb_options import ConvertOptions

_WHY: Final = "by compact, which was to keep only the weights after a time"


@dataclass(frozen=True, slots=True)
class WeightsOnlyStore:
    """What is left of a full store without the optimizer's states, and how to write it."""

    full: Source
    source: Source
    """The rest, read from the full store."""
    kept: KeptArrays
    """The arrays of the kept tensors."""
    limits: Limits

    @classmethod
    def of(
        cls, store: Path, *, at: str, why: str, limits: Limits | None = None
    ) -> "WeightsOnlyStore":
        limits = limits or Limits(resident_memory.resident_bytes(), None, None)
        resident_memory.restart_peak()
        full = open_source(store)
        require_as_written(full)
        with source_errors(store):
            index = StoreIndex(full.path)
            raise_first(index.metadata_faults())
            manifest, _ = index.known()
        source = omissions.without_states(full, at=at, why=why)
        arrays = {array.path: array for array in index.arrays}
        kept = [arrays[array_path(tensor)] for tensor in source.checkpoint.tensors]
        return cls(full, source, KeptArrays(kept, manifest), limits)

    def write(self, target: Path, progress: Progress | None = None) -> None:
        """Write the store as `convert` does, with the chunks of the full one."""
        manifest, limits = self.kept.manifest, self.limits
        options = ConvertOptions(
            self.full.path,
            target,
            codec=manifest.codec,
            memory_limit=limits.memory_limit,
            workers=limits.workers,
        )
        output = store_output(
            self.source, verb="compact", options=options, health=manifest.health, kept=self.kept
        )
        plan_output(options, output, target, limits.floor_bytes).run(progress)


def drop_states(context: RunContext, outcome: CompactedTag) -> CompactedTag:
    """Drop the states of an archive, or remove the rest of a full one; return the result."""
    archived = context.archived(outcome.tag)
    receipt = archived.require_receipt()
    full = archived.full_of(receipt)
    if receipt.state != WEIGHTS_ONLY:
        dropped_at = receipt.dropped or show_moment(context.now)
        store = WeightsOnlyStore.of(full.store, at=dropped_at, why=_WHY, limits=context.limits)
        checkpoint = store.full.checkpoint
        if checkpoint.uncut is not None or not omissions.states_of(checkpoint):
            reason = "its archive holds no optimizer states"
            if checkpoint.uncut is not None:
                reason = "its optimizer has states that are kept in the files of the ranks"
            elif not checkpoint.layout.stage:
                reason = "saved without ZeRO (stage 0), whose states cannot be distinguished"
            return replace(outcome, action=compact_report.KEPT, reason=reason)
        receipt = _make(context, receipt, store)
    _remove_full(context, full)
    return outcome.with_sizes(receipt)


def _make(context: RunContext, receipt: Receipt, store: WeightsOnlyStore) -> Receipt:
    full = context.archived(receipt.tag).full_of(receipt)
    weights = replace(full, of_weights=True)
    log = CheckLog(check for check in receipt.checks if check.holds)
    latest = receipt
    try:
        log.run("original_gone", lambda: _require_original_gone(context, receipt))
        log.run("same_archive", lambda: same_archive(receipt, full))
        log.run("full_archive_bytes", lambda: intact(full, context))
        if receipt.state != DROPPING:
            _require_free(weights)
        # From now on, files under the names of the archive of weights are ours.
        dropped = store.source.checkpoint.dropped
        latest = full.record(receipt, DROPPING, dropped=dropped.at if dropped else "")
        with target_errors(weights.store):
            for left in (partial_of(weights.store), weights.store):  # by a run that was cut off
                remove(left)
        store.write(weights.store, context.progress)
        return _proved(context, latest, store, log)
    except StreamshardError:
        replace(latest, checks=log.checks).write(full.receipt)
        raise


def _require_free(weights: ArchivedTag) -> None:
    for path in (weights.store, partial_of(weights.store), weights.sums):
        if is_there(path):
            message = f"{path}: is there, and no receipt says that compact made it"
            raise TargetExistsError(f"{message}; move it away")


def _proved(
    context: RunContext, receipt: Receipt, store: WeightsOnlyStore, log: CheckLog
) -> Receipt:
    full = context.archived(receipt.tag).full_of(receipt)
    weights = replace(full, of_weights=True)
    statuses = weights.statuses()
    with source_errors(weights.store):
        sums = sums_of(weights, context)
    weights.write_sums(sums)
    archive = prove(store.source, weights, context, log)
    log.run("content_equal", lambda: content_equal(archive, store.source, context))
    log.run("original_still_gone", lambda: _require_original_gone(context, receipt))
    return weights.record(
        receipt,
        WEIGHTS_ONLY,
        archive_bytes=sum(stat.nbytes for stat in statuses.values()),
        # The full archive has one link to a kept file, and this archive another.
        shared_bytes=sum(stat.nbytes for stat in statuses.values() if stat.links > 2),
        sums_sha256=weights.sums_sha256(),
        checks=log.checks,
    )


def _require_original_gone(context: RunContext, receipt: Receipt) -> str:
    context.require_same_directory(receipt)
    for path in context.originals(receipt.tag):
        raise CorruptFileError(f"{path}: is there, and its receipt says that it is gone")
    return ""


def _remove_full(context: RunContext, full: ArchivedTag) -> None:
    """Remove a full archive, after the archive of weights was checked once more."""
    intact(replace(full, of_weights=True), context)
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
