"""The verbs that write a checkpoint on the command line."""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from streamshard import registry
from streamshard.cli.parser import keywords
from streamshard.cli.progress import display
from streamshard.cli.streams import print_result, write_path
from streamshard.cli.text.report_text import report_text
from streamshard.engine.run.phases import Progress
from streamshard.transfer.plan import TransferPlan
from streamshard.transfer.report import Report

if TYPE_CHECKING:
    from streamshard.transfer.estimate import Estimate

PLANNERS: Final[Mapping[str, str]] = {
    "repartition": "streamshard.operations.repartition.repartition:plan_repartition",
    "convert": "streamshard.operations.convert.convert:plan_convert",
    "export": "streamshard.operations.export.export:plan_export",
    "merge": "streamshard.merging.merge:plan_merge",
    "graft": "streamshard.grafting.graft:plan_graft",
}
"""The function that plans each verb that writes, by text: a verb loads only its own."""


def run_transfer(
    arguments: argparse.Namespace, tables: Callable[[Any], str] = lambda report: ""
) -> None:
    """Plan a verb that writes, and run the plan; `tables` are what its text has as well."""
    planner = registry.load(PLANNERS[arguments.verb])
    with display(is_quiet=arguments.quiet) as progress:
        plan = planner(**keywords(arguments))
        done = _carry_out(plan, arguments, progress)
    _show(*done, arguments, tables(done[0]))


def _carry_out(
    plan: TransferPlan, arguments: argparse.Namespace, progress: Progress
) -> "tuple[Report, Estimate | None]":
    """Run a plan, or for `--dry-run` only estimate it."""
    if arguments.dry_run:
        if plan.options.is_lenient and (found := plan.found(progress)) is not None:
            return found, None
        return plan.report, plan.estimate()
    return plan.run(progress), None


def _show(
    report: Report, estimate: "Estimate | None", arguments: argparse.Namespace, tables: str
) -> None:
    if arguments.quiet and not arguments.json:
        write_path(report.path, is_done=not arguments.dry_run)
    elif estimate is None:
        text = partial(report_text, report, tables, verbose=arguments.verbose)
        print_result(report, arguments, text, is_done=not arguments.dry_run)
    else:
        # Not at the top: a dry run alone shows it.
        from streamshard.cli.text.estimate_text import plan_text

        text = partial(plan_text, report, estimate, tables, verbose=arguments.verbose)
        print_result(report, arguments, text, more={"estimate": asdict(estimate)})
