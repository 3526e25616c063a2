"""Checks the files of a distributed checkpoint: the containers of all items, and their CRCs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from streamshard.formats.dcp.item_reader import audit_items, missing_file
from streamshard.formats.torch.zip_audit import StoredRecord
from streamshard.io.entries import identify, is_file
from streamshard.layout.sample import Sample
from streamshard.operations.checks.problems import MALFORMED, Findings
from streamshard.operations.checks.torch_check import TorchFiles

_MOST_LISTED = 100
"""Most items of a file whose problems are listed one by one."""


@dataclass(slots=True)
class ItemFilesCheck(TorchFiles):
    """Files of items to check: every item is a torch file of its own."""

    items: Mapping[Path, Sequence[tuple[int, int]]] = field(default_factory=dict)
    """Offset and length of each item, by file."""

    @classmethod
    def of(
        cls,
        items: Mapping[Path, Sequence[tuple[int, int]]],
        findings: Findings,
        sample: Sample,
    ) -> Self:
        """Look at the files; those that are missing are problems."""
        files = []
        for path in items:
            if is_file(path):
                files.append(identify(path))
            else:
                findings.add_error(missing_file(path), path)
        return cls(files, lambda _: None, findings, sample, items=items)

    def _records(self, path: Path) -> Sequence[StoredRecord]:
        found: list[StoredRecord] = []
        listed = unprotected = 0
        for start, audit in audit_items(path, self.items[path]):
            for problem in audit.problems:
                if listed < _MOST_LISTED:
                    message = f"{path}: item at byte {start:,}: {problem}"
                    self.findings.add(MALFORMED, path, message)
                listed += 1
            checked = [r for r in audit.records if r.crc32 or not r.nbytes]
            unprotected += len(checked) < len(audit.records)
            found += [replace(record, start=start + record.start) for record in checked]
        if unprotected:
            note = f"{path}: {unprotected:,} items whose writer left checksums out, which can"
            self.findings.notes.append(f"{note} therefore not be checked.")
        if listed > _MOST_LISTED:
            message = f"{path}: {listed - _MOST_LISTED:,} more problems of its items"
            self.findings.add(MALFORMED, path, message)
        return found
