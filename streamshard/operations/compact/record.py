"""Small JSON documents beside the archives: written atomically, and read strictly."""

import json
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar, Final, Self

from streamshard.errors import CorruptFileError
from streamshard.formats import strict_json
from streamshard.formats.deepspeed import names
from streamshard.formats.links import require_regular
from streamshard.io.changes import remove_file, write_durably
from streamshard.io.entries import exists, paths_like, read_document
from streamshard.io.files import source_errors, target_errors

MOST_BYTES: Final = 256 << 20
"""More bytes than a receipt or a list of sums has, with a line for each file."""
_UNFINISHED: Final = f"{names.OWN_PREFIX}.unfinished."


@dataclass(frozen=True, slots=True)
class JsonRecord:
    """What all records have in common."""

    FORMAT: ClassVar[int] = 1
    ADVICE: ClassVar[str] = "remove it"
    """What to do with a file that is no such record."""

    def write(self, path: Path) -> None:
        """Write the record durably."""
        data = json.dumps({"format": self.FORMAT, **asdict(self)}, indent=1).encode()
        write_beside(path, data)

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Read a record; None if there is none."""
        try:
            with source_errors(path):
                if not exists(path):
                    return None
                require_regular(path, path.parent)
                return cls._parsed(read_document(path, MOST_BYTES))
        except ValueError as error:
            message = f"{path}: not as streamshard writes it ({error}); {cls.ADVICE}"
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


def write_beside(path: Path, data: bytes) -> None:
    """Write a file beside the archives durably."""
    with target_errors(path):
        write_durably(path, data, path.with_name(f"{_UNFINISHED}{path.name}"))


def remove_unfinished(directory: Path) -> None:
    """Remove unfinished files of interrupted runs; no other run may be active."""
    with target_errors(directory):
        for path in paths_like(directory, f"{_UNFINISHED}*"):
            remove_file(path)


def require_moments(*moments: str) -> None:
    """Refuse texts that are neither empty nor times with a time zone."""
    for moment in filter(None, moments):
        if datetime.fromisoformat(moment).tzinfo is None:
            raise ValueError(f"{moment!r} is without a time zone")
