"""Formats what `compact` did, and its status."""

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from streamshard.cli.text.tables import facts_text, table
from streamshard.operations.compact.compact_report import KEPT, CompactedTag, Compaction, RunRecord
from streamshard.operations.compact.compact_status import GONE, CompactStatus
from streamshard.operations.compact.receipts import ARCHIVED, TRASHED
from streamshard.sizes import counted, show_bytes, some_of


def compaction_text(report: Compaction, *, verbose: bool) -> str:
    """Summarize what `compact` did or would do; if verbose or a dry run, with a table of tags."""
    counts = Counter(tag.action for tag in report.tags)
    line = f"{report.run_dir}: {'dry run: ' if report.is_dry_run else ''}{_counts(counts)}"
    archived = [tag for tag in report.tags if tag.action in (ARCHIVED, TRASHED)]
    if archived and not report.is_dry_run:
        own = sum(tag.archive_bytes - tag.shared_bytes for tag in archived)
        whole = sum(tag.source_bytes for tag in archived)
        line += f"; {show_bytes(whole)} archived in {show_bytes(own)}"
    has_table = verbose or report.is_dry_run
    if counts.keys() == {KEPT} and not has_table:
        line += "; -v says why"
    line = "\n".join([line, *report.notes])
    if not has_table:
        return line
    rows: list[Sequence[object]] = [("tag", "what", "size", "archive", "of it shared", "why")]
    rows += map(_row, report.tags)
    return "\n\n".join([line, *([table(rows)] if report.tags else [])])


def problem_text(tag: CompactedTag) -> str:
    """Say what is wrong with a tag that needs attention."""
    return f"{tag.tag}: {tag.action}: {tag.reason}"


def _counts(tags: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {what}" for what, count in tags.items()) or "no tags"


def _row(tag: CompactedTag) -> Sequence[object]:
    sizes = map(_size, (tag.source_bytes, tag.archive_bytes, tag.shared_bytes))
    # An error is long, and standard error shows it anyway.
    why = "listed on standard error" if tag.needs_attention else tag.reason
    return tag.tag, tag.action, *sizes, why


def _size(nbytes: int) -> str:
    return show_bytes(nbytes) if nbytes else "-"


def status_text(status: CompactStatus, *, verbose: bool) -> str:
    """Show what is archived, in the trash and gone, and how the last run ended.

    Tags whose originals are gone only add up with time: if not verbose, they are counted.
    """
    counts = Counter(tag.state for tag in status.tags)
    facts = [
        ("run", status.run_dir),
        ("archives", f"{status.archive_dir}, {show_bytes(status.archive_bytes)}"),
        ("tags", _counts(counts) if counts else "none archived"),
        ("trash", f"{show_bytes(status.trash_bytes)}, free when it is emptied"),
        ("saved", _signed(status.saved_bytes)),
        ("last run", _run_text(status.last_run)),
        ("healthy", _health_text(status)),
    ]
    blocks = [facts_text(facts)]
    shown = [tag for tag in status.tags if verbose or tag.state not in GONE]
    if shown:
        head = ("tag", "state", "archived", "trash until", "original", "archive")
        rows = [
            (
                tag.tag,
                tag.state,
                _minute(tag.archived),
                _minute(tag.trash_until),
                show_bytes(tag.source_bytes),
                show_bytes(tag.archive_bytes),
            )
            for tag in shown
        ]
        blocks.append(table([head, *rows]))
    if len(shown) < len(status.tags):
        gone = counted(len(status.tags) - len(shown), "tag")
        blocks.append(f"{gone} more, whose originals are gone; -v lists them")
    if status.last_run is not None:
        blocks += map(problem_text, status.last_run.problems)
    return "\n\n".join(blocks)


def _run_text(run: RunRecord | None) -> str:
    if run is None:
        return "no record of any"
    began = f"began {_minute(run.began)}"
    if not run.ended:
        return f"{began}, and has not ended: it is running, or was killed"
    outcome = run.error or _counts(run.actions)
    return f"{began}, ended {_minute(run.ended)} with exit code {run.exit_code}: {outcome}"


def _health_text(status: CompactStatus) -> str:
    newest = status.newest_healthy or "none that is known"
    if not status.unhealthy:
        return f"newest {newest}" if status.newest_healthy else "no tag read yet"
    since, count = _minute(status.unhealthy_since), counted(len(status.unhealthy), "tag")
    return (
        f"newest {newest}; {count} after it not healthy, since {since}: {some_of(status.unhealthy)}"
    )


def _signed(nbytes: int) -> str:
    return show_bytes(nbytes) if nbytes >= 0 else f"-{show_bytes(-nbytes)}"


def _minute(moment: str) -> str:
    return f"{datetime.fromisoformat(moment).astimezone(UTC):%Y-%m-%d %H:%M} UTC" if moment else "-"
