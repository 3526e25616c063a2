"""Makes the archive of one tag: a store without derived weights, which shares equal files."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from streamshard.engine.run import resident_memory
from streamshard.errors import CorruptFileError, SourceError, StreamshardError, TargetExistsError
from streamshard.formats.deepspeed import names
from streamshard.formats.zarr.array_paths import array_path
from streamshard.health import TensorHealth
from streamshard.io.changes import remove, remove_file, rename, sync_tree
from streamshard.io.entries import examine, is_same_file, lexists, paths_below
from streamshard.io.files import source_errors, target_errors
from streamshard.io.object_path import is_object
from streamshard.io.place import place_of
from streamshard.operations.compact import omissions
from streamshard.operations.compact.proof import Proof, content_equal, prove, rebuilt_equal, sums_of
from streamshard.operations.compact.receipts import (
    ARCHIVED,
    BEGUN,
    ArchivedTag,
    CheckLog,
    Receipt,
    SourceRecord,
    show_moment,
)
from streamshard.operations.compact.run_context import RunContext
from streamshard.operations.compact.run_directory import change_digest, identity_of, open_tag
from streamshard.operations.compact.tag_checks import accounted_for, records_of
from streamshard.operations.convert.convert import store_output
from streamshard.sizes import counted
from streamshard.source.narrowing import narrowed
from streamshard.source.source import Source
from streamshard.source.unfinished import has_journal, is_unfinished
from streamshard.transfer.plan import plan_output
from streamshard.transfer.target import is_there, partial_of, require_separate
from streamshard.verb_options import CompactOptions, ConvertOptions

_SCRIPT: Final = "zero_to_fp32.py"
"""DeepSpeed writes this script with every save, always with the same content."""
_LINK: Final = f"{names.OWN_PREFIX}.link"


def archive_tag(
    context: RunContext,
    tag: str,
    storing: CompactOptions,
    *,
    stable_since_ns: int,
    health: Mapping[str, TensorHealth],
    rebuilds: bool,
) -> tuple[Receipt, Proof | None]:
    """Archive a tag and prove the archive; continue an interrupted run.

    `health`: what was measured of the tag's tensors earlier; they are read if some is missing.
    Sidecars next to the tag that changed after `stable_since_ns` are left out, such as logs. If it
    `rebuilds`, the tag is compared with files that are rebuilt from the archive, which proves all
    that has to be proved before the tag is removed.
    """
    log, root = CheckLog(), context.run_dir / tag
    interrupted = context.archived(tag).read_receipt()
    is_packed = storing.packed if interrupted is None else interrupted.packed
    archived = replace(context.archived(tag), is_packed=is_packed)
    if interrupted is None and is_there(archived.store):
        message = f"{archived.store}: is there, and no receipt says that compact made it"
        raise TargetExistsError(f"{message}; move it away")
    resident_memory.restart_peak()
    opened = open_tag(context.run_dir, tag)
    log.run("source_accounted_for", lambda: accounted_for(opened, root))
    # Of a framework's checkpoint every file goes, so none is left out.
    moving = set() if opened.path == root else _moving(opened, context.run_dir, stable_since_ns)
    left_out = tuple(opened.checkpoint.tensors[number].name for number in sorted(moving))
    opened = narrowed(opened, moving)
    records = records_of(opened, context.run_dir)
    here = identity_of(context.run_dir)
    begun = Receipt(
        tag, str(context.run_dir), *here, BEGUN, packed=is_packed,
        source=(), checks=(),
    )  # fmt: skip
    begun.write(archived.receipt)
    derived = omissions.exact_casts(opened, context.limits, context.progress)
    tensors = opened.checkpoint.tensors
    receipt = replace(
        begun,
        source=records,
        source_bytes=sum(record.nbytes for record in records),
        left_out=left_out,
        derived=tuple(array_path(tensors[number]) for number in sorted(derived)),
    )
    small, whole = narrowed(opened, derived), opened if rebuilds else None
    with target_errors(archived.store):
        is_complete = lexists(archived.store) and not has_journal(archived.store)
    if is_complete:
        # An earlier run completed the store; if it is not of this source, it is made again.
        with suppress(StreamshardError):
            return _proved(context, receipt, small, CheckLog(log.checks), whole)
    try:
        _write_store(context, small, archived, storing, health, overwrite=is_complete)
    except TargetExistsError:
        with target_errors(archived.store):
            if lexists(archived.store) and not is_unfinished(archived.store):
                raise
        # It was begun with another source.
        _write_store(context, small, archived, storing, health, overwrite=True)
    return _proved(context, receipt, small, log, whole)


def _moving(opened: Source, run_dir: Path, stable_since_ns: int) -> set[int]:
    """List the files next to the tag that a program may still be writing."""
    numbers = set()
    for number in omissions.sidecars_beside(opened):
        name = opened.checkpoint.tensors[number].name
        with source_errors(run_dir / name):
            changed_ns = examine(run_dir / name).modified_ns
        if changed_ns > stable_since_ns and name != _SCRIPT:
            numbers.add(number)
    return numbers


def _write_store(
    context: RunContext,
    small: Source,
    archived: ArchivedTag,
    storing: CompactOptions,
    health: Mapping[str, TensorHealth],
    *,
    overwrite: bool,
) -> None:
    limits = context.limits
    options = ConvertOptions(
        context.run_dir / archived.tag,
        archived.store,
        codec="zstd",
        chunk_size=storing.chunk_size,
        memory_limit=limits.memory_limit,
        workers=limits.workers,
        overwrite=overwrite,
    )
    require_separate(small.path, archived.store, small.directories)
    output = store_output(small, verb="compact", options=options, health=health)
    plan = plan_output(options, output, archived.store, limits.floor_bytes)
    plan.run(context.progress)


def _proved(
    context: RunContext, receipt: Receipt, small: Source, log: CheckLog, whole: Source | None
) -> tuple[Receipt, Proof | None]:
    archived, run_dir = context.archive_of(receipt), context.run_dir
    with source_errors(run_dir):
        digests = context.hash_all([file.path for file in small.files])
    both = zip(receipt.source, digests, strict=True)
    source = tuple(replace(record, sha256=digest) for record, digest in both)
    with target_errors(archived.store):
        _remove_begun_links(archived)  # before they are listed
        sums = sums_of(archived, context)
        shared = _share(archived, sums, context)
        sync_tree(archived.store)
        # Before anything is read: what is written from here on is not what was compared.
        digest = change_digest(archived.store)
    archived.write_sums(sums)
    archive = prove(small, archived, context, log)
    # If an archive does not give back its tag, the removal of the tag says why.
    comes_back = whole is not None and log.holds(
        "rebuilt_equal", lambda: rebuilt_equal(whole, archive, archived, context)
    )
    if not comes_back:
        log.run("content_equal", lambda: content_equal(archive, small, context))
    log.run("source_unchanged", lambda: _require_unchanged(small, receipt.source, run_dir))
    with target_errors(archived.store):
        remove(partial_of(archived.store))  # of a run that was killed, and is not needed now
    sizes = {path: status.nbytes for path, status in archived.statuses().items()}
    proved = archived.record(
        receipt,
        ARCHIVED,
        archived=show_moment(datetime.now(UTC)),
        source=source,
        archive_bytes=sum(sizes.values()),
        shared_bytes=sum(sizes[path] for path in shared),
        sums_sha256=archived.sums_sha256(),
        checks=log.checks,
    )
    return proved, Proof(digest, log.checks) if comes_back else None


def _require_unchanged(source: Source, records: tuple[SourceRecord, ...], run_dir: Path) -> str:
    for before, now in zip(records, records_of(source, run_dir), strict=True):
        if before != now:
            message = f"{run_dir / now.path}: changed while it was archived"
            raise CorruptFileError(f"{message}; run again when it no longer changes")
    return counted(len(records), "file")


def _share(archived: ArchivedTag, sums: dict[str, str], context: RunContext) -> list[str]:
    """Replace files by links to equal files in earlier archives; return the paths of the links.

    If the file system has no hard links, or a file has too many, the file stays as it is.
    """
    if not _may_share(archived):
        return []
    earlier = _earlier_files(archived)
    return [
        path
        for path, digest in sums.items()
        if digest in earlier and _link(earlier[digest], archived.store / path, digest, context)
    ]


def _remove_begun_links(archived: ArchivedTag) -> None:
    """Remove a link that an interrupted run made, and did not move to its place."""
    for path in list(paths_below(archived.store)) if _may_share(archived) else ():
        if path.name == _LINK:
            remove_file(path)


def _may_share(archived: ArchivedTag) -> bool:
    """Tell whether files of an archive can be links; objects, and what is in one file, cannot."""
    return not (is_object(archived.store) or archived.is_packed)


def _earlier_files(archived: ArchivedTag) -> dict[str, Path]:
    """Return SHA-256 → a file that has it, according to the lists of complete earlier archives."""
    files: dict[str, Path] = {}
    for archive in ArchivedTag.all_in(archived.directory):
        with suppress(SourceError):  # their files are then stored once more
            receipt = archive.read_receipt() if archive.tag != archived.tag else None
            if receipt is None or receipt.state == BEGUN or receipt.packed:
                continue
            earlier = archive.named_by(receipt)
            for path, digest in earlier.read_sums().items():
                files.setdefault(digest, earlier.store / path)
    return files


def _link(known_file: Path, path: Path, digest: str, context: RunContext) -> bool:
    """Replace a file by a link to a known file, after checking the known file's SHA-256."""
    link = path.with_name(_LINK)
    try:
        if is_same_file(known_file, path):
            return True
        if context.hash_all([known_file]) != [digest]:
            return False
        place_of(link).make_link(known_file, link)
    except OSError:
        return False
    rename(link, path)
    return True
