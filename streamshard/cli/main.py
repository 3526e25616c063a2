"""The command line: runs one verb, prints its result, returns the exit code."""

import argparse
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from typing import Final

from streamshard.cli.compact_command import run_compact
from streamshard.cli.completion import completion_script
from streamshard.cli.parser import arguments_of, flag, keywords, parse_command
from streamshard.cli.progress import display
from streamshard.cli.signals import SIGNALS, Signals, StoppedBySignal
from streamshard.cli.streams import (
    close_quietly,
    open_what_was_closed,
    print_json,
    print_result,
    tell,
    tell_error,
    write_out,
    write_path,
)
from streamshard.cli.text.diff_text import diff_text, difference_text
from streamshard.cli.text.estimate_text import plan_text
from streamshard.cli.text.inspect_text import inspection_text, pickles_text
from streamshard.cli.text.newest_text import newest_lines
from streamshard.cli.text.report_text import report_text, worker_text
from streamshard.cli.text.verify_text import findings_lines, verification_text
from streamshard.commands import command
from streamshard.errors import (
    IntegrityError,
    SourceError,
    StreamshardError,
    UsageError,
    memory_errors,
    worded,
)
from streamshard.operations import apply
from streamshard.operations.diff import diff
from streamshard.operations.inspect import inspect, pickle_report
from streamshard.operations.inspect.inspect_report import (
    CheckpointList,
    IncompleteCheckpoint,
    Inspection,
)
from streamshard.operations.inspect.unopened import describe_unopened, draw_unopened
from streamshard.operations.newest import newest
from streamshard.operations.transfer.estimate import Estimate
from streamshard.operations.transfer.plan import TransferPlan
from streamshard.operations.transfer.report import Progress, Report
from streamshard.operations.verify import verify
from streamshard.options import SourceOptions, types_of
from streamshard.verb_options import OPTIONS


def main(argv: Sequence[str] | None = None) -> int:
    """Parse a command line and run its verb; returns the exit code."""
    open_what_was_closed()
    signals = Signals()
    try:
        return carry_out(parse_command(sys.argv[1:] if argv is None else argv), signals)
    finally:
        signals.restore()


def carry_out(arguments: argparse.Namespace, signals: Signals) -> int:
    """Run one verb to its end, or until a signal asks it to stop; returns the exit code."""
    try:
        signals.install()
        with worded(flag):
            code = _run(arguments)
        signals.finish(code)
    except KeyboardInterrupt as error:
        number = error.number if isinstance(error, StoppedBySignal) else signal.SIGINT
        tell_error(error, f"interrupted by {number.name}")
        return SIGNALS[number]
    return code


def _run(arguments: argparse.Namespace) -> int:
    """Run one verb to its end; returns the exit code."""
    try:
        if arguments.verb in OPTIONS:
            OPTIONS[arguments.verb](**keywords(arguments))  # refuses what makes no sense
            _require_sense(arguments)
        with _cluster(arguments), memory_errors():
            code = _VERBS[arguments.verb](arguments)
        sys.stdout.flush()
    except StreamshardError as error:
        tell_error(error)
        return error.exit_code
    except BrokenPipeError:
        close_quietly(sys.stdout)  # the reader has gone
        return 0
    return code or 0


def _require_sense(arguments: argparse.Namespace) -> None:
    """Refuse options of the command line alone that contradict each other."""
    if arguments.plan_out is not None:
        message = f"--plan-out {arguments.plan_out}: saves"
        if not arguments.dry_run:
            raise UsageError(f"{message} a plan; give --dry-run with it")
        if arguments.if_needed:
            message = f"{message} what is to be written, whether it is needed or not"
            raise UsageError(f"{message}; leave --if-needed out")
    if arguments.print_path and arguments.json:
        raise UsageError("--print-path: is the key 'path' of --json; leave one of them out")


@contextmanager
def _cluster(arguments: argparse.Namespace) -> Iterator[None]:
    """Let a verb run on the cluster of `--dask`; with `--verbose`, tell what each worker did."""
    address = getattr(arguments, "dask", None)
    if address is None:
        yield
        return
    from streamshard.cluster.connections import executor  # not at the top: it is an extra

    with executor(address, workers=arguments.workers) as chosen:
        yield
        if arguments.verbose:
            tell(*worker_text(chosen.rates).split("\n"))


def _transfer(arguments: argparse.Namespace) -> None:
    planner = apply.PLANNERS[arguments.verb]
    with _progress(arguments) as progress:
        plan = planner(**keywords(arguments))
        done = _carry_out(plan, arguments, progress)
    _show(*done, arguments)


def _verify(arguments: argparse.Namespace) -> None:
    with _progress(arguments) as progress:
        found = verify.verify(progress=progress, **keywords(arguments))
    form = {"verbose": arguments.verbose, "with_digests": arguments.digests}
    print_result(found, arguments, lambda: verification_text(found, **form))
    if not found.is_good:
        first, *others = findings_lines(found, verbose=arguments.quiet)
        error = IntegrityError(first)
        for line in others:
            error.add_note(line)
        raise error


