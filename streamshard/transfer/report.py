"""The report that a verb returns."""

from dataclasses import dataclass, field, replace

from streamshard.engine.run.phases import Progress
from streamshard.options import Options, option


class Watched(Options):
    """What a function takes that shows its progress."""

    progress: Progress | None = option()


@dataclass(frozen=True, slots=True)
class Change:
    """What another world size changes for the job that resumes, on one subject."""

    subject: str
    """`random generators`, `global batch`, `data position` or `learning rate`."""
    text: str


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a run, or of its plan. The field names are the keys of the JSON document."""

    verb: str
    source: str
    target: str
    tag: str
    zero_stage: int | None
    """None for files of FSDP's ranks."""
    source_world_size: int
    world_size: int | None
    """World size of the target; None for exported weights, which have none, and for stores of
    which every world size can be made."""
    files: int
    """Files written."""
    bytes_written: int
    """Exact; only for a compressed store before the run it is an upper bound."""
    floor_bytes: int
    """Resident memory before anything was opened."""
    limit_bytes: int
    """Memory allowed above the floor."""
    projected_bytes: int
    """Most resident memory that the plan allows the run, floor included."""
    kept_bytes: int = 0
    """Part of `bytes_written` that an earlier, interrupted run had written."""
    peak_bytes: int | None = None
    """Highest resident memory that was measured; None before the run."""
    seconds: float | None = None
    """Duration of the run without planning; None before the run."""
    block: int = 1
    """Elements of the optimizer that share a scale, between which ranks cannot be cut."""
    is_verified: bool = False
    """Whether the written files are read back and compared with the source."""
    tensors: int | None = None
    """Count of exported tensors, tied ones once; None for other verbs."""
    dtype: str | None = None
    """Dtype of an export's weights: `fp32`, `bf16` or `fp16`; None if nothing is cast."""
    overflowed: int | None = None
    """Finite elements that the dtype cannot hold, and that became infinite; None before a run."""
    path: str = ""
    """The path to use or to resume from: the target; or with `if_needed` the source, if a job can
    resume from it as it is."""
    found: str | None = None
    """With `if_needed`, if nothing was written: which one has the result, `source` or `target`."""
    unchecked: tuple[str, ...] = ()
    """Files of the source that record a checksum of more than the run read, so that it was not
    compared."""
    notes: tuple[str, ...] = field(default=())
    """What the user should know or do next."""


def nothing_done(report: Report, found: str, path: str) -> Report:
    return replace(
        report, found=found, path=path, files=0, bytes_written=0, is_verified=False, seconds=0.0
    )
