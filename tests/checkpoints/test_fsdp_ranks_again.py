"""Files of FSDP's ranks for another count of ranks: torch itself saves the same there."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import streamshard
from streamshard.errors import SourceError, TargetError, UnsupportedError, UsageError
from tests.checkpoints.test_fsdp_ranks import Model, fsdp1, in_rank
from tests.dtensor_parts import load, rank_differences

SOURCE = 4
FORM = "fsdp-ranks"
MESHES: dict[tuple[str, int], tuple[int, ...]] = {
    ("FSDP2", 4): (4,), ("FSDP2", 3): (3,), ("HSDP", 4): (2, 2), ("HSDP", 2): (2,),
}  # fmt: skip
"""Form and ranks → the mesh of verl's `create_device_mesh` with one `fsdp_size`."""
KEYED = {"FSDP2": "numbers", "HSDP": "numbers", "by names": "names", "flat": "flat"}


def mesh_of(shape: tuple[int, ...]) -> Any:  # noqa: ANN401
    return init_device_mesh("cpu", shape, mesh_dim_names=("ddp", "fsdp")[-len(shape) :])


def save(root: Path, shape: tuple[int, ...], form: str) -> None:
    """Save what a rank holds after two steps of AdamW, which need no other rank here."""
    ranks, rank = distributed.get_world_size(), distributed.get_rank()
    model, mesh = Model(), mesh_of(shape)
    narrow = nn.Linear(5, 3, bias=False, dtype=torch.bfloat16)
    model.add_module("narrow", narrow)
    fully_shard(narrow, mesh=mesh)
    fully_shard(model.up, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    for step in range(2):
        for number, param in enumerate(p for p in model.parameters() if p.requires_grad):
            assert isinstance(param, DTensor)
            whole = torch.arange(param.numel(), dtype=param.dtype).reshape(param.shape)
            grad = torch.sin(whole + number + step)
            param.grad = distribute_tensor(grad, mesh, param.placements, src_data_rank=None)
        optimizer.step()
        scheduler.step()
    torch.manual_seed(rank)
    extra = {"lr_scheduler": scheduler.state_dict(), "rng": {"cpu": torch.get_rng_state()}}
    for name in ("HSDP",) if form == "HSDP" else KEYED.keys() - {"HSDP"}:
        states = optimizer.state_dict()
        if KEYED[name] != "numbers":
            options = StateDictOptions(flatten_optimizer_state_dict=KEYED[name] == "flat")
            states = get_optimizer_state_dict(model, optimizer, options=options)
        kinds = {"model": model.state_dict(), "optim": states, "extra_state": extra}
        for kind, held in kinds.items():
            saved(root / f"{name} {ranks}", held, rank, ranks, kind)


def _save_all(root: Path, ranks: int) -> None:
    for (form, count), shape in MESHES.items():
        if count == ranks:
            save(root, shape, form)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What torch saves of each form for each count of ranks."""
    root = tmp_path_factory.mktemp("made")
    counts = sorted({ranks for _, ranks in MESHES})
    for ranks in counts:
        for name in KEYED:
            (root / f"{name} {ranks}").mkdir()
        for rank in range(ranks):
            in_rank(rank, partial(_save_all, root, ranks), ranks)
    for name in KEYED:
        place = root / f"{name} {SOURCE}"
        (place / "huggingface").mkdir()
        (place / "huggingface" / "config.json").write_text('{"model_type": "own"}')
        (place / "fsdp_config.json").write_text('{"FSDP_version": 2, "world_size": 4}')
        (place / "lora_train_meta.json").write_text("{}")
    return root


CASES = [
    (name, ranks)
    for name in KEYED
    for form, ranks in MESHES
    if form == ("HSDP" if name == "HSDP" else "FSDP2") and ranks != SOURCE
]


@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_each_rank_gets_what_torch_saves_there(
    name: str, ranks: int, root: Path, tmp_path: Path
) -> None:
    source, wanted, out = root / f"{name} {SOURCE}", root / f"{name} {ranks}", tmp_path / "out"
    report = streamshard.repartition(source, out, world_size=ranks, format=FORM, verify=True)
    assert (report.source_world_size, report.world_size) == (SOURCE, ranks)
    files = sorted(path.name for path in out.glob("*.pt"))
    assert files == sorted(path.name for path in wanted.iterdir())
    for file in files:
        assert rank_differences(out / file, wanted / file, names_groups=name != "HSDP") == []
    assert json.loads((out / "fsdp_config.json").read_text())["world_size"] == ranks
    assert (out / "huggingface" / "config.json").read_text() == '{"model_type": "own"}'
    assert (out / "lora_train_meta.json").read_text() == "{}"
    assert streamshard.verify(out).problems == ()
    assert streamshard.diff(out, source).is_equal


@pytest.mark.parametrize("ranks", [3, 6])
def test_random_states_are_of_ranks_that_had_them(ranks: int, root: Path, tmp_path: Path) -> None:
    source, out = root / f"FSDP2 {SOURCE}", tmp_path / "out"
    report = streamshard.repartition(source, out, world_size=ranks, format=FORM)
    is_more = ranks > SOURCE
    wanted = "states for the new ranks 4 and 5" if is_more else "the random states of rank 3"
    assert any(wanted in note for note in report.notes)
    for rank in range(ranks):
        extra = load(out / f"extra_state_world_size_{ranks}_rank_{rank}.pt")
        if rank >= SOURCE:
            assert "rng" not in extra
            continue
        theirs = load(source / f"extra_state_world_size_{SOURCE}_rank_{rank}.pt")
        assert extra["rng"]["cpu"].equal(theirs["rng"]["cpu"])


def test_states_have_the_names_of_their_parameters(root: Path) -> None:
    place = root / f"FSDP2 {SOURCE}"
    with streamshard.open(place) as opened:
        found = opened["up.weight"].exp_avg[...]
    files = [load(place / f"optim_world_size_{SOURCE}_rank_{rank}.pt") for rank in range(SOURCE)]
    # Before it come `one`, `frozen` and `embed.weight`.
    parts = [states["state"][3]["exp_avg"].to_local() for states in files]
    assert torch.equal(torch.cat(parts), torch.from_numpy(found))


def saved(place: Path, held: object, rank: int, ranks: int, kind: str = "optim") -> None:
    torch.save(held, place / f"{kind}_world_size_{ranks}_rank_{rank}.pt")


def test_fsdp1_is_refused_by_name(tmp_path: Path) -> None:
    place = tmp_path / "actor"
    place.mkdir()
    for rank in range(SOURCE):
        in_rank(rank, partial(_save_fsdp1, place), SOURCE)
    notes = streamshard.inspect(place).notes
    assert any("is another plain tensor on each rank" in note for note in notes)
    with pytest.raises(UnsupportedError, match="its tensors are ShardedTensors, as FSDP1"):
        streamshard.repartition(place, tmp_path / "out", world_size=3, format=FORM)
    streamshard.export(place, tmp_path / "model")


def _save_fsdp1(place: Path) -> None:
    rank = distributed.get_rank()
    saved(place, fsdp1(Model()), rank, SOURCE, "model")
    flat = {"exp_avg": torch.arange(8.0) + rank, "step": torch.tensor(1.0)}
    saved(place, {"state": {0: flat}, "param_groups": [{"lr": 0.1, "params": [0]}]}, rank, SOURCE)


def without(kind: str, rank: int) -> Callable[[Path], object]:
    return lambda place: (place / f"{kind}_world_size_{SOURCE}_rank_{rank}.pt").unlink()


def another_config(data: bytes, *, is_link: bool = False) -> Callable[[Path], object]:
    def change(place: Path) -> None:
        config = place / "fsdp_config.json"
        config.unlink()
        where = place.parent / "outside.json" if is_link else config
        where.write_bytes(data)
        if is_link:
            config.symlink_to(where)

    return change


def from_another_save(place: Path) -> None:
    """Write a rank's optimizer as it was a step later."""
    path = place / f"optim_world_size_{SOURCE}_rank_2.pt"
    held = load(path)
    for state in held["state"].values():
        state["step"] += 1
    torch.save(held, path)


def on_half_of_the_ranks(place: Path) -> None:
    """Write what two groups of two ranks save that know nothing of each other."""
    for rank in range(SOURCE):
        in_rank(rank, partial(_save_on_half, place), SOURCE)


def _save_on_half(place: Path) -> None:
    rank = distributed.get_rank()
    mesh = DeviceMesh("cpu", [rank // 2 * 2, rank // 2 * 2 + 1])
    part = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)], src_data_rank=None)
    for kind, held in (("model", {"one": part}), ("optim", {})):
        saved(place, held, rank, SOURCE, kind)


