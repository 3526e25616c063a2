"""The parser of the command line: verbs, their options and their help."""

import argparse
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Final, NoReturn, TypeAlias

from streamshard.cli.completion import SHELLS
from streamshard.cli.options import (
    add_keeping_options,
    add_moving_options,
    add_reading_options,
    add_resource_options,
    add_source_options,
    duration,
    size,
    with_templates,
)
from streamshard.cli.streams import give_up, write_out
from streamshard.defaults import (
    CODECS,
    DEFAULT_CHUNK_BYTES,
    DEFAULT_GRACE,
    DEFAULT_SHARD_BYTES,
    DTYPES,
    FORMATS,
    ORDERS,
)
from streamshard.errors import StreamshardError, TargetError

Verbs: TypeAlias = "argparse._SubParsersAction[_Parser]"

_EXAMPLE: Final = "Example: "
_SOURCE_HELP: Final = (
    "run directory with 'latest', tag directory, .zarr store, or template of raw per-rank dumps "
    "such as 'ckpt/optimizer.{rank:02d}.pt'; as every path here, local or s3://bucket/..., "
    "gs://... or az://..."
)


def arguments_of() -> argparse.ArgumentParser:
    """Make the parser of the whole command line; `verb` of its result names the verb to run."""
    parser = _Parser(
        prog="streamshard",
        description="Reshard DeepSpeed ZeRO checkpoints to another number of GPUs.",
        epilog="Exit codes: 0 done, 2 usage, 3 source unreadable or incomplete, 4 target, "
        "5 memory limit too small, 6 bytes differ from what was recorded, verify found problems or "
        "diff differences, "
        "130 interrupted, 143 terminated.",
    )
    parser.add_argument("--version", action=_Version, help="show the version and exit")
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    _add_repartition(verbs)
    _add_convert(verbs)
    _add_export(verbs)
    _add_verify(verbs)
    _add_diff(verbs)
    _add_inspect(verbs)
    _add_compact(verbs)
    _add_apply(verbs)
    _add_completion(verbs)
    return parser


