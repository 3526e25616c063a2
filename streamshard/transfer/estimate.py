"""Estimates a run before it starts: files, bytes, memory, disk space, what changes for the job.

A dry run shows the estimate; its JSON document has it under the key `estimate`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from streamshard.io.object_path import is_object
from streamshard.io.place import place_of
from streamshard.layout.memory_plan import SCRATCH_BYTES, SLACK_BYTES, MemoryPlan
from streamshard.model import SourceFile
from streamshard.source.source import Source
from streamshard.transfer.byte_accounting import ByteCounts, read_bytes
from streamshard.transfer.report import Change, Report
from streamshard.transfer.target import nearest_directory, partial_of


@dataclass(frozen=True, slots=True)
class FileBytes:
    """A file, and the count of its bytes that are read or written."""

    path: str
    """A source file's path as it was given or found; a target file's path in the target."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class MemoryParts:
    """The parts of the projected memory, all in bytes.

    `projected = floor + metadata + workers x (window + scratch + codec + requests) + slack`
    """

    projected_bytes: int
    floor_bytes: int
    metadata_bytes: int
    workers: int
    window_bytes: int
    scratch_bytes: int
    codec_bytes: int
    slack_bytes: int
    limit_bytes: int
    """Bytes allowed above the floor."""
    requests_bytes: int = 0
    """Per worker, for requests to an object store."""


@dataclass(frozen=True, slots=True)
class Space:
    directory: str
    """Parent directory of the target, or its nearest parent that exists."""
    free_bytes: int
    free_after_bytes: int
    """Free space after the run and after removal of the replaced target; more if the target is
    compressed."""
    begun_bytes: int
    """Bytes that an earlier run left next to the target's place; this run uses or removes them."""


@dataclass(frozen=True, slots=True)
class Estimate:
    reads: tuple[FileBytes, ...]
    """Every file of the source, with the bytes of content that are read from it."""
    read_bytes: int
    writes: tuple[FileBytes, ...]
    """Every file of the target."""
    written_bytes: int
    is_upper_bound: bool
    """Whether files are compressed, so that the sizes are upper bounds; else sizes are exact."""
    reread_bytes: int
    """Bytes read to verify: the written files twice, and the source once; 0 without `verify`."""
    memory: MemoryParts
    space: Space | None
    """None if the target is in an object store."""
    changes: tuple[Change, ...]
    """Effects of another world size on the job; empty if the world size stays, or there is none."""


def estimate_run(
    source: Source,
    byte_counts: ByteCounts,
    memory_plan: MemoryPlan,
    report: Report,
    target: Path,
    *,
    changes: tuple[Change, ...],
    is_upper_bound: bool,
) -> Estimate:
    read = read_bytes(source, byte_counts.times)
    read_sum, written = int(read.sum()), report.bytes_written
    reread = 2 * written + read_sum if report.is_verified else 0
    return Estimate(
        reads=tuple(_by_path(source.files, read.tolist())),
        read_bytes=read_sum,
        writes=tuple(FileBytes(path, nbytes) for path, nbytes in byte_counts.sizes.items()),
        written_bytes=written,
        is_upper_bound=is_upper_bound,
        reread_bytes=reread,
        memory=MemoryParts(
            projected_bytes=memory_plan.projected_bytes,
            scratch_bytes=SCRATCH_BYTES,
            slack_bytes=SLACK_BYTES,
            limit_bytes=report.limit_bytes,
            **asdict(memory_plan),
        ),
        space=_space(target, written),
        changes=changes,
    )


def _space(target: Path, written: int) -> Space | None:
    if is_object(target):
        return None
    place, directory = place_of(target), nearest_directory(target)
    free, begun = place.free_bytes(directory), place.allocated_bytes(partial_of(target))
    after = free + begun + place.allocated_bytes(target) - written
    return Space(str(directory), free, after, begun)


def _by_path(files: Sequence[SourceFile], read: Sequence[int]) -> Iterator[FileBytes]:
    """Sum up what is read of each file; what is held in memory counts as read of one of them."""
    found = dict.fromkeys((file.path for file in files), 0)
    for file, nbytes in zip(files, read, strict=True):
        found[file.path] += nbytes
    for path, nbytes in found.items():
        yield FileBytes(str(path), nbytes)
