"""Formats what `compact` did and its status: for people, and in Prometheus' text format."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

from streamshard.cli.text.tables import facts_text, table
from streamshard.operations.compact.compact_report import (
    ARCHIVED,
    DELETED,
    KEPT,
    CompactedTag,
    Compaction,
    RunRecord,
)
from streamshard.operations.compact.compact_status import GONE, STATES, CompactStatus
from streamshard.sizes import counted, show_bytes, some_of

_PREFIX: Final = "streamshard_compact"
_GAUGES: Final = {
    "tags": "Tags that have a receipt, by state.",
    "archive_bytes": "Size of all archives.",
    "trash_bytes": "Size of the trash.",
    "saved_bytes": "Size of originals that are gone, less that of their archives.",
    "trash_until_timestamp_seconds": "When the first tag may leave the trash.",
    "unhealthy_tags": "Tags after the newest healthy one: they hold NaN, or are damaged.",
    "unhealthy_since_timestamp_seconds": "When the first of them was saved.",
    "last_began_timestamp_seconds": "When the last run began.",
    "last_ended_timestamp_seconds": "When it ended.",
    "last_exit_code": "Its exit code.",
    "last_tags": "Tags by what it did with them.",
}
"""Name of a metric, without the prefix → what it is."""


def compaction_text(found: Compaction, *, verbose: bool) -> str:
    """Summarize what `compact` did or would do; if verbose or a dry run, with a table of tags."""
    counts = Counter(_shown(tag.action) for tag in found.tags)
    line = f"{found.run_dir}: {'dry run: ' if found.is_dry_run else ''}{_counts(counts)}"
    archived = [tag for tag in found.tags if tag.action in (ARCHIVED, DELETED)]
    if archived and not found.is_dry_run:
        own = sum(tag.archive_bytes - tag.shared_bytes for tag in archived)
        whole = sum(tag.source_bytes for tag in archived)
        line += f"; {show_bytes(whole)} archived in {show_bytes(own)}"
        if again := sum(tag.repeated_bytes for tag in archived):
            line += f", {show_bytes(again)} of it stored again: one file shares none with others"
    has_table = verbose or found.is_dry_run
    if counts.keys() == {KEPT} and not has_table:
        line += "; -v says why"
    line = "\n".join([line, *found.notes])
    if not has_table:
        return line
    rows: list[Sequence[object]] = [("tag", "what", "size", "archive", "of it shared", "why")]
    rows += map(_row, found.tags)
    return "\n\n".join([line, *([table(rows)] if found.tags else [])])


def problem_text(tag: CompactedTag) -> str:
    """Say what is wrong with a tag that needs attention."""
    return f"{tag.tag}: {tag.action}: {tag.reason}"


def _counts(tags: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {what}" for what, count in tags.items()) or "no tags"


def _row(tag: CompactedTag) -> Sequence[object]:
    sizes = map(_size, (tag.source_bytes, tag.archive_bytes, tag.shared_bytes))
    # An error is long, and standard error shows it anyway.
    why = "listed on standard error" if tag.needs_attention else tag.reason
    return tag.tag, _shown(tag.action), *sizes, why


def _shown(action: str) -> str:
    # The tag can still be brought back, and its space is not free until the trash is emptied.
    return "moved to trash" if action == DELETED else action


def _size(nbytes: int) -> str:
    return show_bytes(nbytes) if nbytes else "-"


def status_text(found: CompactStatus, *, verbose: bool) -> str:
    """Show what is archived, in the trash and gone, and how the last run ended.

    Tags whose originals are gone only add up with time: if not verbose, they are counted.
    """
    counts = Counter(tag.state for tag in found.tags)
    states = {state: counts[state] for state in STATES if counts[state]}
    facts = [
        ("run", found.run_dir),
        ("archives", f"{found.archive_dir}, {show_bytes(found.archive_bytes)}"),
        ("tags", _counts(states) if states else "none archived"),
        ("trash", f"{show_bytes(found.trash_bytes)}, free when it is emptied"),
        ("saved", _signed(found.saved_bytes)),
        ("last run", _run_text(found.last_run)),
        ("healthy", _health_text(found)),
    ]
    blocks = [facts_text(facts)]
    shown = [tag for tag in found.tags if verbose or tag.state not in GONE]
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
    if len(shown) < len(found.tags):
        gone = counted(len(found.tags) - len(shown), "tag")
        blocks.append(f"{gone} more, whose originals are gone; -v lists them")
    if found.last_run is not None:
        blocks += map(problem_text, found.last_run.problems)
    return "\n\n".join(blocks)


def _run_text(run: RunRecord | None) -> str:
    if run is None:
        return "no record of any"
    began = f"began {_minute(run.began)}"
    if not run.ended:
        return f"{began}, and has not ended: it is running, or was killed"
    outcome = run.error or _counts({_shown(what): n for what, n in run.actions.items()})
    return f"{began}, ended {_minute(run.ended)} with exit code {run.exit_code}: {outcome}"


def _health_text(found: CompactStatus) -> str:
    newest = found.newest_healthy or "none that is known"
    if not found.unhealthy:
        return f"newest {newest}" if found.newest_healthy else "no tag read yet"
    since, count = _minute(found.unhealthy_since), counted(len(found.unhealthy), "tag")
    return (
        f"newest {newest}; {count} after it not healthy, since {since}: {some_of(found.unhealthy)}"
    )


def _signed(nbytes: int) -> str:
    return show_bytes(nbytes) if nbytes >= 0 else f"-{show_bytes(-nbytes)}"


def _minute(moment: str) -> str:
    return f"{datetime.fromisoformat(moment).astimezone(UTC):%Y-%m-%d %H:%M} UTC" if moment else "-"


def prometheus_text(found: Sequence[CompactStatus]) -> str:
    """Serialize the status of some runs as gauges in Prometheus' text format, one scrape."""
    samples: dict[str, list[tuple[Mapping[str, str], float]]] = {name: [] for name in _GAUGES}
    for status in found:
        own = {"run_dir": status.run_dir, "archive_dir": status.archive_dir}
        for name, more, value in _samples(status):
            samples[name].append(({**own, **more}, value))
    return "\n".join(line for name, held in samples.items() for line in _gauge(name, held))


