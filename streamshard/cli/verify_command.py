"""`verify` on the command line, and its result as text."""

import argparse
from typing import Final

from streamshard.checks.problems import Difference, Problem, Verification
from streamshard.cli.parser import keywords
from streamshard.cli.progress import display
from streamshard.cli.streams import print_result
from streamshard.cli.text.escaping import one_line
from streamshard.cli.text.health_text import health_table, healthy_text
from streamshard.cli.text.report_text import memory_text, read_text
from streamshard.cli.text.tables import facts_text, more_text, paragraph
from streamshard.errors import IntegrityError
from streamshard.operations.verify import verify
from streamshard.registry import reader_of
from streamshard.sizes import counted


def run_verify(arguments: argparse.Namespace) -> None:
    """Verify a checkpoint; raises what was found, if it is not good."""
    with display(is_quiet=arguments.quiet) as progress:
        report = verify.verify(progress=progress, **keywords(arguments))
    print_result(report, arguments, lambda: _verification_text(report, verbose=arguments.verbose))
    if not report.is_good:
        first, *others = _findings_lines(report, verbose=arguments.quiet)
        error = IntegrityError(first)
        for line in others:
            error.add_note(line)
        raise error


_MOST_SHOWN: Final = 20
"""Maximum problems that are shown without `-v`."""


def _verification_text(report: Verification, *, verbose: bool) -> str:
    """Format what `verify` checked and found."""
    kind = f" ({reader_of(report.kind).title})" if report.kind else ""
    facts: list[tuple[str, object]] = [("checkpoint", f"{report.path}{kind}")]
    if report.against is not None:
        facts.append(("against", report.against))
    facts.append(("tag", report.tag or "not known"))
    facts += [("files", f"{report.files:,}"), ("read", read_text(report))]
    if report.against is None:
        facts.append(("checksums", f"{report.checked:,}"))
    if report.against is not None or report.tensors:
        facts.append(("tensors", f"{report.tensors:,}"))
    if report.health:
        facts.append(("healthy", healthy_text(report.health)))
    if verbose:
        facts.append(("memory", memory_text(report, verbose=True)))
    blocks = [facts_text(facts), *map(paragraph, report.notes)]
    if verbose and report.health:
        blocks.append(health_table(report.health))
    wrong: list[Problem | Difference] = [*report.problems, *report.differences]
    shown = wrong if verbose else wrong[:_MOST_SHOWN]
    if wrong:
        blocks.append("\n".join(map(one_line, map(_finding, shown))))
    else:
        same = "No difference. Checksums were not looked at: verify does that without --against."
        blocks.append(same if report.against else "No problem found.")
    return "\n\n".join(filter(None, [*blocks, more_text(len(wrong) - len(shown))]))


def _findings_lines(report: Verification, *, verbose: bool) -> list[str]:
    """Summarize the problems in one line; if verbose, with all problems below."""
    wrong: list[Problem | Difference] = [*report.problems, *report.differences]
    count = counted(len(report.problems), "problem")
    if report.differences:
        differences = f"{counted(len(report.differences), 'difference')} from {report.against}"
        count = f"{count}, {differences}" if report.problems else differences
    return [f"{report.path}: {count}", *(map(_finding, wrong) if verbose else ())]


def _finding(found: Problem | Difference) -> str:
    return f"{found.kind}: {found.message}"
