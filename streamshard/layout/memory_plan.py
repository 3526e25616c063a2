"""The memory contract: projected before the run, refused if above the limit, never guessed after.

``projected = floor + metadata + workers x (window + scratch + codec) + slack``

All in bytes. The floor is what the process occupies before it opens anything (the interpreter
and its libraries); the limit counts what comes on top.
"""

from dataclasses import dataclass
from typing import Final

from streamshard.errors import MemoryLimitError

MIB: Final = 1 << 20
WINDOW_BYTES: Final = MIB
"""Window that a worker gets where the limit allows: larger ones no longer fit the caches."""
MIN_WINDOW_BYTES: Final = MIB // 4
SCRATCH_BYTES: Final = 2 * MIB
"""For casts, and for a block of a store of which only a part is wanted."""
SLACK_BYTES: Final = 16 * MIB
"""Thread stacks, the allocator's reserves, and the plan of the file that is next."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How a run will use memory."""

    floor_bytes: int
    metadata_bytes: int
    workers: int
    window_bytes: int
    codec_bytes: int
    """Per worker, for chunks that are compressed or decompressed as a whole."""

    @property
    def projected_bytes(self) -> int:
        """Peak resident memory that the run will not exceed."""
        per_worker = self.window_bytes + SCRATCH_BYTES + self.codec_bytes
        return self.floor_bytes + self.metadata_bytes + self.workers * per_worker + SLACK_BYTES


def plan_memory(
    *, floor_bytes: int, metadata_bytes: int, codec_bytes: int, workers: int, limit_bytes: int
) -> MemoryPlan:
    """Fit windows into the limit.

    Raises
    ------
    MemoryLimitError
        Not even the smallest windows fit; the message names the smallest limit that would do.
    """
    fixed = metadata_bytes + SLACK_BYTES + workers * (SCRATCH_BYTES + codec_bytes)
    window = min(WINDOW_BYTES, (limit_bytes - fixed) // workers)
    if window < MIN_WINDOW_BYTES:
        least = -(-(fixed + workers * MIN_WINDOW_BYTES) // MIB)
        message = (
            f"this run needs {least} MiB above the {floor_bytes // MIB} MiB of the "
            f"program itself, the limit is {limit_bytes // MIB} MiB; "
            f"use --memory-limit {least}MiB"
        )
        if workers > 1:
            message += " or --workers 1"
        raise MemoryLimitError(f"{message}. Nothing was read or written")
    return MemoryPlan(floor_bytes, metadata_bytes, workers, window, codec_bytes)
