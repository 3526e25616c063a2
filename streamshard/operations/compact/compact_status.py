"""What `compact` has done so far, as a report or on a page: tags archived, in the trash or gone."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path, PurePosixPath
from typing import Any, Final

from streamshard.drawing.page import page
from streamshard.errors import SourceError, StreamshardError, release_frames
from streamshard.formats.deepspeed.names import step_of
from streamshard.io.entries import exists, lexists
from streamshard.io.files import source_errors
from streamshard.io.object_path import as_path
from streamshard.operations.compact.compact_report import IN_TRASH, LAST_RUN, RunRecord
from streamshard.operations.compact.prune import Tag, by_step
from streamshard.operations.compact.receipts import (
    ARCHIVED,
    BEGUN,
    PURGED,
    WEIGHTS_ONLY,
    ArchivedTag,
    Receipt,
    moment_of,
    show_moment,
)
from streamshard.operations.compact.run_directory import (
    directory_status,
    require_on_disk,
    scan_run_directory,
)
from streamshard.operations.compact.tag_health import HealthRecord, TagHealth
from streamshard.operations.compact.trash import Trash
from streamshard.operations.inspect.inspect_report import FileSummary
from streamshard.operations.inspect.page_file import require_free, write_page
from streamshard.transfer.target import require_separate
from streamshard.verb_options import DEFAULT_GRACE

_UNREADABLE: Final = "unreadable"
GONE: Final = (PURGED, WEIGHTS_ONLY)
"""States in which the original is gone."""


@dataclass(frozen=True, slots=True)
class TagStatus:
    """What is left of one tag."""

    tag: str
    step: int | None
    """The number at the end of its name."""
    state: str
    """`begun`, as its archive is not complete; `archived`, and the original is where it was; `in
    the trash`; `purged`, as the original is gone, or about to be; `weights only`, as the archive's
    optimizer states are gone too; `unreadable`, of a receipt."""
    archived: str = ""
    """Time of archiving in UTC, in ISO 8601."""
    trash_until: str = ""
    """Time from which the original may be removed for good; empty if it is not in the trash."""
    source_bytes: int = 0
    archive_bytes: int = 0
    """Bytes of the archive, without files that it shares with earlier archives."""
    problem: str = ""
    """Why its receipt cannot be read."""


@dataclass(frozen=True, slots=True)
class CompactStatus:
    """The state of a run directory and its archives."""

    run_dir: str
    archive_dir: str
    """Absolute paths, or URLs."""
    tags: tuple[TagStatus, ...]
    """All tags that have a receipt, by step."""
    archive_bytes: int
    trash_bytes: int
    """Bytes that are free once the trash is empty."""
    saved_bytes: int
    """Bytes of originals that are gone, less those of their archives."""
    last_run: RunRecord | None
    """The last run by the rules; None before the first."""
    newest_healthy: str = ""
    """The newest tag that a run found whole and without NaN; empty if none is known."""
    unhealthy: tuple[str, ...] = ()
    """Newer tags, which a run found not healthy, by step."""
    unhealthy_since: str = ""
    """Time in UTC at which the first of these was saved; empty if there is none."""

    @property
    def problems(self) -> list[str]:
        """What could not be read."""
        return [tag.problem for tag in self.tags if tag.problem]


def compact_status(
    run_dir: str | os.PathLike[str], archive_dir: str | os.PathLike[str]
) -> CompactStatus:
    """Report what `compact` has done with a run directory so far; changes and locks nothing.

    Parameters
    ----------
    run_dir, archive_dir
        As `compact` takes them.

    Raises
    ------
    UsageError
        The run directory is in a bucket.
    SourceError
        One of both directories, or the record of the last run, cannot be read. Before the first
        run there is no directory of archives, and the status is that of no tags.
    """
    run, archive = as_path(run_dir).absolute(), as_path(archive_dir).absolute()
    require_on_disk(run)
    directory_status(run)
    trash = Trash(run)
    with source_errors(archive):
        is_new = not exists(archive) and not trash.all_tags()
    if not is_new:
        directory_status(archive)
    last = RunRecord.read(archive / LAST_RUN)
    grace = timedelta(seconds=last.grace_seconds) if last else DEFAULT_GRACE
    tags = sorted(_tags(run, archive, grace), key=lambda tag: by_step(tag.tag))
    gone = [tag for tag in tags if tag.state in GONE]
    known = [*_read_tags(run, archive)]
    good = max((by_step(one.tag) for one in known if not one.unhealthy), default=None)
    bad = [one for one in known if good is None or by_step(one.tag) > good]
    return CompactStatus(
        run_dir=str(run),
        archive_dir=str(archive),
        tags=tuple(tags),
        archive_bytes=sum(tag.archive_bytes for tag in tags),
        trash_bytes=sum(tag.source_bytes for tag in tags if tag.state == IN_TRASH),
        saved_bytes=sum(tag.source_bytes - tag.archive_bytes for tag in gone),
        last_run=last,
        newest_healthy="" if good is None else good[1],
        unhealthy=tuple(one.tag for one in bad),
        unhealthy_since=min((one.saved for one in bad), default=""),
    )


def _read_tags(run_dir: Path, archive_dir: Path) -> list[TagHealth]:
    """List the tags that a run of `compact` has read, and that are still there, by step."""
    known = [one for one in HealthRecord.of(archive_dir).tags if one.saved]
    with source_errors(run_dir):
        there = [one for one in known if lexists(run_dir / one.tag)]
    return sorted(there, key=lambda one: by_step(one.tag))


def _tags(run_dir: Path, archive_dir: Path, grace: timedelta) -> Iterator[TagStatus]:
    trash = Trash(run_dir)
    in_trash, being_removed = {*trash.tags()}, {*trash.being_removed()}
    for archived in ArchivedTag.all_in(archive_dir):
        step, until = step_of(archived.tag), ""
        try:
            receipt = archived.read_receipt()
            if receipt is None:
                continue  # removed meanwhile
            state = _state(receipt, run_dir, in_trash, being_removed)
            if state == IN_TRASH:
                until = show_moment(archived.since(receipt.trashed, "in the trash") + grace)
        except (SourceError, OverflowError) as error:
            yield TagStatus(archived.tag, step, _UNREADABLE, problem=str(error))
            continue
        yield TagStatus(
            archived.tag,
            step,
            state,
            archived=receipt.archived,
            trash_until=until,
            source_bytes=receipt.source_bytes,
            archive_bytes=receipt.archive_bytes - receipt.shared_bytes,
        )


def _state(receipt: Receipt, run_dir: Path, in_trash: set[str], being_removed: set[str]) -> str:
    """Say what is left of a tag; where its files are counts more than what its receipt says."""
    tag = receipt.tag
    if tag in being_removed:
        return PURGED
    if tag in in_trash:
        return IN_TRASH
    if receipt.state in (BEGUN, WEIGHTS_ONLY):
        return receipt.state
    original = run_dir / tag
    with source_errors(original):
        return ARCHIVED if lexists(original) else PURGED


def draw_status(runs: Sequence[CompactStatus], html: str | os.PathLike[str]) -> FileSummary:
    """Write a page of the state of runs, with the tags in them as their headers tell."""
    path = as_path(html)
    require_free(path)
    for status in runs:
        for place in (status.run_dir, status.archive_dir):
            require_separate(as_path(place), path)
    document = {
        "runs": [{**asdict(status), **_content(as_path(status.run_dir))} for status in runs]
    }
    title = PurePosixPath(runs[0].run_dir).name if len(runs) == 1 else f"{len(runs):,} runs"
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
