"""Distributed checkpoints of PyTorch become ZeRO's files, with a reference; all fabricated."""

import filecmp
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

import streamshard
from streamshard.errors import DisagreementError, StreamshardError, UnsupportedError
from tests.fabricated import load, write
from tests.fabricated_dcp import Saved, adamw, mesh
from tests.job import STATES, TAG, Job, buffers

GROUPS = [[name for name, _ in group] for group in Job().groups]
BESIDE = {
    "old.weight": torch.randn(5, 3),
    "old.bias": torch.randn(1),
    **{name: tensor.clone() for name, tensor in buffers().items()},
}


def saved(job: Job, **given: Any) -> Saved:  # noqa: ANN401
    """Make up a distributed checkpoint of a job's model, with other values than the job has."""
    cut = {name: mesh(shape, [2] * len(shape)) for name, shape in job.shapes.items()}
    options: dict[str, Any] = {"buffers": BESIDE, "groups": GROUPS[::-1], "cut": cut, **given}
    made = adamw(job.shapes, **options)
    # FSDP saves what is tied under each of its names.
    (key,) = (k for k, path in made.paths.items() if path[-1] == "embed.weight")
    tied = key.replace("embed.weight", "head.weight")
    made.tensors[tied] = made.tensors[key]
    made.paths[tied] = (*made.paths[key][:-1], "head.weight")
    return made


def require_moved(made: Saved, out: Path, dtype: torch.dtype) -> None:
    """Compare what an opened ZeRO checkpoint holds with what was saved."""
    seen = set()
    with streamshard.open(out) as found:
        for key, (tensor, _) in made.tensors.items():
            text = ".".join(map(str, made.paths[key]))
            if ".state." in text:
                name, state = text.split(".state.")[1].rsplit(".", 1)
                if state != "step":
                    assert np.array_equal(found[name].tensors[state][...], tensor.numpy()), text
                    seen.add((name, state))
                continue
            name = made.paths[key][-1]
            if name == "head.weight":
                assert found[name].tied_to == "embed.weight"
            elif name not in BESIDE:
                assert np.array_equal(found[name].tensors["fp32"][...], tensor.numpy()), text
                seen.add((name, "fp32"))
            else:
                wanted = tensor.to(dtype) if name.startswith("old.") else tensor
                assert torch.equal(found[name].tensors["module"].torch(), wanted), text
        assert {(n, s) for n, p in found.items() for s in p.states if not p.tied_to} == seen
        assert len(seen) == 3 * len(Job().shapes)


@pytest.mark.parametrize("style", ["torch", "titan", "tutorial"])
@pytest.mark.parametrize(("like", "stage"), [(1, 3), (2, 2), (3, 1), (3, 3)])
def test_values_are_the_distributed_checkpoint_s(
    style: str, like: int, stage: int, tmp_path: Path
) -> None:
    job = Job(stage=like, world_size=2)
    reference = write(job, tmp_path / "like")
    made = saved(job, style=style)
    made.write(tmp_path / "dcp")
    streamshard.repartition(
        tmp_path / "dcp",
        tmp_path / "out",
        world_size=3,
        zero_stage=stage,
        like=reference,
        verify=True,
    )
    require_moved(made, tmp_path / "out", job.dtype)
    shown = streamshard.inspect(tmp_path / "out")
    assert (shown.world_size, shown.zero_stage) == (3, stage)
    assert [group.states["step"] for group in shown.groups] == [3.0, 3.0]
    # The group that was first saved is the second one of the reference.
    assert [group.hyper_parameters["lr"] for group in shown.groups] == [5e-4, 1e-3]


def test_a_store_in_between_changes_nothing(tmp_path: Path) -> None:
    job = Job(stage=3)
    reference = write(job, tmp_path / "like")
    saved(job).write(tmp_path / "dcp")
    streamshard.convert(tmp_path / "dcp", tmp_path / "s.zarr", like=reference, verify=True)
    streamshard.repartition(tmp_path / "s.zarr", tmp_path / "of-store", world_size=3)
    streamshard.repartition(tmp_path / "dcp", tmp_path / "direct", world_size=3, like=reference)
    paths = [p.relative_to(tmp_path / "direct") for p in (tmp_path / "direct").rglob("*.pt")]
    same, *others = filecmp.cmpfiles(
        tmp_path / "direct", tmp_path / "of-store", map(str, paths), shallow=False
    )
    assert others == [[], []]
    assert len(same) == 6


