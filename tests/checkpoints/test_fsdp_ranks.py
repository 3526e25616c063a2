"""Files of FSDP's ranks: the weights in them are whole again, however a mesh of devices cut."""

import multiprocessing
import shutil
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # ranks are forks: what FSDP loads late is loaded once
from safetensors.torch import load_file, save_file
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._shard_utils import _create_chunk_sharded_tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import streamshard
from streamshard.errors import (
    CorruptFileError,
    DisagreementError,
    IncompleteError,
    SourceError,
    UnsupportedError,
)

State = dict[str, Any]
RANKS = 4


def in_rank(rank: int, do: Callable[[], object], ranks: int = RANKS) -> None:
    """Do something in a process of its own: torch keeps meshes for as long as a process lives."""
    child = multiprocessing.get_context("fork").Process(target=_do, args=(rank, do, ranks))
    child.start()
    child.join()
    assert child.exitcode == 0


def _do(rank: int, do: Callable[[], object], ranks: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    distributed.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    do()


class Model(nn.Module):
    """A frozen weight, a buffer, two names of one weight, and sizes that no count divides."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 7)
        self.down = nn.Linear(7, 6, bias=False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.one = nn.Parameter(torch.full((1,), 3.0))
        self.frozen = nn.Parameter(torch.arange(4.0), requires_grad=False)
        self.register_buffer("freq", torch.arange(5.0))
        self.register_buffer("count", torch.tensor(3))


def fsdp2(model: Model) -> State:
    mesh = init_device_mesh("cpu", (RANKS,))
    fully_shard(model.up, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model.state_dict()


def hsdp(model: Model) -> State:
    mesh = init_device_mesh("cpu", (2, RANKS // 2), mesh_dim_names=("replicas", "shards"))
    fully_shard(model, mesh=mesh)
    return model.state_dict()


def with_tensor_parallelism(model: Model) -> State:
    """Rows of what tensor parallelism has cut by rows are cut again: strided."""
    mesh = init_device_mesh("cpu", (RANKS // 2, 2), mesh_dim_names=("fsdp", "tp"))
    plan = {
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
    }
    parallelize_module(model, mesh["tp"], plan, src_data_rank=None)
    fully_shard(model, mesh=mesh["fsdp"])
    state = model.state_dict()
    assert type(state["up.weight"].placements[0]).__name__ == "_StridedShard"
    return state


def columns(model: Model) -> State:
    return distributed_as(model, (RANKS,), [Shard(1)])


def boxes(model: Model) -> State:
    return distributed_as(model, (2, RANKS // 2), [Shard(1), Shard(0)])


def twice_by_rows(model: Model) -> State:
    return distributed_as(model, (2, RANKS // 2), [Shard(0), Shard(0)])


def distributed_as(model: Model, shape: tuple[int, ...], placements: list[Placement]) -> State:
    mesh = init_device_mesh("cpu", shape)
    return {
        name: distribute_tensor(held, mesh, placements, src_data_rank=None)
        if held.dim() == 2
        else held
        for name, held in model.state_dict().items()
    }


def fsdp1(model: nn.Module) -> State:
    group = distributed.distributed_c10d._get_default_group()
    rank = distributed.get_rank()
    return {
        name: held
        if name in ("freq", "count")
        else _create_chunk_sharded_tensor(held, rank, RANKS, RANKS, group)
        for name, held in model.state_dict().items()
    }


FORMS: dict[str, Callable[[Model], State]] = {
    "FSDP2": fsdp2,
    "HSDP": hsdp,
    "with tensor parallelism": with_tensor_parallelism,
    "columns": columns,
    "boxes": boxes,
    "twice by rows": twice_by_rows,
    "FSDP1": fsdp1,
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What each of four ranks saves in each form, in the files that verl names so."""
    root = tmp_path_factory.mktemp("made")
    for form in FORMS:
        (root / form).mkdir()
    for rank in range(RANKS):
        in_rank(rank, partial(_save_all, root, rank))
    return root


def _save_all(root: Path, rank: int) -> None:
    for form, state_of in FORMS.items():
        torch.save(state_of(Model()), root / form / name(rank))


def weights() -> dict[str, Tensor]:
    return {name: held.detach() for name, held in Model().state_dict().items()}


@pytest.mark.parametrize("form", FORMS)
def test_the_weights_are_whole_again(form: str, made: Path, tmp_path: Path) -> None:
    place = shutil.copytree(made / form, tmp_path / "actor")
    (place / "huggingface").mkdir()
    (place / "huggingface" / "config.json").write_text('{"model_type": "own"}')
    report = streamshard.export(place, tmp_path / "out", verify=True)
    found, wanted = load_file(tmp_path / "out" / "model.safetensors"), weights()
    is_tied = found.keys() != wanted.keys()
    assert is_tied == any("Tied" in note for note in report.notes)
    assert found.keys() | {"head.weight", "embed.weight"} == wanted.keys()
    assert all(torch.equal(held, wanted[name]) for name, held in found.items())
    assert (tmp_path / "out" / "config.json").read_text() == '{"model_type": "own"}'
    assert streamshard.verify(place).problems == ()
    (tmp_path / "model").mkdir()
    save_file({n: t.clone() for n, t in wanted.items()}, tmp_path / "model" / "model.safetensors")
    assert streamshard.diff(place, tmp_path / "model").states[0].changed_tensors == 0
    with streamshard.open(place) as opened:
        assert opened["up.weight"].module[2:5].tolist() == wanted["up.weight"][2:5].tolist()


def test_what_it_says_of_them(made: Path, tmp_path: Path) -> None:
    place = shutil.copytree(made / "FSDP2", tmp_path / "run" / "global_step_5" / "actor")
    torch.save({}, place / "optim_world_size_4_rank_0.pt")
    found = streamshard.inspect(place)
    assert (found.kind, found.world_size, found.weights) == ("fsdp-ranks", 4, 8)
    assert any("Not read: the optimizer's state" in note for note in found.notes)
    compared = streamshard.diff(place, place)
    start = f"{place}: Not read: the optimizer's state"
    assert any(note.startswith(start) for note in compared.notes)
    assert not compared.is_equal  # nothing tells that the optimizers are
    verified = streamshard.verify(place, against=made / "FSDP2")
    assert {found.kind for found in (*compared.differences, *verified.differences)} == {"unread"}
    streamshard.export(place, tmp_path / "weights")
    of_weights = streamshard.verify(tmp_path / "weights", against=place).differences
    assert "unread" not in {found.kind for found in of_weights}
    with pytest.raises(SourceError, match=rf"Give the one in it: {place}"):
        streamshard.export(tmp_path / "run", tmp_path / "out")
    with pytest.raises(UnsupportedError, match="ranks, without an optimizer's state: a job begins"):
        streamshard.repartition(place, tmp_path / "out", world_size=2)
    with pytest.raises(UnsupportedError, match="without an optimizer's state"):
        streamshard.convert(place, tmp_path / "out.zarr")


def test_buffers_that_differ_are_noted(made: Path, tmp_path: Path) -> None:
    place = shutil.copytree(made / "FSDP2", tmp_path / "actor")
    changed(lambda held: {**held, "freq": held["freq"] + 1})(place)
    streamshard.export(place, tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors")["freq"].tolist() == [0, 1, 2, 3, 4]
    notes = streamshard.verify(place).notes
    assert any("The ranks' files differ in freq; rank 0's are taken" in note for note in notes)


def test_replicas_that_differ_are_noted_also_where_padding_is_saved(
    made: Path, tmp_path: Path
) -> None:
    place = shutil.copytree(made / "HSDP", tmp_path / "actor")
    assert not any("differ" in note for note in streamshard.inspect(place).notes)

    def another(held: State) -> State:
        part = held["up.bias"].to_local()
        assert part.untyped_storage().nbytes() == 16
        part += 1
        return held

    changed(another, 3)(place)
    notes = streamshard.inspect(place).notes
    wanted = "differ in up.bias, or in memory that was saved with it; rank 0's are taken"
    assert any(wanted in note for note in notes)
    (problem,) = streamshard.verify(place).problems
    assert problem.kind == "disagreement"
    assert "disagrees with" in problem.message
    assert "about a part of up.bias that both ranks hold" in problem.message
    for notes in (
        streamshard.diff(made / "HSDP", place).notes,
        streamshard.verify(made / "HSDP", against=place).notes,
    ):
        assert any(note.startswith(f"{place}: The ranks' files {wanted}") for note in notes)
    streamshard.export(place, tmp_path / "out")


def test_replicas_may_differ_in_padding(made: Path, tmp_path: Path) -> None:
    place = shutil.copytree(made / "HSDP", tmp_path / "actor")

    def another(held: State) -> State:
        torch.as_strided(held["up.bias"].to_local(), (4,), (1,))[3] += 1
        return held

    changed(another, 3)(place)
    assert any("differ in up.bias, or in memory" in n for n in streamshard.inspect(place).notes)
    assert streamshard.verify(place).is_good


def test_a_part_of_a_weight_is_a_weight_of_its_own(tmp_path: Path) -> None:
    """It begins where the other does in the file, and is not tied to it."""
    whole = torch.arange(12.0).reshape(4, 3)
    weights = {"part": whole[:2], "whole": whole, "flat": whole.view(-1), "tied": whole[:]}
    place = tmp_path / "actor"
    place.mkdir()
    for rank in range(2):
        torch.save(weights, place / name(rank, 2))
    streamshard.export(place, tmp_path / "out", verify=True)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert {key: tensor.tolist() for key, tensor in found.items()} == {
        key: weights[key].tolist() for key in ("whole", "part", "flat")
    }


def test_a_transposed_buffer_is_not_tied_to_the_buffer_that_it_views(tmp_path: Path) -> None:
    """Both begin at one place and have one shape, but not the same elements in the same order."""
    square = torch.arange(9.0).reshape(3, 3)
    for rank in range(2):
        torch.save({"square": square, "turned": square.t()}, tmp_path / name(rank, 2))
    with pytest.raises(UnsupportedError, match="'turned' is not contiguous"):
        streamshard.export(tmp_path, tmp_path.parent / "out")


def name(rank: int, ranks: int = RANKS) -> str:
    return f"model_world_size_{ranks}_rank_{rank}.pt"


def changed(change: Callable[[State], State], rank: int = 1) -> Callable[[Path], None]:
    """Return what changes what a rank saved."""

    def save_again(path: Path) -> None:
        torch.save(change(torch.load(path, weights_only=False)), path)

    return lambda place: in_rank(rank, partial(save_again, place / name(rank)))


def summed(held: State) -> State:
    mesh = init_device_mesh("cpu", (RANKS,))
    return {**held, "up.bias": DTensor.from_local(torch.ones(7), mesh, [Partial()])}


def in_another_order(held: State) -> State:
    """Groups of ranks number these in ascending order, and FSDP2 cuts by their numbers."""
    mesh, part = DeviceMesh("cpu", [1, 0, 2, 3]), held["up.bias"].to_local()
    moved = DTensor.from_local(
        part, mesh, [Shard(0)], run_check=False, shape=torch.Size([7]), stride=(1,)
    )
    return {**held, "up.bias": moved}


def shorter(held: State) -> State:
    mesh = held["up.bias"].device_mesh
    part = DTensor.from_local(
        torch.ones(1), mesh, [Shard(0)], run_check=False, shape=torch.Size([7]), stride=(1,)
    )
    return {**held, "up.bias": part}


REFUSED: dict[str, tuple[Callable[[Path], object], type[SourceError], str]] = {
    "a missing rank": (
        lambda place: (place / name(2)).unlink(),
        IncompleteError, "rank_2.pt: rank 2 is missing",
    ),
    "two saves": (
        lambda place: shutil.copy(place / name(0), place / name(0, 3)),
        IncompleteError, "holds files of 3 ranks and of 4; move away",
    ),
    "a rank beyond": (
        lambda place: shutil.copy(place / name(0), place / name(4)),
        IncompleteError, "rank_4.pt: of a rank beyond the 4",
    ),
    "one rank twice": (
        lambda place: shutil.copy(place / name(0), place / name(1)),
        CorruptFileError, "'one' of|'frozen' of|no box holds",
    ),
    "other names": (
        changed(lambda held: {**held, "more": torch.ones(1)}),
        DisagreementError, r"rank_1.pt: holds other names than \S*rank_0.pt",
    ),
    "another dtype": (
        changed(lambda held: {**held, "up.bias": held["up.bias"].bfloat16()}),
        DisagreementError, "'up.bias' has the dtypes float32, bfloat16",
    ),
    "another cut": (
        changed(lambda held: {**held, "up.bias": torch.ones(7)}),
        DisagreementError, "'up.bias': is cut in another way on other ranks",
    ),
    "no tensor": (
        changed(lambda held: {**held, "up.bias": "weights"}),
        DisagreementError, "up.bias is a tensor on some ranks only",
    ),
    "a sum": (changed(summed), UnsupportedError, "rank_1.pt: a DTensor with the placement <torch"),
    "ranks in another order": (
        changed(in_another_order, 0),
        UnsupportedError, "rank_0.pt: a DTensor on a mesh of the ranks 1, 0, 2, ",
    ),
    "a shorter part": (
        changed(shorter), CorruptFileError, r"'up.bias': a rank holds \[1\] where \[2\] belong",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused(
    change: Callable[[Path], object],
    error: type[SourceError],
    message: str,
    made: Path,
    tmp_path: Path,
) -> None:
    place = shutil.copytree(made / "FSDP2", tmp_path / "actor")
    change(place)
    with pytest.raises(error, match=message) as refused:
        streamshard.export(place, tmp_path / "out")
    assert str(place) in str(refused.value)
    assert streamshard.verify(place).problems
