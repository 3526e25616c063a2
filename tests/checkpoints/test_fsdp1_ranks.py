"""Files of FSDP1's ranks: states of parameters that it has joined, by the modules that it wraps."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn import functional

import streamshard
from streamshard.errors import IntegrityError, SourceError, UnsupportedError, UsageError
from streamshard.operations.repartition.rank_files_target import RankFilesWriter
from tests.checkpoints.test_fsdp_ranks import in_rank
from tests.dtensor_parts import rank_differences

FORM = "fsdp-ranks"
SHAPES = {
    "embed.weight": (7, 3), "blocks.0.up.weight": (5, 3), "blocks.0.up.bias": (5,),
    "blocks.1.up.weight": (5, 3), "blocks.1.up.bias": (5,), "norm.weight": (3,),
}  # fmt: skip
JOINED = [
    ("embed.weight", "norm.weight"),
    ("blocks.0.up.weight", "blocks.0.up.bias"),
    ("blocks.1.up.weight", "blocks.1.up.bias"),
]
"""What FSDP1 joins that wraps the model and its blocks."""
WRAPPED = ("blocks.*",)
STATES = ("exp_avg", "exp_avg_sq")
OPTIONS = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
ALIGNED = 4
"""Elements that FSDP1 aligns parameters to with `use_orig_params`: 16 bytes."""


def modules(wrapped: Sequence[str]) -> dict[str, Any]:
    return {"source": {"wrapped": wrapped}}


def tensor_of(name: str, state: str) -> Tensor:
    shape = SHAPES["embed.weight" if name == "head.weight" else name]
    start = 1.0 + 100 * list(SHAPES).index(name) if name in SHAPES else 1.0
    whole = torch.arange(start, start + torch.Size(shape).numel()).reshape(shape)
    return {"fp32": whole, "exp_avg": -whole, "exp_avg_sq": whole.sqrt()}[state]


def part_of(names: Sequence[str], state: str, shard: int, shards: int) -> Tensor:
    """Join and cut as `FlatParamHandle` does."""
    chunks = torch.cat([tensor_of(name, state).reshape(-1) for name in names]).chunk(shards)
    own = chunks[shard] if shard < len(chunks) else chunks[0].new_empty(0)
    return functional.pad(own, (0, len(chunks[0]) - len(own)))


def save(place: Path, mesh: tuple[int, ...], names: Sequence[str]) -> None:
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    devices = init_device_mesh("cpu", mesh, mesh_dim_names=("ddp", "fsdp")[-len(mesh) :])
    cut = [*[Replicate()] * (len(mesh) - 1), Shard(0)]
    model = {
        name: distribute_tensor(tensor_of(name, "fp32"), devices, cut, src_data_rank=None)
        for name in names
    }
    shard = devices.get_local_rank(-1)
    states = {
        n: {
            "step": torch.tensor(2.0),
            **{s: part_of(joined, s, shard, mesh[-1]) for s in STATES},
        }
        for n, joined in enumerate(JOINED)
    }
    groups = [{**OPTIONS, "params": list(states)}]
    for kind, held in (("model", model), ("optim", {"state": states, "param_groups": groups})):
        torch.save(held, place / f"{kind}_world_size_{ranks}_rank_{rank}.pt")


_SAVED: dict[object, dict[str, bytes]] = {}
"""What was joined, the mesh and the names → content of the ranks' files: many tests save alike."""


def saved(place: Path, *mesh: int, names: Sequence[str] = tuple(SHAPES)) -> Path:
    place.mkdir()
    key, ranks = (tuple(JOINED), mesh, names), torch.Size(mesh).numel()
    if key not in _SAVED:
        for rank in range(ranks):
            in_rank(rank, partial(save, place, mesh, names), ranks)
        _SAVED[key] = {path.name: path.read_bytes() for path in place.iterdir()}
    for name, content in _SAVED[key].items():
        (place / name).write_bytes(content)
    return place


