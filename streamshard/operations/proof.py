"""Proves that an archive is whole and holds what its source holds, and writes down each step."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from stat import S_ISREG

from streamshard.engine import memory
from streamshard.engine.durability import sync_path, sync_tree
from streamshard.engine.files import source_errors, target_errors
from streamshard.engine.hashing import sha256_of
from streamshard.errors import (
    CorruptFileError,
    IncompleteError,
    IntegrityError,
    StreamshardError,
    UnsupportedError,
)
from streamshard.formats import store_state
from streamshard.formats.checkpoint import Checkpoint
from streamshard.formats.zero_module import RANKS_DIFFER
from streamshard.operations import narrowing, running, verify
from streamshard.operations.compare import EXTRA_BYTES, Comparing
from streamshard.operations.convert import Limits
from streamshard.operations.pairing import pair_up
from streamshard.operations.receipts import Check, Place, Receipt, SourceRecord, spell_time
from streamshard.operations.report import Progress
from streamshard.operations.source import Source, open_source
from streamshard.operations.verification import Findings
from streamshard.plan.memory import MemoryPlan
from streamshard.reading import entries_below


class Checks:
    """What was looked at so far."""

    def __init__(self) -> None:
        self.done: list[Check] = []

    def hold(self, name: str, look: Callable[[], str]) -> None:
        """Look at one thing, and write down what came of it; what is wrong goes on as an error."""
        at = spell_time(datetime.now(UTC))
        try:
            told = look()
        except StreamshardError as error:
            self.done.append(Check(name, False, at, str(error)))
            raise
        self.done.append(Check(name, True, at, told))


@dataclass(frozen=True, slots=True)
class Means:
    """What proving may use."""

    limits: Limits
    progress: Progress

    def memory(self, codec_bytes: int = 0) -> MemoryPlan:
        """Fit a comparison into the limit."""
        floor_bytes = self.limits.floor_bytes
        return running.fit_memory(
            floor_bytes=floor_bytes,
            codec_bytes=codec_bytes + EXTRA_BYTES,
            workers=self.limits.workers,
            limit_bytes=running.limit_or_default(self.limits.memory_limit, floor_bytes),
        )

    @property
    def workers(self) -> int:
        """Count of threads that read files."""
        return self.limits.workers or running.default_workers()

    def hash_all(self, paths: list[Path]) -> list[str]:
        """Take the SHA-256 of files, past the page cache."""
        self.progress.start(sum(path.stat().st_size for path in paths))
        try:
            return sha256_of(paths, self.progress.advance, workers=self.workers)
        finally:
            self.progress.stop()


def prove(source: Source, place: Place, means: Means, checks: Checks, *, tag_only: bool) -> None:
    """Hold an archive against what was recorded of it, and against its source.

    Parameters
    ----------
    source
        Without what follows from the rest.
    tag_only
        Whether files beside the tag are left aside, which may be others by now.

    Raises
    ------
    StreamshardError
        Something is not as it should be; the checks say what was found before.
    """
    checks.hold("archive_synced", lambda: _synced(place))
    checks.hold("archive_bytes", lambda: intact(place, means))
    checks.hold("archive_verified", lambda: _verified(place, means))
    memory.restart_peak()
    with source_errors(place.store):
        archive = open_source(place.store)
    if tag_only:
        archive = narrowing.narrowed(archive, narrowing.beside(archive))
        source = narrowing.narrowed(source, narrowing.beside(source))
    checks.hold("state_equal", lambda: _state_equal(archive, source))
    checks.hold("content_equal", lambda: _content_equal(archive, source, means))


def _synced(place: Place) -> str:
    with target_errors(place.store):
        sync_tree(place.store)
        sync_path(place.directory)
    return ""


def intact(place: Place, means: Means) -> str:
    """Require of every file of an archive to be as its SHA-256 says, read past the page cache.

    Raises
    ------
    IntegrityError
        A file is missing, damaged, or is not in the list.
    SourceError
        Something cannot be read.
    """
    sums, found = place.read_sums(), place.files()
    if sums.keys() != {*found}:
        wrong = sorted(sums.keys() ^ {*found})[0]
        message = "missing" if wrong in sums else f"not listed in {place.sums}"
        raise IntegrityError(f"{place.store / wrong}: {message}")
    with source_errors(place.store):
        digests = means.hash_all([place.store / path for path in found])
    for path, digest in zip(found, digests, strict=True):
        if digest != sums[path]:
            raise IntegrityError(f"{place.store / path}: damaged: its SHA-256 is another")
    return f"{len(found):,} files"


def _verified(place: Place, means: Means) -> str:
    found = verify.verify(
        place.store,
        memory_limit=means.limits.memory_limit,
        workers=means.limits.workers,
        progress=means.progress,
    )
    if found.problems:
        raise IntegrityError(found.problems[0].message)
    return f"{found.checked:,} checksums, {found.tensors:,} tensors"


def _state_equal(archive: Source, source: Source) -> str:
    mine, theirs = (_spelled(side.checkpoint) for side in (archive, source))
    if mine != theirs:
        message = f"{archive.path}: its training state is not that of {source.path}"
        raise IntegrityError(f"{message}, or not all tensors are there")
    return f"{len(mine):,} bytes"


def _spelled(checkpoint: Checkpoint) -> bytes:
    """Spell all that is no tensor, and what tensors there are."""
    # Notes are of the reading, and of what lies beside the tags.
    return store_state.dump(store_state.without(replace(checkpoint, notes=()), ()), ())


def _content_equal(archive: Source, source: Source, means: Means) -> str:
    pairing = pair_up(archive, source)
    findings = Findings()
    comparing = Comparing(archive, source, pairing.pairs)
    means.progress.start(2 * comparing.nbytes)
    try:
        plan = means.memory(archive.codec_bytes)
        differences = comparing.run(plan, findings, means.progress.advance)
    finally:
        means.progress.stop()
    wrong = [problem.message for problem in findings.problems]
    wrong += [found.message for found in (*pairing.differences, *differences)]
    if wrong:
        raise IntegrityError(f"{archive.path}: not what {source.path} holds: {wrong[0]}")
    return f"{len(pairing.pairs):,} tensors, {comparing.nbytes:,} bytes"


def accounted_for(source: Source) -> str:
    """Require of everything in a tag directory to be in what was read of it.

    Raises
    ------
    UnsupportedError
        Something is not, so that an archive would lack it.
    """
    tag = source.checkpoint.tag
    known = {file.path for file in source.files}
    known |= {source.path / file.path for file in source.checkpoint.files}
    count = 0
    with source_errors(source.path / tag):
        for path in entries_below(source.path / tag):
            mode = path.lstat().st_mode
            if path.is_dir() and not path.is_symlink():
                continue
            count += 1
            if not S_ISREG(mode) or path not in known:
                raise UnsupportedError(f"{path}: would not be in an archive; move it away")
    return f"{count:,} files"


def ranks_agree(source: Source) -> str:
    """Require of a checkpoint that nothing is known to be left out of it.

    Raises
    ------
    UnsupportedError
        Something is: each rank keeps some of its own.
    """
    for note in source.checkpoint.notes:
        if note.startswith(RANKS_DIFFER):
            raise UnsupportedError(f"{source.path / source.checkpoint.tag}: {note}")
    return ""


def records_of(source: Source, run_dir: Path) -> tuple[SourceRecord, ...]:
    """Record what the files of a source look like.

    Raises
    ------
    SourceError
        One cannot be looked at any more.
    """
    found = []
    for file in source.files:
        with source_errors(file.path):
            stat = file.path.stat()
        looks = stat.st_size, stat.st_mtime_ns, stat.st_ino, stat.st_dev
        found.append(SourceRecord(os.path.relpath(file.path, run_dir), *looks))
    return tuple(found)


def unchanged(receipt: Receipt, root: Path, means: Means | None) -> str:
    """Require of a tag's files to be those that were archived.

    Parameters
    ----------
    root
        Where the tag directory is now.
    means
        To read them too; without, they are only looked at.

    Raises
    ------
    CorruptFileError
        One looks otherwise, or holds something else.
    IncompleteError
        There are others, or not all.
    """
    records = receipt.below_tag()
    with source_errors(root):
        paths = {
            path.relative_to(root).as_posix(): path
            for path in entries_below(root)
            if path.is_symlink() or not path.is_dir()
        }
        for name in sorted(paths.keys() ^ records.keys()):
            there = "was archived, and is not there" if name in records else "was not archived"
            raise IncompleteError(f"{root / name}: {there}")
        for name, path in paths.items():
            _require_as_recorded(path, records[name])
        digests = means.hash_all(list(paths.values())) if means else []
    for name, digest in zip(paths, digests, strict=bool(means)):
        if digest != records[name].sha256:
            raise CorruptFileError(f"{paths[name]}: its bytes are not those that were archived")
    return f"{len(paths):,} files"


def _require_as_recorded(path: Path, record: SourceRecord) -> None:
    stat = path.lstat()
    found = stat.st_size, stat.st_mtime_ns, stat.st_ino, stat.st_dev
    known = record.nbytes, record.mtime_ns, record.inode, record.device
    words = "size", "time of change", "inode", "device"
    for word, now, then in zip(words, found, known, strict=True):
        if now != then:
            message = f"{path}: has {word} {now}, and had {then} when it was archived"
            raise CorruptFileError(f"{message}: is it of another save?")
