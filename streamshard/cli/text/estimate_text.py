"""Formats the estimate of a run: what a dry run shows."""

import os
import re
from collections.abc import Iterator, Sequence
from typing import Final

from streamshard.cli.text.report_text import resize_fact, target_text
from streamshard.cli.text.tables import facts_text, paragraph, table
from streamshard.sizes import counted, show_bytes
from streamshard.transfer.estimate import Estimate, FileBytes, MemoryParts, Space
from streamshard.transfer.report import Report

_MOST_ROWS: Final = 12
"""Maximum kinds of files that are listed without `-v`."""
_NUMBER: Final = re.compile(r"(\d+)")
_SCHEME: Final = re.compile(r"^(\w+):/(?!/)")
"""Start of an object's path as `commonpath` leaves it."""


def plan_text(report: Report, estimate: Estimate, tables: str = "", *, verbose: bool) -> str:
    """Format what a run would do."""
    reads = _files("reads", estimate.reads, verbose=verbose)
    writes = _files("writes", estimate.writes, verbose=verbose)
    subjects = [(change.subject, change.text) for change in estimate.changes]
    listed = {
        line for change in estimate.changes for line in (change.text, *change.text.split("\n"))
    }
    blocks = [facts_text(list(_summary(report, estimate)), wraps=True), tables, reads, writes]
    if estimate.changes:
        blocks.append("For the job that resumes:\n" + facts_text(subjects, wraps=True))
    said = " ".join(text for _, text in subjects)
    blocks += [paragraph(n) for n in report.notes if n not in listed and n not in said]
    return "\n\n".join(filter(None, blocks))


def _summary(report: Report, estimate: Estimate) -> Iterator[tuple[str, str]]:
    yield "would write", target_text(report)
    yield "from", f"{report.source}, tag {report.tag}"
    yield resize_fact(report)
    used = sum(bool(file.nbytes) for file in estimate.reads)
    yield "reads", f"{show_bytes(estimate.read_bytes)} of content, from {counted(used, 'file')}"
    most = "at most " if estimate.is_upper_bound else ""
    into = counted(len(estimate.writes), "file")
    yield "writes", f"{most}{show_bytes(estimate.written_bytes)}, into {into}"
    if report.is_verified:
        yield "verifies", f"and reads {show_bytes(estimate.reread_bytes)} more for that"
    yield "memory", _memory(estimate.memory)
    if estimate.space is not None:
        yield "space", _space(estimate.space)


def _memory(memory: MemoryParts) -> str:
    above = memory.projected_bytes - memory.floor_bytes
    codec = f" + {show_bytes(memory.codec_bytes)} codec" if memory.codec_bytes else ""
    if memory.requests_bytes:
        codec += f" + {show_bytes(memory.requests_bytes)} requests"
    workers = counted(memory.workers, "worker")
    return (
        f"at most {show_bytes(above)} above the program's {show_bytes(memory.floor_bytes)}, of "
        f"{show_bytes(memory.limit_bytes)} allowed: {show_bytes(memory.metadata_bytes)} metadata + "
        f"{workers} x ({show_bytes(memory.window_bytes)} window + "
        f"{show_bytes(memory.scratch_bytes)} scratch{codec}) + "
        f"{show_bytes(memory.slack_bytes)} slack"
    )


def _space(space: Space) -> str:
    begun = ""
    if space.begun_bytes:
        begun = f"; {show_bytes(space.begun_bytes)} are there of a run that was cut off"
    free, after = show_bytes(space.free_bytes), show_bytes(max(0, space.free_after_bytes))
    return f"{free} free on the file system of {space.directory}, {after} after{begun}"


def _files(head: str, files: Sequence[FileBytes], *, verbose: bool) -> str:
    """List files; unless verbose, group paths that differ only in numbers, largest group first."""
    common = _common([file.path for file in files])
    start = len(common) + 1 if common else 0
    name = f"{head}, in {common}" if common else head
    named = [(file.path[start:], file.nbytes) for file in files]
    if verbose:
        rows: list[Sequence[object]] = [(name, "bytes"), *((p, f"{n:,}") for p, n in named)]
        return table(rows)
    kinds: dict[str, list[tuple[str, int]]] = {}
    for path, nbytes in named:
        kinds.setdefault(_NUMBER.sub("0", path), []).append((path, nbytes))
    groups = sorted(kinds.values(), key=lambda kind: -sum(nbytes for _, nbytes in kind))
    rows = [(name, "files", "bytes")]
    for kind in groups[:_MOST_ROWS]:
        nbytes = sum(nbytes for _, nbytes in kind)
        rows.append((_together([path for path, _ in kind]), f"{len(kind):,}", f"{nbytes:,}"))
    rest = [one for kind in groups[_MOST_ROWS:] for one in kind]
    if rest:
        nbytes = sum(nbytes for _, nbytes in rest)
        rows.append(("others, which -v lists", f"{len(rest):,}", f"{nbytes:,}"))
    return table(rows)


def _common(paths: Sequence[str]) -> str:
    """Return the directory that all paths are in; empty if there is none but the root.

    >>> _common(["s3://a/b/c", "s3://a/d"]), _common(["/a/b", "/c/d"]), _common(["s3://a/b", "/a"])
    ('s3://a', '', '')
    """
    if len({path.startswith(os.sep) for path in paths}) != 1:
        return ""
    common = os.path.commonpath([os.path.dirname(path) for path in paths])  # noqa: PTH120
    return "" if common == os.sep or common.endswith(":") else _SCHEME.sub(r"\1://", common)


def _together(paths: Sequence[str]) -> str:
    """Name several paths that differ only in numbers by one pattern.

    >>> _together(["a/rank_0_of_8.pt", "a/rank_11_of_8.pt"])
    'a/rank_{0..11}_of_8.pt'
    """
    columns = list(zip(*(_NUMBER.split(path) for path in paths), strict=True))
    return "".join(
        column[0]
        if len(set(column)) == 1
        else f"{{{min(column, key=int)}..{max(column, key=int)}}}"
        for column in columns
    )
