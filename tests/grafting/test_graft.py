"""`graft`: each rule, at each stage, against the values that both jobs had."""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import streamshard
from streamshard.errors import UnsupportedError, UsageError
from streamshard.formats.checkpoint import GRAFT_RECORD
from tests import fabricated
from tests.checkpoints.test_dcp_repartition import saved
from tests.grafting.jobs import TRAINED, Jobs, differing, tensors_of
from tests.job import MUON, STATES, TAG, Job

FIRST, SECOND = TRAINED.groups


def write(root: Path, stages: tuple[int, int] = (2, 3), **changes: Any) -> Jobs:  # noqa: ANN401
    """Save SRC and START at two stages, for other counts of ranks."""
    old = replace(TRAINED, stage=stages[0])
    return Jobs.write(root, old, **{"stage": stages[1], "world_size": 3, **changes})


def test_a_group_without_kept_parameters_has_no_states(tmp_path: Path) -> None:
    head = ((("head.weight", (2, 3)),),)
    jobs = write(tmp_path, groups=(FIRST, SECOND, *head))
    found = jobs.graft("new head.weight")
    assert differing(found, "head.weight", {"fp32": jobs.new.values("fp32", "head.weight")}) == []
    with streamshard.open(tmp_path / "out") as opened:
        steps = [group.states.get("step") for group in opened.groups]
    assert steps[2] is None
    assert None not in steps[:2]


def test_what_was_grafted_is_recorded_in_the_tag(tmp_path: Path) -> None:
    jobs = write(tmp_path, groups=((("embed.weight", (14, 4)), *FIRST[1:]), SECOND))
    jobs.graft("rows embed.weight  # more tokens")
    assert (tmp_path / "out" / "latest").read_text() == TAG
    record = json.loads((tmp_path / "out" / TAG / GRAFT_RECORD).read_text())
    assert record["rules"] == ["rows embed.weight"]
    assert record["source"] == {"path": str(jobs.source), "tag": TAG, "step": 7}
    assert record["counts"]["rows"] == {"tensors": 1, "elements": 56}


def test_a_difference_without_a_rule_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    jobs = write(tmp_path, groups=((("embed.weight", (14, 4)), *FIRST[1:]), SECOND))
    with pytest.raises(UsageError, match="1 tensors of SRC and START differ"):
        jobs.graft()
    assert not (tmp_path / "out").exists()
    assert list(tmp_path.glob("out*")) == []


def test_other_degrees_are_refused(tmp_path: Path) -> None:
    jobs = write(tmp_path, parts=2, world_size=4)
    with pytest.raises(
        UsageError, match=r"SRC was saved with tensor_parallel=1 .*, START with tensor_parallel=2 "
    ):
        jobs.graft()


def test_a_start_that_took_a_step_is_refused(tmp_path: Path) -> None:
    jobs = write(tmp_path)
    with pytest.raises(UsageError, match="has taken a step"):
        streamshard.graft(jobs.source, tmp_path / "stepped", tmp_path / "out")


def _keep_largest(keeps: bool, file: dict[str, Any]) -> None:
    for group in file["optimizer_state_dict"]["base_optimizer_state"]["param_groups"]:
        group["amsgrad"] = keeps


def test_an_optimizer_that_keeps_one_state_more_is_refused(tmp_path: Path) -> None:
    """It would look for that state at its first step."""
    jobs = write(tmp_path, (2, 2))
    for place, keeps in ((jobs.source, False), (jobs.start, True)):
        for path in place.glob("*/*_optim_states.pt"):
            fabricated.edit(path, partial(_keep_largest, keeps))
    with pytest.raises(UsageError, match="has amsgrad, which SRC's lacks"):
        jobs.graft()
    assert jobs.graft(fresh_states=True)


def _in_16_bits(file: dict[str, Any]) -> None:
    key, state = "single_partition_of_fp32_groups", file["optimizer_state_dict"]
    state[key] = [partition.bfloat16() for partition in state[key]]


