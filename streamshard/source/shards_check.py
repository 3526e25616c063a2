"""Checks a set of shards, and explains file by file why it cannot be opened."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from streamshard.checks.problems import UNREADABLE, Findings
from streamshard.checks.torch_check import TorchFiles, deepspeed_owner
from streamshard.errors import (
    IntegrityError,
    SourceError,
    SourceNotFoundError,
    StreamshardError,
    UnsupportedError,
    UsageError,
    release_frames,
)
from streamshard.formats.deepspeed.read.validation import SetErrors, validate
from streamshard.io.entries import is_directory, is_file, paths_below
from streamshard.io.files import require_regular, stays_inside
from streamshard.source.sidecars import may_come_along
from streamshard.source.source import Kind, Request, Source
from streamshard.source.structure import CheckedStructure
from streamshard.source.tag_directory import find_tag


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
    is_of_a_kind = isinstance(error, UnsupportedError) and not (errors.per_file or readable.others)
    for found in (*errors.per_file, *(() if is_of_a_kind else errors.together)):
        findings.add_error(found, place)
    if not isinstance(error, IntegrityError):  # reading all records finds the damaged one
        findings.add_unexplained(error, place)


def check_native(kind: Kind, place: Path, request: Request, findings: Findings) -> CheckedStructure:
    """Check the structure of a tag directory; all problems are added to the findings."""
    try:
        run_dir, tag_dir = find_tag(place, request.tag)
    except SourceNotFoundError:
        raise
    except SourceError as error:
        if not is_directory(place):
            raise
        findings.add_error(error, place)
        return CheckedStructure(kind, None)
    opened: Source | None = None
    try:
        opened = request.open()
        paths: Iterable[Path] = [file.path for file in opened.files]
        findings.notes += opened.checkpoint.remarks
    except SourceNotFoundError:
        raise
    # The user's options were checked before, so a UsageError is about a config in the files.
    except (SourceError, IntegrityError, UsageError) as error:
        release_frames(error)
        beside = [p for p in may_come_along(run_dir) if is_file(p) and stays_inside(p, run_dir)]
        entries = [*sorted(paths_below(tag_dir)), *sorted(beside)]
        readable = ReadableFiles(entries, [run_dir, tag_dir], findings)
        explain(error, findings, tag_dir, validate(tag_dir, readable.others), readable)
        paths = readable.files
    torch = TorchFiles.at(paths, deepspeed_owner, findings)
    tag = tag_dir.relative_to(run_dir).as_posix()
    return CheckedStructure(kind, tag, torch.files, torch.units, source=opened)
