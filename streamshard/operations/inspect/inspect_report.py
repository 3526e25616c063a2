"""The report of `inspect`. Field names are the keys of its JSON: they stay, new ones may come."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from streamshard.formats.checkpoint import Dropped
from streamshard.health import TensorHealth
from streamshard.registry import reader_of
from streamshard.sizes import counted, show_bytes


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """One param group, or the part of it that one expert rank has."""

    model_part: str
    """Tensor or pipeline parallel part that it belongs to; empty if there is only one."""
    expert_rank: int | None
    """None if the group holds no experts."""
    parameters: int
    numel: int
    master_dtype: str
    states: Mapping[str, Any]
    """State → its dtype if it has one element per parameter element, else its value."""
    hyper_parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ParameterSummary:
    """One trained parameter."""

    name: str
    shape: tuple[int, ...]
    numel: int
    group: int
    """Index in `Inspection.groups`."""
    pieces: int
    """Count of pieces of its master weights: one per rank that holds some of them, or per chunk."""
    first_rank: int | None
    """First data-parallel rank that holds some of it; None for a store, which has no ranks."""
    last_rank: int | None

    @property
    def ranks_text(self) -> str:
        """The ranks that hold some of it, as `0-3`; a store has none."""
        if self.first_rank is None:
            return "-"
        is_single = self.first_rank == self.last_rank
        return f"{self.first_rank}" if is_single else f"{self.first_rank}-{self.last_rank}"


@dataclass(frozen=True, slots=True)
class FileGroup:
    """Files whose names differ only in numbers, such as those of all ranks."""

    pattern: str
    """Path relative to the source, with `*` for the numbers; in a store a directory with `/**`."""
    files: int
    nbytes: int
    """Bytes of all files of the group."""
    smallest: int
    """Bytes of the smallest."""
    largest: int
    """Bytes of the largest."""


@dataclass(frozen=True, slots=True)
class FileSummary:
    """One file of a checkpoint."""

    path: str
    """Relative to the source."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class OwnedPiece:
    """Consecutive elements of one state of one tensor, and their place."""

    state: str
    """`fp32` for master weights, `exp_avg`, …, `module` for the module's own copy."""
    rank: int | None
    """Data-parallel rank whose file holds them; None for a file of no single rank."""
    file: str
    """Relative to the source."""
    start: int
    """First element."""
    stop: int
    """After the last element."""
    offset: int
    """Byte offset of the first element in the file; in a compressed file, in the decompressed
    content."""


@dataclass(frozen=True, slots=True)
class ParameterDetail:
    """Everything about one tensor of the model that `params` names."""

    name: str
    model_part: str
    kind: str
    """`param` (trained), `frozen`, `buffer`, or `alias` (another name of a tied parameter)."""
    alias_of: str | None
    shape: tuple[int, ...]
    numel: int
    group: int | None
    """Index in `Inspection.groups`; None for a tensor that is not trained."""
    states: Mapping[str, str]
    """State → dtype, for all states with one element per element of the tensor."""
    pieces: tuple[OwnedPiece, ...]
    """State by state, in order of elements; empty for a tied name."""


@dataclass(frozen=True, slots=True)
class HeldRange:
    """The part of one parameter that a rank holds."""

    name: str
    numel: int
    """Elements of the whole parameter."""
    start: int
    """First element that the rank holds."""
    stop: int
    """After the last."""
    at: int
    """Place of the first element in the partition, in elements."""


@dataclass(frozen=True, slots=True)
class OwnedPartition:
    """The part of one flat group (stages 1 and 2) or sub-group (stage 3) that a rank holds."""

    group: int
    """Index in `Inspection.groups`."""
    sub_group: int | None
    """Number of the sub-group within its param group; None in stages 1 and 2."""
    numel: int
    """Elements of the partition, padding included."""
    padding: int
    """Elements of the partition that belong to no parameter."""
    file: str
    """Relative to the source."""
    offsets: Mapping[str, int]
    """State → byte offset at which the partition begins in the file."""
    ranges: tuple[HeldRange, ...]
    """In the order of their places."""


@dataclass(frozen=True, slots=True)
class RankDetail:
    """The part of the optimizer that one data-parallel rank holds."""

    rank: int
    """As in the names of files: `zero_pp_rank_1`."""
    files: tuple[FileSummary, ...]
    """Files of this rank only."""
    partitions: tuple[OwnedPartition, ...]


