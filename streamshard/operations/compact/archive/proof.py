"""Proves that an archive is complete and equals its source, and records each check."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Final

from streamshard.engine.run import resident_memory
from streamshard.errors import CorruptFileError, IntegrityError, Option, StreamshardError
from streamshard.formats.checkpoint import Checkpoint
from streamshard.formats.zarr import store_state
from streamshard.io.changes import sync_path, sync_tree
from streamshard.io.entries import (
    ahead_of,
    identify,
    list_ahead,
    listings_kept,
    open_readable,
    request_bytes,
)
from streamshard.io.files import source_errors, target_errors
from streamshard.io.object_path import is_object
from streamshard.io.page_cache import drop_cached, drop_file
from streamshard.layout.memory_plan import MemoryPlan
from streamshard.layout.sample import EVERYTHING
from streamshard.model import SourceFile
from streamshard.operations.checks.problems import Findings
from streamshard.operations.checks.scan import scan
from streamshard.operations.checks.structure import Request, look_at
from streamshard.operations.compact.archive import omissions
from streamshard.operations.compact.archive.receipts import ArchivedTag, Check, Receipt, show_moment
from streamshard.operations.compact.run_directory import looks_of
from streamshard.operations.compare.comparison import EXTRA_BYTES, compare
from streamshard.operations.compare.matching import pair_up
from streamshard.operations.source.source import Source, open_source
from streamshard.operations.transfer import execution
from streamshard.operations.transfer.execution import Limits
from streamshard.operations.transfer.report import Progress

_READ_BYTES: Final = 1 << 20

_UNDELETE: Final = Option("undelete")


@dataclass(slots=True)
class ArchiveReading:
    """One reading of an archive: its checksums, the digests of its tensors, and its SHA-256s."""

    store: Path
    memory: Callable[[int, Sequence[SourceFile]], MemoryPlan]
    """Fits the reading into the memory limit, with the bytes that decoding takes."""
    progress: Progress
    findings: Findings = field(default_factory=Findings)

    def run(self) -> dict[Path, str]:
        """Read the archive, bypassing the page cache; the findings say what is wrong with it.

        Returns the SHA-256 of each file that was read from its first byte to its last. Files that
        are damaged may be missing, and so may large files that several workers read.
        """
        resident_memory.restart_peak()
        drop_cached(self.store)
        looked = look_at(Request(self.store), self.findings, EVERYTHING)
        whole: dict[Path, str] = {}

        def note(file: int, sha256: str) -> None:
            whole[looked.files[file].path] = sha256

        self.progress.start(looked.nbytes)
        try:
            plan = self.memory(looked.codec_bytes, looked.files)
            units, advance = looked.units(), self.progress.advance
            scan(units, looked.files, plan, advance, note)
        finally:
            self.progress.stop()
        return whole


class Checks:
    """The checks so far."""

    def __init__(self, before: Iterable[Check] = ()) -> None:
        self.done = [*before]

    def hold(self, name: str, look: Callable[[], str]) -> None:
        """Do one check and record its result; an error is recorded and raised again."""
        at = show_moment(datetime.now(UTC))
        try:
            result = look()
        except StreamshardError as error:
            self.done.append(Check(name, False, at, str(error)))
            raise
        self.done.append(Check(name, True, at, result))


@dataclass(frozen=True, slots=True)
class Proved:
    """All that is proved of an archive before its tag is removed, as proved earlier in this run."""

    looks: tuple[int, int, str]
    """Looks of the archive before the proof read it."""
    checks: tuple[Check, ...]

    def still(self, place: ArchivedTag) -> str:
        """Require that the archive looks as it did before it was read."""
        with source_errors(place.store):
            is_same = self.looks == looks_of(place.store)
        if not is_same:
            raise IntegrityError(f"{place.store}: changed since it was compared with {place.tag}")
        return ""


@dataclass(frozen=True, slots=True)
class Means:
    """The limits and the progress of proving."""

    limits: Limits
    progress: Progress

    def memory(self, codec_bytes: int = 0, files: Sequence[SourceFile] = ()) -> MemoryPlan:
        """Fit a comparison of files into the memory limit."""
        return self.limits.fit(codec_bytes + EXTRA_BYTES, files)

    def _workers(self, files: Sequence[SourceFile]) -> int:
        """Count the threads that read whole files; for objects each needs memory."""
        if request_bytes(file.path for file in files):
            return self.limits.fit(0, files).workers
        return self.limits.workers or execution.default_workers()

    def hash_all(self, paths: Sequence[Path], below: Path | None = None) -> list[str]:
        """Compute the SHA-256 of files as they are now, bypassing the page cache.

        Parameters
        ----------
        below
            Directory of which the paths are most of the content; objects are listed there.
        """
        with listings_kept(anew=True):
            if below is not None:
                list_ahead(below)
            files = [identify(path) for path in paths]
        self.progress.start(sum(file.nbytes for file in files))
        try:
            return sha256_of(files, self.progress.advance, workers=self._workers(files))
        finally:
            self.progress.stop()


def prove(
    source: Source, place: ArchivedTag, means: Means, checks: Checks, *, tag_only: bool = False
) -> Source:
    """Compare an archive with its records, and all but tensor data with its source.

    Returns the opened archive. Whether its tensors are those of its source is left to prove: by
    `content_equal`, or by files that are rebuilt from it.

    Parameters
    ----------
    source
        The source without derived weights.
    tag_only
        Whether to ignore sidecars beside the tag, which may have changed since.
    """
    checks.hold("archive_synced", lambda: _synced(place))
    reading = ArchiveReading(place.store, means.memory, means.progress)
    checks.hold("archive_bytes", lambda: intact(place, means, reading))
    checks.hold("archive_verified", lambda: _verified(reading))
    resident_memory.restart_peak()
    with source_errors(place.store):
        archive = open_source(place.store)
    archive.require_as_written()
    if tag_only:
        archive, source = omissions.tag_only(archive), omissions.tag_only(source)
    checks.hold("state_equal", lambda: state_equal(archive, source))
    return archive


def _synced(place: ArchivedTag) -> str:
    with target_errors(place.store):
        sync_tree(place.store)
        sync_path(place.directory)
    return ""


def intact(place: ArchivedTag, means: Means, reading: ArchiveReading | None = None) -> str:
    """Require that every file of an archive has its SHA-256, read bypassing the page cache.

    Parameters
    ----------
    reading
        Reads the files for other checks too; files that it does not read are read here.
    """
    sums, found = place.read_sums(), place.files()
    if sums.keys() != {*found}:
        wrong = sorted(sums.keys() ^ {*found})[0]
        message = "missing" if wrong in sums else f"not listed in {place.sums}"
        raise IntegrityError(f"{place.store / wrong}: {message}")
    paths = [place.store / path for path in found]
    with source_errors(place.store):
        digests = reading.run() if reading else {}
        rest = [path for path in paths if path not in digests]
        digests |= zip(rest, means.hash_all(rest, place.store), strict=True)
    for path in paths:
        if digests[path] != sums[path.relative_to(place.store).as_posix()]:
            raise IntegrityError(f"{path}: damaged: its SHA-256 differs")
    return f"{len(found):,} files"


def same_archive(receipt: Receipt, place: ArchivedTag) -> str:
    """Require that an archive is the one that was compared with its source."""
    if place.sums_sha256() != receipt.sums_sha256:
        message = f"{place.sums}: not the list of the archive that was compared with {receipt.tag}"
        if not receipt.sums_sha256:
            message = f"{place.receipt}: does not say which archive was compared with {receipt.tag}"
        raise CorruptFileError(f"{message}; put that back, or {_UNDELETE} it and run again")
    return receipt.sums_sha256


def same_objects(receipt: Receipt, place: ArchivedTag) -> str:
    """Require that the objects of an archive are the very ones that were compared with its source.

    On a disk there are none. Objects that were written again since prove nothing of an earlier
    night, whatever bytes they have; nor does an archive that was copied between disk and bucket.
    """
    known, now = receipt.etags, place.etags()
    for path in sorted(known.keys() | now.keys()):
        if known.get(path) != now.get(path):
            message = f"{place.store / path}: has etag {now.get(path) or 'none'}, and had"
            message = f"{message} {known.get(path) or 'none'} when it was compared with"
            raise CorruptFileError(f"{message} {receipt.tag}; {_UNDELETE} that one and run again")
    return f"{len(now):,} objects"


def _verified(reading: ArchiveReading) -> str:
    found = reading.findings
    if found.problems:
        raise IntegrityError(found.problems[0].message)
    return f"{found.checked:,} checksums, {found.tensors:,} tensors"


def state_equal(archive: Source, source: Source) -> str:
    """Require that both sides are equal in everything but tensor data."""
    mine, theirs = (_serialized(side.checkpoint) for side in (archive, source))
    if mine != theirs:
        message = f"{archive.path}: its training state is not that of {source.path}"
        raise IntegrityError(f"{message}, or not all tensors are there")
    return f"{len(mine):,} bytes"


def _serialized(checkpoint: Checkpoint) -> bytes:
    """Serialize everything that is not a tensor, and the list of tensors."""
    # Notes are about reading, and about files beside the tags.
    return store_state.dump(store_state.without(replace(checkpoint, notes=()), ()), ())


def content_equal(archive: Source, source: Source, means: Means) -> str:
    """Require that both sides are equal in every bit of every tensor, and in everything else."""
    pairing = pair_up(archive, source)
    found = compare(archive, source, pairing.pairs, means.limits, means.progress)
    wrong = [problem.message for problem in found.findings.problems]
    wrong += [one.message for one in (*pairing.differences, *found.differences)]
    if wrong:
        raise IntegrityError(f"{archive.path}: not what {source.path} holds: {wrong[0]}")
    return f"{len(pairing.pairs):,} tensors, {found.nbytes:,} bytes"


def sha256_of(
    files: Sequence[SourceFile], progress: Callable[[int], None], *, workers: int
) -> list[str]:
    """Compute the SHA-256 of each file from the disk, not from the page cache.

    Of an object it is that of the version which is given.
    """

    def take(known: SourceFile) -> str:
        drop_file(known.path)
        digest, view, offset = sha256(), memoryview(bytearray(_READ_BYTES)), 0
        ahead = ahead_of([known.path]).ahead if is_object(known.path) else 0
        with open_readable(known.path, known) as file:
            while count := file.read_into(view, offset):
                offset += count
                if ahead:
                    file.will_need(offset, ahead)
                digest.update(view[:count])
                progress(count)
        return digest.hexdigest()

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(take, files))