def parse_command(argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command line; ends the process if it is not valid."""
    parser = arguments_of()
    try:
        words = with_templates(argv)
    except StreamshardError as error:
        parser.exit(error.exit_code, f"streamshard: {error}\n")
    return parser.parse_args(words)


class _Parser(argparse.ArgumentParser):
    """Suggests the nearest verb or option after a typing error; reports failed output."""

    def parse_known_args(  # type: ignore[override]
        self,
        args: Sequence[str] | None = None,
        namespace: argparse.Namespace | None = None,
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse arguments and refuse unknown ones; a verb's parser gets only the words after it."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            options = [word.partition("=")[0] for word in unknown if word.startswith("-")]
            near = [_near(option, self._option_string_actions) for option in options]
            self.error(f"unrecognized arguments: {' '.join(unknown)}{_hint(near)}")
        return parsed, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:  # noqa: ANN401
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            near = _near(str(value), map(str, action.choices or ()))
            raise argparse.ArgumentError(action, f"{error.message}{_hint([near])}") from error

    def _print_message(self, message: str, file: Any = None) -> None:  # noqa: ANN401
        if file is not sys.stdout:
            super()._print_message(message, file)
            return
        try:
            write_out(message)
        except BrokenPipeError:
            give_up(sys.stdout)  # the reader has gone
        except TargetError as error:
            self.exit(error.exit_code, f"streamshard: {error}\n")


def _near(word: str, known: Iterable[str]) -> str | None:
    """Find the known word that is nearest to a mistyped one, if any is near."""
    from difflib import get_close_matches  # not at the top: most command lines are right

    return next(iter(get_close_matches(word, known, n=1)), None)


def _hint(near: Iterable[str | None]) -> str:
    found = [word for word in near if word]
    return f"; did you mean {' '.join(found)}?" if found else ""


class _Version(argparse.Action):
    """Prints the version, which it looks up only when asked for."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from importlib.metadata import PackageNotFoundError, version

        try:
            found = version("streamshard")
        except PackageNotFoundError:
            found = "(not installed, so its version is not known)"
        parser._print_message(f"{parser.prog} {found}\n", sys.stdout)
        parser.exit()


class _Help(argparse.HelpFormatter):
    """Keeps the example in one line, so that it can be copied."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith(_EXAMPLE) else super()._fill_text(text, width, indent)


def _add_repartition(verbs: Verbs) -> None:
    verb = _add(
        verbs,
        "repartition",
        "write a checkpoint's files for another world size",
        "streamshard repartition runs/7b runs/7b-on-6 --world-size 6",
    )
    verb.add_argument("source", metavar="SRC", help=_SOURCE_HELP)
    verb.add_argument("target", metavar="OUT", help="run directory to make, or template")
    verb.add_argument(
        "--world-size",
        type=int,
        metavar="M",
        help="number of ranks that will resume [of a store: as many as saved its content]",
    )
    verb.add_argument(
        "--zero-stage",
        type=int,
        choices=(1, 2, 3),
        help="stage of the job that will resume [the source's]",
    )
    verb.add_argument(
        "--ds-config",
        dest="ds_config_file",
        metavar="FILE",
        help="whole DeepSpeed config of the job that will resume [the one kept in the checkpoint]",
    )
    add_moving_options(verb, resumes=True)


def _add_convert(verbs: Verbs) -> None:
    verb = _add(
        verbs,
        "convert",
        "write a checkpoint into a Zarr store",
        "streamshard convert runs/7b archive/7b.zarr --codec zstd",
    )
    verb.add_argument("source", metavar="SRC", help=_SOURCE_HELP)
    verb.add_argument("target", metavar="STORE.zarr", help="store to make")
    verb.add_argument("--codec", choices=CODECS, default="none", help="compression [none]")
    verb.add_argument(
        "--chunk-size",
        type=size,
        default=DEFAULT_CHUNK_BYTES,
        metavar="SIZE",
        help="bytes per chunk at most, before compression [64MiB]",
    )
    add_moving_options(verb)


def _add_export(verbs: Verbs) -> None:
    verb = _add(
        verbs,
        "export",
        "write a checkpoint's weights for from_pretrained",
        "streamshard export runs/7b models/7b --dtype bf16",
    )
    verb.add_argument("source", metavar="SRC", help=_SOURCE_HELP)
    verb.add_argument("target", metavar="OUT", help="model directory to make")
    verb.add_argument(
        "--dtype", choices=tuple(DTYPES), default="fp32", help="what to cast weights to [fp32]"
    )
    verb.add_argument(
        "--format",
        choices=FORMATS,
        default=FORMATS[0],
        help="model.safetensors, torch's pytorch_model.bin, or DeepSpeed's universal checkpoint "
        "[safetensors]",
    )
    verb.add_argument(
        "--max-shard-size",
        type=size,
        default=DEFAULT_SHARD_BYTES,
        metavar="SIZE",
        help="bytes per file at most, but for a tensor that is larger [5GB]",
    )
    for option, what in (
        (
            "--include",
            "take nothing but tensors of such names, as often as needed: 'layers.*' [all]",
        ),
        ("--exclude", "leave out tensors of such names, as often as needed [none]"),
        ("--keep-dtype", "do not cast tensors of such names, as often as needed: '*norm*' [none]"),
    ):
        verb.add_argument(option, action="append", default=[], metavar="PATTERN", help=what)
    verb.add_argument(
        "--strip-prefix",
        action="append",
        default=[],
        metavar="TEXT",
        help="prefix to remove from names: module. [none]",
    )
    verb.add_argument(
        "--no-frozen",
        dest="frozen",
        action="store_false",
        help="leave out weights that were not trained",
    )
    add_moving_options(verb)


def _add_verify(verbs: Verbs) -> None:
    verb = _add(
        verbs,
        "verify",
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
    add_reading_options(verb)


def _add_diff(verbs: Verbs) -> None:
    verb = _add(
        verbs,
        "diff",
        "say how different two checkpoints are, tensor by tensor",
        "streamshard diff runs/7b/global_step1000 runs/7b/global_step2000 --param 'layers.0.*'",
    )
    verb.add_argument("source", metavar="A", help=_SOURCE_HELP)
    verb.add_argument("other", metavar="B", help="another one, of any format, stage and world size")
    verb.add_argument(
        "--param",
        dest="params",
        action="append",
        default=[],
        metavar="PATTERN",
        help="compare nothing but tensors of such names: 'layers.0.*' [all, and all else]",
    )
    verb.add_argument(
        "--sort",
        choices=(*ORDERS, "name"),
        default="relative",
        help="the most changed first by relative L2, by the largest or mean difference, by cosine, "
        "by elements changed; or in the checkpoint's order [relative]",
    )
    verb.add_argument(
        "--against-tag", metavar="TAG", help="tag to read of B [the one that 'latest' names]"
    )
    add_reading_options(verb, of=" of A")


def _add_inspect(verbs: Verbs) -> None:
    verb = _add(
        verbs,
        "inspect",
        "show what is in a checkpoint",
        "streamshard inspect runs/7b",
    )
    verb.add_argument("source", metavar="SRC", help=_SOURCE_HELP)
    verb.add_argument(
        "--pickles",
        action="store_true",
        help="list every name that pickles ask for; SRC may be a single file, and may be damaged",
    )
    verb.add_argument(
        "--param",
        dest="params",
        action="append",
        default=[],
        metavar="PATTERN",
        help="show which rank holds which elements of these tensors, in which file, and where",
    )
    verb.add_argument(
        "--rank",
        type=int,
        metavar="R",
        help="show what data-parallel rank R holds, numbered as in zero_pp_rank_R",
    )
    for option, form in (("--svg", "an SVG"), ("--html", "a page with names where one points")):
        what = f"draw how each parameter is cut among ranks, as {form}"
        verb.add_argument(option, metavar="FILE", help=what)
    verb.add_argument(
        "--world-size", type=int, metavar="M", help="draw too how it would be cut for M ranks"
    )
    verb.add_argument(
        "--zero-stage", type=int, choices=(1, 2, 3), help="draw too how it would be cut at a stage"
    )
    verb.add_argument("--overwrite", action="store_true", help="replace pictures that exist")
    add_source_options(verb)


def _add_compact(verbs: Verbs) -> None:
    verb = _add(
        verbs,
        "compact",
        "archive old tags of a run directory, and remove them if asked to",
        "streamshard compact runs/7b archive/7b --keep-last 3 --delete --grace 7d",
    )
    verb.add_argument(
        "source",
        metavar="RUN_DIR",
        help="directory that holds 'latest' and tags; as ARCHIVE_DIR, local or s3://bucket/..., "
        "gs://... or az://...",
    )
    verb.add_argument("target", metavar="ARCHIVE_DIR", help="where TAG.zarr and its receipt go")
    add_keeping_options(verb)
    verb.add_argument(
        "--delete",
        action="store_true",
        help="move what is archived and proved into a trash in RUN_DIR, and empty it in time",
    )
    verb.add_argument(
        "--grace",
        type=duration,
        default=DEFAULT_GRACE,
        metavar="TIME",
        help="time that tags stay in the trash, which takes space all the while [7d]",
    )
    verb.add_argument(
        "--max-delete",
        type=int,
        metavar="N",
        help="move at most N tags in a run; tags that lose their states count too [all]",
    )
    verb.add_argument(
        "--weights-only-older-than",
        type=duration,
        metavar="TIME",
        help="drop the optimizer states of archives whose originals were removed for good longer "
        "ago than this; no job can resume from them then [never]",
    )
    by_hand = verb.add_mutually_exclusive_group()
    by_hand.add_argument(
        "--undelete",
        nargs="+",
        default=[],
        metavar="TAG",
        help="bring tags back from the trash; give it behind ARCHIVE_DIR",
    )
    by_hand.add_argument(
        "--purge",
        nargs="+",
        default=[],
        metavar="TAG",
        help="remove tags in the trash for good once --grace is over, whatever rules say; give it "
        "behind ARCHIVE_DIR",
    )
    by_hand.add_argument(
        "--acknowledge",
        nargs="+",
        default=[],
        metavar="TAG",
        help="leave ambiguous tags as they are, and report them again only when they change; give "
        "it behind ARCHIVE_DIR",
    )
    verb.add_argument("--codec", choices=CODECS, default="zstd", help="compression [zstd]")
    verb.add_argument(
        "--bwlimit",
        dest="bytes_per_second",
        type=size,
        metavar="SIZE",
        help="read and write no more than this a second: 200MB [no limit]",
    )
    add_resource_options(verb)
    verb.add_argument(
        "-n", "--dry-run", action="store_true", help="say what would be done, and do nothing"
    )


def _add_apply(verbs: Verbs) -> None:
    verb = _add(
        verbs,
        "apply",
        "run a plan that --dry-run --plan-out has saved, unless something has changed since",
        "streamshard apply plan.json",
    )
    verb.add_argument("plan", metavar="PLAN", help="file that --plan-out made")
    add_resource_options(verb)
    verb.add_argument(
        "-n", "--dry-run", action="store_true", help="show what would be done, and write nothing"
    )
    verb.set_defaults(plan_out=None, if_needed=False, print_path=False)


def _add_completion(verbs: Verbs) -> None:
    summary = "print what teaches a shell to complete this command line"
    example = "streamshard completion bash > ~/.local/share/bash-completion/completions/streamshard"
    verb = verbs.add_parser(
        "completion",
        help=summary,
        description=summary.capitalize() + ".",
        epilog=_EXAMPLE + example,
        formatter_class=_Help,
    )
    verb.set_defaults(verb="completion")
    verb.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))


def _add(verbs: Verbs, name: str, summary: str, example: str) -> argparse.ArgumentParser:
    verb = verbs.add_parser(
        name,
        help=summary,
        description=summary.capitalize() + ".",
        epilog=_EXAMPLE + example,
        formatter_class=_Help,
    )
    verb.set_defaults(verb=name)
    verb.add_argument("--json", action="store_true", help="print one JSON document")
    volume = verb.add_mutually_exclusive_group()
    volume.add_argument("-q", "--quiet", action="store_true", help="print nothing but errors")
    volume.add_argument("-v", "--verbose", action="store_true", help="print more")
    return verb