REFUSED: dict[str, tuple[Callable[[Path], object], dict[str, Any], type[Exception], str]] = {
    "no count of ranks": (
        lambda _: None, {}, UsageError, "has files for 4 ranks already; say with world_size",
    ),
    "no ranks": (lambda _: None, {"world_size": 0}, UsageError, "a job has 1 to "),
    "too many ranks": (lambda _: None, {"world_size": 10**9}, UsageError, "a job has 1 to "),
    "a ZeRO stage": (
        lambda _: None, {"world_size": 3, "zero_stage": 2}, UsageError, "is for DeepSpeed's files",
    ),
    "fresh states": (
        lambda _: None, {"world_size": 3, "fresh_states": True}, UsageError, "is for DeepSpeed's",
    ),
    "a rank without its optimizer": (
        without("optim", 2), {"world_size": 3}, UnsupportedError, "optim_\\S*rank_2.pt: rank 2 is",
    ),
    "a rank without its other state": (
        without("extra_state", 1), {"world_size": 3}, UnsupportedError, "extra_state_\\S*rank_1.pt",
    ),
}  # fmt: skip

NOT_WRITTEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "a config that is a link": (
        another_config(b'{"FSDP_version": 2}', is_link=True),
        "json: a symbolic link that leads out",
    ),
    "a config that is no JSON": (another_config(b"{"), "fsdp_config.json: is not JSON"),
    "an optimizer of two saves": (from_another_save, "step is not the same on all ranks"),
    "meshes of some ranks": (on_half_of_the_ranks, "on meshes of 2 of its 4 ranks"),
}


