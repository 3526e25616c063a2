"""The options of all verbs; `options` says what an option is."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Final

from streamshard.options import (
    CODECS,
    DASK,
    IF_NEEDED,
    JOB,
    OUTPUT,
    PIPELINE_PARALLEL,
    RUN,
    SOURCE,
    SOURCE_HELP,
    TENSOR_PARALLEL,
    Options,
    Path_,
    RunOptions,
    SourceOptions,
    TransferOptions,
    WritingOptions,
    degree,
    flag,
    option,
    place,
)

_OLD_TAGS: Final = "What becomes of the others"
FP32: Final = "fp32"
DTYPES: Final[Mapping[str, str]] = {FP32: "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Dtypes that weights may be cast to, with torch's names for them."""
TITAN: Final = "titan"
ACCELERATE: Final = "accelerate"
DEFAULT_GRACE: Final = timedelta(days=7)
"""How long tags stay in the trash."""
_OF_STORE: Final = "of the ranks of a job that would resume from the store"


class ConvertOptions(TransferOptions):
    """Options of `convert`."""

    group = OUTPUT

    target: Path_ = place("STORE.zarr", "store to make; STORE.zarr.zip is one file", kw_only=False)
    codec: str = option("", "compression [none]", default="none", choices=CODECS)
    chunk_size: int = option(
        "SIZE",
        "bytes per chunk at most, before compression [64MiB]",
        default=64 << 20,
        least=1,
        few="at least one byte is needed",
    )
    tensor_parallel: int | None = degree("T", TENSOR_PARALLEL.format(_OF_STORE))
    pipeline_parallel: int | None = degree("P", PIPELINE_PARALLEL.format(_OF_STORE))
    if_needed: bool = flag(IF_NEEDED)


class ExportOptions(TransferOptions):
    """Options of `export`."""

    group = OUTPUT

    target: Path_ = place("OUT", "model directory to make", kw_only=False)
    dtype: str | None = option(
        "",
        "what to cast weights to; buffers are cast to fp32 only [fp32, or float64 as it is]",
        choices=tuple(DTYPES),
    )
    format: str = option(
        "",
        "model.safetensors, torch's pytorch_model.bin, DeepSpeed's universal checkpoint, or "
        "PyTorch's distributed checkpoint, for FSDP [safetensors]",
        default="safetensors",
        choices=("safetensors", "torch", "universal", "dcp"),
    )
    max_shard_size: int = option(
        "SIZE",
        "bytes per file at most, except for a tensor that is larger [5GB]",
        default=5 * 10**9,
        least=1,
        few="at least one byte is needed",
        is_rare=True,
    )
    include: Sequence[str] = option(
        "PATTERN",
        "take nothing but tensors of such names, as often as needed: 'layers.*' [all]",
        default=(),
    )
    exclude: Sequence[str] = option(
        "PATTERN", "leave out tensors of such names, as often as needed [none]", default=()
    )
    adapter: bool = flag("write LoRA's weights alone, for PeftModel.from_pretrained", is_rare=True)
    layout: str = option(
        "",
        "what loads a distributed checkpoint: torch's own functions, torchtitan, or Accelerate "
        "[torch]",
        default="torch",
        choices=("torch", TITAN, ACCELERATE),
        is_rare=True,
    )


class MergeOptions(WritingOptions):
    """Options of `merge`."""

    group = "What is merged"

    source: Path_ | Sequence[Path_] = place(
        "SRC ...",
        "checkpoints of one model, of any world size, ZeRO stage and kind, the oldest first; each "
        "as the SRC of convert. With --last one directory that holds them",
        kw_only=False,
    )
    target: Path_ = place(
        "OUT",
        "run directory to make; a store if the name ends in .zarr or .zarr.zip; a model directory "
        "with --format",
        kw_only=False,
    )
    weights: str | Sequence[float] = option(
        "FORM",
        "weight of each: mean; 1-sqrt, linear or cosine, which amount to such a decay of the "
        "learning rate; ema:0.9; or numbers such as 0.2,0.3,0.5 [mean]",
        default="mean",
    )
    states: str = option(
        "",
        "take the optimizer states of the newest; or merge them as the weights are, if they are "
        "exp_avg, exp_avg_sq or momentum_buffer: others are refused [newest]",
        default="newest",
        choices=("newest", "mean"),
    )
    last: int | None = option(
        "N",
        "merge the N newest whole checkpoints of one run directory",
        least=2,
        few="at least 2; a mean of one is that one",
    )
    world_size: int | None = option(
        "M", "number of ranks that will resume [as many as saved the newest]", group=JOB
    )
    zero_stage: int | None = option(
        "", "stage of the job that will resume [the newest's]", choices=(1, 2, 3), group=JOB
    )
    ds_config_file: Path_ | None = option(
        "--ds-config FILE",
        "whole DeepSpeed config of the job that will resume [the one kept in the newest]",
        group=JOB,
        is_rare=True,
    )
    codec: str = option(
        "",
        "compression of a store [none]",
        default="none",
        choices=CODECS,
        group=OUTPUT,
        is_rare=True,
    )
    chunk_size: int = option(
        "SIZE",
        "bytes per chunk of a store at most, before compression [64MiB]",
        default=64 << 20,
        least=1,
        few="at least one byte is needed",
        group=OUTPUT,
        is_rare=True,
    )
    format: str | None = option(
        "",
        "write the model's weights, in this format; see export",
        choices=("safetensors", "torch", "universal", "dcp"),
        group=OUTPUT,
    )
    dtype: str | None = option(
        "",
        "what to cast them to, as export does [fp32, or float64 as it is]",
        choices=tuple(DTYPES),
        group=OUTPUT,
        is_rare=True,
    )


