"""The command line: runs one verb, prints its result, returns the exit code. Only it prints."""

import argparse
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from streamshard.cli.completion import completion_script
from streamshard.cli.flags import flag
from streamshard.cli.notice import notify, require_command
from streamshard.cli.parser import arguments_of, parse_command
from streamshard.cli.progress import display
from streamshard.cli.signals import SIGNALS, Signals, StoppedBySignal
from streamshard.cli.streams import give_up, open_what_was_closed, write_out
from streamshard.cli.text.diff_text import diff_text, difference_text
from streamshard.cli.text.escaping import one_line, printable
from streamshard.cli.text.estimate_text import plan_text
from streamshard.cli.text.inspect_text import inspection_text
from streamshard.cli.text.tables import (
    compaction_text,
    findings_lines,
    pickles_text,
    report_text,
    verification_text,
    worker_text,
)
from streamshard.commands import command
from streamshard.errors import (
    IntegrityError,
    SourceError,
    StreamshardError,
    TargetLockedError,
    UsageError,
    memory_errors,
    worded,
)
from streamshard.io.throttle import lower_priority
from streamshard.operations import apply
from streamshard.operations.compact import compact
from streamshard.operations.compact.compact_report import RunRecord
from streamshard.operations.diff import diff
from streamshard.operations.inspect import inspect, pickle_report
from streamshard.operations.inspect.inspect_report import (
    CheckpointList,
    IncompleteCheckpoint,
    Inspection,
)
from streamshard.operations.inspect.remains import find_remains
from streamshard.operations.transfer.estimate import Estimate
from streamshard.operations.transfer.plan import TransferPlan
from streamshard.operations.transfer.report import Progress, Report
from streamshard.operations.verify import verify
from streamshard.options import SourceOptions, fields_of, types_of
from streamshard.verb_options import OPTIONS


def main(argv: Sequence[str] | None = None) -> int:
    """Parse a command line and run its verb; returns the exit code."""
    open_what_was_closed()
    signals = Signals()
    try:
        return carry_out(parse_command(sys.argv[1:] if argv is None else argv), signals)
    finally:
        signals.give_back()


def carry_out(arguments: argparse.Namespace, signals: Signals) -> int:
    """Run one verb to its end, or until a signal asks it to stop; returns the exit code."""
    try:
        signals.take()
        with worded(flag):
            code = _run(arguments)
        signals.over(code)
    except KeyboardInterrupt as error:
        number = error.number if isinstance(error, StoppedBySignal) else signal.SIGINT
        _tell(f"streamshard: interrupted by {number.name}", error)
        return SIGNALS[number]
    return code


def _run(arguments: argparse.Namespace) -> int:
    """Run one verb to its end; returns the exit code."""
    try:
        if arguments.verb in OPTIONS:
            OPTIONS[arguments.verb](**_keywords(arguments))  # refuses what makes no sense
            _require_sense(arguments)
        with _cluster(arguments), memory_errors():
            _VERBS[arguments.verb](arguments)
        sys.stdout.flush()
    except StreamshardError as error:
        _tell(f"streamshard: {error}", error)
        return error.exit_code
    except BrokenPipeError:
        give_up(sys.stdout)  # the reader has gone
    return 0


def _require_sense(arguments: argparse.Namespace) -> None:
    """Refuse options of the command line alone that contradict each other."""
    if arguments.plan_out is not None:
        message = f"--plan-out {arguments.plan_out}: saves"
        if not arguments.dry_run:
            raise UsageError(f"{message} a plan; give --dry-run with it")
        if arguments.if_needed:
            message = f"{message} what is to be written, whether it is needed or not"
            raise UsageError(f"{message}; leave --if-needed out")
    if arguments.prometheus and not arguments.status:
        raise UsageError("--prometheus: is a form of --status; give both")
    if arguments.prometheus and arguments.json:
        raise UsageError("--prometheus and --json: are two forms of --status; give one of them")
    for name in _CHANGING if arguments.status else ():
        if getattr(arguments, name):
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"--status: only reports; leave {option} out")
    if arguments.print_path and arguments.json:
        raise UsageError("--print-path: is the key 'path' of --json; leave one of them out")


_CHANGING: Final = ("delete", "dry_run", "notify", "undelete", "purge", "acknowledge")
"""Options of `compact` that say what a run is to do."""


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
            print(printable(worker_text(chosen.rates)), file=sys.stderr)


def _print(text: str) -> None:
    """Write to standard output; see `write_out` for errors."""
    write_out(text + "\n")


