"""What `inspect` reports. These names are the keys of `--json`; they stay, and others may come."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from streamshard.formats.checkpoint import Dropped
from streamshard.operations.inspect import notebook
from streamshard.sizes import show_bytes

KINDS: Final = {
    "native": "DeepSpeed shards",
    "store": "Zarr store",
    "dumps": "raw per-rank dumps",
}
"""What each kind of source is called."""


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """One param group, or what one expert rank has of it."""

    family: str
    """Tensor or pipeline parallel part that it belongs to; empty where there is only one."""
    expert_rank: int | None
    """None where it holds no experts."""
    parameters: int
    numel: int
    master_dtype: str
    states: Mapping[str, Any]
    """State → its dtype where it has one element per parameter element, else its value."""
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
    """Into how many its master weights are cut: one per rank that holds some, or per chunk."""
    first_rank: int | None
    """First data-parallel rank that holds some of it; None for a store, which has no ranks."""
    last_rank: int | None


@dataclass(frozen=True, slots=True)
class FileGroup:
    """Files that differ in a number in their name only, such as those of all ranks."""

    pattern: str
    """Path relative to the source, with `*` for what differs; of a store a directory with `/**`."""
    files: int
    nbytes: int
    """Bytes of all of them."""
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
    """Consecutive elements of one state of one tensor, and where they lie."""

    state: str
    """`fp32` for master weights, `exp_avg`, …, `module` for what the module itself holds."""
    rank: int | None
    """Data-parallel rank in whose file they are; None for a file that is no one rank's."""
    file: str
    """Relative to the source."""
    start: int
    """First element."""
    stop: int
    """After the last element."""
    offset: int
    """Byte offset of the first element in the file's content: as it is, or decompressed."""


@dataclass(frozen=True, slots=True)
class ParameterDetail:
    """Everything about one tensor of the model that was asked for by name."""

    name: str
    family: str
    kind: str
    """`param` (trained), `frozen`, `buffer`, or `alias` (another name of a tied parameter)."""
    alias_of: str | None
    shape: tuple[int, ...]
    numel: int
    group: int | None
    """Index in `Inspection.groups`; None for what is not trained."""
    states: Mapping[str, str]
    """State → dtype, for all that has an element per element of the tensor."""
    pieces: tuple[OwnedPiece, ...]
    """State by state, in order of elements; of a tied name none."""


@dataclass(frozen=True, slots=True)
class HeldRange:
    """What a rank holds of one parameter."""

    name: str
    numel: int
    """Elements of the whole parameter."""
    start: int
    """First element that the rank holds."""
    stop: int
    """After the last."""
    at: int
    """Where they begin in the partition, in elements."""


@dataclass(frozen=True, slots=True)
class OwnedPartition:
    """What a rank holds of one flat group (stages 1 and 2) or one sub-group (stage 3)."""

    group: int
    """Index in `Inspection.groups`."""
    sub_group: int | None
    """Number of the sub-group within its param group; None in stages 1 and 2."""
    numel: int
    """Elements of the partition, padding included."""
    padding: int
    """Elements of it that are no parameter's."""
    file: str
    """Relative to the source."""
    offsets: Mapping[str, int]
    """State → byte offset at which the partition begins in the file."""
    ranges: tuple[HeldRange, ...]
    """In order of where they are."""


@dataclass(frozen=True, slots=True)
class RankDetail:
    """What one data-parallel rank holds of the optimizer."""

    rank: int
    """As in the names of files: `zero_pp_rank_1`."""
    files: tuple[FileSummary, ...]
    """Files that are this rank's alone."""
    partitions: tuple[OwnedPartition, ...]


@dataclass(frozen=True, slots=True)
class CheckpointSummary:
    """One checkpoint of a directory that holds several."""

    path: str
    """Relative to the directory; with the directory before it a source by itself."""
    kind: str
    """`native` for shards, `store` for a Zarr store."""
    step: int | None
    """Recorded in it, or else the number at the end of its name."""
    zero_stage: int | None
    world_size: int | None
    """Ranks that saved it."""
    nbytes: int
    """Size of all files below its path."""
    changed: str | None
    """When the newest of these files was written (ISO 8601, UTC)."""
    is_whole: bool | None
    """Whether every rank's file is there and what they record agrees; no tensor data is read. None
    where that cannot be told, as it is of a kind that is not supported."""
    is_newest: bool
    """Whether it is of the last step; of one of them only."""
    is_latest: bool
    """Whether the directory's `latest` names it."""
    problem: str | None
    """Why it is not whole, or cannot be used."""


