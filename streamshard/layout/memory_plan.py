"""Projects a run's memory before it starts, and refuses a run that would exceed the limit.

``projected = floor + metadata + workers x (window + scratch + codec + requests) + slack``

All terms are in bytes. The floor is the memory of the process before it opens a file (the
interpreter and its libraries). The limit applies to the memory above the floor.
"""

from dataclasses import dataclass
from typing import Final

from streamshard.errors import MemoryLimitError, Option

MIB: Final = 1 << 20
WINDOW_BYTES: Final = MIB
"""A worker's window if the limit allows it; larger windows no longer fit the CPU caches."""
MIN_WINDOW_BYTES: Final = MIB // 4
BUFFER_BYTES: Final = MIB
MAPPED_BYTES: Final = 4 * MIB
"""Most that is in memory of a source that is mapped."""
SCRATCH_BYTES: Final = 2 * BUFFER_BYTES + MAPPED_BYTES
"""Memory for casts, for a store's block of which only a part is needed, and for what is mapped."""
COMPARING_BYTES: Final = WINDOW_BYTES + SCRATCH_BYTES + 2 * MIB
"""Memory that a worker takes to compare, apart from one window and its scratch: both for the other
side, and the copies."""
METADATA_STEP_BYTES: Final = 4 * MIB
"""Memory for planning varies a little between runs; rounded up to this, it seldom does."""
SLACK_BYTES: Final = 16 * MIB
"""Memory for thread stacks, the allocator's reserves, and the plan of the next file."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How a run uses memory."""

    floor_bytes: int
    metadata_bytes: int
    workers: int
    window_bytes: int
    codec_bytes: int
    """Per worker, for chunks that are compressed or decompressed as a whole."""
    requests_bytes: int = 0
    """Per worker, for what it requested from an object store, or is sending to one."""

    @property
    def projected_bytes(self) -> int:
        """Upper bound of the run's peak resident memory."""
        return self.floor_bytes + self.metadata_bytes + self.process_bytes

    @property
    def process_bytes(self) -> int:
        """Memory that a process with all workers takes above the floor and the metadata."""
        per_worker = self.window_bytes + SCRATCH_BYTES + self.codec_bytes + self.requests_bytes
        return self.workers * per_worker + SLACK_BYTES


def plan_memory(
    *,
    floor_bytes: int,
    metadata_bytes: int,
    codec_bytes: int,
    workers: int,
    limit_bytes: int,
    requests_bytes: int = 0,
) -> MemoryPlan:
    """Choose the window size that fits the limit."""
    per_worker = SCRATCH_BYTES + codec_bytes + requests_bytes
    fixed = metadata_bytes + SLACK_BYTES + workers * per_worker
    window = min(WINDOW_BYTES, (limit_bytes - fixed) // workers)
    if window < MIN_WINDOW_BYTES:
        least = -(-(fixed + workers * MIN_WINDOW_BYTES) // MIB)
        message = (
            f"this run needs {least} MiB above the {floor_bytes // MIB} MiB of the "
            f"program itself, the limit is {limit_bytes // MIB} MiB; "
            f"use {Option('memory_limit', least * MIB + METADATA_STEP_BYTES)}"
        )
        if workers > 1:
            message += f" or {Option('workers', 1)}"
        raise MemoryLimitError(f"{message}. Nothing was read or written")
    return MemoryPlan(floor_bytes, metadata_bytes, workers, window, codec_bytes, requests_bytes)