def in_pieces(place: Path, ranks: int) -> Path:
    """Save states as `use_orig_params` keeps them: a rank's runs of elements of each parameter."""
    order = list(SHAPES)
    for rank in range(ranks):
        runs: dict[int, dict[str, Tensor]] = {}
        for joined in JOINED:
            numels = [torch.Size(SHAPES[name]).numel() for name in joined]
            starts = [sum(-(-n // ALIGNED) * ALIGNED for n in numels[:k]) for k in range(2)]
            share = -(-(starts[1] + numels[1]) // ranks)
            for name, start, numel in zip(joined, starts, numels, strict=True):
                begin = min(max(rank * share - start, 0), numel)
                end = min(max((rank + 1) * share - start, 0), numel)
                if begin < end:
                    own = {s: tensor_of(name, s).reshape(-1)[begin:end].clone() for s in STATES}
                    runs[order.index(name)] = {"step": torch.tensor(2.0), **own}
        states = {number: runs[number] for number in sorted(runs)}
        groups = [{**OPTIONS, "params": list(range(len(order)))}]
        path = place / f"optim_world_size_{ranks}_rank_{rank}.pt"
        torch.save({"state": states, "param_groups": groups}, path)
    return place


def test_runs_of_elements_are_put_together(tmp_path: Path) -> None:
    place = in_pieces(saved(tmp_path / "source", 3), 3)
    with streamshard.open(place) as opened:
        for name in SHAPES:
            for state in ("fp32", *STATES):
                assert torch.equal(opened[name].tensors[state].torch(), tensor_of(name, state))
    assert streamshard.verify(place).is_good
    streamshard.export(place, tmp_path / "dcp", format="dcp", verify=True)
    with pytest.raises(UnsupportedError, match="how FSDP1 with use_orig_params pads"):
        streamshard.repartition(place, tmp_path / "out", world_size=2, format=FORM)
    path = place / "optim_world_size_3_rank_0.pt"
    held = torch.load(path, weights_only=False)
    torch.save({**held, "param_groups": [{**held["param_groups"][0], "lr": 0.2}]}, path)
    assert any("in more than tensors" in note for note in streamshard.inspect(place).notes)
    held["state"][0]["exp_avg"] = held["state"][0]["exp_avg"][1:].clone()
    torch.save(held, path)
    wanted = (
        "exp_avg of parameter 0 has 20 elements of all ranks, and is no state of 'embed.weight'"
    )
    assert any(wanted in note for note in streamshard.inspect(place).notes)


def test_each_rank_gets_what_it_would_have_saved(tmp_path: Path) -> None:
    source, out = saved(tmp_path / "source", 2), tmp_path / "out"
    streamshard.repartition(source, out, world_size=5, format=FORM, verify=True)
    wanted = saved(tmp_path / "wanted", 5)
    for path in sorted(wanted.iterdir()):
        assert rank_differences(out / path.name, path) == []
    assert streamshard.diff(source, out).is_equal


def test_states_are_those_of_the_parameters(tmp_path: Path) -> None:
    """Also of two replicas, and with a second name for a weight, which is joined once."""
    place = saved(tmp_path / "source", 2, 2, names=(*SHAPES, "head.weight"))
    with streamshard.open(place) as opened:
        for name in SHAPES:
            for state in ("fp32", *STATES):
                assert torch.equal(opened[name].tensors[state].torch(), tensor_of(name, state))
        assert opened["head.weight"].tied_to == "embed.weight"
    assert streamshard.verify(place).is_good
    path = place / "optim_world_size_4_rank_3.pt"
    held = torch.load(path, weights_only=False)
    held["state"][1]["exp_avg"][-1] = 0.5
    torch.save(held, path)
    (problem,) = streamshard.verify(place).problems
    assert "about a part of exp_avg of blocks.0.up.weight, blocks.0.up.bias that" in problem.message
    assert any("differ in exp_avg of " in note for note in streamshard.inspect(place).notes)
    with pytest.raises(UnsupportedError, match="FSDP1 with replicas: it loads DTensors by"):
        streamshard.repartition(place, tmp_path / "out", world_size=6, format=FORM)


def test_one_rank_is_refused_as_fsdp1_does_not_cut_there(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="FSDP1 does not cut on one rank"):
        streamshard.repartition(
            saved(tmp_path / "source", 2), tmp_path / "out", world_size=1, format=FORM
        )


def changed(place: Path, change: Callable[[Any], object]) -> None:
    for path in place.glob("optim_*"):
        held = torch.load(path, weights_only=False)
        change(held["state"])
        torch.save(held, path)


def behind(states: Any) -> None:  # noqa: ANN401
    states[0]["exp_avg"][-1] += 1


def longer(states: Any) -> None:  # noqa: ANN401
    states[1].update({state: functional.pad(states[1][state], (0, 7)) for state in STATES})


def not_all(states: Any) -> None:  # noqa: ANN401
    del states[2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (behind, "exp_avg of flat parameter 0 holds more than zeros after its 24 elements"),
        (longer, "has 3 flat parameters of FSDP1, of 5, "),
        (not_all, "does not have states of one length of flat parameter 2"),
    ],
)
def test_what_may_be_of_other_parameters_is_not_taken(
    change: Callable[[Any], object], message: str, tmp_path: Path
) -> None:
    place = saved(tmp_path / "source", 5)
    changed(place, change)
    assert any(message in note for note in streamshard.inspect(place).notes)
    with pytest.raises(SourceError, match=message):
        streamshard.repartition(place, tmp_path / "out", world_size=2, format=FORM)


def with_groups(place: Path, change: Callable[[dict[str, Any]], list[dict[str, Any]]]) -> None:
    for path in place.glob("optim_*"):
        held = torch.load(path, weights_only=False)
        torch.save({**held, "param_groups": change(held["param_groups"][0])}, path)


def test_states_of_named_parameters_need_no_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `use_orig_params` keeps them where each rank has elements of all parameters."""
    monkeypatch.setattr(f"{__name__}.JOINED", [(name,) for name in SHAPES])
    place, out = saved(tmp_path / "source", 2), tmp_path / "out"
    with_groups(place, lambda group: [{**group, "param_names": [*SHAPES]}])
    with streamshard.open(place) as opened:
        for name in SHAPES:
            assert torch.equal(opened[name].tensors["exp_avg"].torch(), tensor_of(name, "exp_avg"))
    streamshard.repartition(place, out, world_size=3, format=FORM, verify=True)


def spoil(place: Path) -> None:
    """Change an element of a state in each rank's file."""
    changed(place, lambda states: states[1]["exp_avg"][0].add_(1))


@pytest.mark.parametrize(("ranks", "wrapped"), [(3, ()), (5, WRAPPED)])
def test_written_states_are_read_back(
    ranks: int, wrapped: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the parts' lengths on these ranks do not tell what was joined."""
    source, read_back = saved(tmp_path / "source", 2), RankFilesWriter.differences

    def spoiled(self: RankFilesWriter, place: Path, *others: Any) -> list[str]:  # noqa: ANN401
        spoil(place)
        return read_back(self, place, *others)

    monkeypatch.setattr(RankFilesWriter, "differences", spoiled)
    with pytest.raises(IntegrityError, match=r"state/exp_avg/\S+: \d of \d+ elements differ"):
        streamshard.repartition(
            source,
            tmp_path / "o",
            world_size=ranks,
            format=FORM,
            facts=modules(wrapped),
            verify=True,
        )


def test_what_was_joined_is_that_of_both_sides(tmp_path: Path) -> None:
    one, other = saved(tmp_path / "one", 2), saved(tmp_path / "other", 3)
    for wrapped in ((), WRAPPED):
        assert streamshard.verify(one, against=other, facts=modules(wrapped)).is_good
    spoil(other)
    for wrapped in ((), WRAPPED):
        assert not streamshard.verify(one, against=other, facts=modules(wrapped)).is_good
        assert not streamshard.verify(other, against=one, facts=modules(wrapped)).is_good
        assert not streamshard.diff(one, other, facts=modules(wrapped)).is_equal
    plain = tmp_path / "plain"
    streamshard.export(one, plain)
    assert streamshard.diff(one, plain, facts=modules(WRAPPED)).is_equal  # it has none


def test_where_param_groups_hide_the_order_the_weights_are_read(tmp_path: Path) -> None:
    place = saved(tmp_path / "source", 2)
    with_groups(place, lambda group: [{**group, "params": some} for some in ([1], [0, 2])])
    assert any("numbered, in 2 param groups" in note for note in streamshard.inspect(place).notes)
    streamshard.export(place, tmp_path / "weights", verify=True)


def test_a_weight_with_the_values_of_another_is_joined_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is tied is joined once: with it the lengths would be others."""
    monkeypatch.setattr(f"{__name__}.JOINED", [(*JOINED[0], "head.weight"), *JOINED[1:]])
    place = saved(tmp_path / "source", 2, names=(*SHAPES, "head.weight"))
    with streamshard.open(place) as opened:
        for name in (*SHAPES, "head.weight"):
            assert opened[name].tied_to is None
            assert torch.equal(opened[name].tensors["exp_avg"].torch(), tensor_of(name, "exp_avg"))


def test_other_modules_than_layers_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        f"{__name__}.JOINED", [("embed.weight", *JOINED[1], *JOINED[2]), JOINED[0][1:]]
    )
    place, out = saved(tmp_path / "source", 2), tmp_path / "out"
    message = r"wrapped each layer .* give facts=FILE, .* \[source\] and wrapped = \["
    assert any(re.search(message, note) for note in streamshard.inspect(place).notes)
    with pytest.raises(UnsupportedError, match=message):
        streamshard.export(place, out, format="dcp")
    with streamshard.open(place, facts=modules(["norm"])) as opened:
        for name in SHAPES:
            assert torch.equal(opened[name].tensors["exp_avg"].torch(), tensor_of(name, "exp_avg"))


@pytest.mark.parametrize(
    ("wrapped", "message"),
    [
        (
            "layers.*",
            r"source\.wrapped given with facts=: no module around a parameter is n",
        ),
        ("blocks.*.up", None),
        ("blocks", r"have 3 flat parameters of FSDP1, of 12, 10, 10 elements per rank; t"),
        ("blocks.1", r"of 12, 10, 10 elements per rank; these modules give other lengths"),
    ],
)
def test_modules_that_were_not_wrapped_are_refused(
    wrapped: str, message: str | None, tmp_path: Path
) -> None:
    place = saved(tmp_path / "source", 2)
    if message is None:  # what is joined is the same
        with streamshard.open(place, facts=modules([wrapped])) as opened:
            assert "exp_avg" in opened["blocks.1.up.bias"].tensors
        return
    with pytest.raises(UsageError, match=message):
        streamshard.open(place, facts=modules([wrapped]))
    for path in place.glob("optim_*"):
        path.unlink()
    with pytest.raises(
        UsageError, match=r"not those of flat parameters; leave source\.wrapped given"
    ):
        streamshard.inspect(place, facts=modules([wrapped]))
