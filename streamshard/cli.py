"""The command line: argv, one call, what is printed, the exit code."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Final, TypeAlias

from tqdm import tqdm

from streamshard import sizes
from streamshard.engine import memory
from streamshard.errors import IntegrityError, SourceError, StreamshardError, UsageError
from streamshard.formats.zarr_documents import CODECS
from streamshard.operations import convert, inspect, pickles, repartition, verify
from streamshard.operations.report import Progress, Report, Silent
from streamshard.tables import (
    findings_text,
    inspection_text,
    pickles_text,
    printable,
    report_text,
    verification_text,
)

Verbs: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

INTERRUPTED: Final = 130
_SOURCE_HELP: Final = (
    "run directory with 'latest', tag directory, .zarr store, or template of raw per-rank dumps "
    "such as 'ckpt/optimizer.{rank:02d}.pt'"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        arguments.verb(arguments)
        sys.stdout.flush()
    except StreamshardError as error:
        print(printable(f"streamshard: {error}"), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("streamshard: interrupted; nothing half-written was left", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has gone; keep the interpreter from complaining about it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="streamshard",
        description="Reshard DeepSpeed ZeRO checkpoints to another number of GPUs.",
        epilog="Exit codes: 0 done, 2 usage, 3 source unreadable or incomplete, 4 target, "
        "5 memory limit too small, 6 bytes differ from what was recorded or verify found problems, "
        "130 interrupted.",
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    _add_repartition(verbs)
    _add_convert(verbs)
    _add_verify(verbs)
    _add_inspect(verbs)
    return parser


def _add_repartition(verbs: Verbs) -> None:
    verb = _add(
        verbs,
        "repartition",
        _repartition,
        "write a checkpoint's files for another world size",
        "streamshard repartition runs/7b runs/7b-on-6 --world-size 6",
    )
    verb.add_argument("source", metavar="SRC", help=_SOURCE_HELP)
    verb.add_argument("target", metavar="OUT", help="run directory to make, or template")
    verb.add_argument(
        "--world-size", type=int, required=True, metavar="M", help="all ranks that will resume"
    )
    verb.add_argument(
        "--zero-stage", type=int, choices=(1, 2, 3), help="stage that will resume [the source's]"
    )
    verb.add_argument(
        "--ds-config",
        metavar="FILE",
        help="whole DeepSpeed config of the job that will resume [the one kept in the checkpoint]",
    )
    _add_moving_options(verb)


def _add_convert(verbs: Verbs) -> None:
    verb = _add(
        verbs,
        "convert",
        _convert,
        "write a checkpoint into a Zarr store",
        "streamshard convert runs/7b archive/7b.zarr --codec zstd",
    )
    verb.add_argument("source", metavar="SRC", help=_SOURCE_HELP)
    verb.add_argument("target", metavar="STORE.zarr", help="store to make")
    verb.add_argument("--codec", choices=CODECS, default="none", help="compression [none]")
    verb.add_argument(
        "--chunk-size",
        type=_size,
        default=convert.DEFAULT_CHUNK_BYTES,
        metavar="SIZE",
        help="bytes per chunk at most, before compression [64MiB]",
    )
    _add_moving_options(verb)


def _add_verify(verbs: Verbs) -> None:
    verb = _add(
        verbs,
        "verify",
        _verify,
        "check that a checkpoint is whole and as it was written, or the same as another",
        "streamshard verify archive/7b.zarr --against runs/7b",
    )
    verb.add_argument("source", metavar="PATH", help=_SOURCE_HELP)
    verb.add_argument(
        "--against",
        metavar="SRC",
        help="compare the content with that of another checkpoint, tensor by tensor, whatever "
        "its format, ZeRO stage and world size; checksums are not looked at then",
    )
    verb.add_argument(
        "--sample",
        metavar="PART",
        help="read a part only: 3/20, or 5%% for the one of twenty whose turn it is today [all]",
    )
    verb.add_argument(
        "--digests",
        action="store_true",
        help="list the digest of every tensor, which does not depend on how it is cut",
    )
    _add_reading_options(verb)


def _add_inspect(verbs: Verbs) -> None:
    verb = _add(
        verbs,
        "inspect",
        _inspect,
        "show what is in a checkpoint",
        "streamshard inspect runs/7b",
    )
    verb.add_argument("source", metavar="SRC", help=_SOURCE_HELP)
    verb.add_argument(
        "--pickles",
        action="store_true",
        help="list every name that pickles ask for; SRC may be a single file, and may be damaged",
    )
    _add_source_options(verb)


def _add(
    verbs: Verbs, name: str, run: Callable[[argparse.Namespace], None], summary: str, example: str
) -> argparse.ArgumentParser:
    verb = verbs.add_parser(
        name, help=summary, description=summary.capitalize() + ".", epilog=f"Example: {example}"
    )
    verb.set_defaults(verb=run)
    verb.add_argument("--json", action="store_true", help="print one JSON document")
    volume = verb.add_mutually_exclusive_group()
    volume.add_argument("-q", "--quiet", action="store_true", help="print nothing but errors")
    volume.add_argument("-v", "--verbose", action="store_true", help="print more")
    return verb


def _add_source_options(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--source-ds-config", metavar="FILE", help="DeepSpeed config of the job that left raw dumps"
    )
    verb.add_argument(
        "--like",
        metavar="SRC",
        help="another checkpoint of the same job, for what SRC does not tell: see the README",
    )
    verb.add_argument("--tag", help="tag to read [the one that 'latest' names]")


def _add_reading_options(verb: argparse.ArgumentParser) -> None:
    _add_source_options(verb)
    verb.add_argument(
        "--memory-limit",
        type=_memory,
        metavar="SIZE",
        help="memory above the program's own: 512MiB, 2GB, or 50%% of the machine's [1GiB, at most "
        "half of what there is]",
    )
    verb.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="threads [one per core, at most 4, fewer where memory is tight]",
    )


def _add_moving_options(verb: argparse.ArgumentParser) -> None:
    _add_reading_options(verb)
    verb.add_argument("--overwrite", action="store_true", help="replace the target if it exists")
    verb.add_argument(
        "-n", "--dry-run", action="store_true", help="show what would be done, and write nothing"
    )
    verb.add_argument(
        "--verify",
        action="store_true",
        help="read back from disk what was written, and compare it with SRC before it takes its "
        "place",
    )


def _size(text: str) -> int:
    try:
        return sizes.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _memory(text: str) -> int:
    try:
        return sizes.parse(text, whole=memory.available_bytes())
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _repartition(arguments: argparse.Namespace) -> None:
    plan = repartition.plan_repartition(
        arguments.source,
        arguments.target,
        world_size=arguments.world_size,
        zero_stage=arguments.zero_stage,
        ds_config_file=arguments.ds_config,
        **_moving_options(arguments),
    )
    _show(plan.report if arguments.dry_run else plan.run(_progress(arguments)), arguments)


def _convert(arguments: argparse.Namespace) -> None:
    plan = convert.plan_convert(
        arguments.source,
        arguments.target,
        codec=arguments.codec,
        chunk_size=arguments.chunk_size,
        **_moving_options(arguments),
    )
    _show(plan.report if arguments.dry_run else plan.run(_progress(arguments)), arguments)


def _verify(arguments: argparse.Namespace) -> None:
    found = verify.verify(
        arguments.source,
        against=arguments.against,
        sample=arguments.sample,
        digests=arguments.digests,
        progress=_progress(arguments),
        **_reading_options(arguments),
    )
    if arguments.json:
        print(json.dumps(asdict(found), indent=2))
    elif not arguments.quiet:
        with_digests = arguments.digests
        text = verification_text(found, verbose=arguments.verbose, with_digests=with_digests)
        print(printable(text))
    if not found.is_good:
        sys.stdout.flush()
        raise IntegrityError(findings_text(found, verbose=arguments.quiet))


def _inspect(arguments: argparse.Namespace) -> None:
    if arguments.pickles:
        _inspect_pickles(arguments)
        return
    found = inspect.inspect(arguments.source, **_source_options(arguments))
    if arguments.json:
        print(json.dumps(asdict(found), indent=2))
    elif not arguments.quiet:
        print(printable(inspection_text(found, verbose=arguments.verbose)))


def _inspect_pickles(arguments: argparse.Namespace) -> None:
    if arguments.like is not None or arguments.source_ds_config is not None:
        raise UsageError("--pickles needs neither --like nor --source-ds-config")
    found = pickles.list_pickles(arguments.source, tag=arguments.tag)
    if arguments.json:
        print(json.dumps(asdict(found), indent=2))
    elif not arguments.quiet:
        print(printable(pickles_text(found, verbose=arguments.verbose)))
    if found.problems:
        sys.stdout.flush()
        count, first = len(found.problems), found.problems[0]
        message = f"{found.path}: {count} of {len(found.files)} files not looked through to the end"
        raise SourceError(f"{message}, so there may be more names; {first.path}: {first.problem}")


def _source_options(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "source_ds_config_file": arguments.source_ds_config,
        "like": arguments.like,
        "tag": arguments.tag,
    }


def _reading_options(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.workers is not None and arguments.workers < 1:
        raise UsageError(f"--workers {arguments.workers}: at least one is needed")
    return {
        **_source_options(arguments),
        "memory_limit": arguments.memory_limit,
        "workers": arguments.workers,
    }


def _moving_options(arguments: argparse.Namespace) -> dict[str, Any]:
    writing = {"overwrite": arguments.overwrite, "verify": arguments.verify}
    return {**_reading_options(arguments), **writing}


def _show(report: Report, arguments: argparse.Namespace) -> None:
    if arguments.json:
        print(json.dumps(asdict(report), indent=2))
    elif not arguments.quiet:
        print(printable(report_text(report, verbose=arguments.verbose)))


def _progress(arguments: argparse.Namespace) -> Progress:
    """Show a bar to a person at a terminal, and to nobody else."""
    if arguments.quiet or not sys.stderr.isatty():
        return Silent()
    return _Bar()


class _Bar:
    """Progress as a bar with bytes and rate."""

    def __init__(self) -> None:
        self._bar: tqdm[Any] | None = None

    def start(self, total_bytes: int) -> None:
        self._bar = tqdm(total=total_bytes, unit="B", unit_scale=True, unit_divisor=1024)

    def advance(self, nbytes: int) -> None:
        if self._bar is not None:
            self._bar.update(nbytes)

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.close()


if __name__ == "__main__":
    sys.exit(main())
