"""Parameters that files list as ones to be averaged: copies that differ are refused."""

from pathlib import Path
from typing import Any

import pytest

import streamshard
from streamshard.errors import DisagreementError
from tests.comparing import compare
from tests.fabricated import write
from tests.fabricated_parts import TensorJob, edit_parts, with_degree
from tests.job import TAG

NAMES = ("block.1.bias", "embed.bias")
TWO = TensorJob(parts=2, world_size=3, in_lists=True, averaged=NAMES).told()
MERGED: dict[str, Any] = {"tensor_parallel": 1, "world_size": 2}
DRIFTED = r"of (embed|block\.1)\.bias: 1 of \d elements differ.*list it as one whose mean counts"


def test_copies_that_differ_are_refused(tmp_path: Path) -> None:
    run, store, out = write(TWO, tmp_path / "run"), tmp_path / "run.zarr", tmp_path / "out"
    like = write(with_degree(TWO, 3, 2), tmp_path / "like")
    options: dict[str, Any] = {"tensor_parallel": 3, "world_size": 6, "like": like}
    streamshard.convert(run, store, codec="zstd")
    for source in (run, store):
        with pytest.raises(DisagreementError, match=DRIFTED):
            streamshard.repartition(source, out, **options)
    with pytest.raises(DisagreementError, match=DRIFTED):
        streamshard.convert(run, out, tensor_parallel=1)
    with pytest.raises(DisagreementError, match=DRIFTED):
        streamshard.export(run, out)
    assert not out.exists()


def test_copies_that_are_equal_need_no_mean(tmp_path: Path) -> None:
    """NaNs with a payload and negative zeros stay as they are."""
    job = TensorJob(parts=2, world_size=3, in_lists=True).told()
    run, out = write(job, tmp_path / "run"), tmp_path / "out"
    wanted = write(with_degree(job, 1, 2), tmp_path / "wanted")
    edit_parts(run, average_what_is_replicated)
    streamshard.repartition(run, out, **MERGED)
    compare(out / TAG, wanted / TAG)


def average_what_is_replicated(content: dict[str, Any]) -> None:
    told = content["universal_checkpoint_info"]
    patterns = told["tp_replicated_parameter_patterns"]
    told["parameter_to_average_patterns"] = [p for p in patterns if "bias" in p and "old" not in p]
    told["tp_replicated_parameter_patterns"] = [
        p for p in patterns if p not in told["parameter_to_average_patterns"]
    ]