class GraftOptions(TransferOptions):
    """Options of `graft`."""

    group = "What is grafted"

    source: Path_ = place("SRC", f"the trained job: {SOURCE_HELP}", kw_only=False)
    start: Path_ = place(
        "START",
        "what the job that will resume saved before its first step, with engine.save_checkpoint "
        "right after deepspeed.initialize",
        kw_only=False,
    )
    target: Path_ = place("OUT", "run directory to make", kw_only=False)
    rules: Path_ | None = option(
        "FILE",
        "what to do where SRC and START differ, one rule a line; a difference without a rule is "
        "refused, with the rules that would name it",
    )
    fresh_states: bool = flag(
        "keep the master weights, and start the optimizer fresh: no states, step 0"
    )


class OpenOptions(SourceOptions):
    """What `streamshard.open` takes."""

    source: Path_ = place("SRC", SOURCE_HELP, kw_only=False)


class ServeOptions(SourceOptions):
    """Options of `serve`."""

    group = "What is served"

    source: Path_ = place("SRC", SOURCE_HELP, kw_only=False)
    bind: str = option(
        "HOST:PORT",
        "address to listen on; with another than a loopback address, other machines can read the "
        "checkpoint [127.0.0.1:8000]",
        default="127.0.0.1:8000",
    )
    allow_origin: str | None = option(
        "ORIGIN",
        "site whose pages, opened in a browser, can read the checkpoint, such as "
        "https://neuroglancer-demo.appspot.com",
    )
    chunk_size: int = option(
        "SIZE",
        "bytes per chunk at most [64MiB]",
        default=64 << 20,
        least=1,
        few="at least one byte is needed",
    )


class VerifyOptions(SourceOptions, RunOptions):
    """Options of `verify`."""

    group = "What is checked"

    path: Path_ = place("PATH", SOURCE_HELP, kw_only=False)
    against: Path_ | None = option(
        "SRC",
        "compare the content with that of another checkpoint, tensor by tensor, whatever its "
        "format, ZeRO stage and world size; checksums are not looked at then",
    )
    health: bool = flag(
        "look for NaN and infinities in weights and optimizer states; with -v, show how large the "
        "numbers of every tensor are"
    )


class DiffOptions(SourceOptions, RunOptions):
    """Options of `diff`."""

    group = "What is compared"

    left: Path_ = place("A", SOURCE_HELP, kw_only=False)
    right: Path_ = place("B", "another one, of any format, stage and world size", kw_only=False)
    params: Sequence[str] = option(
        "--param PATTERN",
        "compare nothing but tensors of such names: 'layers.0.*' [all, and all else]",
        default=(),
    )
    tag: str | None = option("", "tag to read of A [the one that 'latest' names]", group=SOURCE)


class InspectOptions(SourceOptions):
    """Options of `inspect`."""

    group = "What is shown"

    source: Path_ = place("SRC", SOURCE_HELP, kw_only=False)
    params: Sequence[str] = option(
        "--param PATTERN",
        "show which rank holds which elements of these tensors, in which file, and where",
        default=(),
    )
    rank: int | None = option(
        "R", "show what data-parallel rank R holds, numbered as in zero_pp_rank_R"
    )
    html: Path_ | None = option(
        "FILE",
        "draw a page: what is wrong, sizes by rank and group, and where each parameter lies",
    )
    world_size: int | None = option("M", "draw too how it would be cut for M ranks")
    zero_stage: int | None = option(
        "", "draw too how it would be cut at a stage", choices=(1, 2, 3)
    )