@dataclass(frozen=True, slots=True)
class CheckpointList:
    """What is in a directory that holds checkpoints and is none itself."""

    path: str
    kind: str
    """`directory`."""
    checkpoints: tuple[CheckpointSummary, ...]
    """In order of their steps."""
    problems: tuple[str, ...]
    """What keeps DeepSpeed from finding the checkpoint to load."""


@dataclass(frozen=True, slots=True)
class IncompleteCheckpoint:
    """What is there of a checkpoint that cannot be opened."""

    path: str
    kind: str
    """`native` for shards, `store` for a Zarr store, `dumps` for raw per-rank dumps."""
    is_whole: bool
    """Always false."""
    tag: str | None
    zero_stage: int | None
    """As most of the files record it that can be read; None where none does. So are all below."""
    world_size: int | None
    global_steps: int | None
    deepspeed_version: str | None
    files: int
    """Files that are there."""
    file_bytes: int
    file_groups: tuple[FileGroup, ...]
    file_list: tuple[FileSummary, ...]
    problems: tuple[str, ...]
    """Everything that is missing, or is not as it should be."""
    checkpoints: tuple[CheckpointSummary, ...]
    """All that are in the same run directory, where that was what was asked for."""


@dataclass(frozen=True, slots=True, repr=False)
class Inspection:
    """What a checkpoint holds."""

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
    expert_parallel: int
    """Data-parallel ranks over which the experts are spread; 1 without experts."""
    module_dtype: str | None
    """None for raw dumps, which do not tell."""
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
    """Files that it consists of."""
    file_bytes: int
    file_groups: tuple[FileGroup, ...]
    file_list: tuple[FileSummary, ...]
    tensors: int
    """Logical tensors: every state of every parameter, buffers, frozen weights."""
    codec: str | None
    """How a store's chunks are compressed; None for what is no store, or not compressed."""
    problems: tuple[str, ...]
    """What does not keep it from being read, and somebody should look at."""
    notes: tuple[str, ...]
    """What a user should know about the reading of it."""
    weights_only: Dropped | None = None
    """What was dropped, when and why, of a store from which no job can resume; None of others."""
    details: tuple[ParameterDetail, ...] = ()
    """Tensors that were asked for by name (`--param`)."""
    rank: RankDetail | None = None
    """The rank that was asked for (`--rank`)."""
    weights: int = 0
    """Weights of which the files do not tell whether they are trained, as without ZeRO (stage 0);
    they are not among `parameters`."""
    pictures: tuple[FileSummary, ...] = ()
    """Pictures that were asked for (`--svg`, `--html`), and how large they have become."""
    checkpoints: tuple[CheckpointSummary, ...] = ()
    """All that are in the run directory, where a whole one was asked for, in order of steps."""

    def __repr__(self) -> str:
        """Say what it is about, in a line; its attributes tell the rest."""
        what = f"{self.tag}, ZeRO stage {self.zero_stage}, world size {self.world_size}"
        size = show_bytes(self.file_bytes)
        held = f"{len(self.parameters):,} parameters, {self.files:,} files, {size}"
        wrong = f", {len(self.problems):,} problems" if self.problems else ""
        return f"<Inspection {self.path!r}: {what}, {held}{wrong}>"

    def _repr_html_(self) -> str:
        """Show it in a notebook."""
        facts: list[tuple[str, object]] = [
            ("checkpoint", f"{self.path} ({KINDS[self.kind]})"),
            ("tag", self.tag),
            ("saved by", f"ZeRO stage {self.zero_stage}, world size {self.world_size}"),
            ("DeepSpeed", self.deepspeed_version),
            ("steps", self.global_steps),
            ("optimizer", self.optimizer),
            ("on disk", f"{self.files:,} files, {show_bytes(self.file_bytes)}"),
            *(("problem", problem) for problem in self.problems),
            *(("note", note) for note in self.notes),
        ]
        sizes = [(state, show_bytes(nbytes)) for state, nbytes in self.state_bytes.items()]
        rows = [
            (p.name, list(p.shape), p.numel, p.group, _between(p.first_rank, p.last_rank))
            for p in self.parameters
        ]
        head = ("parameter", "shape", "elements", "group", "ranks")
        parameters = notebook.table(head, rows, "the attribute parameters has all")
        return notebook.page(facts, notebook.table(("tensors", "bytes"), sizes), parameters)


def _between(first: int | None, last: int | None) -> str:
    ranks = None if first is None or last is None else range(first, last + 1)
    return notebook.ranks_text(ranks)
