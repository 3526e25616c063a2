"""Draws on a page what became of the checkpoints of runs: kept, archived, in the trash, gone."""

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import Any

from streamshard.drawing.page import page
from streamshard.errors import StreamshardError, release_frames
from streamshard.formats.deepspeed.names import step_of
from streamshard.io.object_path import as_path
from streamshard.operations.compact.compact_status import CompactStatus
from streamshard.operations.compact.prune import Tag, by_step
from streamshard.operations.compact.receipts import moment_of, show_moment
from streamshard.operations.compact.run_directory import scan_run_directory
from streamshard.operations.inspect.inspect_report import FileSummary
from streamshard.operations.inspect.page_file import require_free, write_page
from streamshard.transfer.target import require_separate


def draw_status(found: Sequence[CompactStatus], html: str | os.PathLike[str]) -> FileSummary:
    """Write a page of the state of runs, with the tags in them as their headers tell."""
    path = as_path(html)
    require_free(path)
    for status in found:
        for place in (status.run_dir, status.archive_dir):
            require_separate(as_path(place), path)
    document = {
        "runs": [{**asdict(status), **_content(as_path(status.run_dir))} for status in found]
    }
    title = PurePosixPath(found[0].run_dir).name if len(found) == 1 else f"{len(found):,} runs"
    return write_page(path, page(title, document))


def _content(run_dir: Path) -> dict[str, Any]:
    """Describe the tags in a run directory, and say which one a job resumes from."""
    try:
        run = scan_run_directory(run_dir)
    except StreamshardError as error:
        release_frames(error)
        return {"latest": None, "problem": str(error), "present": []}
    tags = [_described(tag) for tag in sorted(run.tags, key=lambda tag: by_step(tag.name))]
    return {"latest": run.latest, "problem": run.problem, "present": tags}


def _described(tag: Tag) -> dict[str, Any]:
    return {
        "tag": tag.name,
        "step": step_of(tag.name),
        "nbytes": tag.nbytes,
        "changed": show_moment(moment_of(tag.changed_ns)),
        "problem": tag.problem,
    }