def _tell(message: str, error: BaseException) -> None:
    """Print an error message, and the error's notes, to standard error."""
    for line in (message, *getattr(error, "__notes__", ())):
        print(one_line(line), file=sys.stderr)


def _keywords(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the keywords of the verb's function; its parser was made from the same options."""
    kind = OPTIONS[arguments.verb]
    fields = fields_of(kind)
    return {name: getattr(arguments, name) for name in types_of(kind) if fields[name].help}


def _transfer(arguments: argparse.Namespace) -> None:
    planner = apply.PLANNERS[arguments.verb]
    with _progress(arguments) as progress:
        plan = planner(**_keywords(arguments))
        done = _carry_out(plan, arguments, progress)
    _show(*done, arguments)


def _verify(arguments: argparse.Namespace) -> None:
    with _progress(arguments) as progress:
        found = verify.verify(progress=progress, **_keywords(arguments))
    if arguments.json:
        _print(json.dumps(asdict(found), indent=2))
    elif not arguments.quiet:
        with_digests = arguments.digests
        text = verification_text(found, verbose=arguments.verbose, with_digests=with_digests)
        _print(printable(text))
    if not found.is_good:
        first, *others = findings_lines(found, verbose=arguments.quiet)
        error = IntegrityError(first)
        for line in others:
            error.add_note(line)
        raise error


def _diff(arguments: argparse.Namespace) -> None:
    with _progress(arguments) as progress:
        found = diff.diff(progress=progress, **_keywords(arguments))
    if arguments.json:
        _print(json.dumps(asdict(found), indent=2))
    elif not arguments.quiet:
        _print(printable(diff_text(found, sort=arguments.sort, verbose=arguments.verbose)))
    if not found.is_equal:
        raise IntegrityError(difference_text(found))


def _inspect(arguments: argparse.Namespace) -> None:
    if arguments.pickles:
        _inspect_pickles(arguments)
        return
    options = _keywords(arguments)
    found: Inspection | CheckpointList | IncompleteCheckpoint | None
    try:
        found = inspect.inspect(**options)
    except SourceError as error:
        own = {name: options.pop(name) for name in ("source", *types_of(SourceOptions))}
        found = None if any(map(_is_given, options.values())) else find_remains(error, **own)
        if found is None:
            raise
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
        _print(json.dumps(asdict(found), indent=2))
    elif not arguments.quiet:
        _print(inspection_text(found, verbose=arguments.verbose, width=_terminal_width()))


def _terminal_width() -> int | None:
    """Return the terminal's width; None if output is no terminal, or colours and lines are off."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return None
    if sys.stdout.encoding.lower() not in ("utf-8", "utf8"):
        return None
    return shutil.get_terminal_size().columns


def _inspect_pickles(arguments: argparse.Namespace) -> None:
    options = _keywords(arguments)
    source, tag = options.pop("source"), options.pop("tag")
    if any(map(_is_given, options.values())):
        raise UsageError("--pickles lists names and nothing else: only --tag may be given with it")
    found = pickle_report.list_pickles(source, tag=tag)
    if arguments.json:
        _print(json.dumps(asdict(found), indent=2))
    elif not arguments.quiet:
        _print(printable(pickles_text(found, verbose=arguments.verbose)))
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


def _apply(arguments: argparse.Namespace) -> None:
    with _progress(arguments) as progress:
        plan = apply.load_plan(**_keywords(arguments))
        done = _carry_out(plan, arguments, progress)
    _show(*done, arguments)


def _compact(arguments: argparse.Namespace) -> None:
    runs = compact.runs_like(arguments.run_dir, arguments.archive_dir)
    if arguments.status:
        _compact_status(runs or [(arguments.run_dir, arguments.archive_dir)], arguments)
        return
    if arguments.notify is not None:
        require_command(arguments.notify)
    lower_priority()
    records: list[RunRecord] = []
    try:
        if runs is None:
            code = _compact_run(arguments, records)
        elif arguments.undelete or arguments.purge or arguments.acknowledge:
            raise UsageError(
                f"{arguments.run_dir}: to name tags, give the one run that they are of"
            )
        else:
            codes = [_compact_one_of_many(arguments, records, *run) for run in runs]
            code = next(filter(None, codes), 0)
    except StreamshardError:
        _notify(records, arguments)
        raise
    _notify(records, arguments)
    if code:
        raise SystemExit(code)


def _compact_one_of_many(
    arguments: argparse.Namespace, records: list[RunRecord], run: Path, archive: Path
) -> int:
    """Compact one of several runs; an error is reported, and stops no other run."""
    one = argparse.Namespace(
        **{**vars(arguments), "run_dir": str(run), "archive_dir": str(archive)}
    )
    try:
        return _compact_run(one, records, indent=None)
    except StreamshardError as error:
        if arguments.json:
            document = {"run_dir": one.run_dir, "archive_dir": one.archive_dir, "error": str(error)}
            _print(json.dumps(document))
        elif not arguments.quiet:
            _print(one_line(f"{run}: nothing was done"))
        print(one_line(f"streamshard: {error}"), file=sys.stderr)
        return error.exit_code


def _compact_run(
    arguments: argparse.Namespace, records: list[RunRecord], indent: int | None = 2
) -> int:
    """Compact one run, and return the exit code; its outcome is added to `records`."""
    record = RunRecord(arguments.run_dir, arguments.archive_dir)
    try:
        with _progress(arguments) as progress, memory_errors():
            found = compact.compact(progress=progress, **_keywords(arguments))
    except TargetLockedError as error:
        if arguments.quiet:
            return error.exit_code
        raise
    except StreamshardError as error:
        records.append(record.after((), error))
        raise
    records.append(record.after(found.tags))
    if arguments.json:
        _print(json.dumps(asdict(found), indent=indent))
    elif not arguments.quiet:
        _print(printable(compaction_text(found, verbose=arguments.verbose)))
    for tag in found.problems:
        where = "" if indent else f"{found.run_dir}: "
        print(
            one_line(f"streamshard: {where}{tag.tag}: {tag.action}: {tag.reason}"), file=sys.stderr
        )
    return found.exit_code


def _notify(records: Sequence[RunRecord], arguments: argparse.Namespace) -> None:
    """Run the command of `--notify` if a run needs attention."""
    by_hand = arguments.undelete or arguments.purge or arguments.acknowledge
    wanting = [record for record in records if record.needs_attention]
    if arguments.notify is None or arguments.dry_run or by_hand or not wanting:
        return
    problem = notify(arguments.notify, wanting)
    if problem:
        print(one_line(f"streamshard: {problem}"), file=sys.stderr)


def _compact_status(
    runs: Sequence[tuple[str | Path, str | Path]], arguments: argparse.Namespace
) -> None:
    # Not at the top: a run needs none of it.
    from streamshard.cli.text.status_text import prometheus_text, status_text
    from streamshard.operations.compact.compact_status import compact_status

    found, errors = [], list[StreamshardError]()
    for run, archive in runs:
        try:
            found.append(compact_status(run, archive))
        except StreamshardError as error:
            errors.append(error)
    errors += [SourceError(problem) for status in found for problem in status.problems]
    if arguments.json:
        indent = 2 if len(runs) == 1 else None
        for status in found:
            _print(json.dumps(asdict(status), indent=indent))
    elif arguments.prometheus:
        _print(prometheus_text(found))
    elif not arguments.quiet and found:
        _print(printable("\n\n".join(status_text(one, verbose=arguments.verbose) for one in found)))
    for other in errors[1:]:
        _tell(f"streamshard: {other}", other)
    if errors:
        raise errors[0]


def _completion(arguments: argparse.Namespace) -> None:
    _print(completion_script(arguments_of(), arguments.shell))


_VERBS: Final[Mapping[str, Callable[[argparse.Namespace], None]]] = {
    **dict.fromkeys(apply.PLANNERS, _transfer),
    "verify": _verify,
    "diff": _diff,
    "inspect": _inspect,
    "compact": _compact,
    "apply": _apply,
    "completion": _completion,
}
"""The function that runs each verb of the command line."""


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
    if arguments.json:
        more = {} if estimate is None else {"estimate": asdict(estimate)}
        _print(json.dumps({**asdict(report), **more}, indent=2))
    elif arguments.print_path:
        _print(report.path)
    elif arguments.quiet:
        return
    elif estimate is not None:
        _print(printable(plan_text(report, estimate, verbose=arguments.verbose)))
        if arguments.plan_out is not None:
            _print(printable(f"\nTo do this: {command('apply', arguments.plan_out)}"))
    else:
        _print(printable(report_text(report, verbose=arguments.verbose)))


def _progress(arguments: argparse.Namespace) -> AbstractContextManager[Progress]:
    return display(arguments.progress_mode, is_quiet=arguments.quiet)


if __name__ == "__main__":
    sys.exit(main())
