"""Estimates a run before it starts: files, memory, time, disk space, parts left out or made.

A dry run shows the estimate; its JSON document has it under the key `estimate`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np

from streamshard.errors import SourceError, StreamshardError, TargetError
from streamshard.io.disk_speed import Speed, measure_encoding, measure_reading, measure_writing
from streamshard.io.object_path import as_path, is_object
from streamshard.io.place import place_of
from streamshard.layout.memory_plan import SCRATCH_BYTES, SLACK_BYTES, MemoryPlan
from streamshard.model import BLOB, FILE, MASTER, MODULE, SourceFile
from streamshard.operations.resume.resizing import Change
from streamshard.operations.source.source import Source
from streamshard.operations.transfer.byte_accounting import ByteCounts, read_bytes
from streamshard.operations.transfer.report import Report
from streamshard.operations.transfer.target import nearest_directory, partial_of

Encode = Callable[[memoryview], bytes]

_SHARE: Final = 10
"""At most one tenth of the free space is written to measure the disk."""


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
class TimeEstimate:
    """A rough estimate of a run's duration, from measuring the disk for about a second."""

    seconds: float | None
    """Time to read, compress and write one after the other. In a run these overlap, and compressed
    stores are smaller; time to decompress is not counted. None if one of them could not be
    measured."""
    read_bytes_per_second: int
    """Rate for pieces from all over the source, read from disk or from the page cache."""
    read_sample_bytes: int
    write_bytes_per_second: int
    """Rate for a file next to the target that was written and synced; 0 if that was impossible."""
    write_sample_bytes: int
    encode_bytes_per_second: int
    """Rate at which all workers compressed pieces of the source; 0 without compression."""
    encode_sample_bytes: int
    problem: str | None
    """Why something could not be measured."""

    @property
    def error(self) -> StreamshardError | None:
        """The error that ends a run too where something could not be measured."""
        if self.problem is None:
            return None
        return (TargetError if self.read_sample_bytes else SourceError)(self.problem)


@dataclass(frozen=True, slots=True)
class Space:
    """Space on the target's file system."""

    directory: str
    """Parent directory of the target, or its nearest parent that exists."""
    free_bytes: int
    free_after_bytes: int
    """Free space after the run and after removal of the replaced target; more if the target is
    compressed."""
    begun_bytes: int
    """Bytes that an earlier run left next to the target's place; this run uses or removes them."""


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests to object stores, without those for headers, listings and repetitions."""

    down: int
    """At least; a file whose fragments lie apart takes one for each."""
    down_bytes: int
    up: int
    up_bytes: int


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the source that is not in the target, or the other way round."""

    what: str
    count: int
    """Count of tensors or files; 0 if a count has no meaning."""
    nbytes: int
    why: str


@dataclass(frozen=True, slots=True)
class Estimate:
    """The estimate of a run."""

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
    time: TimeEstimate | None
    """None if the disk was not measured."""
    space: Space | None
    """None if the target is in an object store."""
    changes: tuple[Change, ...]
    """Effects of another world size on the job; empty if the world size stays, or there is none."""
    left_out: tuple[Part, ...]
    made: tuple[Part, ...]
    """Parts of the target that are not copied from the source."""
    requests: Requests | None = None
    """None if neither the source nor the target is in an object store."""


def estimate_run(
    source: Source,
    byte_counts: ByteCounts,
    memory_plan: MemoryPlan,
    report: Report,
    target: Path,
    *,
    changes: tuple[Change, ...] = (),
    new_files: int = 0,
    encode: Encode | None = None,
    measures_disk: bool = True,
) -> Estimate:
    """Estimate a run; files written to measure the disk are removed again.

    `new_files`: count of files that are made for new ranks.
    `encode`: the function that compresses the target's data; None if it is not compressed.
    """
    read = read_bytes(source, byte_counts.times)
    read_sum, written = int(read.sum()), report.bytes_written
    reread = 2 * written + read_sum if report.is_verified else 0
    space = _space(target, written)
    used = [file for file, nbytes in zip(source.files, read, strict=True) if nbytes]
    return Estimate(
        reads=tuple(_by_path(source.files, read.tolist())),
        read_bytes=read_sum,
        writes=tuple(FileBytes(path, nbytes) for path, nbytes in byte_counts.sizes.items()),
        written_bytes=written,
        is_upper_bound=encode is not None,
        reread_bytes=reread,
        memory=MemoryParts(
            projected_bytes=memory_plan.projected_bytes,
            scratch_bytes=SCRATCH_BYTES,
            slack_bytes=SLACK_BYTES,
            limit_bytes=report.limit_bytes,
            **asdict(memory_plan),
        ),
        time=_time(used, memory_plan.workers, space, (read_sum + reread, written), encode)
        if measures_disk and space is not None and not any(is_object(f.path) for f in used)
        else None,
        space=space,
        changes=changes,
        left_out=tuple(_left_out(source, byte_counts, report)),
        made=tuple(_made(byte_counts, report, new_files)),
        requests=_requests(
            zip(source.files, read.tolist(), strict=True), target, byte_counts.sizes
        ),
    )


def _requests(
    files: Iterable[tuple[SourceFile, int]], target: Path, sizes: Mapping[str, int]
) -> Requests | None:
    """Count the requests of a run; None if neither side is in an object store."""
    down = [(place_of(file.path), nbytes) for file, nbytes in files if is_object(file.path)]
    up, to = [*sizes.values()] if is_object(target) else [], place_of(target)
    if not down and not up:
        return None
    return Requests(
        sum(place.requests_to_read(nbytes) for place, nbytes in down),
        sum(nbytes for _, nbytes in down),
        sum(map(to.requests_to_write, up)),
        sum(up),
    )


