"""`diff` on the command line, and its result as text."""

import argparse
import math
from collections.abc import Iterable
from typing import Final

from streamshard.cli.parser import keywords
from streamshard.cli.progress import display
from streamshard.cli.streams import print_result
from streamshard.cli.text.report_text import memory_text, read_text
from streamshard.cli.text.tables import facts_text, more_text, paragraph, table
from streamshard.errors import IntegrityError
from streamshard.operations.diff import diff
from streamshard.operations.diff.diff_report import DiffReport, Distance, TensorDiff
from streamshard.registry import reader_of
from streamshard.sizes import counted

_MOST_SHOWN: Final = 20
"""Maximum tensors, and other differences, that are shown without `-v`."""
_HEAD: Final = ("elements", "changed", "relative L2", "max abs", "mean abs", "cosine")


def most_changed_first(tensors: Iterable[TensorDiff]) -> list[TensorDiff]:
    """Sort tensors by relative L2, those without it first; at the end what are no numbers, and
    then what is equal.
    """

    def rank(tensor: TensorDiff) -> tuple[bool, bool, float]:
        figures = tensor.distance
        relative = math.inf if figures.relative_l2 is None else figures.relative_l2
        return figures.changed > 0, figures.max_abs is not None, relative

    return sorted(tensors, key=rank, reverse=True)


def diff_text(report: DiffReport, *, verbose: bool) -> str:
    """Format the result of `diff`."""
    blocks = [_summary(report, verbose=verbose), *map(paragraph, report.notes)]
    blocks += [_states(report)] if report.states else ["No tensor is in both with the same shape."]
    blocks += _tensors(report, verbose=verbose)
    blocks += _not_finite(report, verbose=verbose)
    if report.differences:
        lines = [f"{difference.kind}: {difference.message}" for difference in report.differences]
        shown = lines if verbose else lines[:_MOST_SHOWN]
        blocks.append("\n".join(["Other differences:", *shown]))
        blocks.append(more_text(len(lines) - len(shown)))
    if report.is_equal:
        blocks.append("Equal to the bit. Checksums were not looked at: verify does that.")
    return "\n\n".join(filter(None, blocks))


def _difference_text(report: DiffReport) -> str:
    """Summarize the differences in one line."""
    changed, others = len(report.changed), len(report.differences)
    parts = [f"{changed:,} of {counted(len(report.tensors), 'tensor')}"] if changed else []
    parts += [counted(others, "other difference")] if others else []
    return f"{report.left}: differs from {report.right}: {', '.join(parts)}"


def _summary(found: DiffReport, *, verbose: bool) -> str:
    changed = len(found.changed)
    left, right = (
        f"{path} ({reader_of(kind).title}), {tag}"
        for path, kind, tag in zip((found.left, found.right), found.kinds, found.tags, strict=True)
    )
    facts = [
        ("from", left),
        ("to", right),
        ("tensors", f"{changed:,} changed, {len(found.tensors) - changed:,} equal"),
        ("read", read_text(found)),
    ]
    if verbose:
        facts.append(("memory", memory_text(found, verbose=True)))
    return facts_text(facts)


def _states(report: DiffReport) -> str:
    rows = [
        (state.state, f"{state.changed_tensors:,} of {state.tensors:,}", *_cells(state.distance))
        for state in report.states
    ]
    return table([("state", "tensors", *_HEAD), *rows], of_numbers=True)


def _tensors(report: DiffReport, *, verbose: bool) -> list[str]:
    tensors = most_changed_first(report.tensors if verbose else report.changed)
    shown = tensors if verbose else tensors[:_MOST_SHOWN]
    if not shown:
        return []
    rows = [(tensor.name, *_cells(tensor.distance)) for tensor in shown]
    more = more_text(len(tensors) - len(shown), "-v shows all tensors", "more changed")
    return [table([("tensor", *_HEAD), *rows], of_numbers=True), more]


def _not_finite(report: DiffReport, *, verbose: bool) -> list[str]:
    """List the tensors with NaNs or infinities, which the figures leave out."""
    rows = [
        (tensor.name, *(f"{count:,}" for count in (*tensor.distance.nan, *tensor.distance.inf)))
        for tensor in report.tensors
        if any((*tensor.distance.nan, *tensor.distance.inf))
    ]
    shown = rows if verbose else rows[:_MOST_SHOWN]
    if not shown:
        return []
    head = ("not finite", "NaN from", "NaN to", "inf from", "inf to")
    return [table([head, *shown]), more_text(len(rows) - len(shown))]


def _cells(distance: Distance) -> tuple[str, ...]:
    numbers = (distance.relative_l2, distance.max_abs, distance.mean_abs)
    cosine = _cosine(distance.cosine)
    return (f"{distance.numel:,}", _percent(distance), *map(_number, numbers), cosine)


def _percent(distance: Distance) -> str:
    """Format the changed part, rounded so that 0 and 100% appear only if they are exact."""
    if distance.changed in (0, distance.numel):
        return "100%" if distance.changed else "0"
    percent = 100 * distance.fraction_changed
    if percent < 0.01:
        return "<0.01%"
    return ">99.99%" if percent > 99.99 else f"{percent:.2f}%"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _cosine(value: float | None) -> str:
    if value is None or value == 1:
        return "-" if value is None else "1"
    return ">0.999999" if value > 0.999999 else f"{value:.6f}"


def run_diff(arguments: argparse.Namespace) -> None:
    """Compare two checkpoints; raises the difference, if there is one."""
    with display(is_quiet=arguments.quiet) as progress:
        report = diff.diff(progress=progress, **keywords(arguments))
    print_result(report, arguments, lambda: diff_text(report, verbose=arguments.verbose))
    if not report.is_equal:
        raise IntegrityError(_difference_text(report))
