"""Formats the results of verbs as text for people."""

import shutil
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from streamshard.cli.text.escaping import one_line
from streamshard.cluster.worker_rate import WorkerRate
from streamshard.operations.checks.problems import Difference, Problem, Verification
from streamshard.operations.compact.compact_report import (
    ARCHIVED,
    DELETED,
    CompactedTag,
    Compaction,
)
from streamshard.operations.inspect.inspect_report import KINDS
from streamshard.operations.inspect.pickle_report import PickleListing
from streamshard.operations.transfer.report import Report
from streamshard.sizes import UNITS, show_bytes

_MOST_SHOWN: Final = 20
"""Maximum problems that are shown without `-v`."""


def paragraph(text: str) -> str:
    """Wrap text at the terminal's width; keep indented lines, so that they can be copied."""
    width = min(100, shutil.get_terminal_size((100, 24)).columns)
    return "\n".join(
        line if line.startswith(" ") else textwrap.fill(line, width) for line in text.split("\n")
    )


def table(rows: Sequence[Sequence[object]]) -> str:
    """Align columns; the first row is the head."""
    texts = [[one_line(str(cell)) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    right = [all(_is_number(row[i]) for row in texts[1:]) for i in range(len(widths))]
    lines = []
    for row in texts:
        cells = [
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def worker_text(rates: Mapping[str, WorkerRate]) -> str:
    """Format what each worker of a cluster did; the rate is that of one thread."""
    rows: list[tuple[str, ...]] = [("worker", "jobs", "bytes", "a second")]
    for address, rate in sorted(rates.items()):
        per_second = int(rate.nbytes / rate.seconds) if rate.seconds else 0
        shown = show_bytes(rate.nbytes), f"{show_bytes(per_second)}/s"
        rows.append((address, f"{rate.jobs:,}", *shown))
    return table(rows)


def _is_number(text: str) -> bool:
    """Tell whether a cell is a number, a size, or the dash that stands for none."""
    number, _, unit = text.partition(" ")
    is_one = number.replace(",", "").replace(".", "").isdecimal()
    return text == "-" or (is_one and unit in ("", *UNITS))


def facts_text(facts: Sequence[tuple[str, object]]) -> str:
    width = max(len(name) for name, _ in facts)
    return "\n".join(f"{name.ljust(width)}  {one_line(str(value))}" for name, value in facts)


def pickles_text(found: PickleListing, *, verbose: bool) -> str:
    """Format the result of `inspect --pickles`."""
    in_set = sum(name.is_known for name in found.names)
    facts: list[tuple[str, object]] = [
        ("looked into", found.path),
        ("pickles", f"{sum(file.pickles for file in found.files):,} in {len(found.files):,} files"),
        ("names", f"{len(found.names) - in_set:,} outside the known set, {in_set:,} in it"),
    ]
    rows: list[Sequence[object]] = [("name", "known", "times", "files")]
    for name in found.names:
        more = len(name.files) - 1
        known = "DANGER" if name.is_dangerous else "yes" if name.is_known else "NO"
        where = name.files[0] + (f" and {more:,} more" if more else "")
        rows.append((name.name, known, f"{name.count:,}", where))
    blocks = [facts_text(facts), *([table(rows)] if found.names else [])]
    if verbose:
        blocks.append(table([("file", "pickles"), *((f.path, f.pickles) for f in found.files)]))
    blocks += [f"{file.path}: {file.problem}" for file in found.problems]
    return "\n\n".join([*blocks, *map(paragraph, found.notes)])


def report_text(report: Report, *, verbose: bool) -> str:
    """Format what a run did, or would do."""
    if report.found is not None:
        return _found(report)
    done = report.seconds is not None
    facts: list[tuple[str, object]] = [
        ("wrote" if done else "would write", target_text(report)),
        ("tag", report.tag),
        ("world size", _resize(report)) if report.tensors is None else ("tensors", _cast(report)),
        ("files", f"{report.files:,}, {show_bytes(report.bytes_written)}"),
        ("memory", _memory(report, verbose=verbose)),
    ]
    if report.is_verified:
        facts.append(("verified", "read back: no difference" if done else "will be"))
    if report.seconds is not None:
        rate = report.bytes_written / max(report.seconds, 1e-9)
        facts.append(("took", f"{report.seconds:.1f} s, {show_bytes(int(rate))}/s"))
    return "\n\n".join([facts_text(facts), *map(paragraph, report.notes)])


def target_text(report: Report) -> str:
    """Name the target; a store is marked as one, as its name need not show that."""
    is_store = report.tensors is None and report.world_size is None
    return f"{report.target} ({KINDS['store']})" if is_store else report.target


def _found(report: Report) -> str:
    """Say that there is nothing to do, and why."""
    if report.found == "source":
        return f"Nothing to do: a job with {report.world_size} ranks resumes from {report.path}."
    return f"Nothing to do: {report.path} is already what this would make, to the byte."


def compaction_text(found: Compaction, *, verbose: bool) -> str:
    """Summarize what `compact` did or would do; if verbose or a dry run, with a table of tags."""
    counts = Counter(map(_action, found.tags))
    done = ", ".join(f"{count:,} {action}" for action, count in counts.items()) or "no tags"
    line = f"{found.run_dir}: {'dry run: ' if found.is_dry_run else ''}{done}"
    archived = [tag for tag in found.tags if tag.action in (ARCHIVED, DELETED)]
    if archived and not found.is_dry_run:
        own = sum(tag.archive_bytes - tag.shared_bytes for tag in archived)
        whole = sum(tag.source_bytes for tag in archived)
        line += f"; {show_bytes(whole)} archived in {show_bytes(own)}"
    line = "\n".join([line, *found.notes])
    if not (verbose or found.is_dry_run):
        return line
    rows: list[Sequence[object]] = [("tag", "what", "size", "archive", "of it shared", "why")]
    rows += map(_row, found.tags)
    return "\n\n".join([line, *([table(rows)] if found.tags else [])])


def _row(tag: CompactedTag) -> Sequence[object]:
    sizes = map(_size, (tag.source_bytes, tag.archive_bytes, tag.shared_bytes))
    # An error is long, and standard error shows it anyway.
    why = "listed on standard error" if tag.needs_somebody else tag.reason
    return tag.tag, _action(tag), *sizes, why


def _action(tag: CompactedTag) -> str:
    # The tag can still be brought back, and its space is not free until the trash is emptied.
    return "moved to trash" if tag.action == DELETED else tag.action


def _size(nbytes: int) -> str:
    return show_bytes(nbytes) if nbytes else "-"


def verification_text(found: Verification, *, verbose: bool, with_digests: bool) -> str:
    """Format what `verify` checked and found."""
    facts: list[tuple[str, object]] = [("checkpoint", found.path)]
    if found.kind:
        facts[0] = ("checkpoint", f"{found.path} ({KINDS[found.kind]})")
    if found.against is not None:
        facts.append(("against", found.against))
    facts.append(("tag", found.tag or "not known"))
    if found.sample != "1/1":
        facts.append(("sample", found.sample))
    rate = found.bytes_read / max(found.seconds, 1e-9)
    facts += [
        ("files", f"{found.files:,}"),
        (
            "read",
            f"{show_bytes(found.bytes_read)} in {found.seconds:.1f} s, {show_bytes(int(rate))}/s",
        ),
    ]
    if found.against is None:
        facts.append(("checksums", f"{found.checked:,}"))
    if found.against is not None or found.tensors:
        facts.append(("tensors", f"{found.tensors:,}"))
    if verbose:
        peak = show_bytes(max(0, found.peak_bytes - found.floor_bytes))
        projected = show_bytes(found.projected_bytes - found.floor_bytes)
        above = f"{peak} above the program's {show_bytes(found.floor_bytes)}; projected {projected}"
        facts.append(("memory", above))
    blocks = [facts_text(facts), *map(paragraph, found.notes)]
    if with_digests:
        blocks.append(table([("digest", "tensor"), *((d, n) for n, d in found.digests.items())]))
    wrong: list[Problem | Difference] = [*found.problems, *found.differences]
    shown = wrong if verbose else wrong[:_MOST_SHOWN]
    if wrong:
        blocks.append("\n".join(map(one_line, map(_finding, shown))))
    else:
        same = "No difference. Checksums were not looked at: verify does that without --against."
        blocks.append(same if found.against else "No problem found.")
    if len(shown) < len(wrong):
        blocks.append(f"{len(wrong) - len(shown):,} more; -v shows all.")
    return "\n\n".join(blocks)


def findings_lines(found: Verification, *, verbose: bool) -> list[str]:
    """Summarize the problems in one line; if verbose, with all problems below."""
    wrong: list[Problem | Difference] = [*found.problems, *found.differences]
    count = f"{len(found.problems):,} problem{'s' * (len(found.problems) != 1)}"
    if found.differences:
        many = len(found.differences)
        differences = f"{many:,} difference{'s' * (many != 1)} from {found.against}"
        count = f"{count}, {differences}" if found.problems else differences
    return [f"{found.path}: {count}", *(map(_finding, wrong) if verbose else ())]


def _finding(found: Problem | Difference) -> str:
    return f"{found.kind}: {found.message}"


def _resize(report: Report) -> str:
    if report.world_size is None:
        return f"{report.source_world_size} -> any"
    return f"{report.source_world_size} -> {report.world_size}, ZeRO stage {report.zero_stage}"


def _cast(report: Report) -> str:
    return f"{report.tensors:,}" + (f", {report.dtype}" if report.dtype else "")


def _memory(report: Report, *, verbose: bool) -> str:
    """Format the measured or projected memory above the program's own."""
    projected = show_bytes(report.projected_bytes - report.floor_bytes)
    above = f"above the program's {show_bytes(report.floor_bytes)}"
    if report.peak_bytes is None:
        return f"at most {projected} {above}"
    measured = f"{show_bytes(max(0, report.peak_bytes - report.floor_bytes))} {above}"
    return f"{measured}; projected {projected}" if verbose else measured
