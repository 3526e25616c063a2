"""What all steps of a run of `compact` share: directories, time, limits, and SHA-256 of files."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Final

from streamshard.engine.run import memory_limits
from streamshard.engine.run.memory_limits import Limits
from streamshard.engine.run.phases import READING, Progress
from streamshard.errors import CorruptFileError
from streamshard.io.entries import (
    ahead_of,
    identify,
    list_ahead,
    listings_kept,
    open_readable,
    request_bytes,
)
from streamshard.io.object_path import is_object
from streamshard.io.page_cache import drop_file
from streamshard.io.throttle import Throttle
from streamshard.model import SourceFile
from streamshard.operations.compact.receipts import (
    DROPPING,
    PURGED,
    WEIGHTS_ONLY,
    ArchivedTag,
    Receipt,
)
from streamshard.operations.compact.run_directory import identity_of
from streamshard.operations.compact.trash import Trash
from streamshard.transfer.target import is_there

_READ_BYTES: Final = 1 << 20


class TagProgress:
    """Passes progress on with the name of the tag, and slows the run down to the allowed rate."""

    def __init__(self, inner: Progress, bytes_per_second: int | None) -> None:
        self._inner = inner
        self.tag = ""
        self.keep, self.advance = inner.keep, inner.advance
        if bytes_per_second is not None:
            self.advance = Throttle(inner.advance, bytes_per_second).advance

    def start(self, total_bytes: int, phase: str = READING) -> None:
        self._inner.start(total_bytes, self._named(phase))

    def enter(self, phase: str) -> None:
        self._inner.enter(self._named(phase))

    def _named(self, phase: str) -> str:
        return f"{self.tag}: {phase}" if self.tag else phase


@dataclass(frozen=True, slots=True)
class RunContext:
    run_dir: Path
    archive_dir: Path
    identity: tuple[int, int]
    """Device and inode of the run directory when the run began."""
    now: datetime
    limits: Limits
    progress: TagProgress

    @property
    def now_ns(self) -> int:
        return int(self.now.timestamp() * 10**9)

    @property
    def trash(self) -> Trash:
        return Trash(self.run_dir)

    def archived(self, tag: str) -> ArchivedTag:
        """Return the paths of a tag's receipt, and of its archive if that is a directory."""
        return ArchivedTag(self.archive_dir, tag)

    def archive_of(self, receipt: Receipt) -> ArchivedTag:
        """Return the paths of the archive that a receipt names."""
        return self.archived(receipt.tag).named_by(receipt)

    def tags(self) -> list[str]:
        return [archived.tag for archived in ArchivedTag.all_in(self.archive_dir)]

    def trashed_at(self, tag: str) -> datetime:
        archived = self.archived(tag)
        return archived.since(archived.require_receipt().trashed, "in the trash")

    def removed_at(self, tag: str) -> datetime | None:
        """Return when a tag was removed for good; None if its archive has nothing to lose.

        Nothing is lost while the original exists anywhere, or unless the receipt says that it was
        removed. Of a full archive whose states were dropped, a rest may be left: since ever.
        """
        archived = self.archived(tag)
        receipt = archived.read_receipt()
        if receipt is None or receipt.state not in (PURGED, DROPPING, WEIGHTS_ONLY):
            return None
        archived.require_own(receipt)
        if receipt.state == WEIGHTS_ONLY:
            is_left = any(map(is_there, archived.full_of(receipt).leftovers))
            return datetime(1, 1, 1, tzinfo=UTC) if is_left else None
        since = archived.since(receipt.purged, "gone")
        return None if any(self.originals(tag)) else since

    def originals(self, tag: str) -> Iterator[Path]:
        """Yield the paths where the original of an archive, or a part of it, still exists."""
        if is_there(self.run_dir / tag):
            yield self.run_dir / tag
        if tag in self.trash.all_tags():
            yield self.trash.path_of(tag)

    def require_same_directory(self, receipt: Receipt) -> str:
        """Require that the run directory is the one whose tag was archived."""
        if not identity_of(self.run_dir) == self.identity == (receipt.device, receipt.inode):
            message = f"{self.run_dir}: is another directory, or on another device, than the one"
            raise CorruptFileError(f"{message} whose tag was archived; is that one elsewhere?")
        return ""

    def hash_all(self, paths: Sequence[Path], below: Path | None = None) -> list[str]:
        """Compute the SHA-256 of files as they are now on the disk, bypassing the page cache.

        Most of `below` are these paths, so in a bucket it is listed.
        """
        with listings_kept(fresh=True):
            if below is not None:
                list_ahead(below)
            files = [identify(path) for path in paths]
        self.progress.start(sum(file.nbytes for file in files))
        with ThreadPoolExecutor(self._workers(files)) as pool:
            return list(pool.map(self._hash, files))

    def _hash(self, file: SourceFile) -> str:
        drop_file(file.path)
        digest, view, offset = sha256(), memoryview(bytearray(_READ_BYTES)), 0
        ahead = ahead_of([file.path]).ahead if is_object(file.path) else 0
        with open_readable(file.path, file) as stream:
            while count := stream.read_into(view, offset):
                offset += count
                if ahead:
                    stream.will_need(offset, ahead)
                digest.update(view[:count])
                self.progress.advance(count)
        return digest.hexdigest()

    def _workers(self, files: Sequence[SourceFile]) -> int:
        """Count the threads that read whole files; for objects each needs memory."""
        if request_bytes(file.path for file in files):
            return self.limits.fit(0, files).workers
        return self.limits.workers or memory_limits.default_workers()