def _space(target: Path, written: int) -> Space | None:
    """Describe the target's file system; None for a bucket, which has no end."""
    if is_object(target):
        return None
    place, directory = place_of(target), nearest_directory(target)
    free, begun = place.free_bytes(directory), place.allocated_bytes(partial_of(target))
    after = free + begun + place.allocated_bytes(target) - written
    return Space(str(directory), free, after, begun)


def _time(
    files: list[SourceFile],
    workers: int,
    space: Space,
    nbytes: tuple[int, int],
    encode: Encode | None,
) -> TimeEstimate:
    """Measure the disk, and estimate the time for so many bytes to read, and to write."""
    read, written = nbytes
    reading = encoding = writing = Speed(0, 0)
    problem = None
    try:
        reading = measure_reading(files, workers=workers)
        if encode is not None:
            encoding = measure_encoding(files, encode, workers=workers)
        most = min(space.free_bytes // _SHARE, written)  # a quota may allow no more
        writing = measure_writing(as_path(space.directory), most_bytes=most)
    except OSError as error:
        place = error.filename or space.directory
        verb = "written" if reading.nbytes else "read"
        problem = f"{place}: cannot be {verb} ({error.strerror})"
    steps = [(read, reading.bytes_per_second), (written, writing.bytes_per_second)]
    if encode is not None:
        steps.append((written, encoding.bytes_per_second))
    is_known = all(rate or not amount for amount, rate in steps)
    seconds = sum(amount / rate for amount, rate in steps if rate) if is_known else None
    return TimeEstimate(
        seconds=None if seconds is None else round(seconds, 1),
        read_bytes_per_second=reading.bytes_per_second,
        read_sample_bytes=reading.nbytes,
        write_bytes_per_second=writing.bytes_per_second,
        write_sample_bytes=writing.nbytes,
        encode_bytes_per_second=encoding.bytes_per_second,
        encode_sample_bytes=encoding.nbytes,
        problem=problem,
    )


_WHY_NOT: Final = {
    "repartition": "follow from the master weights",
    "export": "the master weights are exported in their place",
}
_NOT_THERE: Final = {
    "repartition": "in no file of that ZeRO stage",
    "export": "not part of what is exported",
}
_OTHERS: Final = {
    MASTER: "weights that were not chosen",
    MODULE: "buffers and frozen weights",
    BLOB: "tensors in training state",
    FILE: "files next to the tensors",
}


def _by_path(files: Sequence[SourceFile], read: Sequence[int]) -> Iterator[FileBytes]:
    """Sum up what is read of each file; what is held in memory counts as read of one of them."""
    found = dict.fromkeys((file.path for file in files), 0)
    for file, nbytes in zip(files, read, strict=True):
        found[file.path] += nbytes
    for path, nbytes in found.items():
        yield FileBytes(str(path), nbytes)


def _left_out(source: Source, byte_counts: ByteCounts, report: Report) -> Iterator[Part]:
    """Yield the parts of the source that are not read, state by state."""
    checkpoint, kind = source.checkpoint, "repartition" if report.tensors is None else "export"
    weights = {
        (model_part.name, entry.name)
        for model_part in checkpoint.model_parts
        for entry in model_part.module
        if entry.kind == "param"
    }
    found: dict[tuple[str, str], list[int]] = {}
    for number in np.flatnonzero(byte_counts.times == 0).tolist():
        tensor = checkpoint.tensors[number]
        if tensor.state == MODULE and (tensor.model_part, tensor.name) in weights:
            key = "module weights", _WHY_NOT[kind]
        elif tensor.state == FILE and kind == "repartition":
            key = tensor.name, "of a rank that the target does not have"
        else:
            other = _OTHERS.get(tensor.state, f"optimizer state {tensor.state}")
            is_of_fsdp = report.tensors is None and report.zero_stage is None
            key = other, "in no file of these ranks" if is_of_fsdp else _NOT_THERE[kind]
        found.setdefault(key, []).append(tensor.nbytes)
    for (what, why), sizes in found.items():
        yield Part(what, len(sizes), sum(sizes), why)
    if source.kind != "store":
        copied = int(read_bytes(source, np.ones_like(byte_counts.times)).sum())
        stored = {file.path: file.nbytes for file in source.files}
        nbytes = max(0, sum(stored.values()) - copied)
        why = "not copied: newly written, or redundant among ranks"
        of_others = ", all but the weights of older checkpoints" * (report.verb == "merge")
        yield Part(f"padding, headers, pickles{of_others}", 0, nbytes, why)


def _made(byte_counts: ByteCounts, report: Report, new_files: int) -> Iterator[Part]:
    """Yield the parts of the target that are not copied from the source."""
    if byte_counts.cast_bytes:
        if report.tensors is not None:
            yield Part("weights", 0, byte_counts.cast_bytes, f"cast to {report.dtype}")
        else:
            why = f"cast from the master weights, for ZeRO stage {report.zero_stage}"
            yield Part("module weights", 0, byte_counts.cast_bytes, why)
    if byte_counts.padding_bytes:
        yield Part("padding", 0, byte_counts.padding_bytes, "zeros that fill up partitions")
    if new_files:
        yield Part("files of new ranks", new_files, 0, "with the step, without random generators")
