"""Checks torch files: their containers, and the CRC of every record."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Final, Self

from streamshard.checks.problems import DAMAGED, DISAGREEMENT, MALFORMED, UNREADABLE, Findings
from streamshard.checks.scan import Result, ScanPiece, Unit
from streamshard.checksums import difference, join_crc32
from streamshard.engine.scan.probe import Probe
from streamshard.formats.deepspeed import names
from streamshard.formats.torch import zip_audit
from streamshard.formats.torch.torch_file import LACKS_CHECKSUMS
from streamshard.formats.torch.zip_audit import StoredRecord, TorchAudit
from streamshard.io.entries import identify
from streamshard.model import SourceFile
from streamshard.sizes import some_of

_PIECE_BYTES: Final = 16 << 20
"""Workers get large records in pieces of this size."""

Owner = Callable[[str], object]
"""Returns the owner of a file from its name: kind and rank; None if the name says nothing."""


@dataclass(slots=True)
class TorchFiles:
    """Files to check; those whose names have an owner must be torch files."""

    files: Sequence[SourceFile]
    owner: Owner
    findings: Findings
    _unprotected: list[str] = field(default_factory=list)
    """Files that hold no checksums at all."""

    @classmethod
    def at(cls, paths: Iterable[Path], owner: Owner, findings: Findings) -> Self:
        """Return the files at some paths, as they are now, each once."""
        return cls([identify(path) for path in dict.fromkeys(paths)], owner, findings)

    def units(self) -> Iterator[Unit]:
        for index, file in enumerate(self.files):
            for record in self._readable_records(file.path):
                if record.nbytes:
                    yield self._unit(index, record)
            self.findings.files += 1
        if self._unprotected:
            few = some_of(self._unprotected)
            self.findings.notes.append(f"Files without checksums, not read: {few}.")

    def _readable_records(self, path: Path) -> Sequence[StoredRecord]:
        try:
            return self._records(path)
        except OSError as error:
            message = f"{path}: cannot be read ({error.strerror})"
            self.findings.add(UNREADABLE, path, message)
            return ()

    def _records(self, path: Path) -> Sequence[StoredRecord]:
        """Check a file's container, and return the records that can be read and compared."""
        owner = self.owner(path.name)
        if owner is None and not zip_audit.is_torch_file(path):
            self._unprotected.append(path.name)
            return ()
        audit = zip_audit.audit(path)
        for problem in audit.problems:
            self.findings.add(MALFORMED, path, f"{path}: {problem}")
        saved_as = self.owner(audit.root + path.suffix)
        if owner is not None and saved_as not in (None, owner):
            message = (
                f"{path}: was saved as {audit.root:.100}{path.suffix}; have the two been swapped?"
            )
            self.findings.add(DISAGREEMENT, path, message)
        if _lacks_checksums(audit):
            note = f"{path}: {LACKS_CHECKSUMS}"
            self.findings.notes += [note] if note not in self.findings.notes else []
            others = [r for r in audit.records if not r.name.startswith(zip_audit.DATA)]
            return others if any(record.crc32 for record in others) else ()
        return audit.records

    def _unit(self, file: int, record: StoredRecord) -> Unit:
        stop = record.start + record.nbytes
        cuts = [*range(record.start, stop, _PIECE_BYTES), stop]
        pieces = [
            ScanPiece(after - before, partial(Probe.crc32, file=file, start=before, stop=after))
            for before, after in pairwise(cuts)
        ]
        sizes = [piece.nbytes for piece in pieces]
        path = self.files[file].path
        failed = partial(self.findings.add_error, place=path)
        return Unit(pieces, partial(self._judge, path, record, sizes), failed)

    def _judge(
        self, path: Path, record: StoredRecord, sizes: Sequence[int], results: Sequence[Result]
    ) -> None:
        crc32 = 0
        for size, result in zip(sizes, results, strict=True):
            crc32 = join_crc32(crc32, result, size)
        self.findings.checked += 1
        if crc32 != record.crc32:
            message = difference(record.name, record.nbytes, crc32, record.crc32)
            self.findings.add(DAMAGED, path, f"{path}: {message}")


def _lacks_checksums(audit: TorchAudit) -> bool:
    """Tell whether a writer left zeros where the CRCs of tensor data belong."""
    data = [r for r in audit.records if r.name.startswith(zip_audit.DATA) and r.nbytes]
    return bool(data) and not any(record.crc32 for record in data)


def deepspeed_owner(name: str) -> object:
    """Return the owner in the name of a checkpoint file: its ranks, or its part of the model."""
    parsed = names.parse(name)
    if parsed is None:
        return None
    return name if parsed.kind == "part" else (parsed.kind, parsed.dp_rank, parsed.mp_rank)
