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
        found = verify.verify(progress=progress, **keywords(arguments))
    print_result(found, arguments, lambda: _verification_text(found, verbose=arguments.verbose))
    if not found.is_good:
        first, *others = _findings_lines(found, verbose=arguments.quiet)
        error = IntegrityError(first)
        for line in others:
            error.add_note(line)
        raise error


_MOST_SHOWN: Final = 20
"""Maximum problems that are shown without `-v`."""


def _verification_text(found: Verification, *, verbose: bool) -> str:
    """Format what `verify` checked and found."""
    kind = f" ({reader_of(found.kind).title})" if found.kind else ""
    facts: list[tuple[str, object]] = [("checkpoint", f"{found.path}{kind}")]
    if found.against is not None:
        facts.append(("against", found.against))
    facts.append(("tag", found.tag or "not known"))
    facts += [("files", f"{found.files:,}"), ("read", read_text(found))]
    if found.against is None:
        facts.append(("checksums", f"{found.checked:,}"))
    if found.against is not None or found.tensors:
        facts.append(("tensors", f"{found.tensors:,}"))
    if found.health:
        facts.append(("healthy", healthy_text(found.health)))
    if verbose:
        facts.append(("memory", memory_text(found, verbose=True)))
    blocks = [facts_text(facts), *map(paragraph, found.notes)]
    if verbose and found.health:
        blocks.append(health_table(found.health))
    wrong: list[Problem | Difference] = [*found.problems, *found.differences]
    shown = wrong if verbose else wrong[:_MOST_SHOWN]
    if wrong:
        blocks.append("\n".join(map(one_line, map(_finding, shown))))
    else:
        same = "No difference. Checksums were not looked at: verify does that without --against."
        blocks.append(same if found.against else "No problem found.")
    return "\n\n".join(filter(None, [*blocks, more_text(len(wrong) - len(shown))]))


def _findings_lines(found: Verification, *, verbose: bool) -> list[str]:
    """Summarize the problems in one line; if verbose, with all problems below."""
    wrong: list[Problem | Difference] = [*found.problems, *found.differences]
    count = counted(len(found.problems), "problem")
    if found.differences:
        differences = f"{counted(len(found.differences), 'difference')} from {found.against}"
        count = f"{count}, {differences}" if found.problems else differences
    return [f"{found.path}: {count}", *(map(_finding, wrong) if verbose else ())]


def _finding(found: Problem | Difference) -> str:
    return f"{found.kind}: {found.message}"