def test_master_weights_of_another_dtype_are_told_to_be_cast(tmp_path: Path) -> None:
    jobs = write(tmp_path, (2, 2))
    for path in jobs.start.glob("*/*_optim_states.pt"):
        fabricated.edit(path, _in_16_bits)
    made = streamshard.graft(jobs.source, jobs.start, tmp_path / "out", verify=True)
    (told,) = (note for note in made.notes if "they are cast" in note)
    assert told.startswith("Master weights are float32 in SRC, and bfloat16 in START")
    found = tensors_of(tmp_path / "out")
    for name in jobs.old.shapes:
        kept = jobs.kept(name)
        assert differing(found, name, {**kept, "fp32": kept["fp32"].bfloat16()}) == []


@pytest.mark.parametrize(
    ("before", "after", "goes_on"),
    [("AdamW", "Adam", True), ("Adam", "AdamW", True), ("Adam", "SGD", False)],
)
def test_an_optimizer_of_another_kind_is_refused(
    tmp_path: Path, before: str, after: str, goes_on: bool
) -> None:
    jobs = write(tmp_path, (2, 2))
    for place, kind in ((jobs.source, before), (jobs.start, after)):
        for path in place.glob("*/*_states.pt"):
            fabricated.edit(path, partial(_set, {"optimizer": {"type": kind}}))
    if goes_on:
        assert differing(jobs.graft(), "embed.weight", jobs.kept("embed.weight")) == []
    else:
        with pytest.raises(UsageError, match="START's optimizer is sgd, SRC's adam"):
            jobs.graft()


def test_muon_is_refused(tmp_path: Path) -> None:
    jobs = write(tmp_path)
    muon = fabricated.write(MUON, tmp_path / "muon")
    with pytest.raises(UnsupportedError, match="Muon"):
        streamshard.graft(muon, jobs.start, tmp_path / "out")


def test_verify_proves_what_was_kept_and_lists_the_rest(tmp_path: Path) -> None:
    head = (("head.weight", (2, 3)),)
    jobs = write(tmp_path, groups=((("embed.weight", (14, 4)), *FIRST[1:]), SECOND + head))
    jobs.graft("rows embed.weight\nnew head.weight\nfresh block.0.mlp")
    found = streamshard.verify(tmp_path / "out", against=jobs.source)
    assert (found.problems, found.differences) == ((), ())
    assert "By the rule 'new': head.weight." in found.notes
    others = fabricated.write(
        replace(jobs.old, changed=("exp_avg", "embed.weight", 7)), tmp_path / "x"
    )
    found = streamshard.verify(tmp_path / "out", against=others)
    assert [difference.name for difference in found.differences] == ["exp_avg of 'embed.weight'"]


def test_a_store_of_it_and_other_ranks_keep_the_record(tmp_path: Path) -> None:
    jobs = write(tmp_path, groups=((("embed.weight", (14, 4)), *FIRST[1:]), SECOND))
    jobs.graft("rows embed.weight")
    streamshard.convert(tmp_path / "out", tmp_path / "out.zarr")
    streamshard.repartition(tmp_path / "out.zarr", tmp_path / "again", world_size=5)
    for path in ("out", "out.zarr", "again"):
        notes = streamshard.inspect(tmp_path / path).notes
        assert any(note.startswith(f"Grafted from {jobs.source}") for note in notes)
        assert streamshard.verify(tmp_path / path, against=jobs.source).is_good


@pytest.mark.parametrize("stage", [2, 3])
def test_warm_states_begin_with_the_mean_of_what_is_kept(tmp_path: Path, stage: int) -> None:
    head = (("head.weight", (2, 3)),)
    groups = ((("embed.weight", (14, 4)), *FIRST[1:], *head), SECOND)
    jobs = write(tmp_path, (2, stage), groups=groups)
    found = jobs.graft("rows warm embed.weight\nnew warm head.weight\nfresh block.0.bias")
    kept = {name: jobs.old.values("exp_avg_sq", name).double() for name, _ in FIRST}
    of_rows = kept["embed.weight"].mean().float()
    assert torch.equal(found["exp_avg_sq", "embed.weight"][11:], of_rows.expand(3, 4))
    everything = torch.cat([tensor.flatten() for tensor in kept.values()])
    assert torch.equal(found["exp_avg_sq", "head.weight"], everything.mean().float().expand(2, 3))
    for name in ("embed.weight", "head.weight"):
        assert not found["exp_avg", name][11:].any()
    assert not found["exp_avg_sq", "block.0.bias"].any()


