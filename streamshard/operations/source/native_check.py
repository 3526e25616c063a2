"""Checks the structure of a tag directory, as DeepSpeed saves it."""

from collections.abc import Iterable
from pathlib import Path

from streamshard.errors import (
    IntegrityError,
    SourceError,
    SourceNotFoundError,
    UsageError,
    release_frames,
)
from streamshard.formats.deepspeed.read.validation import validate
from streamshard.io.entries import is_directory, is_file, paths_below
from streamshard.io.files import stays_inside
from streamshard.operations.checks.problems import Findings
from streamshard.operations.checks.structure import CheckedStructure
from streamshard.operations.checks.torch_check import TorchFiles, deepspeed_owner
from streamshard.operations.source.readable_files import ReadableFiles, explain
from streamshard.operations.source.sidecars import may_come_along
from streamshard.operations.source.source import Kind, Request, Source
from streamshard.operations.source.tag_directory import find_tag


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
