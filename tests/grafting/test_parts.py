"""`graft` of a pipeline's stages, and of experts: the files of layers and experts follow."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import streamshard
from streamshard.errors import DisagreementError, UnsupportedError, UsageError
from tests import fabricated
from tests.fabricated_auto_experts import ON_2, AutoExpertsJob, write_auto
from tests.fabricated_pipes import BLOCK, CUTS, PipeJob, layer_file, write_pipe
from tests.grafting.jobs import Start, tensors_of
from tests.job import EXPERTS, TAG, Job, local_experts

Write = Callable[[Any, Path], object]
PIPE = PipeJob(world_size=2)
DEEPER = (*PIPE.layers[:-1], BLOCK, "embed")
MIXTURE = Job(stage=2, world_size=4, experts=EXPERTS, expert_parallel=2)


class PipeStart(PipeJob):
    """A job whose values are others than those of SRC, everywhere."""

    def values(self, state: str, name: str, expert_rank: int = 0) -> Tensor:
        return super().values(state, name, expert_rank) + 1


class AutoStart(AutoExpertsJob):
    """The same, with AutoEP."""

    __slots__ = ()

    def values(self, state: str, name: str, expert_rank: int = 0) -> Tensor:
        return super().values(state, name, expert_rank) + 1


@dataclass(frozen=True)
class Sides:
    """SRC and START on a disk."""

    root: Path
    write_files: Write

    def write(self, old: Job, new: Job, like: type[Job]) -> "Sides":
        """Save a trained job, and a new one, whose values are those of the class `like`."""
        fields = {name: getattr(new, name) for name in type(new).__dataclass_fields__}
        self.write_files(old, self.root / "source")
        self.write_files(like(**fields), self.root / "stepped")
        options: dict[str, Any] = {"world_size": new.world_size * new.parts, "fresh_states": True}
        streamshard.repartition(self.root / "stepped", self.root / "start", **options)
        return self

    def graft(self, rules: str = "", source: str = "source") -> Path:
        """Graft, and prove what was kept; returns OUT."""
        (self.root / "rules").write_text(rules)
        sides = self.root / source, self.root / "start", self.root / "out"
        streamshard.graft(*sides, rules=self.root / "rules", verify=True)
        found = streamshard.verify(sides[2], against=sides[0])
        assert (found.problems, found.differences) == ((), ())
        return sides[2]


def pipes(root: Path, old: PipeJob = PIPE, **changes: Any) -> Sides:  # noqa: ANN401
    """Save SRC, and a START that differs by `changes`."""
    return Sides(root, write_pipe).write(old, replace(old, **changes), PipeStart)


def mixtures(root: Path, old: Job = MIXTURE, **changes: Any) -> Sides:  # noqa: ANN401
    """The same, of a job with experts."""
    return Sides(root, fabricated.write).write(old, replace(old, **changes), Start)


def parts_of(run: Path) -> dict[tuple[str, str], Tensor]:
    """Read the tensors in the files of layers and of experts, by file and name."""
    files = {path.name: fabricated.load(path) for path in (run / TAG).glob("layer_*")}
    return {(file, name): tensor for file, held in files.items() for name, tensor in held.items()}


def differing(one: Mapping[Any, Tensor], other: Mapping[Any, Tensor]) -> list[Any]:
    """Name what is not to the bit the same, or in one alone."""
    both = one.keys() & other.keys()
    alike = {key for key in both if one[key].dtype == other[key].dtype}
    return sorted(
        (one.keys() ^ other.keys()) | {k for k in both if k not in alike}
        | {key for key in alike if not torch.equal(one[key], other[key])}
    )  # fmt: skip


@pytest.mark.parametrize(
    "job",
    [
        PIPE,
        PipeJob(world_size=1, files_of_shared=False),
        PipeJob(world_size=2, tensor=2),
        PipeJob(world_size=1, tensor=2, cuts=CUTS),
    ],
    ids=["stages", "shared-without-files", "stages-of-two", "cut"],
)
@pytest.mark.parametrize("is_store", [False, True], ids=["shards", "store"])
def test_a_pipeline_keeps_all_on_each_stage(tmp_path: Path, job: PipeJob, is_store: bool) -> None:
    sides = pipes(tmp_path, job, world_size=3)
    streamshard.convert(tmp_path / "source", tmp_path / "store.zarr")
    out = sides.graft(source="store.zarr" if is_store else "source")
    assert differing(parts_of(out), parts_of(tmp_path / "source")) == []
    assert differing(tensors_of(out), tensors_of(tmp_path / "source")) == []
    for path in (tmp_path / "source" / TAG).glob("mp_rank_*"):
        mine, theirs = (fabricated.load(one) for one in (out / TAG / path.name, path))
        assert list(mine) == list(theirs)
        assert mine["shared_params"] == theirs["shared_params"]


def test_layers_are_added_to_a_stage(tmp_path: Path) -> None:
    sides = pipes(tmp_path, layers=DEEPER)
    with pytest.raises(UsageError) as refused:
        sides.graft()
    lines = ["new 5.up", "new 5.bias", "new 5.old", "new 5.running"]
    assert refused.value.__notes__ == lines
    found = parts_of(
        sides.graft("copy 5.up <- 4.up\nnew 5.{bias,old}\ncopy 5.running <- 3.running")
    )
    new, file = PipeStart(layers=DEEPER), layer_file(tmp_path, 5).name
    wanted = {
        "up": PIPE.weight("4.up"),
        "bias": new.weight("5.bias"),
        "old": new.weight("5.old"),
        "running": PIPE.weight("3.running"),
    }
    assert differing({name: found[file, name] for name in wanted}, wanted) == []
    assert torch.equal(found[layer_file(tmp_path, 4).name, "up"], PIPE.weight("4.up"))
    shared = found[layer_file(tmp_path, 6).name, "weight"]
    assert torch.equal(shared, PIPE.weight("tied_modules.embed.weight"))


def test_rules_are_told_for_all_stages_at_once(tmp_path: Path) -> None:
    sides = pipes(
        tmp_path, layers=("embed", (*BLOCK, ("a", (2,))), None, BLOCK, DEEPER[3], "embed")
    )
    more = pipes(tmp_path / "more", layers=(*DEEPER[:1], (*BLOCK, ("a", (2,))), *DEEPER[2:]))
    for place, wanted in ((sides, ["new 1.a"]), (more, ["new 1.a", "new 5.up"])):
        with pytest.raises(UsageError) as refused:
            place.graft()
        assert refused.value.__notes__[: len(wanted)] == wanted


def test_a_shared_vocabulary_has_more_rows_on_each_stage(tmp_path: Path) -> None:
    name, shape = "tied_modules.embed.weight", (9, 2)
    shared = (("embed", (("weight", shape), ("bias", (2,)))),)
    out = pipes(tmp_path, shared=shared).graft(f"rows {name}")
    begun = PipeStart(shared=shared).values("fp32", name)
    master = torch.cat([PIPE.values("fp32", name), begun[7:]])
    for number in (0, 5):
        found = parts_of(out)[layer_file(tmp_path, number).name, "weight"]
        assert torch.equal(found, master.to(PIPE.dtype))
    assert torch.equal(tensors_of(out)["fp32", name], master)


def test_other_stages_are_refused_and_the_way_out_leads_there(tmp_path: Path) -> None:
    sides = pipes(tmp_path, starts=(0, 4), layers=DEEPER)
    with pytest.raises(UsageError, match=r"'3\.up' of START is on another stage .* to one stage"):
        sides.graft("new 5.*")
    for side in ("source", "start"):
        options: dict[str, Any] = {"pipeline_parallel": 1, "world_size": 1}
        streamshard.repartition(tmp_path / side, tmp_path / "one" / side, **options)
    one = Sides(tmp_path / "one", write_pipe).graft("new 5.*")
    out, back = tmp_path / "out", {"pipeline_parallel": 2, "world_size": 4}
    streamshard.repartition(one, out, like=tmp_path / "start", **back)  # type: ignore[arg-type]
    mine, begun, kept = (parts_of(run) for run in (out, tmp_path / "start", tmp_path / "source"))
    added, last = layer_file(tmp_path, 5).name, layer_file(tmp_path, 6).name
    wanted = {key: begun[key] if key[0] == added else kept.get(key) for key in begun}
    wanted |= {(last, name): kept[added, name] for name in ("weight", "bias")}
    assert differing(mine, wanted) == []  # type: ignore[arg-type]


@pytest.mark.parametrize("side", ["source", "start"])
def test_copies_that_have_drifted_apart_are_refused(tmp_path: Path, side: str) -> None:
    """Only values show which layers share a module."""
    sides = pipes(tmp_path)
    fabricated.edit(layer_file(tmp_path / side, 5), lambda held: held["weight"][3].add_(64))
    with pytest.raises(DisagreementError, match=f"/{side}: .*layer_05-model_states.pt and the mod"):
        sides.graft()
    assert not (tmp_path / "out").exists()


def test_shared_modules_that_are_alike_are_refused(tmp_path: Path) -> None:
    shared = (*PIPE.shared, ("head", PIPE.shared[0][1]))
    layers = ("embed", BLOCK, "head", BLOCK, BLOCK, "embed", "head")
    with pytest.raises(UnsupportedError, match=r"layer_00.*alike: not known which"):
        pipes(tmp_path, PipeJob(shared=shared, layers=layers)).graft()


def _with_more(content: dict[str, Any]) -> None:
    content["_extra_state"] = torch.ones(3)


def test_what_a_layer_saves_beside_its_tensors_is_refused(tmp_path: Path) -> None:
    sides = pipes(tmp_path)
    for side in ("source", "start"):
        fabricated.edit(layer_file(tmp_path / side, 3), _with_more)
    with pytest.raises(UnsupportedError, match="a state that is no tensor of the model"):
        sides.graft()


def test_as_many_parts_of_other_degrees_are_refused(tmp_path: Path) -> None:
    sides = pipes(tmp_path, PipeJob(tensor=2, starts=(0,)), tensor=1, starts=(0, 3))
    with pytest.raises(
        UsageError, match="SRC was saved with tensor_parallel=2 pipeline_parallel=1"
    ):
        sides.graft()


@pytest.mark.parametrize(
    "changes",
    [
        {"stage": 1},
        {"world_size": 2, "expert_parallel": 1, "experts": local_experts(4)},
        {"world_size": 6, "data_before_experts": True},
    ],
    ids=["same", "on-one-rank", "other-order"],
)
def test_experts_keep_all_wherever_they_are(tmp_path: Path, changes: dict[str, Any]) -> None:
    out = mixtures(tmp_path, **changes).graft()
    assert differing(parts_of(out), parts_of(tmp_path / "source")) == []
    found, saved = (
        {key: tensor for key, tensor in tensors_of(run).items() if key[0] != "module"}
        for run in (out, tmp_path / "source")
    )
    assert differing(found, saved) == []


def test_tensor_parallel_parts_of_experts_are_grafted_each_by_itself(tmp_path: Path) -> None:
    out = mixtures(tmp_path, replace(MIXTURE, parts=2)).graft()
    assert differing(parts_of(out), parts_of(tmp_path / "source")) == []


def test_each_expert_becomes_two(tmp_path: Path) -> None:
    sides = mixtures(tmp_path, experts=local_experts(4))
    numbers = "{0,1,2,3}", "{4,5,6,7}"
    out = sides.graft(f"copy *_experts.{numbers[1]}.* <- *_experts.{numbers[0]}.*")
    found, saved = (parts_of(run) for run in (out, tmp_path / "source"))
    experts = "moe.deepspeed_moe.experts.deepspeed_experts"
    for number in range(8):
        for name in ("weight", "bias"):
            files = (f"layer_0_expert_{n}_mp_rank_00_model_states.pt" for n in (number, number % 4))
            mine, theirs = (found, number), (saved, number % 4)
            values = [
                held[file, f"{experts}.{n}.{name}"]
                for file, (held, n) in zip(files, (mine, theirs), strict=True)
            ]
            assert torch.equal(*values)


def test_new_experts_go_on_from_the_step_of_their_group(tmp_path: Path) -> None:
    """Although one of the ranks has none but new ones."""
    sides = mixtures(tmp_path, experts=local_experts(4))
    out, new = sides.graft("new warm *_experts.{4,5,6,7}.*"), "_experts.{}."
    with streamshard.open(out) as opened:
        assert len({str(group.states.get("step")) for group in opened.groups}) == 1
    found, saved = tensors_of(out), tensors_of(tmp_path / "source")
    old = [t for (state, n), t in saved.items() if state == "exp_avg_sq" and "_experts." in n]
    mean = torch.cat([tensor.double().flatten() for tensor in old]).mean().float()
    for (state, name), tensor in found.items():
        if any(new.format(number) in name for number in (4, 5, 6, 7)):
            assert state != "exp_avg" or not tensor.any()
            assert state != "exp_avg_sq" or torch.equal(tensor, mean.expand(tensor.shape))


def test_a_model_gets_experts(tmp_path: Path) -> None:
    sides = mixtures(tmp_path, replace(MIXTURE, experts=()), experts=EXPERTS)
    out = sides.graft("new moe.*")
    assert differing(parts_of(out), parts_of(tmp_path / "start")) == []


def test_empty_files_of_the_optimizers_of_experts_are_those_of_start(tmp_path: Path) -> None:
    """As older versions of DeepSpeed save them next to those of ZeRO."""
    sides, file = mixtures(tmp_path), "expp_rank_{}_mp_rank_00_optim_states.pt"
    for side, ranks in (("source", 2), ("start", 4)):
        for rank in range(ranks):
            path = tmp_path / side / TAG / file.format(rank)
            fabricated.save({"optimizer": None, "of": side}, path)
    kept = sorted((sides.graft() / TAG).glob("expp_*"))
    assert [path.name for path in kept] == [file.format(rank) for rank in range(4)]
    assert {fabricated.load(path)["of"] for path in kept} == {"start"}


def test_files_of_the_optimizers_of_experts_with_states_are_refused(tmp_path: Path) -> None:
    sides = mixtures(tmp_path)
    file = tmp_path / "start" / TAG / "expp_rank_0_mp_rank_00_optim_states.pt"
    fabricated.save({"optimizer": {"state": torch.ones(2)}}, file)
    with pytest.raises(UnsupportedError, match=r"expp_rank_0_.*: holds tensors of the model"):
        sides.graft()


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 3), (3, 2)])
def test_experts_of_autoep(tmp_path: Path, before: int, after: int) -> None:
    old, new = (replace(ON_2, stage=stage) for stage in (before, after))
    out = Sides(tmp_path, write_auto).write(old, new, AutoStart).graft()
    write_auto(replace(ON_2, stage=after), tmp_path / "wanted")
    assert differing(parts_of(out), parts_of(tmp_path / "wanted")) == []
