"""Files of FSDP's ranks become ZeRO's files, with a reference, and a distributed checkpoint."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

import streamshard
from streamshard.errors import DisagreementError, UnsupportedError, UsageError
from streamshard.testing.reader import SavedCheckpoint
from tests.checkpoints.test_dcp_repartition import BESIDE, require_moved, saved
from tests.checkpoints.test_fsdp_ranks import in_rank
from tests.checkpoints.test_laws_of_readers import PLAIN, ReadingTests, made_of, of_distributed
from tests.fabricated import write
from tests.fabricated_dcp import Saved
from tests.job import Job


def write_ranks(made: Saved, place: Path, shape: tuple[int, ...] = (2,)) -> None:
    """Write what a job would save with `get_model_state_dict` and `get_optimizer_state_dict`.

    `shape`: of the mesh; its second dimension is that of tensor parallelism.
    """
    place.mkdir()
    ranks = torch.Size(shape).numel()
    for rank in range(ranks):
        in_rank(rank, partial(_write_rank, made, place, shape), ranks)


def _write_rank(made: Saved, place: Path, shape: tuple[int, ...]) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("fsdp", "tp")[: len(shape)])
    rank, ranks = distributed.get_rank(), distributed.get_world_size()

    def part(tensor: torch.Tensor) -> torch.Tensor:
        by_columns: Placement = Shard(1) if tensor.dim() > 1 else Replicate()
        cut = [Shard(0), by_columns][: len(shape)]
        return distribute_tensor(tensor, mesh, cut, src_data_rank=None)

    parts: dict[int, torch.Tensor] = {}
    model, states = dict[str, torch.Tensor](), dict[str, dict[str, torch.Tensor]]()
    for key, (tensor, _) in made.tensors.items():
        path = made.paths[key]
        if "state" in path:
            held = tensor if path[-1] == "step" else part(tensor)
            states.setdefault(path[2], {})[path[3]] = held
        else:
            name = path[-1]
            is_cut = name not in BESIDE
            parts.setdefault(id(tensor), part(tensor) if is_cut else tensor)
            model[name] = parts[id(tensor)]
    groups: dict[int, dict[str, Any]] = {}
    for key, value in made.values.items():
        _, kind, number, option = made.paths[key]
        assert kind == "param_groups"
        groups.setdefault(number, {})[option] = value
    optimizer = {"state": states, "param_groups": [groups[n] for n in sorted(groups)]}
    torch.save(model, place / f"model_world_size_{ranks}_rank_{rank}.pt")
    torch.save(optimizer, place / f"optim_world_size_{ranks}_rank_{rank}.pt")


@pytest.fixture(scope="module")
def made() -> Saved:
    return saved(Job(), files=1)


@pytest.fixture(scope="module")
def ranks(made: Saved, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("ranks") / "actor"
    write_ranks(made, place)
    return place


def test_a_zero_job_goes_on_with_them(made: Saved, ranks: Path, tmp_path: Path) -> None:
    stage, job, out = 2, Job(stage=3, world_size=2), tmp_path / "out"
    reference = write(job, tmp_path / "like")
    with pytest.raises(UnsupportedError, match=r"'streamshard repartition' format=fsdp-ranks"):
        streamshard.repartition(ranks, out, world_size=3)
    streamshard.repartition(ranks, out, world_size=3, zero_stage=stage, like=reference, verify=True)
    require_moved(made, out, job.dtype)
    shown = streamshard.inspect(out)
    assert (shown.world_size, shown.zero_stage) == (3, stage)
    assert [group.states["step"] for group in shown.groups] == [3.0, 3.0]
    assert [group.hyper_parameters["lr"] for group in shown.groups] == [5e-4, 1e-3]
    with pytest.raises(UsageError, match="is for DeepSpeed's files"):
        streamshard.repartition(
            ranks, tmp_path / "again", world_size=3, like=reference, format="fsdp-ranks"
        )


def test_states_that_tensor_parallelism_cuts_are_read(made: Saved, tmp_path: Path) -> None:
    place = tmp_path / "actor"
    write_ranks(made, place, (2, 2))
    made.write(tmp_path / "wanted")
    found = streamshard.diff(tmp_path / "wanted", place)
    assert found.is_equal
    assert {one.state for one in found.states} >= {"fp32", "exp_avg", "exp_avg_sq"}
    with pytest.raises(UnsupportedError, match="as with tensor parallelism: how a job"):
        streamshard.repartition(place, tmp_path / "out", world_size=2, format="fsdp-ranks")


def test_a_job_does_not_go_on_without_its_steps(ranks: Path, tmp_path: Path) -> None:
    place = shutil.copytree(ranks, tmp_path / "actor")
    for path in place.glob("optim_*"):
        held = torch.load(path, weights_only=False)
        for state in held["state"].values():
            del state["step"]
        torch.save(held, path)
    reference = write(Job(world_size=2), tmp_path / "like")
    with pytest.raises(DisagreementError, match=r"tells no count of steps, which .*like= has"):
        streamshard.repartition(place, tmp_path / "out", world_size=3, like=reference)


def test_a_learning_rate_in_a_tensor_is_a_number_elsewhere(
    made: Saved, ranks: Path, tmp_path: Path
) -> None:
    place = shutil.copytree(ranks, tmp_path / "actor")
    for path in place.glob("optim_*"):
        held = torch.load(path, weights_only=False)
        for group in held["param_groups"]:
            group["lr"] = torch.tensor(0.25)
        torch.save(held, path)
    reference = write(Job(world_size=2), tmp_path / "like")
    streamshard.repartition(place, tmp_path / "zero", world_size=3, like=reference, verify=True)
    streamshard.export(place, tmp_path / "dcp", format="dcp", verify=True)
    for out in (place, tmp_path / "zero", tmp_path / "dcp"):
        groups = streamshard.inspect(out).groups
        assert [group.hyper_parameters["lr"] for group in groups] == [0.25, 0.25]
    require_moved(made, tmp_path / "zero", Job().dtype)


@pytest.fixture(scope="module")
def plain_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Saved]:
    made, place = made_of(PLAIN, files=1), tmp_path_factory.mktemp("ranks") / "actor"
    write_ranks(made, place)
    return place, made


class TestFsdpRanks(ReadingTests):
    kind = "fsdp-ranks"
    has_sums = True

    @pytest.fixture
    def saved(self, plain_ranks: tuple[Path, Saved], tmp_path: Path) -> SavedCheckpoint:
        place = shutil.copytree(plain_ranks[0], tmp_path / "actor")
        like = write(PLAIN, tmp_path / "run")
        return SavedCheckpoint(place, of_distributed(plain_ranks[1]), like)
