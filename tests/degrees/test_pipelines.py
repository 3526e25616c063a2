"""Pipelines: their layers are put together, whatever the stages were."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import streamshard
from streamshard.cli.main import main
from streamshard.errors import (
    DisagreementError,
    IncompleteError,
    StreamshardError,
    UnsupportedError,
    UsageError,
)
from streamshard.formats.deepspeed.model_parallel.parallel_degrees import AS_SAVED
from tests.comparing import compare
from tests.fabricated import edit, load, save, write
from tests.fabricated_pipes import BLOCK, CUTS, SHARED, PipeJob, is_trained, layer_file, write_pipe
from tests.job import TAG, Job

TWO = PipeJob(world_size=2)
OTHERS = {
    "one-stage": replace(TWO, starts=(0,), world_size=1),
    "three-stages": replace(TWO, starts=(0, 2, 4), world_size=2),
    "other-starts": replace(TWO, starts=(0, 4)),
}


def of_model(job: PipeJob) -> dict[str, tuple[int, ...]]:
    """Name → shape of all that the model has, in the order of its state dict."""
    found = dict(one for number in range(len(job.layers)) for one in job.layer(number))
    return dict(sorted(found.items(), key=lambda item: not item[0].startswith("tied")))


def exported(run: Path) -> dict[str, Tensor]:
    out = run.parent / f"{run.name}-out"
    streamshard.export(run, out, dtype="fp32", verify=True)
    return load_file(out / "model.safetensors")


@pytest.mark.parametrize("job", [TWO, OTHERS["three-stages"]], ids=["two-stages", "three-stages"])
def test_the_model_is_put_together(tmp_path: Path, job: PipeJob) -> None:
    run = write_pipe(job, tmp_path / "run")
    found = exported(run)
    assert found.keys() == of_model(job).keys()
    for name, tensor in found.items():
        wanted = job.values("fp32", name) if is_trained(name) else job.weight(name).float()
        assert tensor.tolist() == wanted.tolist()
    with streamshard.open(run) as ckpt:
        assert list(ckpt) == list(of_model(job))
        for name, held in ckpt.items():
            assert held.module.torch().tolist() == job.weight(name).tolist()
            for state, kept in held.states.items():
                assert kept[...].tolist() == job.values(state, name).tolist()
            kind = {"old": "frozen", "running": "buffer"}.get(name.split(".")[-1], "trained")
            assert (held.kind, len(held.states)) == (kind, 3 if kind == "trained" else 0)


def changed_in_layer(run: Path) -> None:
    edit(layer_file(run, 5), lambda held: held["weight"].view(-1)[3:4].add_(1000))


def lost_layer(run: Path) -> None:
    layer_file(run, 4).unlink()


def other_shape(run: Path) -> None:
    edit(layer_file(run, 3), lambda held: held.update(bias=held["bias"][:1].clone()))


ALIKE = (("embed", SHARED), ("other", SHARED))
BUFFERED = (*SHARED, ("running", (4,)))


@pytest.mark.parametrize(
    ("job", "damage", "kind", "message"),
    [
        (
            replace(TWO, changed=("exp_avg", "tied_modules.embed.bias", 1), changed_by=1000),
            None,
            DisagreementError,
            r"exp_avg of tied_modules\.embed\.bias: 1 of 2 elements differ, the first at index 1",
        ),
        (
            TWO,
            changed_in_layer,
            DisagreementError,
            r"module of tied_modules\.embed\.weight: 1 of 14 .* layer_05-model_states\.pt and",
        ),
        (TWO, lost_layer, IncompleteError, r"layer_04-model_states\.pt: missing, in which '4\.up'"),
        (TWO, other_shape, DisagreementError, r"'3\.bias' has shape \(1,\)"),
        (
            PipeJob(
                layers=("embed", BLOCK, "other", BLOCK, "embed", "other"),
                shared=(("embed", BUFFERED), ("other", BUFFERED)),
            ),
            None,
            UnsupportedError,
            r"layer_00-model_states\.pt: has 'running' of a module that several layers share",
        ),
    ],
)
def test_what_cannot_be_put_together_is_refused(
    tmp_path: Path,
    job: PipeJob,
    damage: Callable[[Path], None] | None,
    kind: type[StreamshardError],
    message: str,
) -> None:
    run = write_pipe(job, tmp_path / "run")
    if damage is not None:
        damage(run)
    with pytest.raises(kind, match=message):
        streamshard.export(run, tmp_path / "out")


LOST = {
    "layers": (TWO, ["layer_01-model_states.pt", "layer_04-model_states.pt"]),
    "axis": (replace(TWO, has_axis=True), ["layer_03-model_00-model_states.pt"]),
    "one-rank": (replace(TWO, tensor=2), ["layer_03-model_01-model_states.pt"]),
    "second-rank": (
        replace(TWO, tensor=2, files_of_shared=False),
        [f"layer_{number:02d}-model_01-model_states.pt" for number in (1, 3, 4)],
    ),
    "buffers": (
        replace(TWO, layers=("embed", BLOCK, (("running", (4,)),), BLOCK, BLOCK, "embed")),
        ["layer_02-model_states.pt"],
    ),
}
"""Job, and files of layers that its checkpoint lacks."""


@pytest.mark.parametrize(("job", "lost"), LOST.values(), ids=LOST)
def test_a_checkpoint_without_the_file_of_a_layer_is_not_whole(
    tmp_path: Path, job: PipeJob, lost: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_pipe(job, tmp_path / "run")
    for name in lost:
        (run / TAG / name).unlink()
    first = re.escape(f"{run / TAG / lost[0]}: missing, in which ")
    with pytest.raises(IncompleteError, match=f"^{first}"):
        streamshard.repartition(run, tmp_path / "out", world_size=2 * job.parts)
    with pytest.raises(IncompleteError, match=f"^{first}"):
        streamshard.convert(run, tmp_path / "store")
    found = streamshard.verify(run).problems
    assert sorted((p.kind, Path(p.file).name) for p in found) == [("missing", n) for n in lost]
    assert main(["inspect", str(run), "--json"]) == 3
    shown = json.loads(capsys.readouterr().out)
    assert not shown["is_whole"]
    for name, problem in zip(lost, shown["problems"], strict=True):
        assert problem.startswith(f"{run / TAG / name}: missing")
    assert main(["verify", str(run)]) == 6


def test_other_problems_do_not_hide_the_missing_file_of_a_layer(tmp_path: Path) -> None:
    run = write_pipe(TWO, tmp_path / "run")
    lost_layer(run)
    rank = next((run / TAG).glob("*zero_pp_rank_1_mp_rank_01_optim_states.pt"))
    rank.unlink()
    found = {Path(problem.file).name for problem in streamshard.verify(run).problems}
    assert found == {rank.name, "layer_04-model_states.pt"}


def test_files_of_layers_on_a_grid_with_other_axes_are_not_missing(tmp_path: Path) -> None:
    """Their names have these axes too (`PipelineModule.ckpt_layer_path`)."""
    run = write_pipe(TWO, tmp_path / "run")
    for path in (run / TAG).glob("layer_*"):
        save(load(path), path.with_name(path.name.replace("-model_", "-node_00-model_")))
        path.unlink()
    streamshard.repartition(run, tmp_path / "out", world_size=4)
    assert not streamshard.verify(run).problems
    next((run / TAG).glob("layer_03*")).unlink()
    with pytest.raises(IncompleteError, match=r"layer_03-.*: missing, in which '3\.up' is"):
        streamshard.repartition(run, tmp_path / "again", world_size=4)


def test_modules_that_are_shared_without_a_file(tmp_path: Path) -> None:
    """A layer that calls its shared module by a function of its own has no file."""
    job = replace(TWO, files_of_shared=False)
    assert exported(write_pipe(job, tmp_path / "run")).keys() == of_model(job).keys()


def test_shared_modules_that_are_alike(tmp_path: Path) -> None:
    """Which is in which file is not known, and need not be: the master weights are."""
    job = PipeJob(layers=("embed", BLOCK, "other", BLOCK, "embed", "other"), shared=ALIKE)
    run = write_pipe(job, tmp_path / "run")
    found = exported(run)
    assert found.keys() == of_model(job).keys()
    for name in ("tied_modules.embed.weight", "tied_modules.other.weight"):
        assert found[name].tolist() == job.values("fp32", name).tolist()
    with streamshard.open(run) as ckpt:
        assert "module" not in ckpt["tied_modules.embed.weight"].tensors


def test_a_frozen_layer_like_a_shared_module_is_not_taken_for_it(tmp_path: Path) -> None:
    """It has the same names and shapes, and no stage lists it. Its values tell."""
    job = replace(TWO, layers=(*TWO.layers, None))
    run = write_pipe(job, tmp_path / "run")
    save({name: torch.zeros(shape) for name, shape in SHARED}, layer_file(run, 6))
    with pytest.raises(DisagreementError, match=r"layer_06-model_states\.pt and the module that"):
        streamshard.export(run, tmp_path / "out")


def test_diff_is_of_whole_layers_where_the_stages_differ(tmp_path: Path) -> None:
    job = OTHERS["three-stages"]
    run, other = write_pipe(TWO, tmp_path / "run"), write_pipe(job, tmp_path / "other")
    found = streamshard.diff(run, other)
    assert found.is_equal
    held = {tensor.name for tensor in found.tensors if tensor.state != "training"}
    states = [f"state/{state}/{name}" for name in of_model(TWO) if is_trained(name)
              for state in ("fp32", "exp_avg", "exp_avg_sq")]  # fmt: skip
    assert held >= {*states, *(f"module/{name}" for name in of_model(TWO))}
    one_more = replace(job, changed=("exp_avg", "4.up", 2))
    changed = write_pipe(one_more, tmp_path / "changed")
    edit(layer_file(changed, 3), add_to_one)
    assert {
        tensor.name: tensor.distance.changed for tensor in streamshard.diff(run, changed).changed
    } == {
        "module/3.running": 1,
        "state/exp_avg/4.up": 1,
    }


def add_to_one(held: dict[str, Tensor]) -> None:
    held["running"][1] += 1


def test_copies_that_differ_by_rounding_are_the_first_stage_s(tmp_path: Path) -> None:
    job = replace(TWO, changed=("fp32", "tied_modules.embed.weight", 4), world_size=3)
    run, wanted = write_pipe(job, tmp_path / "run"), write_pipe(TWO, tmp_path / "wanted")
    report = streamshard.diff(run, write_pipe(OTHERS["three-stages"], tmp_path / "other"))
    assert report.is_equal
    assert any("fp32 of tied_modules.embed.weight, is" in note for note in report.notes)
    for source, out in ((run, "run-out"), (wanted, "wanted-out")):
        streamshard.repartition(
            source, tmp_path / out, world_size=2, pipeline_parallel=1, verify=True
        )
    compare(tmp_path / "run-out" / TAG, tmp_path / "wanted-out" / TAG)


def as_two_stages(content: dict[str, Any]) -> None:
    content["checkpoint_parallel_dimensions"]["pp_degree"] = 2


def test_inspect_counts_stages(tmp_path: Path) -> None:
    run = write_pipe(OTHERS["three-stages"], tmp_path / "run")
    found = streamshard.inspect(run, html=tmp_path / "cut.html")
    assert (found.tensor_parallel, found.pipeline_parallel) == (1, 3)
    assert found.ranks_text == "6: 2 data-parallel x 3 pipeline-parallel"
    assert "mp_rank_02 (stage 2 of 3), param group 0" in (tmp_path / "cut.html").read_text()
    assert streamshard.inspect(write_pipe(OTHERS["one-stage"], tmp_path / "one")).ranks_text == "1"
    edit(run / TAG / "mp_rank_00_model_states.pt", as_two_stages)
    assert (
        streamshard.inspect(run).ranks_text == "6: 2 data-parallel x 3 tensor or pipeline parallel"
    )


def test_tensor_parallel_stages_of_which_nothing_tells_the_cut(tmp_path: Path) -> None:
    run = write_pipe(replace(TWO, tensor=2), tmp_path / "run")
    what = "cut among 2 tensor-parallel ranks, and no 'universal_checkpoint_info'"
    like = write_pipe(TWO, tmp_path / "like")
    with pytest.raises(UnsupportedError, match=f"{what} .*facts=FILE.*cut_rules = .*{AS_SAVED}"):
        streamshard.repartition(run, tmp_path / "out", world_size=2, tensor_parallel=1, like=like)
    with pytest.raises(UnsupportedError, match=rf"{what} .*streamshard\.open reads its parts"):
        streamshard.export(run, tmp_path / "out")
    # What the messages advise.
    streamshard.repartition(run, tmp_path / "out", world_size=4)
    with streamshard.open(run) as ckpt:
        assert "mp_rank_03/4.up" in ckpt
    assert streamshard.inspect(run).ranks_text == (
        "8: 2 data-parallel x 2 tensor-parallel x 2 pipeline-parallel"
    )


def test_stages_change_whatever_they_are_on(tmp_path: Path) -> None:
    job, other = replace(TWO, tensor=2), replace(OTHERS["three-stages"], tensor=2)
    run, wanted = write_pipe(job, tmp_path / "run"), write_pipe(other, tmp_path / "wanted")
    out, back = tmp_path / "out", tmp_path / "back"
    streamshard.repartition(run, out, world_size=12, pipeline_parallel=3, like=wanted)
    compare(out / TAG, wanted / TAG)
    streamshard.repartition(out, back, world_size=8, pipeline_parallel=2, like=run)
    compare(back / TAG, run / TAG)


TURNED = (("up", (3, 5)), *BLOCK[1:])
OTHER_SHAPES = replace(
    OTHERS["three-stages"], tensor=2, layers=("embed", TURNED, None, *TWO.layers[3:])
)


@pytest.mark.parametrize(
    ("job", "like", "degrees", "message"),
    [
        (
            replace(TWO, tensor=2),
            partial(write_pipe, OTHER_SHAPES),
            {"pipeline_parallel": 3, "world_size": 6},
            r"'1\.up' has other shapes than in the checkpoint",
        ),
        (
            replace(TWO, tensor=2, cuts=CUTS),
            partial(write, Job(world_size=2)),
            {"pipeline_parallel": 1, "tensor_parallel": 1, "world_size": 4},
            None,
        ),
    ],
    ids=["shapes", "no-layers"],
)
def test_references_of_another_job_are_refused(
    tmp_path: Path,
    job: PipeJob,
    like: Callable[[Path], Path],
    degrees: dict[str, Any],
    message: str | None,
) -> None:
    run, other = write_pipe(job, tmp_path / "run"), like(tmp_path / "like")
    with pytest.raises(DisagreementError, match=message):
        streamshard.repartition(run, tmp_path / "out", like=other, **degrees)


@pytest.mark.parametrize("stage", [2, 3])
def test_pipelines_stay_at_stage_1(tmp_path: Path, stage: int) -> None:
    run, out, config = write_pipe(TWO, tmp_path / "run"), tmp_path / "out", tmp_path / "ds.json"
    kept = load(run / TAG / "mp_rank_00_model_states.pt")["ds_config"]
    config.write_text(json.dumps({**kept, "zero_optimization": {"stage": stage}}))
    message = f"stage {stage} does not train with pipeline parallelism, as this checkpoint was"
    with pytest.raises(UsageError, match=message):
        streamshard.repartition(run, out, world_size=4, zero_stage=stage)
    with pytest.raises(UsageError, match=message):
        streamshard.repartition(run, out, world_size=4, ds_config_file=config)


def test_forms_that_take_no_pipeline(tmp_path: Path) -> None:
    run = write_pipe(TWO, tmp_path / "run")
    for form in ("universal", "dcp"):
        with pytest.raises(UnsupportedError, match="give format=safetensors or torch"):
            streamshard.export(run, tmp_path / "out", format=form)


@pytest.mark.parametrize(("tensor", "stages"), [(1, (0, 2, 4)), (3, (0,))])
def test_both_degrees_change(tmp_path: Path, tensor: int, stages: tuple[int, ...]) -> None:
    job = replace(TWO, tensor=2, cuts=CUTS, world_size=1)
    other = replace(TWO, tensor=tensor, cuts=CUTS, starts=stages, world_size=2, has_axis=True)
    run, wanted = write_pipe(job, tmp_path / "run"), write_pipe(other, tmp_path / "wanted")
    out, back = tmp_path / "out", tmp_path / "back"
    degrees: dict[str, Any] = {"tensor_parallel": tensor, "pipeline_parallel": len(stages)}
    streamshard.repartition(
        run, out, world_size=2 * other.parts, like=wanted, verify=True, **degrees
    )
    compare(out / TAG, wanted / TAG)
    degrees = {"tensor_parallel": 2, "pipeline_parallel": 2}
    streamshard.repartition(out, back, world_size=4, like=run, verify=True, **degrees)
    compare(back / TAG, run / TAG)
    assert streamshard.diff(run, out).is_equal
    for name, tensor_of in exported(back).items():
        wanted_of = TWO.values("fp32", name) if is_trained(name) else TWO.weight(name).float()
        assert tensor_of.tolist() == wanted_of.tolist()


def test_rules_tell_the_cut(tmp_path: Path) -> None:
    job, rules = replace(TWO, tensor=2, cuts=CUTS), tmp_path / "rules.txt"
    run, wanted = write_pipe(job, tmp_path / "run"), write_pipe(TWO, tmp_path / "wanted")
    for path in (run / TAG).glob("mp_rank_*"):
        edit(path, lambda held: held.pop("universal_checkpoint_info"))
    rules.write_text(".*up: split 1\n.*weight: split 0\n.*old: split 0\n.*bias: replicated\n")
    options: dict[str, Any] = {
        "tensor_parallel": 1,
        "facts": {"source": {"cut_rules": rules}},
        "like": wanted,
    }
    streamshard.repartition(run, tmp_path / "out", world_size=4, verify=True, **options)
    compare(tmp_path / "out" / TAG, wanted / TAG)
    streamshard.export(
        run, tmp_path / "exported", dtype="fp32", facts={"source": {"cut_rules": rules}}
    )
    assert load_file(tmp_path / "exported" / "model.safetensors").keys() == of_model(TWO).keys()
    options = {"pipeline_parallel": 1, "like": write_pipe(OTHERS["one-stage"], tmp_path / "one")}
    with pytest.raises(UsageError, match="facts=: no tensor is cut otherwise"):
        streamshard.repartition(
            run, tmp_path / "none", world_size=2, facts={"source": {"cut_rules": rules}}, **options
        )


def test_a_store_of_another_tensor_parallel_degree(tmp_path: Path) -> None:
    """It has the layers' tensors, so that it can be read, and cut anew, as files can."""
    job = replace(TWO, tensor=2, cuts=CUTS, world_size=2)
    other = replace(TWO, tensor=3, cuts=CUTS, starts=(0, 2, 4), world_size=1)
    run, like = write_pipe(job, tmp_path / "run"), write_pipe(other, tmp_path / "like")
    store, out = tmp_path / "run.zarr", tmp_path / "out"
    degrees: dict[str, Any] = {"tensor_parallel": 3, "pipeline_parallel": 3}
    streamshard.convert(run, store, like=like, verify=True, **degrees)
    streamshard.repartition(store, out, world_size=other.parts, verify=True)
    compare(out / TAG, like / TAG)
    one = write_pipe(replace(other, starts=(0,)), tmp_path / "one")
    streamshard.repartition(store, tmp_path / "of-one", world_size=3, pipeline_parallel=1, like=one)
    compare(tmp_path / "of-one" / TAG, one / TAG)
    assert streamshard.diff(run, store).is_equal
    assert exported(store).keys() == of_model(TWO).keys()