@dataclass(frozen=True, slots=True)
class CheckpointSummary:
    """One checkpoint of a directory that holds several."""

    path: str
    """Relative to the directory; joined to the directory's path, it can be opened as a source."""
    kind: str
    """`native` for shards, `store` for a Zarr store."""
    step: int | None
    """The recorded step, or else the number at the end of its name."""
    zero_stage: int | None
    world_size: int | None
    """Ranks that saved it."""
    nbytes: int
    """Size of all files below its path."""
    changed: str | None
    """When the newest of these files was written (ISO 8601, UTC)."""
    is_whole: bool | None
    """Whether every rank's file exists and the files' records agree; no tensor data is read. None
    if that is not known, because the checkpoint is of a kind that is not supported."""
    is_newest: bool
    """Whether it is of the last step; true for only one checkpoint."""
    is_latest: bool
    """Whether the directory's `latest` names it."""
    problem: str | None
    """Why it is incomplete, or cannot be used."""
    is_healthy: bool | None = None
    """Whether its weights and optimizer states held neither NaN nor infinities when a store of it
    was made; None if that was not recorded."""
    warnings: tuple[str, ...] = ()
    """What is suspicious in its headers, as for `newest`."""


@dataclass(frozen=True, slots=True)
class CheckpointList:
    """The content of a directory that holds checkpoints but is not a checkpoint itself."""

    path: str
    kind: str
    """`directory`."""
    checkpoints: tuple[CheckpointSummary, ...]
    """In order of their steps."""
    problems: tuple[str, ...]
    """The reasons why DeepSpeed cannot find the checkpoint to load."""
    pictures: tuple[FileSummary, ...] = ()
    """The page that was written, with its size."""


@dataclass(frozen=True, slots=True)
class IncompleteCheckpoint:
    """The files that exist of a checkpoint that cannot be opened."""

    path: str
    kind: str
    """`native` for shards, `store` for a Zarr store, `dumps` for raw per-rank dumps."""
    is_whole: bool
    """Always false."""
    tag: str | None
    zero_stage: int | None
    """As most of the readable files record it; None if none does. So are the three fields below."""
    world_size: int | None
    global_steps: int | None
    deepspeed_version: str | None
    files: int
    """Files that exist."""
    file_bytes: int
    file_groups: tuple[FileGroup, ...]
    file_list: tuple[FileSummary, ...]
    problems: tuple[str, ...]
    """Everything that is missing or wrong."""
    checkpoints: tuple[CheckpointSummary, ...]
    """All checkpoints in the run directory, if the source is the run directory."""
    pictures: tuple[FileSummary, ...] = ()
    """The page that was written, with its size."""