def test_what_was_made_differs_in_nothing(tmp_path: Path) -> None:
    job = Job()
    reference = write(job, tmp_path / "like")
    saved(job).write(tmp_path / "dcp")
    streamshard.repartition(tmp_path / "dcp", tmp_path / "out", world_size=3, like=reference)
    found = streamshard.diff(tmp_path / "dcp", tmp_path / "out")
    # Frozen weights are cast; their values differ, and so do their dtypes.
    assert {t.name for t in found.changed} <= {"module/old.weight", "module/old.bias"}
    assert {d.name for d in found.differences} == {"module/old.weight", "module/old.bias"}
    with_like = streamshard.verify(tmp_path / "out", against=tmp_path / "dcp", like=reference)
    # There the reference tells that they are kept in 16 bits.
    assert with_like.is_good
    assert with_like.tensors > len(found.tensors)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_there_and_back_is_the_identity(stage: int, tmp_path: Path) -> None:
    job = Job(stage=stage, world_size=2)
    run = write(job, tmp_path / "run")
    saved_groups = streamshard.inspect(run).groups
    groups = [
        {
            **group.hyper_parameters,
            "betas": tuple(group.hyper_parameters["betas"]),
            "params": [name for name, _ in shapes],
        }
        for group, shapes in zip(saved_groups, job.groups, strict=True)
    ]
    states = {
        name: {
            "step": torch.tensor(float(saved_groups[number].states["step"])),
            **{state: job.values(state, name) for state in STATES},
        }
        for number, shapes in enumerate(job.groups)
        for name, _ in shapes
    }
    model = {name: job.values("fp32", name) for name in job.shapes}
    model |= {name: job.values("frozen", name).to(job.dtype) for name, _ in job.frozen}
    model |= {name: model[other] for name, other in job.tied.items()} | buffers()
    state = {"model": model, "optimizer": {"state": states, "param_groups": groups}}
    save_distributed(state, checkpoint_id=tmp_path / TAG, no_dist=True)
    streamshard.repartition(tmp_path / TAG, tmp_path / "out", world_size=3, like=run)
    streamshard.repartition(tmp_path / "out", tmp_path / "back", world_size=2)
    found = streamshard.verify(tmp_path / "back", against=run)
    assert [d for d in found.differences if not d.name.startswith("file/")] == []
    assert found.tensors > 20