def test_a_vocabulary_keeps_its_padding(tmp_path: Path) -> None:
    job = replace(TWO, tensor=2, cuts=CUTS, shared=(("embed", (("weight", (8, 2)), SHARED[1])),))
    padded = replace(job, tensor=1, shared=(("embed", (("weight", (9, 2)), SHARED[1])),))
    run, like = write_pipe(job, tmp_path / "run"), write_pipe(padded, tmp_path / "like")
    words = {"vocabulary_parameter_patterns": [r"tied_modules.embed.weight"]}
    for path in (run / TAG).glob("mp_rank_*"):
        edit(path, lambda held: held["universal_checkpoint_info"].update(words))
    with pytest.raises(DisagreementError, match=r"8 rows, in .* 9\. .*divisible-by 8\), save"):
        streamshard.repartition(run, tmp_path / "out", world_size=2, tensor_parallel=1, like=like)
    # What the message advises.
    like = write_pipe(replace(job, tensor=1), tmp_path / "as-many")
    streamshard.repartition(run, tmp_path / "out", world_size=2, tensor_parallel=1, like=like)


def drifted_bias(run: Path) -> None:
    edit(layer_file(run, 3, 1), lambda held: held["bias"].add_(1000))


def other_buffer(run: Path) -> None:
    edit(layer_file(run, 3, 1), add_to_one)


def lost_part(run: Path) -> None:
    layer_file(run, 4, 1).unlink()


@pytest.mark.parametrize(
    ("damage", "kind", "message"),
    [
        (drifted_bias, DisagreementError, r"module of 3\.bias: \d of 3 elements differ"),
        (other_buffer, DisagreementError, r"module of 3\.running: 1 of 4 elements differ"),
        (lost_part, IncompleteError, r"layer_04-model_01-model_states\.pt: missing, in which"),
    ],
)
def test_parts_of_layers_that_do_not_fit_are_refused(
    tmp_path: Path, damage: Callable[[Path], None], kind: type[StreamshardError], message: str
) -> None:
    run = write_pipe(replace(TWO, tensor=2, cuts=CUTS), tmp_path / "run")
    like, out = write_pipe(TWO, tmp_path / "like"), tmp_path / "out"
    damage(run)
    with pytest.raises(kind, match=message):
        streamshard.repartition(run, out, world_size=2, tensor_parallel=1, like=like)
    assert not out.exists()
