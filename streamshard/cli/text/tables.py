"""Formats the results of verbs as text for people."""

import itertools
import re
import shutil
import textwrap
import unicodedata
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
from streamshard.operations.diff.diff_report import DiffReport
from streamshard.operations.inspect.inspect_report import KINDS
from streamshard.operations.inspect.pickle_report import PickleListing
from streamshard.operations.transfer.report import Report
from streamshard.sizes import UNITS, counted, show_bytes, some_of

_MOST_SHOWN: Final = 20
"""Maximum problems that are shown without `-v`."""
_NUMBER: Final = re.compile(r"-?[0-9][0-9,.]*(e[+-]?[0-9]+)?")
_LEAST_TEXT: Final = 4
"""Columns to which text is wrapped at the narrowest."""


def paragraph(text: str) -> str:
    """Wrap text at the terminal's width; keep indented lines, so that they can be copied."""
    width = min(100, shutil.get_terminal_size((100, 24)).columns)
    return "\n".join(
        line if line.startswith(" ") else textwrap.fill(line, width) for line in text.split("\n")
    )


def table(rows: Sequence[Sequence[object]], width: int | None = None) -> str:
    """Align columns; the first row is the head.

    `width`: columns of a terminal, which gets a bold head, and in which text is wrapped, but no
    number. None for any other output: nothing is wrapped there.
    """
    texts = [[one_line(str(cell)) for cell in row] for row in rows]
    columns = list(zip(*texts, strict=True))
    right = [all(map(_is_number, column[1:])) for column in columns]
    widths = [max(map(_columns, column)) for column in columns]
    if width is not None:
        widths = _narrowed(widths, right, width)
    lines = [_row_lines(row, widths, right) for row in texts]
    head = lines[0] if width is None else [bold(line) for line in lines[0]]
    dashes = "  ".join("-" * width for width in widths)
    return "\n".join([*head, dashes, *(line for row in lines[1:] for line in row)])


def bold(text: str) -> str:
    """Show a line in bold on a terminal."""
    return f"\x1b[1m{text}\x1b[0m"


def _narrowed(widths: Sequence[int], is_number: Sequence[bool], most: int) -> list[int]:
    """Narrow the widest columns of text until the table fits, as far as that goes."""
    found = list(widths)
    texts = [i for i, fixed in enumerate(is_number) if not fixed and found[i] > _LEAST_TEXT]
    excess = sum(found) + 2 * (len(found) - 1) - most
    while excess > 0 and texts:
        widest = max(texts, key=found.__getitem__)
        found[widest] -= 1
        excess -= 1
        if found[widest] == _LEAST_TEXT:
            texts.remove(widest)
    return found


def _row_lines(row: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> list[str]:
    wrapped = [_wrapped(cell, width) for cell, width in zip(row, widths, strict=True)]
    lines = []
    for cells in itertools.zip_longest(*wrapped, fillvalue=""):
        gaps = [" " * (width - _columns(cell)) for cell, width in zip(cells, widths, strict=True)]
        both = zip(cells, gaps, right, strict=True)
        aligned = (gap + cell if to_right else cell + gap for cell, gap, to_right in both)
        lines.append("  ".join(aligned).rstrip())
    return lines


def _wrapped(cell: str, width: int) -> list[str]:
    if _columns(cell) <= width:
        return [cell]
    letters = width if _columns(cell) == len(cell) else width // 2
    return textwrap.wrap(cell, letters, break_on_hyphens=False)


def _columns(text: str) -> int:
    """Count the columns that a text takes in a terminal, where some letters take two.

    >>> _columns("layer"), _columns("層")
    (5, 2)
    """
    return len(text) + sum(unicodedata.east_asian_width(letter) in "WF" for letter in text)


def worker_text(rates: Mapping[str, WorkerRate]) -> str:
    """Format what each worker of a cluster did; the rate is that of one thread."""
    rows: list[tuple[str, ...]] = [("worker", "jobs", "bytes", "a second")]
    for address, rate in sorted(rates.items()):
        per_second = int(rate.nbytes / rate.seconds) if rate.seconds else 0
        shown = show_bytes(rate.nbytes), f"{show_bytes(per_second)}/s"
        rows.append((address, f"{rate.jobs:,}", *shown))
    return table(rows)


def _is_number(text: str) -> bool:
    """Tell whether a cell is a number, a size, or the dash that stands for none.

    >>> [_is_number(text) for text in ("1,024", "1e-08", "1.5 KiB", "-", "3 files")]
    [True, True, True, True, False]
    """
    number, _, unit = text.partition(" ")
    return text == "-" or (bool(_NUMBER.fullmatch(number)) and unit in ("", *UNITS))


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
        known = "DANGER" if name.is_dangerous else "yes" if name.is_known else "NO"
        rows.append((name.name, known, f"{name.count:,}", some_of(name.files, 1)))
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
        resize_fact(report),
        ("files", f"{report.files:,}, {show_bytes(report.bytes_written)}"),
        ("memory", memory_text(report, verbose=verbose)),
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
    why = "listed on standard error" if tag.needs_attention else tag.reason
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
    facts += [("files", f"{found.files:,}"), ("read", read_text(found))]
    if found.against is None:
        facts.append(("checksums", f"{found.checked:,}"))
    if found.against is not None or found.tensors:
        facts.append(("tensors", f"{found.tensors:,}"))
    if verbose:
        facts.append(("memory", memory_text(found, verbose=True)))
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
    return "\n\n".join([*blocks, *more_text(len(wrong) - len(shown))])


def findings_lines(found: Verification, *, verbose: bool) -> list[str]:
    """Summarize the problems in one line; if verbose, with all problems below."""
    wrong: list[Problem | Difference] = [*found.problems, *found.differences]
    count = counted(len(found.problems), "problem")
    if found.differences:
        differences = f"{counted(len(found.differences), 'difference')} from {found.against}"
        count = f"{count}, {differences}" if found.problems else differences
    return [f"{found.path}: {count}", *(map(_finding, wrong) if verbose else ())]


def read_text(found: Verification | DiffReport) -> str:
    """Say how much was read, and how fast."""
    rate = show_bytes(int(found.bytes_read / max(found.seconds, 1e-9)))
    return f"{show_bytes(found.bytes_read)} in {found.seconds:.1f} s, {rate}/s"


def more_text(left: int, hint: str = "more; -v shows all.") -> list[str]:
    """Return the line about what is left out, if anything is."""
    return [f"{left:,} {hint}"] if left > 0 else []


def _finding(found: Problem | Difference) -> str:
    return f"{found.kind}: {found.message}"


def resize_fact(report: Report) -> tuple[str, str]:
    """Say for how many ranks a target is, or how many tensors an export has."""
    if report.tensors is not None:
        return "tensors", f"{report.tensors:,}" + (f", {report.dtype}" if report.dtype else "")
    if report.world_size is None:
        return "world size", f"{report.source_world_size} -> any"
    now = f"{report.world_size}, ZeRO stage {report.zero_stage}"
    return "world size", f"{report.source_world_size} -> {now}"


def memory_text(found: Report | Verification | DiffReport, *, verbose: bool) -> str:
    """Format the measured or projected memory above the program's own."""
    projected = show_bytes(found.projected_bytes - found.floor_bytes)
    above = f"above the program's {show_bytes(found.floor_bytes)}"
    if found.peak_bytes is None:
        return f"at most {projected} {above}"
    measured = f"{show_bytes(max(0, found.peak_bytes - found.floor_bytes))} {above}"
    return f"{measured}; projected {projected}" if verbose else measured
