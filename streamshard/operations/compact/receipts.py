"""The files next to an archive: its receipt, with a table of states, and SHA-256 of its files."""

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar, Final, Self

from streamshard.errors import CorruptFileError, SourceError, StreamshardError
from streamshard.formats import strict_json
from streamshard.formats.deepspeed import names
from streamshard.io.changes import remove_file, write_durably
from streamshard.io.entries import (
    examine,
    exists,
    listed_below,
    paths_in,
    paths_like,
    read_document,
)
from streamshard.io.files import require_regular, source_errors, target_errors
from streamshard.io.object_path import PACKED_SUFFIX
from streamshard.io.readable import Status

_MOST_DOCUMENT_BYTES: Final = 256 << 20
"""More bytes than a receipt or a list of sums has, with a line for each file."""
_UNFINISHED: Final = f"{names.OWN_PREFIX}.unfinished."
_RECEIPT: Final = ".receipt.json"
"""Suffix of the names of receipts."""
_SUM_LETTERS: Final = 64
_MOST_BYTES: Final = 1 << 63
_FIRST: Final = int(datetime(1, 1, 1, tzinfo=UTC).timestamp())
_LAST: Final = int(datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC).timestamp())

_TIME: Final = "time of change"
_LOOKS: Final = {"size": "nbytes", _TIME: "mtime_ns", "inode": "inode", "device": "device"}
"""What tells whether a file is the one that was archived: in words, and in its record."""

BEGUN: Final = "begun"
"""The archive is being made, or a run was interrupted while it made the archive."""
ARCHIVED: Final = "archived"
"""The archive is complete, and the tag is where it was."""
TRASHED: Final = "trashed"
"""The tag is in the trash, or about to be moved there."""
PURGED: Final = "purged"
"""The tag is removed for good, or about to be."""
DROPPING: Final = "dropping"
"""As purged, and an archive of only the weights is being made next to the full archive."""
WEIGHTS_ONLY: Final = "weights only"
"""The archive holds only the weights; the full archive is removed, or about to be."""


_TABLE: Final[Mapping[str, tuple[tuple[str, ...], str]]] = {
    ARCHIVED: ((BEGUN, ARCHIVED, TRASHED, PURGED), "kept in its place"),
    TRASHED: ((ARCHIVED, TRASHED), "moved to the trash"),
    PURGED: ((ARCHIVED, TRASHED, PURGED), "removed for good"),
    DROPPING: ((PURGED, DROPPING), "left with its weights only"),
    WEIGHTS_ONLY: ((DROPPING,), "without its full archive"),
}
"""State → the states that it can follow, and what then becomes of a tag; all else is refused. A
receipt is written before files are moved or removed, and again by a run that continues."""


@dataclass(frozen=True, slots=True)
class JsonRecord:
    """A small document next to the archives: written atomically, and read strictly."""

    FORMAT: ClassVar[int] = 1
    ADVICE: ClassVar[str] = "remove it"
    """What to do with a file that is no such record."""

    def write(self, path: Path) -> None:
        data = json.dumps({"format": self.FORMAT, **asdict(self)}, indent=1).encode()
        _write_beside(path, data)

    @classmethod
    def read(cls, path: Path) -> Self | None:
        try:
            with source_errors(path):
                if not exists(path):
                    return None
                require_regular(path, path.parent)
                return cls._parsed(read_document(path, _MOST_DOCUMENT_BYTES))
        except ValueError as error:
            message = f"{path}: not as this version of streamshard writes it ({error})"
            message = f"{message}; {cls.ADVICE}"
            raise CorruptFileError(message) from error

    @classmethod
    def _parsed(cls, data: bytes) -> Self:
        document: Any = strict_json.parse(data)
        if type(document) is not dict or document.pop("format", None) != cls.FORMAT:
            raise ValueError("of another version")
        found = strict_json.make(cls, document)
        found.require_sound()
        return found

    def require_sound(self) -> None:
        """Refuse, with a `ValueError`, values that have the right type and cannot be."""


def _write_beside(path: Path, data: bytes) -> None:
    with target_errors(path):
        write_durably(path, data, path.with_name(f"{_UNFINISHED}{path.name}"))


