"""The options of verbs that write a target: `repartition`, `convert`, `export` and `apply`."""

import argparse

from streamshard.cli.options import (
    add_moving_options,
    add_resource_options,
    numbers,
    size,
)
from streamshard.cli.verbs import SOURCE_HELP, Verbs, add_verb
from streamshard.defaults import (
    CODECS,
    DEFAULT_CHUNK_BYTES,
    DEFAULT_SHARD_BYTES,
    DTYPES,
    FORMATS,
    LAYOUTS,
)


def add_repartition(verbs: Verbs) -> None:
    """Add `repartition`."""
    verb = add_verb(
        verbs,
        "repartition",
        "write a checkpoint's files for another world size",
        "streamshard repartition runs/7b runs/7b-on-6 --world-size 6",
    )
    verb.add_argument("source", metavar="SRC", help=SOURCE_HELP)
    verb.add_argument("target", metavar="OUT", help="run directory to make, or template")
    verb.add_argument(
        "--world-size",
        type=int,
        metavar="M",
        help="number of ranks that will resume [of a store: as many as saved its content]",
    )
    _add_degrees(verb, "of these ranks")
    verb.add_argument(
        "--expert-parallel",
        type=int,
        metavar="E",
        help="of these ranks, over how many the experts of each layer are spread [the source's]",
    )
    _add_cut_rules(verb)
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
    verb.add_argument(
        "--ds-version",
        metavar="VERSION",
        help="DeepSpeed's version in the job that will resume: 0.16.9 [the one that saved]",
    )
    add_moving_options(verb, resumes=True)


def _add_degrees(verb: argparse.ArgumentParser, of_what: str) -> None:
    verb.add_argument(
        "--tensor-parallel",
        type=int,
        metavar="T",
        help=f"{of_what}, how many share each tensor; another number than the source's, except "
        "1, takes --like, a save of the job that will resume [the source's]",
    )
    verb.add_argument(
        "--pipeline-parallel",
        type=int,
        metavar="P",
        help=f"{of_what}, how many stages share the layers; as above [the source's]",
    )
    verb.add_argument(
        "--stages",
        type=numbers,
        metavar="LIST",
        help="first layer of each of these stages, in place of --like: 0,4,7 [what --like tells]",
    )


def _add_cut_rules(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--cut-rules",
        dest="cut_rules_file",
        metavar="FILE",
        help="how tensor parallelism cut the parameters, where files do not tell: lines such as "
        "'.*norm: replicated' [what files tell]",
    )
    verb.add_argument(
        "--average",
        action="store_true",
        help="take the mean of parameters that files list as ones to average, of which tensor "
        "parallel ranks have different copies; not lossless [refuse different copies]",
    )


def add_convert(verbs: Verbs) -> None:
    """Add `convert`."""
    verb = add_verb(
        verbs,
        "convert",
        "write a checkpoint into a Zarr store",
        "streamshard convert runs/7b archive/7b.zarr --codec zstd",
    )
    verb.add_argument("source", metavar="SRC", help=SOURCE_HELP)
    verb.add_argument("target", metavar="STORE.zarr", help="store to make")
    verb.add_argument("--codec", choices=CODECS, default="none", help="compression [none]")
    verb.add_argument(
        "--chunk-size",
        type=size,
        default=DEFAULT_CHUNK_BYTES,
        metavar="SIZE",
        help="bytes per chunk at most, before compression [64MiB]",
    )
    _add_degrees(verb, "of the ranks of a job that would resume from the store")
    _add_cut_rules(verb)
    add_moving_options(verb)


def add_export(verbs: Verbs) -> None:
    """Add `export`."""
    verb = add_verb(
        verbs,
        "export",
        "write a checkpoint's weights for from_pretrained",
        "streamshard export runs/7b models/7b --dtype bf16",
    )
    verb.add_argument("source", metavar="SRC", help=SOURCE_HELP)
    verb.add_argument("target", metavar="OUT", help="model directory to make")
    verb.add_argument(
        "--dtype", choices=tuple(DTYPES), default="fp32", help="what to cast weights to [fp32]"
    )
    verb.add_argument(
        "--format",
        choices=FORMATS,
        default=FORMATS[0],
        help="model.safetensors, torch's pytorch_model.bin, DeepSpeed's universal checkpoint, or "
        "PyTorch's distributed checkpoint, for FSDP [safetensors]",
    )
    verb.add_argument(
        "--max-shard-size",
        type=size,
        default=DEFAULT_SHARD_BYTES,
        metavar="SIZE",
        help="bytes per file at most, except for a tensor that is larger [5GB]",
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
    verb.add_argument(
        "--layout",
        choices=LAYOUTS,
        default=LAYOUTS[0],
        help="what loads a distributed checkpoint: torch's own functions, torchtitan, or "
        "Accelerate [torch]",
    )
    verb.add_argument(
        "--ranks",
        type=int,
        default=1,
        metavar="K",
        help="files of a distributed checkpoint, with about as many bytes in each [1]",
    )
    _add_cut_rules(verb)
    add_moving_options(verb)


def add_apply(verbs: Verbs) -> None:
    """Add `apply`."""
    verb = add_verb(
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
