"""Describes a source that `inspect` cannot open: several checkpoints, or an incomplete one."""

import os
from dataclasses import replace
from pathlib import Path

from streamshard.checks.problems import Findings
from streamshard.errors import (
    CorruptFileError,
    DisagreementError,
    IncompleteError,
    SourceError,
    StreamshardError,
    release_frames,
)
from streamshard.formats.deepspeed import names
from streamshard.formats.deepspeed.read.validation import recorded
from streamshard.formats.zarr.store_index import is_hierarchy
from streamshard.io.entries import exists, is_directory, is_file
from streamshard.io.object_path import as_path
from streamshard.operations.inspect.checkpoint_list import summaries
from streamshard.operations.inspect.file_groups import group_files, natural_order
from streamshard.operations.inspect.inspect_report import (
    CheckpointList,
    CheckpointSummary,
    FileSummary,
    IncompleteCheckpoint,
)
from streamshard.operations.inspect.page_file import require_free, write_page
from streamshard.options import Path_, SourceOptions
from streamshard.registry import reader_of
from streamshard.source import structure
from streamshard.source.candidates import may_be_finished
from streamshard.source.source import Request, requests
from streamshard.source.tag_directory import find_tag
from streamshard.source.unfinished import is_unfinished
from streamshard.transfer.target import require_separate


def describe_unopened(
    error: SourceError, source: Path_, options: SourceOptions
) -> CheckpointList | IncompleteCheckpoint | None:
    """Describe a source that could not be opened; return None if there is nothing to list."""
    root = as_path(source)
    release_frames(error)
    try:
        if is_unfinished(root):
            return None
        if options.tag is None and is_directory(root) and _needs_choice(root):
            return _directory(root, error)
        if not isinstance(error, IncompleteError | CorruptFileError | DisagreementError):
            return None
        return _incomplete(*requests(options, source))
    except (StreamshardError, OSError):
        return None  # the first error is more useful


def draw_unopened(
    report: CheckpointList | IncompleteCheckpoint, source: Path_, html: Path_
) -> CheckpointList | IncompleteCheckpoint:
    # Not at the top: only few runs draw anything.
    from streamshard.operations.inspect.inspect_page import unopened_page

    path = as_path(html)
    require_free(path)
    require_separate(as_path(source), path)
    return replace(report, pictures=(write_page(path, unopened_page(report)),))


def _needs_choice(root: Path) -> bool:
    try:
        find_tag(root, None)
    except (SourceError, OSError):
        return not is_hierarchy(root)
    return False


def _directory(root: Path, error: SourceError) -> CheckpointList | None:
    """List a directory's checkpoints; tags without a `latest` next to them are a problem."""
    checkpoints = summaries(root)
    is_run = exists(root / names.LATEST) or any(
        "/" not in checkpoint.path
        and reader_of(checkpoint.kind).is_tag
        and may_be_finished(root / checkpoint.path)
        and not is_file(root / checkpoint.path / names.LATEST)
        for checkpoint in checkpoints
    )
    return CheckpointList(
        str(root), "directory", checkpoints, (str(error),) if is_run else ()
    ) if checkpoints else None  # fmt: skip


def _incomplete(request: Request) -> IncompleteCheckpoint:
    findings = Findings()
    checked = structure.check_structure(request, findings)
    template, root = request.template, as_path(request.path)
    base = template.directory if template else root
    checkpoints: tuple[CheckpointSummary, ...] = ()
    if checked.kind.is_tag:
        base, tag_dir = find_tag(root, request.tag)
        if base == root and request.tag is None and tag_dir.parent == root:
            checkpoints = summaries(root)
    files = tuple(
        sorted(
            (FileSummary(os.path.relpath(f.path, base), f.nbytes) for f in checked.files),
            key=lambda file: natural_order(file.path),
        )
    )
    record = recorded(f.path for f in checked.files if checked.kind.is_shard(f.path))
    return IncompleteCheckpoint(
        path=str(base),
        kind=checked.kind.name,
        is_whole=False,
        tag=checked.tag,
        zero_stage=record.zero_stage,
        world_size=record.world_size,
        global_steps=record.global_steps,
        deepspeed_version=record.version,
        files=len(files),
        file_bytes=sum(file.nbytes for file in files),
        file_groups=group_files(files, checked.kind),
        file_list=files,
        problems=tuple(problem.message for problem in findings.problems),
        checkpoints=checkpoints,
    )
