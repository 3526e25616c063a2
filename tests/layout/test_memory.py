"""The memory contract, with primes so that no term can hide after another."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamshard.errors import MemoryLimitError
from streamshard.layout.memory_plan import (
    METADATA_STEP_BYTES,
    MIB,
    MIN_WINDOW_BYTES,
    SCRATCH_BYTES,
    SLACK_BYTES,
    WINDOW_BYTES,
    MemoryPlan,
    plan_memory,
)

FLOOR, METADATA, CODEC = 104_729, 1_299_709, 15_485_863
SIZES = st.integers(0, 100 * MIB)


def fit(*, metadata: int, codec: int, workers: int, limit: int, floor: int = FLOOR) -> MemoryPlan:
    return plan_memory(
        floor_bytes=floor,
        metadata_bytes=metadata,
        codec_bytes=codec,
        workers=workers,
        limit_bytes=limit,
    )


def test_every_term_is_counted() -> None:
    plan = fit(metadata=METADATA, codec=CODEC, workers=3, limit=1024 * MIB)
    per_worker = WINDOW_BYTES + SCRATCH_BYTES + CODEC
    assert plan.projected_bytes == FLOOR + METADATA + 3 * per_worker + SLACK_BYTES
    assert MemoryPlan(2, 3, 5, 7, 11).projected_bytes == (
        2 + 3 + 5 * (7 + SCRATCH_BYTES + 11) + SLACK_BYTES
    )


def smallest_limit(metadata: int, codec: int, workers: int, limit: int) -> int | None:
    """Return the MiB that a refusal names; None where there is no refusal."""
    try:
        fit(metadata=metadata, codec=codec, workers=workers, limit=limit)
    except MemoryLimitError as error:
        message = str(error)
    else:
        return None
    named = re.search(r"use memory_limit=(\d+)( or workers=1)?\.", message)
    assert named
    assert bool(named[2]) == (workers > 1)
    return int(named[1]) // MIB


@given(SIZES, SIZES, st.integers(1, 9), st.integers(0, 2000 * MIB))
def test_a_run_fits_or_is_told_the_smallest_limit_that_would_do(
    metadata: int, codec: int, workers: int, limit: int
) -> None:
    enough = smallest_limit(metadata, codec, workers, limit)
    if enough is not None:
        assert enough * MIB > limit
        # A step more is named than this run needs: the next may be measured a step larger.
        less = (enough - 1) * MIB - METADATA_STEP_BYTES
        with pytest.raises(MemoryLimitError):
            fit(metadata=metadata, codec=codec, workers=workers, limit=less)
        limit = enough * MIB
    plan = fit(metadata=metadata, codec=codec, workers=workers, limit=limit)
    assert plan.projected_bytes - FLOOR <= limit
    assert MIN_WINDOW_BYTES <= plan.window_bytes <= WINDOW_BYTES
    # Nothing that would make windows larger is left unused.
    left = limit - (plan.projected_bytes - FLOOR)
    assert plan.window_bytes == WINDOW_BYTES or left < workers
