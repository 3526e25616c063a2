"""The options of `verify`, `diff` and `inspect`, which look at checkpoints, and of `compact`."""

from streamshard.cli.options import (
    add_keeping_options,
    add_lock_option,
    add_reading_options,
    add_resource_options,
    add_source_options,
    duration,
    size,
)
from streamshard.cli.verbs import SOURCE_HELP, Verbs, add_verb
from streamshard.defaults import (
    CODECS,
    DEFAULT_GRACE,
    ORDERS,
)


def add_verify(verbs: Verbs) -> None:
    """Add `verify`."""
    verb = add_verb(
        verbs,
        "verify",
        "check that a checkpoint is whole and as it was written, or the same as another",
        "streamshard verify archive/7b.zarr --against runs/7b",
    )
    verb.add_argument("source", metavar="PATH", help=SOURCE_HELP)
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


def add_diff(verbs: Verbs) -> None:
    """Add `diff`."""
    verb = add_verb(
        verbs,
        "diff",
        "say how different two checkpoints are, tensor by tensor",
        "streamshard diff runs/7b/global_step1000 runs/7b/global_step2000 --param 'layers.0.*'",
    )
    verb.add_argument("source", metavar="A", help=SOURCE_HELP)
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


def add_inspect(verbs: Verbs) -> None:
    """Add `inspect`."""
    verb = add_verb(
        verbs,
        "inspect",
        "show what is in a checkpoint",
        "streamshard inspect runs/7b",
    )
    verb.add_argument("source", metavar="SRC", help=SOURCE_HELP)
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


def add_compact(verbs: Verbs) -> None:
    """Add `compact`."""
    verb = add_verb(
        verbs,
        "compact",
        "archive old tags of a run directory, and remove them if asked to",
        "streamshard compact runs/7b archive/7b --keep-last 3 --delete --grace 7d",
    )
    verb.add_argument(
        "source",
        metavar="RUN_DIR",
        help="directory that holds 'latest' and tags; as ARCHIVE_DIR, local or s3://bucket/..., "
        "gs://... or az://...; or an output directory of HF Trainer, Accelerate or Lightning; or a "
        "pattern of many such directories, in quotes",
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
        "--notify",
        metavar="COMMAND",
        help="run this, without a shell, if a tag is ambiguous or something failed: it gets the "
        "outcome as JSON on standard input [none]",
    )
    verb.add_argument(
        "--status",
        action="store_true",
        help="only report what is archived, in the trash until when, and how the last run ended",
    )
    verb.add_argument(
        "--prometheus",
        action="store_true",
        help="print --status in the text format of Prometheus",
    )
    add_lock_option(verb, "RUN_DIR and ARCHIVE_DIR")
    verb.add_argument(
        "-n", "--dry-run", action="store_true", help="say what would be done, and do nothing"
    )
