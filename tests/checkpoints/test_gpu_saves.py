"""What engines saved on a GPU, with storages that lie there, is read where there is none.

`saved_on_a_gpu.tar.xz` is of 4 ranks of DeepSpeed 0.19.8 on an H100 (torch 2.11, gloo): stage 2,
the model of `tests/oracle/models.py`. Its frozen weights are parts of one storage.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

import streamshard
from tests.oracle.values import value_differences
from tests.unpacking import unpack

KEPT = Path(__file__).with_name("saved_on_a_gpu.tar.xz")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("gpu")
    unpack(KEPT, directory)
    return directory / "z2-views-at4"


def model_of(run: Path) -> dict[str, Any]:
    path = run / "global_step3" / "mp_rank_00_model_states.pt"
    loaded: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=False)
    return loaded


def test_all_of_it_is_there_after_resharding(run: Path, tmp_path: Path) -> None:
    streamshard.convert(run, tmp_path / "run.zarr", codec="zstd")
    streamshard.repartition(tmp_path / "run.zarr", tmp_path / "one", world_size=1, verify=True)
    streamshard.repartition(tmp_path / "one", tmp_path / "four", world_size=4)
    for out in ("one", "four"):
        assert streamshard.verify(tmp_path / out, against=run).differences == ()
    # Of the client state, a tensor, a part of one, and the state of a generator lay on the GPU.
    assert list(value_differences(model_of(run), model_of(tmp_path / "four"), "model")) == []
    # Nothing that is written asks for a GPU.
    torch.load(tmp_path / "four/global_step3/mp_rank_00_model_states.pt", weights_only=False)
