"""`convert`: writes a checkpoint as chunked Zarr arrays, which do not depend on the ranks."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from streamshard.defaults import CODECS, DEFAULT_CHUNK_BYTES
from streamshard.engine.run import resident_memory
from streamshard.engine.run.phases import COMMITTING
from streamshard.errors import UsageError
from streamshard.formats.pickle.node_checks import of_file
from streamshard.layout.grid import chunk_shape
from streamshard.layout.memory_plan import MIB, MemoryPlan
from streamshard.model import ITEMSIZE
from streamshard.operations.checks.structure import Request
from streamshard.operations.compare.comparison import EXTRA_BYTES
from streamshard.operations.convert.store_targets import StoreTargets
from streamshard.operations.source.source import Source, open_source
from streamshard.operations.transfer import execution, needed, plan_file, read_back
from streamshard.operations.transfer.byte_accounting import ByteCounts
from streamshard.operations.transfer.estimate import Outlook, estimate_run
from streamshard.operations.transfer.plan_file import Asked
from streamshard.operations.transfer.report import Progress, Report, Silent
from streamshard.operations.transfer.run_identity import RunIdentity
from streamshard.operations.transfer.staging import PartialTarget
from streamshard.operations.transfer.target import (
    place_to_make,
    require_free,
    require_named,
    require_other,
    require_separate,
    require_space,
)


@dataclass(frozen=True, slots=True)
class StoreShape:
    """How a store's arrays are cut and compressed."""

    codec: str
    chunk_size: int
    """Bytes per chunk at most, before compression."""

    def __post_init__(self) -> None:
        if self.codec not in CODECS:
            raise UsageError(f"--codec {self.codec}: choose one of {', '.join(CODECS)}")
        if self.chunk_size < 1:
            raise UsageError(f"--chunk-size {self.chunk_size}: at least one byte is needed")


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a run."""

    floor_bytes: int
    """Resident memory before anything was opened."""
    memory_limit: int | None
    workers: int | None


@dataclass(frozen=True, slots=True)
class ConvertPlan:
    """A conversion that fits memory and disk, ready to run."""

    asked: Asked | None
    source: Source
    target: Path
    purpose: RunIdentity
    files: StoreTargets
    memory: MemoryPlan
    overwrite: bool
    report: Report
    """What the run will do."""
    if_needed: bool = False
    """Whether to write nothing if the target holds the result already."""

    def found(self, progress: Progress | None = None) -> Report | None:
        """Return the report of a run that has nothing to do; None if there is something to do.

        Raises
        ------
        TargetExistsError
            The target exists, holds something else, and may not be replaced.
        """
        return needed.Wanted(
            self.report,
            self.target,
            self.source,
            self.memory,
            self.sizes(),
            [self.files.content, self.files.manifest],
            self.overwrite,
        ).found(progress)

    def run(self, progress: Progress | None = None) -> Report:
        """Write the store.

        Raises
        ------
        StreamshardError
            The source changed, or the target cannot be written. Then there is no store, but the
            files written so far are kept beside its place, and the same plan continues with them.
        """
        if self.if_needed and (found := self.found(progress)) is not None:
            return found
        with PartialTarget(
            self.target, self.purpose, nbytes=self.report.bytes_written, overwrite=self.overwrite
        ) as partial_target:
            told = progress or Silent()

            def work() -> None:
                # The manifest last, because it lists the checksums of everything else.
                for targets in (self.files.content, self.files.manifest):
                    execution.run(self.source, targets(), partial_target, self.memory, told)
                if self.report.is_verified and not partial_target.is_done:
                    place = partial_target.path
                    written = Request(place)
                    read_back.require_same(written, place, self.source, self.memory, told)
                told.enter(COMMITTING)
                partial_target.commit()

            done = execution.measured(self.report, partial_target, told, work)
            return replace(done, bytes_written=self.files.nbytes or done.bytes_written)

    def sizes(self) -> Mapping[str, int]:
        """Return the size of every file that will be written, by its path."""
        return self.files.sizes()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the plan to a file, for `load_plan` or `streamshard apply`."""
        if self.asked is None:
            raise UsageError(f"{path}: a part of a larger plan, which cannot be saved by itself")
        plan_file.write(Path(path), self.asked, self.purpose, self.sizes())

    def outlook(self, *, measures_disk: bool = True) -> Outlook:
        """Estimate in detail what the run will do, and how long it may take."""
        times = np.ones(len(self.source.checkpoint.tensors), dtype=np.int64)
        byte_counts = ByteCounts(self.sizes(), times)
        return estimate_run(
            self.source,
            byte_counts,
            self.memory,
            self.report,
            self.target,
            encode=self.files.encode,
            measures_disk=measures_disk,
        )


