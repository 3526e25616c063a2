"""Proves that an archive is complete, equals its source, and gives it back when it is rebuilt."""

from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from streamshard.checks.problems import Findings
from streamshard.checks.scan import scan
from streamshard.compare.comparison import compare
from streamshard.compare.matching import pair_up
from streamshard.engine.run import resident_memory
from streamshard.errors import (
    CorruptFileError,
    IntegrityError,
    NoSpaceError,
    Option,
    UnsupportedError,
)
from streamshard.formats.checkpoint import Checkpoint
from streamshard.formats.deepspeed import names
from streamshard.formats.zarr import store_state
from streamshard.io.changes import remove, sync_path, sync_tree
from streamshard.io.files import source_errors, target_errors
from streamshard.io.object_path import is_object
from streamshard.io.page_cache import drop_cached
from streamshard.io.place import place_of
from streamshard.layout.memory_plan import COMPARING_BYTES
from streamshard.operations.compact import omissions
from streamshard.operations.compact.receipts import (
    DROPPING,
    PURGED,
    ArchivedTag,
    Check,
    CheckLog,
    Receipt,
)
from streamshard.operations.compact.run_context import RunContext
from streamshard.operations.compact.run_directory import change_digest
from streamshard.operations.repartition.repartition import prepare
from streamshard.options import RepartitionOptions
from streamshard.sizes import counted
from streamshard.source.source import Request, Source, open_source
from streamshard.source.structure import check_structure
from streamshard.transfer.plan import plan_opened

_REBUILT: Final = f"{names.OWN_PREFIX}.rebuilt"
_RUN: Final = "run"


@dataclass(frozen=True, slots=True)
class Proof:
    """All that is proved of an archive before its tag is removed, as proved earlier in this run."""

    digest: tuple[int, int, str]
    """Digest of the archive's entries before the proof read it."""
    checks: tuple[Check, ...]

    def require_unchanged(self, archived: ArchivedTag) -> str:
        with source_errors(archived.store):
            is_same = self.digest == change_digest(archived.store)
        if not is_same:
            raise IntegrityError(
                f"{archived.store}: changed since it was compared with {archived.tag}"
            )
        return ""


def prove(
    source: Source,
    archived: ArchivedTag,
    context: RunContext,
    log: CheckLog,
    *,
    tag_only: bool = False,
) -> Source:
    """Compare an archive with its records, and all but tensor data with its source.

    Returns the opened archive. Whether its tensors are those of its source is left to prove: by
    `content_equal`, or by files that are rebuilt from it. `tag_only` ignores sidecars next to the
    tag, which may have changed since.
    """
    log.run("archive_synced", lambda: _synced(archived))
    findings = Findings()
    log.run("archive_bytes", lambda: intact(archived, context, findings))
    log.run("archive_verified", lambda: _verified(findings))
    resident_memory.restart_peak()
    with source_errors(archived.store):
        archive = open_source(archived.store)
    require_as_written(archive)
    sides = [omissions.tag_only(side) if tag_only else side for side in (archive, source)]
    log.run("state_equal", lambda: _state_equal(*sides))
    return archive


def require_as_written(archive: Source) -> None:
    """Refuse a store in which another tool rewrote an array."""
    rewritten = archive.kind.rewritten(archive)
    if rewritten:
        message = "rewritten by another tool: no archive that"
        raise UnsupportedError(
            f"{message} proves anything. Put back what streamshard wrote",
            path=archive.path / rewritten[0],
        )


def _synced(archived: ArchivedTag) -> str:
    with target_errors(archived.store):
        sync_tree(archived.store)
        sync_path(archived.directory)
    return ""


def intact(archived: ArchivedTag, context: RunContext, findings: Findings | None = None) -> str:
    """Require that every file of an archive has its SHA-256, read bypassing the page cache.

    If there are `findings` to fill, the same reading looks for other damage too.
    """
    sums, files = archived.read_sums(), archived.files()
    if sums.keys() != {*files}:
        wrong = sorted(sums.keys() ^ {*files})[0]
        message = "missing" if wrong in sums else f"not listed in {archived.sums}"
        raise IntegrityError(f"{archived.store / wrong}: {message}")
    paths = [archived.store / path for path in files]
    with source_errors(archived.store):
        digests = {} if findings is None else read_archive(archived.store, context, findings)
        rest = [path for path in paths if path not in digests]
        digests |= zip(rest, context.hash_all(rest, archived.store), strict=True)
    for path, name in zip(paths, files, strict=True):
        if digests[path] != sums[name]:
            raise IntegrityError(f"{path}: damaged: its SHA-256 differs")
    return counted(len(files), "file")


def sums_of(archived: ArchivedTag, context: RunContext) -> dict[str, str]:
    files = archived.files()
    digests = context.hash_all([archived.store / path for path in files], archived.store)
    return dict(zip(files, digests, strict=True))