class _ReportOptions(Options):
    """Options of `compact` about its outcome."""

    group = OUTPUT

    status = flag(
        "only report what is archived, in the trash until when, since when a run saves NaN, and "
        "how the last run ended"
    )
    html = option("FILE", "draw --status on a page: what became of each checkpoint", is_rare=True)
    dask = DASK
    dry_run: bool = flag("say what would be done, and do nothing", "-n --dry-run", group=RUN)


class CompactOptions(RunOptions, _ReportOptions):
    """Options of `compact`."""

    group = "Which tags stay"

    run_dir: Path_ = place(
        "RUN_DIR",
        "directory that holds 'latest' and tags; or an output directory of HF Trainer, Accelerate "
        "or Lightning; or a pattern of many such directories, in quotes",
        kw_only=False,
    )
    archive_dir: Path_ = place(
        "ARCHIVE_DIR",
        "where TAG.zarr and its receipt go, local or s3://bucket/..., gs://... or az://...",
        kw_only=False,
    )
    keep_last: int = option(
        "K",
        "newest steps to leave that are whole and healthy: without NaN [3]",
        default=3,
        least=2,
        few="at least 2, as one may be damaged",
    )
    keep_every: int | None = option(
        "N", "leave every step that is a multiple of N too [none]", least=1
    )
    keep_tags: Sequence[str] = option(
        "--keep-tag PATTERN",
        "leave tags of such names too, as often as needed: 'release-*' [none]",
        default=(),
    )
    tags: str | None = option(
        "PATTERN",
        "consider only tags that match this, relative to RUN_DIR: 'run*/global_step*'; others are "
        "neither touched nor counted [all]",
        is_rare=True,
    )
    min_age: timedelta = option(
        "TIME",
        "leave tags that changed within this time: 90m, 2h, 7d, 4w [2h]",
        default=timedelta(hours=2),
    )
    delete: bool = flag(
        "move what is archived and proved into a trash in RUN_DIR, and empty it in time",
        group=_OLD_TAGS,
    )
    grace: timedelta = option(
        "TIME",
        "time that tags stay in the trash, which takes space all the while [7d]",
        default=DEFAULT_GRACE,
        group=_OLD_TAGS,
    )
    weights_only_older_than: timedelta | None = option(
        "TIME",
        "drop the optimizer states of archives whose originals were removed for good longer ago "
        "than this; no job can resume from them then [never]",
        group=_OLD_TAGS,
        is_rare=True,
    )
    undelete: Sequence[str] = option(
        "TAG ...",
        "bring tags back from the trash; put it after ARCHIVE_DIR",
        default=(),
        apart=True,
        group=_OLD_TAGS,
        is_rare=True,
    )
    purge: Sequence[str] = option(
        "TAG ...",
        "remove tags in the trash for good once --grace is over, whatever rules say; put it "
        "after ARCHIVE_DIR",
        default=(),
        apart=True,
        group=_OLD_TAGS,
        is_rare=True,
    )
    acknowledge: Sequence[str] = option(
        "TAG ...",
        "leave ambiguous tags as they are, and report them again only when they change; put it "
        "after ARCHIVE_DIR",
        default=(),
        apart=True,
        group=_OLD_TAGS,
        is_rare=True,
    )
    packed: bool = flag(
        "make each archive one file, TAG.zarr.zip, where many small files are slow or counted; it "
        "shares none with other archives",
        group=OUTPUT,
        is_rare=True,
    )
    chunk_size: int = option(default=64 << 20, least=1, few="at least one byte is needed")
    bytes_per_second: int | None = option(
        "--bwlimit RATE",
        "read and write no more than this a second, with a unit: 200MB [no limit]",
        least=1,
        group=RUN,
    )

    @property
    def is_by_hand(self) -> bool:
        """Whether the run is only about tags that the user names."""
        return bool(self.undelete or self.purge or self.acknowledge)


class NewestOptions(RunOptions):
    """Options of `newest`."""

    group = "What is looked at"

    run_dir: Path_ = place(
        "RUN_DIR",
        "directory that holds 'latest' and tags, local or s3://bucket/..., gs://... or az://...; "
        "or an output directory of HF Trainer, Accelerate or Lightning; or a directory of stores",
        kw_only=False,
    )
    quick: bool = flag("look at headers alone: damaged bytes and NaN are not noticed")
