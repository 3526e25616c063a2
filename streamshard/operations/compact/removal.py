"""Removes a tag whose archive is proved: first into the trash, after the grace time for good."""

from collections.abc import Callable
from datetime import UTC, datetime

from streamshard.engine.run import resident_memory
from streamshard.errors import CorruptFileError, SourceError, StreamshardError
from streamshard.formats.deepspeed import names
from streamshard.operations.compact import omissions
from streamshard.operations.compact.proof import Proof, intact, prove, rebuilt_equal, same_archive
from streamshard.operations.compact.receipts import (
    ARCHIVED,
    PURGED,
    TRASHED,
    CheckLog,
    Receipt,
    show_moment,
)
from streamshard.operations.compact.run_context import RunContext
from streamshard.operations.compact.run_directory import open_tag
from streamshard.operations.compact.tag_checks import (
    accounted_for,
    padding_alike,
    ranks_agree,
    unchanged,
)
from streamshard.source.narrowing import narrowed
from streamshard.source.source import Source, open_source
from streamshard.transfer.target import is_there


def move_to_trash(
    context: RunContext, tag: str, require_removable: Callable[[], str], proof: Proof | None
) -> None:
    """Move a tag into the trash if its archive holds all of it.

    `require_removable` scans the run directory again, and raises an error if something protects the
    tag now. A `proof` is of this run, which has just archived the tag: both sides have to be
    unchanged since. Without it everything is proved again.
    """
    archived, log = context.archived(tag), CheckLog(proof.checks if proof else ())
    receipt = archived.require_receipt()
    archived = archived.named_by(receipt)
    archived.require_possible(receipt, TRASHED)
    if tag in context.trash.being_removed():
        message = "another save of that name is not wholly removed yet"
        raise SourceError(f"{context.trash.rest_of(tag)}: {message}")
    try:
        _check(context, receipt, log, require_removable, proof)
        # The receipt must say when the tag was moved before the tag is in the trash.
        at = show_moment(max(context.now, datetime.now(UTC)))  # the run may have begun long ago
        receipt = archived.record(
            receipt,
            TRASHED,
            trashed=at,
            sums_sha256=archived.sums_sha256(),
            checks=log.checks,
        )
        context.trash.move_in(tag)
    except StreamshardError:
        archived.record(receipt, ARCHIVED, trashed="", checks=log.checks)
        raise
    # If this fails, the tag is in the trash all the same, as the receipt says.
    context.trash.make_durable(tag)


def _check(
    context: RunContext,
    receipt: Receipt,
    log: CheckLog,
    require_removable: Callable[[], str],
    proof: Proof | None,
) -> None:
    root, archived = context.run_dir / receipt.tag, context.archive_of(receipt)
    log.run("same_run_directory", lambda: context.require_same_directory(receipt))
    log.run("source_as_recorded", lambda: unchanged(receipt, root, None if proof else context))
    resident_memory.restart_peak()
    opened = open_tag(context.run_dir, receipt.tag)
    log.run("source_accounted_for", lambda: accounted_for(opened, root))
    log.run("ranks_agree", lambda: ranks_agree(opened))
    log.run("padding_alike", lambda: padding_alike(opened))
    if proof is not None:
        log.run("archive_unchanged", lambda: proof.require_unchanged(archived))
    else:
        _prove_again(context, opened, receipt, log)
    log.run("source_unchanged", lambda: unchanged(receipt, root))
    log.run("not_protected", require_removable)
    log.run("still_same_run_directory", lambda: context.require_same_directory(receipt))


def _prove_again(context: RunContext, opened: Source, receipt: Receipt, log: CheckLog) -> None:
    archived = context.archive_of(receipt)
    candidates = omissions.cast_candidates(opened.checkpoint).items()
    derived = [number for number, pair in candidates if pair.name in receipt.derived]
    # Files next to a tag stay, and those of a framework's checkpoint go with it.
    tag_only = opened.path != context.run_dir / receipt.tag
    small = narrowed(opened, derived)
    archive = prove(small, archived, context, log, tag_only=tag_only)
    # What the store's reader gives is written into files, and every bit of these is the tag's:
    # so the archive's tensors are the tag's, and weights that it leaves out follow from them.
    log.run(
        "rebuilt_equal",
        lambda: rebuilt_equal(opened, archive, archived, context, tag_only=tag_only),
    )


def purge(
    context: RunContext, tag: str, require_unprotected: Callable[[], str] | None = None
) -> None:
    """Remove a tag in the trash for good, if its archive is still as it was.

    `require_unprotected` scans the run directory again, and raises an error if something would
    protect the tag now. It is not called for a tag that is partly removed; None if the user named
    the tag.
    """
    archived, trash = context.archived(tag), context.trash
    is_begun = tag in trash.being_removed()
    if not is_begun:
        trash.require(tag)
    receipt = archived.require_receipt()
    archived, log = archived.named_by(receipt), CheckLog(receipt.checks)
    log.run("same_run_directory", lambda: context.require_same_directory(receipt))
    if not is_begun:
        root = trash.path_of(tag)
        log.run("trash_as_recorded", lambda: unchanged(receipt, root))
    elif receipt.state != PURGED:
        message = f"{archived.receipt}: is of another save than what is left of one in"
        message = f"{message} {trash.rest_of(tag)}; put back the archive of that, or"
        raise CorruptFileError(f"{message} remove it yourself")
    archived.require_possible(receipt, PURGED)
    log.run("same_archive", lambda: same_archive(receipt, archived))
    log.run("archive_bytes", lambda: intact(archived, context))
    log.run("archive_opens", lambda: open_source(archived.store).checkpoint.tag)
    if require_unprotected is not None and not is_begun:
        log.run("not_protected", require_unprotected)
    # Before the tag is removed: after an interruption, no later run would record it.
    archived.record(receipt, PURGED, purged=show_moment(context.now), checks=log.checks)
    trash.mark_for_removal(tag)
    trash.remove(tag)


def bring_back(context: RunContext, tag: str) -> None:
    """Move a tag out of the trash to its former place; continue an interrupted run."""
    receipt = context.archived(tag).read_receipt()
    if receipt is not None and receipt.tag != tag:
        receipt = None
    if receipt is None or not is_back(context, receipt):
        context.trash.move_out(tag)
    else:
        unchanged(receipt, context.run_dir / tag)
    # Another receipt is of another save of that name.
    if receipt is not None and receipt.state in (ARCHIVED, TRASHED, PURGED):
        record_back(context, receipt)


def is_back(context: RunContext, receipt: Receipt) -> bool:
    """Tell whether a tag is in its place although its receipt says that it is in the trash."""
    tag = receipt.tag
    is_here = names.is_tag(tag) and is_there(context.run_dir / tag)
    return receipt.state == TRASHED and is_here and tag not in context.trash.tags()


def record_back(context: RunContext, receipt: Receipt) -> Receipt:
    """Record in the receipt that a tag is in its place again; return the receipt."""
    return context.archived(receipt.tag).record(receipt, ARCHIVED, trashed="")