@pytest.mark.parametrize(("change", "message"), NOT_WRITTEN.values(), ids=NOT_WRITTEN)
def test_what_cannot_be_written_is_refused(
    change: Callable[[Path], object], message: str, root: Path, tmp_path: Path
) -> None:
    place = shutil.copytree(root / f"FSDP2 {SOURCE}", tmp_path / "actor")
    change(place)
    with pytest.raises(SourceError, match=message):
        streamshard.repartition(place, tmp_path / "out", format=FORM, world_size=3)


@pytest.mark.parametrize(("change", "options", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused(
    change: Callable[[Path], object],
    options: dict[str, Any],
    error: type[Exception],
    message: str,
    root: Path,
    tmp_path: Path,
) -> None:
    place = shutil.copytree(root / f"FSDP2 {SOURCE}", tmp_path / "actor")
    change(place)
    with pytest.raises(error, match=message):
        streamshard.repartition(place, tmp_path / "out", format=FORM, **options)
    if error is UnsupportedError:
        assert streamshard.verify(place).problems
        streamshard.export(place, tmp_path / "model", dtype="bf16")


class Quantised:
    """An optimizer's own object around tensors."""

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held


def hide(place: Path, kind: str) -> None:
    """Put a tensor of each rank into an object."""
    for rank in range(SOURCE):
        path = place / f"{kind}_world_size_{SOURCE}_rank_{rank}.pt"
        held = load(path)
        if kind == "optim":
            states = held["state"][3]
            states["exp_avg"] = Quantised(states["exp_avg"])
        else:
            held["_extra_state"] = Quantised(held["up.bias"].detach())
        torch.save(held, path)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("optim", "a tensor inside of another object, as quantised states are"),
        ("model", "holds a DTensor inside of another object"),
    ],
)
def test_what_is_hidden_is_refused(kind: str, message: str, root: Path, tmp_path: Path) -> None:
    place = shutil.copytree(root / f"FSDP2 {SOURCE}", tmp_path / "actor")
    hide(place, kind)
    with pytest.raises(UnsupportedError, match=message):
        streamshard.repartition(place, tmp_path / "out", world_size=3, format=FORM)
    streamshard.export(place, tmp_path / "model", dtype="bf16")


class Outside:
    """A tensor that leaves its storage, which torch itself makes none of."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> tuple[object, ...]:
        rebuild, args = self.tensor.__reduce_ex__(2)[:2]  # type: ignore[no-untyped-call]
        return rebuild, (args[0], 7, *args[2:])


@pytest.mark.parametrize("state", ["step", "exp_avg"])
def test_a_tensor_that_leaves_its_storage_is_a_problem(
    state: str, root: Path, tmp_path: Path
) -> None:
    place = shutil.copytree(root / f"FSDP2 {SOURCE}", tmp_path / "actor")
    path = place / f"optim_world_size_{SOURCE}_rank_1.pt"
    held = load(path)
    if state == "step":
        held["state"][3]["step"] = Outside(held["state"][3]["step"])
    else:
        part = held["state"][3]["exp_avg"]
        part._local_tensor = Outside(part._local_tensor)
    torch.save(held, path)
    (problem,) = streamshard.verify(place).problems
    assert "start 7 reaches to byte" in problem.message
    streamshard.export(place, tmp_path / "model", dtype="bf16")


def test_a_plan_is_of_the_config_that_was_there(root: Path, tmp_path: Path) -> None:
    place = shutil.copytree(root / f"FSDP2 {SOURCE}", tmp_path / "actor")
    plan = streamshard.plan_repartition(place, tmp_path / "out", world_size=3, format=FORM)
    another_config(b'{"FSDP_version": 1, "world_size": 4}')(place)
    with pytest.raises(SourceError, match=r"fsdp_config\.json"):
        plan.run()


def test_replicas_keep_their_size(root: Path, tmp_path: Path) -> None:
    place = root / f"HSDP {SOURCE}"
    with pytest.raises(UnsupportedError, match="HSDP with 2 ranks in each replica: 5 ranks are no"):
        streamshard.repartition(place, tmp_path / "out", world_size=5, format=FORM)


def test_a_checkpoint_is_replaced_only_where_it_is_alone(root: Path, tmp_path: Path) -> None:
    place, out = root / f"FSDP2 {SOURCE}", tmp_path / "out"
    for ranks in (3, 2):
        streamshard.repartition(place, out, world_size=ranks, format=FORM, overwrite=ranks == 2)
    assert len(list(out.glob("model_*"))) == 2
    (out / "notes.md").write_text("mine")
    with pytest.raises(TargetError):
        streamshard.repartition(place, out, world_size=3, format=FORM, overwrite=True)