@pytest.mark.parametrize("ranks", [1, 3])
def test_files_of_ranks_are_those_of_the_source(tmp_path: Path, ranks: int) -> None:
    jobs = write(tmp_path, world_size=ranks)
    for rank in range(2):
        (jobs.source / f"rng_state_{rank}.pth").write_bytes(b"state %d" % rank)
    (jobs.source / "trainer_state.json").write_text(json.dumps({"global_step": 3}))
    for name in ("adapter_config.json", "config.json"):
        (jobs.source / name).write_text("{}")
    told = streamshard.graft(jobs.source, jobs.start, tmp_path / "out", verify=True).notes
    kept = {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.pth")}
    both = {f"rng_state_{k}.pth": b"state %d" % k for k in range(2)}
    assert kept == ({"rng_state.pth": b"state 0"} if ranks == 1 else both)
    (ranked,) = (note for note in told if "random state" in note)
    assert ("so the random state of" in ranked) == (ranks == 1)
    (left_out,) = (note for note in told if note.startswith("Left out"))
    assert "adapter_config.json, config.json" in left_out


def test_steps_of_accelerate_are_given_to_new_ranks(tmp_path: Path) -> None:
    jobs = write(tmp_path, world_size=3)
    for rank in range(2):
        torch.save({"step": 5, "random_state": rank}, jobs.source / f"random_states_{rank}.pkl")
    streamshard.graft(jobs.source, jobs.start, tmp_path / "out")
    found = torch.load(tmp_path / "out" / "random_states_2.pkl", weights_only=True)
    assert found == {"step": 5}


def test_a_scheduler_without_end_is_left_out(tmp_path: Path) -> None:
    jobs = write(tmp_path)
    endless: dict[str, Any] = {"last_epoch": 1}
    endless["_schedulers"] = [endless, endless]
    torch.save(endless, jobs.source / "scheduler.pt")
    told = streamshard.graft(jobs.source, jobs.start, tmp_path / "out").notes
    assert "scheduler.pt is left out: the job begins with the scheduler it makes." in told
    assert not (tmp_path / "out" / "scheduler.pt").exists()


def _set(sizes: Mapping[str, object], file: dict[str, Any]) -> None:
    file["ds_config"].update(sizes)


@pytest.mark.parametrize("sizes", [(6, 1, 2), (12, 2, 2)])
def test_a_job_is_told_of_its_batch_only_if_it_is_another_one(
    tmp_path: Path, sizes: tuple[int, int, int]
) -> None:
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    jobs = write(tmp_path, (2, 2))
    for place, given in ((jobs.source, (6, 3, 1)), (jobs.start, sizes)):
        for path in place.glob("*/*_states.pt"):
            fabricated.edit(path, partial(_set, dict(zip(keys, given, strict=True))))
    told = "\n".join(streamshard.graft(jobs.source, jobs.start, tmp_path / "out").notes)
    assert ("global batch" in told) == (sizes[0] != 6)
    assert ("This job has a global batch of 12, the job that saved had 6." in told) == (
        sizes[0] == 12
    )


@pytest.mark.parametrize("stage", [2, 3])
def test_parameters_that_no_gradient_has_reached(tmp_path: Path, stage: int) -> None:
    """torch keeps no states of them."""
    reference, bare = fabricated.write(Job(), tmp_path / "like"), "block.0.bias"
    made = saved(Job())
    for key in [key for key in made.tensors if f".state.{bare}." in key]:
        del made.tensors[key], made.paths[key]
    made.write(tmp_path / "source")
    start = Jobs.write(tmp_path / "jobs", Job(stage=stage), world_size=3).start
    given: dict[str, Any] = {"like": reference, "rules": tmp_path / "rules"}
    with pytest.raises(UnsupportedError, match=f"no states of {bare}, .* 'streamshard graft'"):
        streamshard.repartition(tmp_path / "source", tmp_path / "out", world_size=2, like=reference)
    given["rules"].write_text("")
    with pytest.raises(UsageError) as refused:
        streamshard.graft(tmp_path / "source", start, tmp_path / "out", **given)
    assert refused.value.__notes__ == [f"fresh {bare}"]
    given["rules"].write_text(f"fresh {bare}")
    streamshard.graft(tmp_path / "source", start, tmp_path / "out", **given)
    found = tensors_of(tmp_path / "out")
    for name in Job().shapes:
        master, zeros = made.tensors[f"model.{name}"][0], torch.zeros(Job().shapes[name])
        states = {
            key: zeros if name == bare else made.tensors[f"optimizer.state.{name}.{key}"][0]
            for key in STATES
        }
        assert differing(found, name, {"fp32": master, **states}) == []
    proved = streamshard.verify(tmp_path / "out", against=tmp_path / "source", like=reference)
    assert (proved.problems, proved.differences) == ((), ())
    assert f"By the rule 'fresh': {bare}." in proved.notes
    streamshard.graft(
        tmp_path / "source", start, tmp_path / "fresh", like=reference, fresh_states=True
    )
    master = made.tensors[f"model.{bare}"][0]
    assert differing(tensors_of(tmp_path / "fresh"), bare, {"fp32": master}) == []
    assert streamshard.verify(
        tmp_path / "fresh", against=tmp_path / "source", like=reference
    ).is_good


def test_frozen_weights_that_stage_1_did_not_save_are_those_of_start(tmp_path: Path) -> None:
    jobs = Jobs.write(tmp_path, replace(TRAINED, stage=1, frozen=()), frozen=TRAINED.frozen)
    found = jobs.graft()
    for name, _ in TRAINED.frozen:
        value = jobs.new.values("frozen", name).to(jobs.new.dtype)
        assert torch.equal(found["module", name], value)
    notes = streamshard.inspect(tmp_path / "out").notes
    assert any("unsaved 2" in note for note in notes)


def test_weights_that_are_frozen_now_are_not_called_unsaved(tmp_path: Path) -> None:
    weight, adapter = ("w", (4, 4)), ("lora", (2, 4))
    old = replace(TRAINED, stage=1, frozen=(), groups=((weight,),))
    jobs = Jobs.write(tmp_path, old, groups=((adapter,),), frozen=(("base.w", (4, 4)),))
    (tmp_path / "rules").write_text("move w -> base.w\nfreeze base.w\nnew lora")
    made = streamshard.graft(
        jobs.source, jobs.start, tmp_path / "out", rules=tmp_path / "rules", verify=True
    )
    assert not any("did not save" in note for note in made.notes)
    kept = jobs.old.values("fp32", "w").to(jobs.new.dtype)
    assert torch.equal(tensors_of(tmp_path / "out")["module", "base.w"], kept)


def test_tensor_parallel_parts_are_grafted_each_by_itself(tmp_path: Path) -> None:
    head = (("head.weight", (2, 3)),)
    jobs = Jobs.write(tmp_path, replace(TRAINED, parts=2), stage=3, groups=(FIRST + head, SECOND))
    found = jobs.graft("new head.weight\nfresh embed.bias")
    for part in range(2):
        old, new = replace(jobs.old, part=part), replace(jobs.new, part=part)
        name = f"mp_rank_{part:02d}/head.weight"
        assert torch.equal(found["fp32", name], new.values("fp32", "head.weight"))
        for name, _ in FIRST:
            kept = {state: old.values(state, name) for state in ("fp32", *STATES)}
            assert differing(found, f"mp_rank_{part:02d}/{name}", kept) == []
    assert streamshard.verify(tmp_path / "out", against=jobs.source).is_good


def test_rows_that_may_be_cut_are_refused(tmp_path: Path) -> None:
    groups = ((("embed.weight", (14, 4)), *FIRST[1:]), SECOND)
    jobs = Jobs.write(tmp_path, replace(TRAINED, parts=2), groups=groups)
    with pytest.raises(UnsupportedError, match=r"'embed\.weight' has another count of rows"):
        jobs.graft("rows embed.weight")