def remove_unfinished(directory: Path) -> None:
    """Remove unfinished files of interrupted runs; no other run may be active."""
    with target_errors(directory):
        for path in paths_like(directory, f"{_UNFINISHED}*"):
            remove_file(path)


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

    @classmethod
    def of(cls, path: str, status: Status) -> "SourceRecord":
        """Record what is known of a file without reading it."""
        return cls(path, status.nbytes, status.modified_ns, status.file_id, status.device)

    def difference(self, status: Status) -> str:
        """Say how a file differs from the one that was archived; empty if it does not."""
        now = self.of(self.path, status)
        for word, name in _LOOKS.items():
            found, known = (getattr(side, name) for side in (now, self))
            if found != known:
                shown = [_precise(v) if word == _TIME else str(v) for v in (found, known)]
                return f"has {word} {shown[0]}, was archived with {shown[1]}"
        return ""


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    holds: bool
    at: str
    told: str = ""
    """The result, or the error."""


class CheckLog:
    """The checks of a tag so far, which its receipt records."""

    def __init__(self, checks: Iterable[Check] = ()) -> None:
        self._checks = [*checks]

    @property
    def checks(self) -> tuple[Check, ...]:
        return tuple(self._checks)

    def run(self, name: str, check: Callable[[], str]) -> None:
        """Do one check and record its result; an error is recorded and raised again."""
        at = show_moment(datetime.now(UTC))
        try:
            result = check()
        except StreamshardError as error:
            self._checks.append(Check(name, False, at, str(error)))
            raise
        self._checks.append(Check(name, True, at, result))

    def holds(self, name: str, check: Callable[[], str]) -> bool:
        """Do one check and record its result only if it holds."""
        log = CheckLog()
        with suppress(StreamshardError):
            log.run(name, check)
            self._checks += log.checks
            return True
        return False


