"""What `repartition` writes, as `ravex` reads it, which is no part of this project."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import streamshard as api
from tests.exported import same
from tests.fabricated import load, write
from tests.job import STATES, Job, values

foreign = pytest.importorskip("ravex._interop.foreign", reason="ravex is not installed")
zero = pytest.importorskip("ravex._interop.zero")


def read(run: Path) -> dict[str, Any]:
    """Read a run directory with `ravex`."""
    found = foreign.confirm_stage(foreign.identify(str(run)), load)
    content: dict[str, Any] = zero.unshard(found, lambda path: load(Path(path)))
    return content


@pytest.mark.parametrize(("stage", "zero_stage"), [(1, 3), (2, 1), (3, 2)])
def test_it_finds_every_weight_and_both_moments(
    stage: int, zero_stage: int, tmp_path: Path
) -> None:
    job = Job(stage=stage, world_size=4)
    write(job, tmp_path / "run")
    write(replace(job, stage=zero_stage, world_size=3), tmp_path / "like")
    api.repartition(tmp_path / "run", tmp_path / "out", world_size=3, zero_stage=zero_stage)
    found, like = read(tmp_path / "out"), read(tmp_path / "like")
    moments, names = found["optimizer"].pop("state"), job.shapes
    assert moments.keys() == names.keys()
    for state in STATES:
        wanted = {name: values(state, name, shape) for name, shape in names.items()}
        same({name: moments[name][state] for name in names}, wanted)
    wanted = {name: values("fp32", name, shape) for name, shape in names.items()}
    same({name: found["model"][name] for name in names}, wanted)
    same(found.pop("model"), like.pop("model"))
    del like["optimizer"]["state"]
    assert found == like
