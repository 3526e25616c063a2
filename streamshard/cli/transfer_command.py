"""The verbs that write a checkpoint on the command line, and `apply`."""

import argparse
from dataclasses import asdict
from functools import partial

from streamshard import registry
from streamshard.cli.parser import keywords
from streamshard.cli.progress import display
from streamshard.cli.streams import print_result, write_path
from streamshard.cli.text.estimate_text import plan_text
from streamshard.cli.text.report_text import report_text
from streamshard.commands import command
from streamshard.operations import apply
from streamshard.operations.transfer.estimate import Estimate
from streamshard.operations.transfer.plan import TransferPlan
from streamshard.operations.transfer.report import Progress, Report


def run_transfer(arguments: argparse.Namespace) -> None:
    """Plan a verb that writes, or read a plan that was saved, and run the plan."""
    verb = arguments.verb
    planner = apply.load_plan if verb == "apply" else registry.load(apply.PLANNERS[verb])
    with display(arguments.progress_mode, is_quiet=arguments.quiet) as progress:
        plan = planner(**keywords(arguments))
        done = _carry_out(plan, arguments, progress)
    _show(*done, arguments)


def _carry_out(
    plan: TransferPlan, arguments: argparse.Namespace, progress: Progress
) -> tuple[Report, Estimate | None]:
    """Run a plan, or for `--dry-run` only estimate it."""
    if arguments.dry_run:
        if arguments.if_needed and (found := plan.found(progress)) is not None:
            return found, None
        if arguments.plan_out is not None:
            plan.save(arguments.plan_out)
        return plan.report, plan.estimate()
    return plan.run(progress), None


def _show(report: Report, estimate: Estimate | None, arguments: argparse.Namespace) -> None:
    if arguments.print_path:
        write_path(report.path)
    elif estimate is None:
        text = partial(report_text, report, verbose=arguments.verbose)
        print_result(report, arguments, text, is_done=not arguments.dry_run)
    else:
        more = {"estimate": asdict(estimate)}
        print_result(report, arguments, lambda: _plan_text(report, estimate, arguments), more=more)
    if estimate is not None and estimate.time is not None and estimate.time.error is not None:
        raise estimate.time.error


def _plan_text(report: Report, estimate: Estimate, arguments: argparse.Namespace) -> str:
    text = plan_text(report, estimate, verbose=arguments.verbose)
    if arguments.plan_out is None:
        return text
    return f"{text}\n\nTo do this: {command('apply', arguments.plan_out)}"