@pytest.mark.parametrize("layout", ["torch", "titan", "accelerate"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_is_exported_comes_back(stage: int, layout: str, tmp_path: Path) -> None:
    run = write(Job(stage=stage), tmp_path / "run")
    report = streamshard.export(run, tmp_path / "dcp", format="dcp", layout=layout, ranks=3)
    assert report.tensors
    steps = [*(tmp_path / "dcp").glob("step-*")]
    source = steps[0] if steps else tmp_path / "dcp"
    assert streamshard.verify(source).is_good
    assert not streamshard.diff(source, run).changed
    streamshard.repartition(source, tmp_path / "out", world_size=3, like=run, verify=True)
    streamshard.repartition(tmp_path / "out", tmp_path / "back", world_size=2)
    found = streamshard.verify(tmp_path / "back", against=run)
    assert [d for d in found.differences if not d.name.startswith("file/")] == []
    assert found.tensors > 20


def test_a_changed_step_is_a_difference(tmp_path: Path) -> None:
    job = Job()
    reference = write(job, tmp_path / "like")
    saved(job).write(tmp_path / "dcp")
    saved(job, step=4.0).write(tmp_path / "later")
    streamshard.repartition(tmp_path / "dcp", tmp_path / "out", world_size=3, like=reference)
    found = streamshard.diff(tmp_path / "later", tmp_path / "out")
    assert any("4.0 here, 3.0 there" in one.message for one in found.differences)


def test_the_reference_s_training_state_comes_along(tmp_path: Path) -> None:
    rng = torch.arange(100, dtype=torch.uint8)
    kept = {"rng": rng, "note": "kept"}
    reference = write(Job(client_state=kept), tmp_path / "like")
    streamshard.convert(reference, tmp_path / "like.zarr", codec="zstd")
    saved(Job()).write(tmp_path / "dcp")
    for number, like in enumerate((reference, tmp_path / "like.zarr")):
        out = tmp_path / f"out{number}"
        streamshard.repartition(tmp_path / "dcp", out, world_size=2, like=like)
        held = load(out / "dcp" / "mp_rank_00_model_states.pt")
        assert torch.equal(held["rng"], rng)
        assert held["note"] == "kept"


def without(made: Saved, name: str) -> Saved:
    """Leave a tensor out of the model."""
    del made.tensors[f"model.{name}"]
    del made.paths[f"model.{name}"]
    return made


def test_a_tensor_that_is_missing_is_named(tmp_path: Path) -> None:
    reference = write(Job(), tmp_path / "like")
    without(saved(Job()), "norm.count").write(tmp_path / "dcp")
    with pytest.raises(DisagreementError, match=r"dcp: lacks what .* has: norm\.count"):
        streamshard.convert(tmp_path / "dcp", tmp_path / "o.zarr", like=reference)


def test_a_tensor_too_many_is_named(tmp_path: Path) -> None:
    reference = write(Job(), tmp_path / "like")
    more = {**BESIDE, "lora.weight": torch.zeros(3)}
    saved(Job(), buffers=more).write(tmp_path / "dcp")
    with pytest.raises(
        DisagreementError,
        match=r"dcp: the checkpoint .* lacks what is in it: lora\.w",
    ):
        streamshard.convert(tmp_path / "dcp", tmp_path / "o.zarr", like=reference)


def test_another_shape_is_named(tmp_path: Path) -> None:
    reference = write(Job(), tmp_path / "like")
    other = {**BESIDE, "rotary.inv_freq": torch.zeros(9)}
    saved(Job(), buffers=other).write(tmp_path / "dcp")
    with pytest.raises(DisagreementError, match=r"'rotary\.inv_freq' is \[9\], in .* \[8\]"):
        streamshard.convert(tmp_path / "dcp", tmp_path / "o.zarr", like=reference)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([[*GROUPS[0], *GROUPS[1]]], "are in one param group, in .* in two"),
        ([GROUPS[0][:1], GROUPS[0][1:], GROUPS[1]], "in .* they are in one param group"),
        ([GROUPS[0]], "is in no param group of it"),
    ],
)
def test_other_param_groups_are_refused(
    groups: list[list[str]], message: str, tmp_path: Path
) -> None:
    reference = write(Job(), tmp_path / "like")
    saved(Job(), groups=groups).write(tmp_path / "dcp")
    with pytest.raises(StreamshardError, match=message):
        streamshard.convert(tmp_path / "dcp", tmp_path / "o.zarr", like=reference)


def test_16_bit_masters_are_refused(tmp_path: Path) -> None:
    reference = write(Job(), tmp_path / "like")
    made = saved(Job())
    tensor, boxes = made.tensors["model.embed.bias"]
    made.tensors["model.embed.bias"] = tensor.bfloat16(), boxes
    made.write(tmp_path / "dcp")
    with pytest.raises(UnsupportedError, match=r"'embed\.bias' is bfloat16.*float32"):
        streamshard.convert(tmp_path / "dcp", tmp_path / "o.zarr", like=reference)


def test_a_model_without_an_optimizer_is_refused(tmp_path: Path) -> None:
    reference = write(Job(), tmp_path / "like")
    made = saved(Job())
    weights = {k: v for k, v in made.tensors.items() if k.startswith("model.")}
    Saved(weights).write(tmp_path / "dcp")
    with pytest.raises(UnsupportedError, match="holds no states of an optimizer"):
        streamshard.convert(tmp_path / "dcp", tmp_path / "o.zarr", like=reference)


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (Job(parts=2), "cut by tensor or pipeline parallelism"),
    ],
)
def test_references_that_tell_too_little_are_refused(
    job: Job, message: str, tmp_path: Path
) -> None:
    reference = write(job, tmp_path / "like")
    saved(Job()).write(tmp_path / "dcp")
    with pytest.raises(UnsupportedError, match=message):
        streamshard.convert(tmp_path / "dcp", tmp_path / "o.zarr", like=reference)