def _diff(arguments: argparse.Namespace) -> None:
    with _progress(arguments) as progress:
        found = diff.diff(progress=progress, **keywords(arguments))
    form = {"sort": arguments.sort, "verbose": arguments.verbose}
    print_result(found, arguments, lambda: diff_text(found, **form))
    if not found.is_equal:
        raise IntegrityError(difference_text(found))


def _inspect(arguments: argparse.Namespace) -> None:
    if arguments.pickles:
        _inspect_pickles(arguments)
        return
    options = keywords(arguments)
    found: Inspection | CheckpointList | IncompleteCheckpoint | None
    try:
        found = inspect.inspect(**options)
    except SourceError as error:
        own = {name: options.pop(name) for name in ("source", *types_of(SourceOptions))}
        html, overwrite = options.pop("html"), options.pop("overwrite")
        found = None if any(map(_is_given, options.values())) else describe_unopened(error, **own)
        if found is None:
            raise
        if html is not None:
            found = draw_unopened(found, own["source"], html, overwrite=overwrite)
        _show_inspection(found, arguments)
        if isinstance(found, CheckpointList) and found.problems:
            raise SourceError(found.problems[0]) from None  # without advice to do this
        if found.problems:
            raise
        return
    _show_inspection(found, arguments)


def _is_given(value: object) -> bool:
    return value is not None and value is not False and value != []


def _show_inspection(
    found: Inspection | CheckpointList | IncompleteCheckpoint, arguments: argparse.Namespace
) -> None:
    if arguments.json:
        print_json(asdict(found))
    elif not arguments.quiet:
        text = inspection_text(found, verbose=arguments.verbose, width=_terminal_width())
        write_out(text + "\n")


def _terminal_width() -> int | None:
    """Return the terminal's width; None if output is no terminal, or colours and lines are off."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return None
    if sys.stdout.encoding.lower() not in ("utf-8", "utf8"):
        return None
    return shutil.get_terminal_size().columns


def _inspect_pickles(arguments: argparse.Namespace) -> None:
    options = keywords(arguments)
    source, tag = options.pop("source"), options.pop("tag")
    if any(map(_is_given, options.values())):
        raise UsageError("--pickles lists names and nothing else: only --tag may be given with it")
    found = pickle_report.list_pickles(source, tag=tag)
    print_result(found, arguments, lambda: pickles_text(found, verbose=arguments.verbose))
    if found.dangers:
        worst = found.dangers[0]
        message = (
            f"{found.path}: a pickle calls {worst.name}, which runs what the file says as soon"
        )
        raise IntegrityError(
            f"{message} as a job loads it; in {worst.files[0]}. Nothing was run here"
        )
    if found.problems:
        count, first = len(found.problems), found.problems[0]
        message = f"{found.path}: {count} of {len(found.files)} files not read to the end"
        raise SourceError(f"{message}, so there may be more names; {first.path}: {first.problem}")


def _newest(arguments: argparse.Namespace) -> None:
    with _progress(arguments) as progress:
        found = newest.search(progress=progress, **keywords(arguments))
    if arguments.json:
        print_json(asdict(found))
    if found.path is None:
        raise newest.none_good(found)
    if not arguments.quiet:
        tell(*newest_lines(found))
    if not arguments.json:
        write_path(found.path)


def _apply(arguments: argparse.Namespace) -> None:
    with _progress(arguments) as progress:
        plan = apply.load_plan(**keywords(arguments))
        done = _carry_out(plan, arguments, progress)
    _show(*done, arguments)


def _completion(arguments: argparse.Namespace) -> None:
    write_out(completion_script(arguments_of(), arguments.shell) + "\n")


_VERBS: Final[Mapping[str, Callable[[argparse.Namespace], int | None]]] = {
    **dict.fromkeys(apply.PLANNERS, _transfer),
    "verify": _verify,
    "diff": _diff,
    "inspect": _inspect,
    "newest": _newest,
    "compact": run_compact,
    "apply": _apply,
    "completion": _completion,
}
"""The function that runs each verb of the command line; it may return another exit code than 0."""


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
        print_result(report, arguments, lambda: report_text(report, verbose=arguments.verbose))
    else:
        more = {"estimate": asdict(estimate)}
        print_result(report, arguments, lambda: _plan_text(report, estimate, arguments), more=more)


def _plan_text(report: Report, estimate: Estimate, arguments: argparse.Namespace) -> str:
    text = plan_text(report, estimate, verbose=arguments.verbose)
    if arguments.plan_out is None:
        return text
    return f"{text}\n\nTo do this: {command('apply', arguments.plan_out)}"


def _progress(arguments: argparse.Namespace) -> AbstractContextManager[Progress]:
    return display(arguments.progress_mode, is_quiet=arguments.quiet)


if __name__ == "__main__":
    sys.exit(main())