def _samples(status: CompactStatus) -> Iterator[tuple[str, Mapping[str, str], float]]:
    """Yield the name, the labels in addition to those of the run, and the value of each sample."""
    counts = Counter(tag.state for tag in status.tags)
    for state in STATES:
        yield "tags", {"state": _label(state)}, counts[state]
    yield "archive_bytes", {}, status.archive_bytes
    yield "trash_bytes", {}, status.trash_bytes
    yield "saved_bytes", {}, status.saved_bytes
    ends = [_seconds(tag.trash_until) for tag in status.tags if tag.trash_until]
    if ends:
        yield "trash_until_timestamp_seconds", {}, min(ends)
    yield "unhealthy_tags", {}, len(status.unhealthy)
    if status.unhealthy:
        yield "unhealthy_since_timestamp_seconds", {}, _seconds(status.unhealthy_since)
    run = status.last_run
    if run is None:
        return
    yield "last_began_timestamp_seconds", {}, _seconds(run.began)
    if run.ended:  # else it is running, or was killed
        yield "last_ended_timestamp_seconds", {}, _seconds(run.ended)
        yield "last_exit_code", {}, run.exit_code
        for action, count in run.actions.items():
            yield "last_tags", {"action": _label(action)}, count


def _gauge(name: str, samples: Iterable[tuple[Mapping[str, str], float]]) -> Iterator[str]:
    """Yield the lines of one metric.

    >>> print(*_gauge("trash_bytes", [({"run_dir": 'a"b'}, 3)]), sep="\\n")
    # HELP streamshard_compact_trash_bytes Size of the trash.
    # TYPE streamshard_compact_trash_bytes gauge
    streamshard_compact_trash_bytes{run_dir="a\\"b"} 3
    """
    yield f"# HELP {_PREFIX}_{name} {_GAUGES[name]}"
    yield f"# TYPE {_PREFIX}_{name} gauge"
    for labels, value in samples:
        inner = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
        yield f"{_PREFIX}_{name}{{{inner}}} {value}"


def _label(words: str) -> str:
    """Write a state or an action as queries do, in one word.

    >>> _label("in the trash")
    'in_the_trash'
    """
    return words.replace(" ", "_")


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _seconds(moment: str) -> int:
    return int(datetime.fromisoformat(moment).timestamp())