def read_archive(store: Path, context: RunContext, findings: Findings) -> dict[Path, str]:
    """Read an archive, bypassing the page cache; the findings say what is wrong with it.

    Returns the SHA-256 of each file that was read from its first byte to its last. Files that are
    damaged may be missing, and so may large files that several workers read.
    """
    resident_memory.restart_peak()
    with source_errors(store):
        drop_cached(store)
    structure = check_structure(Request(store), findings)
    whole: dict[Path, str] = {}

    def note(file: int, sha256: str) -> None:
        whole[structure.files[file].path] = sha256

    context.progress.start(structure.nbytes)
    plan = context.limits.fit(structure.codec_bytes + COMPARING_BYTES, structure.files)
    scan(structure.units(), structure.files, plan, context.progress.advance, note)
    return whole


def same_archive(receipt: Receipt, archived: ArchivedTag) -> str:
    """Require that an archive is the one that was compared with its source."""
    if archived.sums_sha256() != receipt.sums_sha256:
        message = (
            f"{archived.sums}: not the list of the archive that was compared with {receipt.tag}"
        )
        advice = "put that back"
        if receipt.state not in (PURGED, DROPPING):
            back = Option("undelete", [receipt.tag])
            advice += f", or {back}, move its archive and receipt away, and run again"
        raise CorruptFileError(f"{message}; {advice}")
    return receipt.sums_sha256


def _verified(findings: Findings) -> str:
    if findings.problems:
        raise IntegrityError(findings.problems[0].message)
    return f"{counted(findings.checked, 'checksum')}, {counted(findings.tensors, 'tensor')}"


def _state_equal(archive: Source, source: Source) -> str:
    archive_state, source_state = (_serialized(side.checkpoint) for side in (archive, source))
    if archive_state != source_state:
        message = f"{archive.path}: its training state is not that of {source.path}"
        raise IntegrityError(f"{message}, or not all tensors are there")
    return f"{len(archive_state):,} bytes"


def _serialized(checkpoint: Checkpoint) -> bytes:
    """Serialize everything that is not a tensor, and the list of tensors."""
    # Notes are about reading, and about files next to the tags.
    return store_state.dump(store_state.without(replace(checkpoint, notes=()), ()), ())


def content_equal(archive: Source, source: Source, context: RunContext) -> str:
    """Require that both sides are equal in every bit of every tensor, and in everything else."""
    pairing = pair_up(archive, source)
    comparison = compare(archive, source, pairing.pairs, context.limits, context.progress)
    wrong = [problem.message for problem in comparison.findings.problems]
    wrong += [one.message for one in (*pairing.differences, *comparison.differences)]
    if wrong:
        raise IntegrityError(f"{archive.path}: not what {source.path} holds: {wrong[0]}")
    return f"{counted(len(pairing.pairs), 'tensor')}, {counted(comparison.nbytes, 'byte')}"


def rebuilt_equal(
    source: Source,
    archive: Source,
    archived: ArchivedTag,
    context: RunContext,
    *,
    tag_only: bool = False,
) -> str:
    """Write native files from an opened archive, compare them with the tag, and remove them.

    Meanwhile they take as much space next to the archive as the tag itself, in a bucket too.
    """
    rebuilt_dir = archived.directory / _REBUILT / _RUN
    remove_rebuilt(archived.directory)
    with ExitStack() as stack:
        stack.callback(remove_rebuilt, archived.directory)
        _rebuild(archive, rebuilt_dir, context)
        resident_memory.restart_peak()
        with source_errors(rebuilt_dir):
            rebuilt = open_source(rebuilt_dir)
        if tag_only:
            rebuilt, source = omissions.tag_only(rebuilt), omissions.tag_only(source)
        if is_object(rebuilt_dir):  # which has no modes; the archive's were compared with the tag's
            rebuilt, source = _without_modes(rebuilt), _without_modes(source)
        try:
            _state_equal(rebuilt, source)
            return content_equal(rebuilt, source, context)
        except IntegrityError as error:
            raise IntegrityError(
                f"{archived.store}: does not give back its tag: {error}"
            ) from error


def _without_modes(source: Source) -> Source:
    files = tuple(replace(file, mode=0) for file in source.checkpoint.files)
    return replace(source, checkpoint=replace(source.checkpoint, files=files))


def remove_rebuilt(directory: Path) -> None:
    """Remove rebuilt files from a directory of archives; no other run may be active."""
    rebuilt = directory / _REBUILT
    with target_errors(rebuilt):
        remove(rebuilt)
        place_of(rebuilt).abort_uploads(rebuilt)


def _rebuild(archive: Source, rebuilt_dir: Path, context: RunContext) -> None:
    limits = context.limits
    options = RepartitionOptions(
        archive.path, rebuilt_dir, memory_limit=limits.memory_limit, workers=limits.workers
    )
    try:
        prepared = partial(prepare, None, options, None)
        plan_opened(options, lambda: archive, prepared).run(context.progress)
    except NoSpaceError as error:
        message = "is archived, and stays until there is room to rebuild it from its archive"
        raise NoSpaceError(f"{message}: {error}") from error
    except BaseException as error:
        error.__notes__ = []  # they say that files are kept to continue with, which is not so here
        raise
