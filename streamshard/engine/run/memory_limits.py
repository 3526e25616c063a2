"""Fits a run into the memory that it may use."""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from streamshard.engine.jobs.executor import current_executor
from streamshard.engine.run import resident_memory
from streamshard.errors import MemoryLimitError, Option, UsageError
from streamshard.io.entries import request_bytes
from streamshard.layout.memory_plan import METADATA_STEP_BYTES, MIB, MemoryPlan, plan_memory
from streamshard.model import SourceFile

_DEFAULT_LIMIT_BYTES: Final = 1024 * MIB
_CLIENT_BYTES: Final = 32 * MIB
"""Memory of the client of an object store: its threads, their connections and allocator."""
_REMOTE_WORKERS: Final = 8


def default_workers(*, copies: bool = False, encodes: bool = False, is_remote: bool = False) -> int:
    """Return a count of workers that keeps a disk busy without overloading a login node.

    A worker that only copies large files mostly waits for its writes: then it is two per core.
    Encoding is slower than a disk: then it is one worker per core, and two that write meanwhile.
    A request to an object store takes long, and costs this machine little.
    """
    if is_remote:
        return _REMOTE_WORKERS
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2
    return min(16, cores + 2) if encodes else min(4, 2 * cores if copies else cores)


def limit_or_default(given_bytes: int | None, floor_bytes: int) -> int:
    """Return the given limit; by default 1 GiB, or half of the available memory if that is less."""
    if given_bytes is not None:
        return given_bytes
    return min(_DEFAULT_LIMIT_BYTES, max(0, resident_memory.available_bytes() - floor_bytes) // 2)


def fit_memory(
    *,
    floor_bytes: int,
    codec_bytes: int,
    workers: int | None,
    limit_bytes: int,
    copies_bytes: Callable[[int], int],
    reopened: int = 0,
    copies: bool = False,
    encodes: bool = False,
    requests_bytes: int,
    waiting_bytes: int = 0,
    shared_bytes: int = 0,
    uploads: bool = False,
) -> MemoryPlan:
    """Fit a run into the memory limit; call it after everything is planned.

    The peak memory of planning is the estimate for the metadata, which the run holds again.

    `workers`: count of workers; by default see `default_workers`, and fewer if memory is short.
    `copies_bytes`: memory for the copies of the files in flight, which are located only during the
    run, by the count of workers.
    `reopened`: memory for the headers that are read back after the run, in multiples of the
    source's.
    `requests_bytes`: memory of one worker for requests to an object store.
    `waiting_bytes`: memory for a file that is packed with others: two per worker, and one more.
    `shared_bytes`: memory for a file that all workers write together.
    `uploads`: whether anything is written to an object store.
    """
    if workers is not None and workers < 1:
        raise UsageError(f"{Option('workers', workers)}: at least one is needed")
    workers = workers or current_executor().workers
    held_bytes = (1 + reopened) * max(0, resident_memory.peak_bytes() - floor_bytes)
    held_bytes += waiting_bytes + shared_bytes
    if requests_bytes or uploads:
        held_bytes += _CLIENT_BYTES

    def fit(count: int) -> MemoryPlan:
        steps = -(-(held_bytes + copies_bytes(count)) // METADATA_STEP_BYTES)
        return plan_memory(
            floor_bytes=floor_bytes,
            metadata_bytes=steps * METADATA_STEP_BYTES,
            codec_bytes=codec_bytes + 2 * waiting_bytes,
            workers=count,
            limit_bytes=limit_bytes,
            requests_bytes=requests_bytes,
        )

    if workers is not None:
        return fit(workers)
    most = default_workers(copies=copies, encodes=encodes, is_remote=requests_bytes > 0)
    for count in range(most, 1, -1):
        with suppress(MemoryLimitError):
            return fit(count)
    return fit(1)


@dataclass(frozen=True, slots=True)
class Limits:
    floor_bytes: int
    """Resident memory before anything was opened."""
    memory_limit: int | None
    workers: int | None

    def fit(
        self, codec_bytes: int, files: Sequence[SourceFile] = (), copies_bytes: int = 0
    ) -> MemoryPlan:
        """Fit a run that only reads into the memory limit; call it after everything is opened."""
        return fit_memory(
            floor_bytes=self.floor_bytes,
            codec_bytes=codec_bytes,
            copies_bytes=lambda _: copies_bytes,
            workers=self.workers,
            requests_bytes=request_bytes(file.path for file in files),
            limit_bytes=limit_or_default(self.memory_limit, self.floor_bytes),
        )
