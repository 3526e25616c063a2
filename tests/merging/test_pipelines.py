"""Of a pipeline, the files of layers hold the 16-bit weights: they follow from the means too."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import streamshard
from streamshard.errors import DisagreementError
from tests.comparing import compare
from tests.fabricated import edit
from tests.fabricated_pipes import PipeJob, layer_file, write_pipe
from tests.job import TAG
from tests.merging.means import mean

ADDED, WEIGHTS = (0.25, 1.75), (0.3, 0.7)


@dataclass(frozen=True)
class Trained(PipeJob):
    """A pipeline whose master weights are other ones by a constant, or the mean of such."""

    added: Sequence[float] = ()
    weights: Sequence[float] = (1.0,)

    def values(self, state: str, name: str, expert_rank: int = 0) -> Tensor:
        """Make a state of a parameter."""
        made = super().values(state, name, expert_rank)
        return mean([made + one for one in self.added], self.weights) if state == "fp32" else made


@pytest.fixture(params=[{}, {"tensor": 2}], ids=["stages", "stages of two ranks"])
def runs(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[list[Path], Path]:
    """Two runs, and what their merge is to be."""
    made = [
        write_pipe(Trained(added=(one,), **request.param), tmp_path / f"run{number}")
        for number, one in enumerate(ADDED)
    ]
    wanted = Trained(added=ADDED, weights=WEIGHTS, **request.param)
    return made, write_pipe(wanted, tmp_path / "wanted")


def test_files_of_layers_follow_from_the_means(
    runs: tuple[list[Path], Path], tmp_path: Path
) -> None:
    sources, wanted = runs
    (sources[1] / "model.safetensors").write_bytes(b"of one checkpoint")
    streamshard.merge(sources, tmp_path / "out", weights=WEIGHTS, verify=True)
    compare(tmp_path / "out" / TAG, wanted / TAG)
    streamshard.merge(sources, tmp_path / "out.zarr", weights=WEIGHTS, verify=True)
    streamshard.repartition(tmp_path / "out.zarr", tmp_path / "again")
    compare(tmp_path / "again" / TAG, wanted / TAG)


def test_weights_are_those_of_the_whole_model(tmp_path: Path) -> None:
    sources = [write_pipe(Trained(added=(one,)), tmp_path / str(one)) for one in ADDED]
    wanted = write_pipe(Trained(added=ADDED, weights=WEIGHTS), tmp_path / "wanted")
    streamshard.export(wanted, tmp_path / "model")
    form: dict[str, Any] = {"format": "safetensors"}
    streamshard.merge(sources, tmp_path / "out", weights=WEIGHTS, **form)
    found, expected = (tmp_path / name / "model.safetensors" for name in ("out", "model"))
    assert found.read_bytes() == expected.read_bytes()


def test_a_layer_that_is_no_copy_of_a_shared_module_is_refused(tmp_path: Path) -> None:
    sources = [write_pipe(Trained(added=(one,)), tmp_path / str(one)) for one in ADDED]

    def change(held: dict[str, torch.Tensor]) -> None:
        next(tensor for tensor in held.values() if tensor.numel()).view(-1)[0] += 9

    shared = [number for number, held in enumerate(PipeJob().layers) if isinstance(held, str)]
    edit(layer_file(sources[1], shared[-1]), change)
    with pytest.raises(DisagreementError, match="the file of a layer is no copy of its module"):
        streamshard.merge(sources, tmp_path / "out")
    assert not (tmp_path / "out").exists()