def plan_convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    codec: str = "none",
    chunk_size: int = DEFAULT_CHUNK_BYTES,
    source_ds_config_file: str | os.PathLike[str] | None = None,
    like: str | os.PathLike[str] | None = None,
    tag: str | None = None,
    memory_limit: int | None = None,
    workers: int | None = None,
    overwrite: bool = False,
    verify: bool = False,
    if_needed: bool = False,
) -> ConvertPlan:
    """Read the source's headers and plan a conversion; writes nothing.

    Parameters
    ----------
    source
        Run directory with `latest`, tag directory, or another store.
    target
        Store to make; by convention it ends in `.zarr`.
    codec
        `none`, `lz4` or `zstd`.
    chunk_size
        Bytes per chunk at most, before compression.
    source_ds_config_file, like
        For sources that lack information; see `plan_repartition`.
    memory_limit
        Bytes of memory beyond what the program itself takes; by default 1 GiB, but at most half of
        the remaining memory of the machine or the cgroup.
    verify
        Read the written files back from disk, and compare them with the source before they are
        renamed into place.
    if_needed
        Write nothing if the target already holds exactly the bytes that would be written; the
        report says so.

    Raises
    ------
    StreamshardError
        One of its subclasses, each with its own exit code; see `streamshard.errors`.
    """
    asked = Asked.of(
        "convert",
        source,
        target,
        codec=codec,
        chunk_size=chunk_size,
        source_ds_config_file=source_ds_config_file,
        like=like,
        tag=tag,
        memory_limit=memory_limit,
        workers=workers,
        overwrite=overwrite,
        verify=verify,
    )
    floor_bytes = resident_memory.resident_bytes()
    resident_memory.restart_peak()
    shape = StoreShape(codec, chunk_size)
    target = place_to_make(Path(target))
    require_other(source, target)
    if if_needed:
        require_named(target)  # its content is compared after planning
    else:
        require_free(target, overwrite=overwrite)
    opened = open_source(source, tag, ds_config_file=source_ds_config_file, like=like)
    opened.require_use_of_like()
    limits = Limits(floor_bytes, memory_limit, workers)
    return plan_store(
        opened,
        target,
        shape,
        limits,
        named=str(source),
        overwrite=overwrite,
        verify=verify,
        if_needed=if_needed,
        asked=asked,
    )


def plan_store(
    opened: Source,
    target: Path,
    shape: StoreShape,
    limits: Limits,
    *,
    named: str,
    verb: str = "convert",
    overwrite: bool = False,
    verify: bool = False,
    if_needed: bool = False,
    asked: Asked | None = None,
) -> ConvertPlan:
    """Plan to write an opened source into a store; see `plan_convert`.

    Parameters
    ----------
    named
        The source's path as the user gave it.
    verb
        The verb that writes the store.
    asked
        The options from which the plan can be made again; without them it cannot be saved.
    """
    codec, floor_bytes = shape.codec, limits.floor_bytes
    require_separate(opened.path, opened.files, target)
    tensors = opened.checkpoint.tensors
    shapes = [chunk_shape(t.shape, ITEMSIZE[t.dtype], shape.chunk_size) for t in tensors]
    files = StoreTargets(opened, shapes, codec)
    with of_file(opened.path):
        sizes = files.sizes(reads_back=True)
    count, bytes_written = len(sizes), sum(sizes.values())
    del sizes  # it is large for a large store
    both = zip(shapes, tensors, strict=True)
    largest = max((math.prod(s) * ITEMSIZE[t.dtype] for s, t in both), default=0)
    options = {
        "verb": verb,
        "--tag": opened.checkpoint.tag,
        "--codec": codec,
        "--chunk-size": str(shape.chunk_size),
    }
    purpose = RunIdentity.of(opened, options, replaces=overwrite)
    limit_bytes = execution.limit_or_default(limits.memory_limit, floor_bytes)
    memory_plan = execution.fit_memory(
        floor_bytes=floor_bytes,
        # A chunk that is being compressed takes its content, Blosc's buffer and Blosc's result.
        codec_bytes=opened.codec_bytes
        + (0 if codec == "none" else 3 * largest + MIB)
        + (EXTRA_BYTES if verify else 0),
        workers=limits.workers,
        limit_bytes=limit_bytes,
        reopened=int(verify),
        encodes=codec != "none",
    )
    if not if_needed:
        require_space(target, bytes_written)
    report = Report(
        verb=verb,
        source=named,
        target=str(target),
        tag=opened.checkpoint.tag,
        zero_stage=opened.checkpoint.layout.stage,
        source_world_size=opened.checkpoint.layout.world_size,
        world_size=None,
        files=count,
        bytes_written=bytes_written,
        floor_bytes=floor_bytes,
        limit_bytes=limit_bytes,
        projected_bytes=memory_plan.projected_bytes,
        is_verified=verify,
        path=str(target),
        notes=opened.checkpoint.remarks,
    )
    return ConvertPlan(
        asked, opened, target, purpose, files, memory_plan, overwrite, report, if_needed
    )


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    codec: str = "none",
    chunk_size: int = DEFAULT_CHUNK_BYTES,
    source_ds_config_file: str | os.PathLike[str] | None = None,
    like: str | os.PathLike[str] | None = None,
    tag: str | None = None,
    memory_limit: int | None = None,
    workers: int | None = None,
    overwrite: bool = False,
    verify: bool = False,
    if_needed: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Write a checkpoint's store; see `plan_convert`."""
    plan = plan_convert(
        source,
        target,
        codec=codec,
        chunk_size=chunk_size,
        source_ds_config_file=source_ds_config_file,
        like=like,
        tag=tag,
        memory_limit=memory_limit,
        workers=workers,
        overwrite=overwrite,
        verify=verify,
        if_needed=if_needed,
    )
    return plan.run(progress)
