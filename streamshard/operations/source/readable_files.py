"""Explains why a set of shards cannot be opened, file by file."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from streamshard.errors import IntegrityError, SourceError, StreamshardError, UnsupportedError
from streamshard.formats.deepspeed.read.validation import SetErrors
from streamshard.io.entries import is_directory
from streamshard.io.files import require_regular, stays_inside
from streamshard.operations.checks.problems import UNREADABLE, Findings


class ReadableFiles:
    """The files that can be read; the problems of the others are added to the findings."""

    def __init__(self, entries: Iterable[Path], roots: Sequence[Path], findings: Findings) -> None:
        self.files: list[Path] = []
        self.others: set[Path] = set()
        for entry in entries:
            try:
                if is_directory(entry) and stays_inside(entry, *roots):
                    continue
                require_regular(entry, *roots)
                self.files.append(entry)
            except (OSError, SourceError) as error:
                if isinstance(error, OSError):
                    message = f"{entry}: cannot be read ({error.strerror})"
                    findings.add(UNREADABLE, entry, message)
                else:
                    findings.add_error(error, entry)
                self.others.add(entry)


def explain(
    error: StreamshardError,
    findings: Findings,
    place: Path,
    errors: SetErrors,
    readable: ReadableFiles,
) -> None:
    """Add all problems of a set of shards that cannot be opened."""
    # For an unsupported kind of checkpoint it is not known which files belong together, so such
    # problems are left out. But if a single file is refused, that is the reason, whatever the kind.
    is_of_a_kind = isinstance(error, UnsupportedError) and not (errors.own or readable.others)
    for found in (*errors.own, *(() if is_of_a_kind else errors.together)):
        findings.add_error(found, place)
    if not isinstance(error, IntegrityError):  # reading all records finds the damaged one
        findings.add_unexplained(error, place)
