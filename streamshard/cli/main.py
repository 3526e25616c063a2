"""The command line: runs one verb, prints its result, returns the exit code."""

import argparse
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from streamshard import registry
from streamshard.cli.parser import OPTIONS, flag, keywords, options_of, parse_command
from streamshard.cli.signals import SIGNALS, Signals
from streamshard.cli.streams import close_quietly, open_what_was_closed, tell, tell_error
from streamshard.errors import StreamshardError, memory_errors, worded

_Runner = Callable[[argparse.Namespace], int | None]


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
        run = registry.load(_VERBS[arguments.verb])
        signals.install()  # not before: what is loaded might mistake the error for its own
        with worded(flag):
            code = _run(run, arguments)
        signals.finish(code)
    except (KeyboardInterrupt, RuntimeError) as error:
        # A condition that is interrupted while it takes its lock raises an error of its own.
        number = signals.stopped_by
        if number is None and isinstance(error, RuntimeError):
            raise
        number = number or signal.SIGINT
        tell_error(error, f"interrupted by {number.name}")
        return SIGNALS[number]
    return code


def _run(run: _Runner, arguments: argparse.Namespace) -> int:
    try:
        if arguments.verb in OPTIONS:
            options_of(arguments.verb)(**keywords(arguments))  # refuses what makes no sense
        with _cluster(arguments), _ways_told(arguments), memory_errors():
            code = run(arguments)
        sys.stdout.flush()
    except StreamshardError as error:
        tell_error(error)
        return error.exit_code
    except BrokenPipeError:
        close_quietly(sys.stdout)  # the reader has gone
        return 0
    return code or 0


@contextmanager
def _ways_told(arguments: argparse.Namespace) -> Iterator[None]:
    """With `--verbose`, tell at the end whether source files were mapped, or why they were read."""
    if not getattr(arguments, "verbose", False):
        yield
        return
    from streamshard.io.memory_map import ways_taken  # not at the top: help needs none

    ways_taken.clear()
    try:
        yield
    finally:
        if ways_taken:
            tell(f"source files: {'; '.join(sorted(ways_taken))}")


@contextmanager
def _cluster(arguments: argparse.Namespace) -> Iterator[None]:
    """Let a verb run on the cluster of `--dask`; with `--verbose`, tell what each worker did."""
    address = getattr(arguments, "dask", None)
    if address is None:
        yield
        return
    from streamshard.cli.text.report_text import worker_text  # not at the top: most need neither
    from streamshard.cluster.connections import executor

    with executor(address, workers=arguments.workers) as chosen:
        yield
        if arguments.verbose:
            tell(*worker_text(chosen.rates).split("\n"))


_VERBS: Final[Mapping[str, str]] = {
    "repartition": "streamshard.cli.transfer_command:run_transfer",
    "convert": "streamshard.cli.transfer_command:run_transfer",
    "export": "streamshard.cli.transfer_command:run_transfer",
    "merge": "streamshard.cli.transfer_command:run_transfer",
    "graft": "streamshard.cli.graft_command:run_graft",
    "verify": "streamshard.cli.verify_command:run_verify",
    "diff": "streamshard.cli.diff_command:run_diff",
    "inspect": "streamshard.cli.inspect_command:run_inspect",
    "newest": "streamshard.cli.newest_command:run_newest",
    "serve": "streamshard.cli.serve_command:run_serve",
    "compact": "streamshard.cli.compact_command:run_compact",
    "completion": "streamshard.cli.completion:run_completion",
}
"""The function that runs each verb, and may return an exit code; a verb loads only its own."""


if __name__ == "__main__":
    sys.exit(main())
