"""Reads and writes the files beside an archive: the SHA-256 of its files, and its receipt."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import ClassVar, Final

from streamshard.errors import CorruptFileError
from streamshard.formats.deepspeed import names
from streamshard.io.entries import exists, listed_below, paths_in, read_document
from streamshard.io.files import source_errors
from streamshard.io.object_path import is_object
from streamshard.io.readable import Status
from streamshard.operations.compact.record import (
    MOST_BYTES,
    JsonRecord,
    require_moments,
    write_beside,
)

_SUM_LETTERS: Final = 64
_MOST_BYTES: Final = 1 << 63

_TIME: Final = "time of change"
_LOOKS: Final = {
    "size": "nbytes", _TIME: "mtime_ns", "inode": "inode", "device": "device", "etag": "etag"
}  # fmt: skip
"""What tells whether a file is the one that was archived: in words, and in its record."""

_RECEIPT: Final = ".receipt.json"
"""Suffix of the names of receipts."""

BEGUN: Final = "begun"
"""The archive is being made, or a run was interrupted while it made the archive."""
ARCHIVED: Final = "archived"
"""The archive is complete, and the tag is where it was."""
TRASHED: Final = "trashed"
"""The tag is in the trash, or about to be moved there."""
PURGED: Final = "purged"
"""The tag is removed for good, or about to be."""
DROPPING: Final = "dropping"
"""As purged, and an archive of only the weights is being made beside the full archive."""
WEIGHTS_ONLY: Final = "weights only"
"""The archive holds only the weights; the full archive is removed, or about to be."""


@dataclass(frozen=True, slots=True)
class SourceRecord:
    """A file from which an archive was made."""

    path: str
    """Relative to the run directory."""
    nbytes: int
    mtime_ns: int
    inode: int
    device: int
    sha256: str = ""
    etag: str = ""
    """Of an object; of a local file empty."""

    @classmethod
    def of(cls, path: str, status: Status) -> "SourceRecord":
        """JsonRecord what is known of a file without reading it."""
        ids = status.file_id, status.device
        return cls(path, status.nbytes, status.modified_ns, *ids, etag=etag_of(status))

    def difference(self, status: Status) -> str:
        """Say how a file differs from the one that was archived; empty if it does not."""
        now = self.of(self.path, status)
        for word, name in _LOOKS.items():
            found, known = (getattr(side, name) for side in (now, self))
            if found != known:
                shown = [_moment(v) if word == _TIME else str(v) for v in (found, known)]
                return f"has {word} {shown[0]}, was archived with {shown[1]}"
        return ""


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check."""

    name: str
    holds: bool
    at: str
    told: str = ""
    """The result, or the error."""


@dataclass(frozen=True, slots=True)
class Receipt(JsonRecord):
    """The record of one tag and its archive."""

    ADVICE: ClassVar[str] = "look into it"

    tag: str
    run_dir: str
    device: int
    """Device of the run directory; `inode` is the directory's too."""
    inode: int
    state: str
    archived: str = ""
    """Time of archiving, in UTC as all times here; empty before it."""
    trashed: str = ""
    purged: str = ""
    source: tuple[SourceRecord, ...] = field(kw_only=True)
    derived: tuple[str, ...] = ()
    """Arrays that are left out because they are exact casts of others."""
    left_out: tuple[str, ...] = ()
    """Files beside the tag that were left out because they had changed recently."""
    source_bytes: int = 0
    archive_bytes: int = 0
    shared_files: int = 0
    """Count of the archive's files that are links to equal files in earlier archives."""
    shared_bytes: int = 0
    dropped: str = ""
    """Time at which dropping the optimizer states was decided; the archive records it too."""
    dropped_states: tuple[str, ...] = ()
    full_bytes: int = 0
    """Size of the full archive before the states were dropped; 0 while it has them."""
    sums_sha256: str = ""
    """SHA-256 of the list of the archive's files when the archive was last compared with its
    original; empty in receipts of early versions."""
    etags: Mapping[str, str] = field(default_factory=dict)
    """Path in the archive → etag of its object then; empty for an archive on a disk."""
    checks: tuple[Check, ...] = field(kw_only=True)

    def require_sound(self) -> None:
        """Refuse times without a time zone, and sizes that nothing has."""
        require_moments(self.archived, self.trashed, self.purged, self.dropped)
        sizes = self.source_bytes, self.archive_bytes, self.shared_bytes, self.full_bytes
        if not all(0 <= nbytes < _MOST_BYTES for nbytes in sizes):
            raise ValueError("holds a size that nothing has")

    def below_tag(self) -> dict[str, SourceRecord]:
        """Return the files of the tag directory by their path in it."""
        prefix = f"{self.tag}/"
        return {
            record.path.removeprefix(prefix): record
            for record in self.source
            if record.path.startswith(prefix)
        }