@dataclass(frozen=True, slots=True)
class Receipt(JsonRecord):
    """The record of one tag and its archive."""

    ADVICE: ClassVar[str] = "look into it"
    RETIRED: ClassVar[tuple[str, ...]] = ("dropped_states", "etags", "full_bytes", "repeated_bytes")

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
    """Files next to the tag that were left out because they had changed recently."""
    packed: bool = False
    """Whether the archive is one file."""
    source_bytes: int = 0
    archive_bytes: int = 0
    shared_bytes: int = 0
    """Bytes of the archive's files that are links to equal files in earlier archives."""
    dropped: str = ""
    """Time at which dropping the optimizer states was decided; the archive records it too."""
    sums_sha256: str = ""
    """SHA-256 of the list of the archive's files when the archive was last compared with its
    original; empty before it."""
    checks: tuple[Check, ...] = field(kw_only=True)

    def require_sound(self) -> None:
        for moment in filter(None, (self.archived, self.trashed, self.purged, self.dropped)):
            parse_moment(moment)
        sizes = self.source_bytes, self.archive_bytes, self.shared_bytes
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
    """The paths of a tag's archive and of the files next to it."""

    directory: Path
    tag: str
    of_weights: bool = False
    """Whether it is the archive without optimizer states, which has another name."""
    is_packed: bool = False
    """Whether it is one file."""

    @classmethod
    def all_in(cls, directory: Path) -> "list[ArchivedTag]":
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
        suffix = PACKED_SUFFIX if self.is_packed else ".zarr"
        return self.directory / f"{self._name}{'.weights' if self.of_weights else ''}{suffix}"

    @property
    def sums(self) -> Path:
        """The list of the SHA-256 of all files of the store, for sha256sum."""
        return self.store.with_name(f"{self.store.name}.sha256")

    @property
    def receipt(self) -> Path:
        return self.directory / f"{self._name}{_RECEIPT}"

    @property
    def going(self) -> Path:
        """The full archive while it is removed, once the archive of only the weights is proved."""
        return self.store.with_name(f"{names.OWN_PREFIX}.going.{self.store.name}")

    @property
    def leftovers(self) -> tuple[Path, Path, Path]:
        """The paths that may be left of a full archive whose states were dropped."""
        return self.store, self.going, self.sums

    def named_by(self, receipt: Receipt) -> "ArchivedTag":
        """Return the archive that a receipt names: the full one, or that of only the weights."""
        return replace(self.full_of(receipt), of_weights=receipt.state == WEIGHTS_ONLY)

    def full_of(self, receipt: Receipt) -> "ArchivedTag":
        """Return the full archive of a receipt, which may be gone."""
        return replace(self, of_weights=False, is_packed=receipt.packed)

    def read_receipt(self) -> Receipt | None:
        return Receipt.read(self.receipt)

    def require_receipt(self) -> Receipt:
        """Read the receipt, which has to be that of this tag."""
        receipt = self.read_receipt()
        if receipt is None:
            message = f"{self.receipt}: not there, so nothing tells what was archived of {self.tag}"
            raise SourceError(f"{message}; is {self.directory} mounted?")
        self.require_own(receipt)
        return receipt

    def require_own(self, receipt: Receipt) -> None:
        if receipt.tag != self.tag:
            raise CorruptFileError(f"{self.receipt}: is the receipt of {receipt.tag}")

    def since(self, moment: str, where: str) -> datetime:
        try:
            return parse_moment(moment).astimezone(UTC)
        except (ValueError, OverflowError) as error:
            message = f"{self.receipt}: does not say since when {self.tag} is {where} ({error})"
            raise CorruptFileError(message) from error

    def require_possible(self, receipt: Receipt, state: str) -> None:
        """Require that a state can follow that of the receipt."""
        before, what = _TABLE[state]
        if receipt.state not in before:
            message = f"{self.receipt}: says '{receipt.state}' of a tag that is to be {what}"
            raise SourceError(message)

    def record(self, receipt: Receipt, state: str, **facts: Any) -> Receipt:  # noqa: ANN401
        """Write the receipt with its next state, durably."""
        self.require_possible(receipt, state)
        after = replace(receipt, state=state, **facts)
        after.write(self.receipt)
        return after

    def write_sums(self, sums: Mapping[str, str]) -> None:
        """Write the list durably; `sums` has the SHA-256 of every file by its path in the store."""
        lines = (_line(f"{self._listed}{path}", digest) for path, digest in sums.items())
        _write_beside(self.sums, "".join(lines).encode("utf-8", "surrogateescape"))

    def read_sums(self) -> dict[str, str]:
        """Read the list; returns the SHA-256 of every file by its path in the store."""
        with source_errors(self.sums):
            text = read_document(self.sums, _MOST_DOCUMENT_BYTES).decode("utf-8", "surrogateescape")
        found = dict(map(_parse, text.splitlines()))
        if not found or not all(path.startswith(self._listed) for path in found):
            raise CorruptFileError(f"{self.sums}: no list of the files of {self.store}")
        return {path.removeprefix(self._listed): digest for path, digest in found.items()}

    @property
    def _listed(self) -> str:
        """What the paths in the list begin with; the path of a store in one file is empty."""
        return self.store.name if self.is_packed else f"{self.store.name}/"

    def sums_sha256(self) -> str:
        """Compute the SHA-256 of the list itself, which identifies the whole archive."""
        with source_errors(self.sums):
            return sha256(read_document(self.sums, _MOST_DOCUMENT_BYTES)).hexdigest()

    def statuses(self) -> dict[str, Status]:
        """Return the present status of each file of the archive by its path in the store."""
        with source_errors(self.store):
            if self.is_packed:
                return {"": examine(self.store)}
            found = [entry for entry in listed_below(self.store) if not entry.is_directory]
            return {one.path.relative_to(self.store).as_posix(): one.status() for one in found}

    def files(self) -> list[str]:
        return sorted(self.statuses())


def _precise(epoch_ns: int) -> str:
    return f"{moment_of(epoch_ns):%Y-%m-%d %H:%M:%S}.{epoch_ns % 10**9:09d} UTC"


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


def parse_moment(text: str) -> datetime:
    """Parse a time in a receipt.

    >>> str(parse_moment("2026-11-20T22:00:00+00:00"))
    '2026-11-20 22:00:00+00:00'
    """
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError(f"{text!r} is without a time zone")
    return moment


def moment_of(epoch_ns: int) -> datetime:
    """Return a time of change, or the closest that can be shown: file systems keep any number.

    >>> str(moment_of(1 << 90))
    '9999-12-31 23:59:59+00:00'
    """
    return datetime.fromtimestamp(min(max(epoch_ns // 10**9, _FIRST), _LAST), UTC)


def show_moment(at: datetime) -> str:
    """Serialize a time for a receipt, with full precision: the grace time is counted from it.

    >>> show_moment(datetime(2026, 11, 21, 4, 5, tzinfo=UTC))
    '2026-11-21T04:05:00+00:00'
    """
    return at.astimezone(UTC).isoformat()