@dataclass(frozen=True, slots=True, repr=False)
class Inspection:
    """The content of a checkpoint."""

    path: str
    kind: str
    """`native` for shards, `store` for a Zarr store, `dumps` for raw per-rank dumps."""
    tag: str
    zero_stage: int
    """Stage that saved it."""
    world_size: int
    """Ranks that saved it."""
    data_parallel: int
    """Ranks that share each part of the model."""
    model_parallel: int
    """Tensor and pipeline parallel parts of the model."""
    tensor_parallel: int | None
    """Ranks that share each layer; None if the files contradict each other about it."""
    pipeline_parallel: int | None
    """Stages that share the layers; None as well."""
    expert_parallel: int
    """Data-parallel ranks over which the experts are spread; 1 without experts."""
    module_dtype: str | None
    """None for raw dumps, which do not record it."""
    optimizer: str | None
    """Type named in the DeepSpeed config; the files themselves do not name it."""
    deepspeed_version: str | None
    global_steps: int | None
    skipped_steps: int | None
    global_samples: int | None
    groups: tuple[GroupSummary, ...]
    parameters: tuple[ParameterSummary, ...]
    frozen: int
    buffers: int
    tied: Mapping[str, str]
    """Name of a tied parameter → the name under which its values are kept."""
    state_bytes: Mapping[str, int]
    """Bytes of logical tensors by state, without padding and copies."""
    files: int
    """Files of the checkpoint."""
    file_bytes: int
    file_groups: tuple[FileGroup, ...]
    file_list: tuple[FileSummary, ...]
    tensors: int
    """Logical tensors: every state of every parameter, buffers, frozen weights."""
    codec: str | None
    """Compression of a store's chunks; None for shards, and for a store without compression."""
    problems: tuple[str, ...]
    """Problems that do not prevent reading, but that the user should look at."""
    notes: tuple[str, ...]
    """What the user should know about how the checkpoint is read."""
    weights_only: Dropped | None = None
    """For a store whose optimizer states were dropped: which, when and why; no job can resume from
    it. None for other sources."""
    health: Mapping[str, TensorHealth] | None = None
    """Tensor → which numbers it holds; None unless a store recorded it when it was made."""
    details: tuple[ParameterDetail, ...] = ()
    """The tensors that `params` names."""
    rank: RankDetail | None = None
    """The rank that `rank` names."""
    weights: int = 0
    """Weights of which the files do not record whether they are trained, as without ZeRO (stage 0);
    they are not among `parameters`."""
    pictures: tuple[FileSummary, ...] = ()
    """The page that was written (`html`), with its size."""
    checkpoints: tuple[CheckpointSummary, ...] = ()
    """All checkpoints in the run directory, if the source is a run directory, in order of steps."""

    @property
    def ranks_text(self) -> str:
        """The count of ranks, and as what they share the model."""
        parts, expert = self.model_parallel, self.expert_parallel
        if parts == expert == 1:
            return f"{self.world_size}"
        text = f"{self.world_size}: {self.data_parallel} data-parallel"
        tensor, pipeline = self.tensor_parallel, self.pipeline_parallel
        if tensor is None or pipeline is None:
            text += f" x {parts} tensor or pipeline parallel"
        else:
            both = ((tensor, "tensor"), (pipeline, "pipeline"))
            text += "".join(f" x {count} {kind}-parallel" for count, kind in both if count > 1)
        return text + (f", experts over {expert}" if expert > 1 else "")

    @property
    def title(self) -> list[tuple[str, str]]:
        """The facts that say which checkpoint it is."""
        codec = f", {self.codec}" if self.codec else ""
        kind = reader_of(self.kind)
        facts = [("checkpoint", f"{self.path} ({kind.title}{codec})"), ("tag", self.tag)]
        if not kind.is_foreign:
            stage = f"ZeRO stage {self.zero_stage}" if self.zero_stage else "DeepSpeed without ZeRO"
            facts.append(("saved by", f"{stage}, world size {self.ranks_text}"))
        return facts

    @property
    def facts(self) -> list[tuple[str, str]]:
        """All of it in a few words: names of facts, and what they are."""
        on_disk = f"{counted(self.files, 'file')}, {show_bytes(self.file_bytes)}"
        return [*self.title, *_facts(self), ("on disk", on_disk)]

    def __repr__(self) -> str:
        """Summarize the checkpoint in a line; the attributes hold the details."""
        what = f"{self.tag}, ZeRO stage {self.zero_stage}, world size {self.world_size}"
        size = show_bytes(self.file_bytes)
        parameters = counted(len(self.parameters), "parameter")
        held = f"{parameters}, {counted(self.files, 'file')}, {size}"
        wrong = f", {counted(len(self.problems), 'problem')}" if self.problems else ""
        return f"<Inspection {self.path!r}: {what}, {held}{wrong}>"


def _facts(inspection: Inspection) -> Iterator[tuple[str, str]]:
    """Yield what is in a checkpoint; one without ZeRO, or of others, does not record everything."""
    numel = sum(group.numel for group in inspection.groups)
    states = ", ".join(dict.fromkeys(key for group in inspection.groups for key in group.states))
    trained = f"{len(inspection.parameters):,} trained, {counted(numel, 'element')}"
    uncertain = f"{inspection.weights:,}, the files do not say which of them are trained"
    also = [counted(inspection.buffers, "buffer"), counted(len(inspection.tied), "tied name")]
    if reader_of(inspection.kind).is_foreign:
        yield "dtypes", inspection.module_dtype or "not recorded"
        if not inspection.groups:
            yield "weights", uncertain
            return
        yield "states", states or "none"
        yield "parameters", trained
        yield "also", f"{inspection.weights:,} that are not trained: frozen weights or buffers"
        return
    yield "DeepSpeed", inspection.deepspeed_version or "version not recorded"
    yield "dtypes", _dtypes(inspection)
    yield "steps", _steps(inspection)
    yield "optimizer", inspection.optimizer or "type not recorded"
    if inspection.zero_stage:
        yield "states", states or ("dropped" if inspection.weights_only else "none yet")
        yield "parameters", trained
        yield "also", ", ".join([f"{inspection.frozen:,} frozen", *also])
    else:
        yield "states", "whole, in the model file, by number of the parameter"
        yield "parameters", uncertain
        yield "also", ", ".join(also)


def _dtypes(inspection: Inspection) -> str:
    if not inspection.zero_stage:
        return inspection.module_dtype or "not recorded"
    masters = ", ".join(sorted({group.master_dtype for group in inspection.groups})) or "none"
    return f"{inspection.module_dtype or 'not recorded'}, master weights {masters}"


def _steps(found: Inspection) -> str:
    steps = "not recorded" if found.global_steps is None else f"{found.global_steps:,}"
    if found.skipped_steps:
        steps += f" ({found.skipped_steps:,} skipped)"
    return steps + (f", {counted(found.global_samples, 'sample')}" if found.global_samples else "")