@dataclass(frozen=True, slots=True)
class ArchivedTag:
    """The paths of a tag's archive and of the files beside it."""

    directory: Path
    tag: str
    of_weights: bool = False
    """Whether it is the archive without optimizer states, which has another name."""

    @classmethod
    def all_in(cls, directory: Path) -> "list[ArchivedTag]":
        """List the places of all archives that have a receipt."""
        with source_errors(directory):
            found = paths_in(directory) if exists(directory) else iter(())
            known = sorted(entry.name for entry in found if entry.name.endswith(_RECEIPT))
        own = (name for name in known if not name.startswith(names.OWN_PREFIX))
        return [cls(directory, names.unflat(name.removesuffix(_RECEIPT))) for name in own]

    @property
    def _name(self) -> str:
        """File name made from the tag, which may be a path."""
        return names.flat(self.tag)

    @property
    def store(self) -> Path:
        """The archive's store."""
        return self.directory / f"{self._name}{'.weights' if self.of_weights else ''}.zarr"

    @property
    def sums(self) -> Path:
        """The list of the SHA-256 of all files of the store, for sha256sum."""
        return self.store.with_name(f"{self.store.name}.sha256")

    @property
    def receipt(self) -> Path:
        """The receipt, which records the checks."""
        return self.directory / f"{self._name}{_RECEIPT}"

    def held(self, receipt: Receipt) -> "ArchivedTag":
        """Return the place of the archive that a receipt says is complete: full or only weights."""
        return replace(self, of_weights=receipt.state == WEIGHTS_ONLY)

    def write_receipt(self, receipt: Receipt) -> None:
        """Write the receipt durably."""
        receipt.write(self.receipt)

    def read_receipt(self) -> Receipt | None:
        """Read the receipt; None if there is none."""
        return Receipt.read(self.receipt)

    def write_sums(self, sums: Mapping[str, str]) -> None:
        """Write the list durably; `sums` has the SHA-256 of every file by its path in the store."""
        lines = (_line(f"{self.store.name}/{path}", digest) for path, digest in sums.items())
        write_beside(self.sums, "".join(lines).encode("utf-8", "surrogateescape"))

    def read_sums(self) -> dict[str, str]:
        """Read the list; returns the SHA-256 of every file by its path in the store."""
        with source_errors(self.sums):
            text = read_document(self.sums, MOST_BYTES).decode("utf-8", "surrogateescape")
        prefix = f"{self.store.name}/"
        found = dict(map(_parse, text.splitlines()))
        if not found or not all(path.startswith(prefix) for path in found):
            raise CorruptFileError(f"{self.sums}: no list of the files of {self.store}")
        return {path.removeprefix(prefix): digest for path, digest in found.items()}

    def sums_sha256(self) -> str:
        """Compute the SHA-256 of the list itself, which identifies the whole archive."""
        with source_errors(self.sums):
            return sha256(read_document(self.sums, MOST_BYTES)).hexdigest()

    def statuses(self) -> dict[str, Status]:
        """Return the present status of each file of the archive by its path in the store."""
        with source_errors(self.store):
            found = [entry for entry in listed_below(self.store) if not entry.is_directory]
            return {one.path.relative_to(self.store).as_posix(): one.status() for one in found}

    def files(self) -> list[str]:
        """List the files of the archive as they are now."""
        return sorted(self.statuses())

    def etags(self) -> dict[str, str]:
        """Return the present etag of each object of the archive; of one on a disk nothing."""
        if not is_object(self.store):
            return {}
        return {path: etag_of(status) for path, status in sorted(self.statuses().items())}


def etag_of(status: Status) -> str:
    """Return the etag of an object; empty for a local file, which has an inode.

    Without quotation marks, which some services leave out in their listings.
    """
    return "" if status.file_id or status.device else status.version.strip('"')


def _moment(epoch_ns: int) -> str:
    """Format the time of a file for a message."""
    try:
        moment = datetime.fromtimestamp(epoch_ns // 10**9, UTC)
    except (OSError, OverflowError, ValueError):  # some file systems keep any number
        return f"{epoch_ns} ns"
    return f"{moment:%Y-%m-%d %H:%M:%S}.{epoch_ns % 10**9:09d} UTC"


def _line(path: str, digest: str) -> str:
    r"""Serialize a line as sha256sum does.

    >>> _line("a/b", "00"), _line("a\\b", "00")
    ('00  a/b\n', '\\00  a\\\\b\n')
    """
    escaped = path.replace("\\", "\\\\")
    return f"{chr(92) if escaped != path else ''}{digest}  {escaped}\n"


def _parse(line: str) -> tuple[str, str]:
    """Parse a line of sha256sum into (path, digest).

    >>> _parse("0" * 64 + "  a/b")[0]
    'a/b'
    """
    is_escaped = line.startswith("\\")
    digest, _, path = line.removeprefix("\\").partition("  ")
    if len(digest) != _SUM_LETTERS or not path:
        raise CorruptFileError(f"{line[:80]!r} is not a line of sha256sum's")
    if is_escaped:
        path = path.replace("\\\\", "\\")
    return path, digest


def age_at(now: datetime, since: str) -> timedelta:
    """Return how long ago a time in a receipt was.

    >>> str(age_at(datetime(2026, 11, 21, tzinfo=UTC), "2026-11-20T22:00:00+00:00"))
    '2:00:00'
    """
    then = datetime.fromisoformat(since)
    if then.tzinfo is None:
        raise ValueError("without a time zone")
    return now.astimezone(UTC) - then


def show_moment(at: datetime) -> str:
    """Serialize a time for a receipt, with full precision: the grace time is counted from it.

    >>> show_moment(datetime(2026, 11, 21, 4, 5, tzinfo=UTC))
    '2026-11-21T04:05:00+00:00'
    """
    return at.astimezone(UTC).isoformat()


def moment_after(since: str, time: timedelta) -> str:
    """Serialize the time so long after a time in a receipt.

    >>> moment_after("2026-11-21T04:05:00+00:00", timedelta(days=7))
    '2026-11-28T04:05:00+00:00'
    """
    return show_moment(datetime.fromisoformat(since) + time)
