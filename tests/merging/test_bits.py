"""What a merge writes is, bit for bit, what a job with the mean of the weights would have saved."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import streamshard
from tests.comparing import compare
from tests.fabricated import edit, load, write
from tests.job import JOBS, Job
from tests.merging.means import Merged, mean, save

STAGES = ((2, 2), (3, 3), (1, 4), (3, 2), (2, 3), (1, 1), (3, 1), (2, 4))
"""ZeRO stage and world size of one checkpoint after another."""


def trained(count: int) -> list[Job]:
    """Make jobs that go on from one another, on other ranks each time."""
    return [Job(stage=s, world_size=w, step=5 + n) for n, (s, w) in enumerate(STAGES[:count])]


def wanted(job: Merged, place: Path) -> Path:
    """Save what a merge should write; returns the tag directory."""
    tag = f"global_step{job.step}"
    return write(job, place, tag) / tag


@pytest.mark.parametrize(("count", "stage", "ranks"), [(1, 2, 2), (2, 3, 4), (8, 1, 3)])
def test_of_one_to_eight_checkpoints_for_every_stage(
    count: int, stage: int, ranks: int, tmp_path: Path
) -> None:
    jobs = trained(count)
    weights = [(1 + n) / sum(range(1, count + 1)) for n in range(count)]
    options: dict[str, Any] = {"world_size": ranks, "zero_stage": stage}
    sources, job = save(jobs, tmp_path), Merged.of(jobs, weights)
    streamshard.merge(sources, tmp_path / "out", weights=weights, **options)
    streamshard.repartition(wanted(job, tmp_path / "mean"), tmp_path / "wanted", **options)
    tag = f"global_step{job.step}"
    compare(tmp_path / "out" / tag, tmp_path / "wanted" / tag)


def test_shards_and_stores_give_the_same_bytes(tmp_path: Path) -> None:
    jobs = trained(3)
    shards, stores = save(jobs, tmp_path), [tmp_path / f"{n}.zarr" for n in range(3)]
    for shard, store in zip(shards, stores, strict=True):
        streamshard.convert(shard, store, codec="zstd", chunk_size=50)
    mixed = [shards[0], stores[1], shards[2]]
    found = []
    for number, sources in enumerate((shards, mixed)):
        outs = tmp_path / f"{number}-of.zarr", tmp_path / f"{number}-run"
        streamshard.merge(sources, outs[0], verify=True, chunk_size=40)
        streamshard.merge(sources, outs[1], world_size=3, verify=True)
        streamshard.repartition(outs[0], tmp_path / f"{number}-again", world_size=3)
        compare(tmp_path / f"{number}-again" / "global_step7", outs[1] / "global_step7")
        found.append({p.name: p.read_bytes() for p in (outs[1] / "global_step7").iterdir()})
    assert found[0] == found[1]
    job = Merged.of(jobs, [1 / 3] * 3, world_size=3)
    compare(tmp_path / "0-run" / "global_step7", wanted(job, tmp_path / "wanted"))


def test_stores_in_one_file_are_merged_into_one_file(tmp_path: Path) -> None:
    jobs = trained(2)
    sources, stores = save(jobs, tmp_path), [tmp_path / f"{n}.zarr.zip" for n in range(2)]
    for source, store in zip(sources, stores, strict=True):
        streamshard.convert(source, store)
    out = tmp_path / "out.zarr.zip"
    assert streamshard.merge(stores, out, verify=True).bytes_written
    assert out.is_file()
    streamshard.repartition(out, tmp_path / "run", world_size=3)
    job = Merged.of(jobs, [0.5, 0.5], world_size=3)
    compare(tmp_path / "run" / "global_step6", wanted(job, tmp_path / "wanted"))


def test_the_bytes_depend_neither_on_workers_nor_on_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = trained(3)
    sources, found = save(jobs, tmp_path), []
    for workers, step in ((1, 1 << 15), (4, 3)):
        monkeypatch.setattr("streamshard.merging.weighted_mean._STEP_NUMEL", step)
        out = tmp_path / f"out-{workers}"
        streamshard.merge(sources, out, weights="1-sqrt", workers=workers)
        found.append({p.name: p.read_bytes() for p in (out / "global_step7").iterdir()})
    assert found[0] == found[1]


def test_one_checkpoint_with_the_weight_1_stays_as_it_is(tmp_path: Path) -> None:
    """Also zeros below zero, and numbers too small for a full mantissa."""
    run = write(Job(), tmp_path / "run")

    def change(held: dict[str, Any]) -> None:
        for master in held["optimizer_state_dict"]["single_partition_of_fp32_groups"]:
            master.data[0] = -0.0
            master.data[1:2] = 1e-45

    path = run / "global_step7" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    edit(path, change)
    streamshard.repartition(run, tmp_path / "same", world_size=2)
    for weights in ("mean", [1.0], "ema:0.9", "cosine"):
        out = tmp_path / f"out-{weights}"
        streamshard.merge(run, out, weights=weights)
        found = _masters(out / "global_step7" / path.name)
        assert found == _masters(tmp_path / "same" / "global_step7" / path.name)
        assert np.float32(-0.0).tobytes() in found


def _masters(path: Path) -> bytes:
    held = load(path)["optimizer_state_dict"]["single_partition_of_fp32_groups"]
    return b"".join(master.detach().numpy().tobytes() for master in held)


@pytest.mark.parametrize("states", ["newest", "mean"])
def test_states_are_the_newest_s_or_means(states: str, tmp_path: Path) -> None:
    jobs, weights = trained(3), [0.5, 0.25, 0.25]
    sources = save(jobs, tmp_path)
    streamshard.merge(sources, tmp_path / "out", weights=weights, states=states, world_size=2)
    averaged = ("fp32", "exp_avg", "exp_avg_sq") if states == "mean" else ("fp32",)
    job = Merged.of(jobs, weights, averaged, world_size=2)
    compare(tmp_path / "out" / "global_step7", wanted(job, tmp_path / "wanted"))


def test_sums_are_in_the_order_given_and_the_newest_is_that_of_the_highest_step(
    tmp_path: Path,
) -> None:
    jobs, weights = trained(4), [0.4, 0.3, 0.2, 0.1]
    sources = save(jobs, tmp_path)
    for number, order in enumerate(itertools.islice(itertools.permutations(range(4)), 0, 24, 13)):
        out = tmp_path / f"out-{number}"
        streamshard.merge([sources[n] for n in order], out, weights=weights, world_size=2)
        job = Merged.of([jobs[n] for n in order], weights, world_size=2)
        compare(out / "global_step8", wanted(job, tmp_path / f"wanted-{number}"))


def test_of_two_of_one_step_the_last_one_is_the_newest(tmp_path: Path) -> None:
    """As two runs that were trained with other seeds."""
    jobs = [Job(step=5), Job(step=5, world_size=3)]
    one, other = (write(job, tmp_path / str(job.world_size), "same") for job in jobs)
    streamshard.merge([one, other], tmp_path / "out")
    assert streamshard.inspect(tmp_path / "out").world_size == 3


@pytest.mark.parametrize("name", ["tensor-2", "tensor-3"])
def test_parts_of_tensors_are_merged_part_by_part(name: str, tmp_path: Path) -> None:
    jobs = [replace(JOBS[name], step=step) for step in (5, 6)]
    weights = [0.5, 0.5]
    streamshard.merge(save(jobs, tmp_path), tmp_path / "out", weights=weights)
    compare(tmp_path / "out" / "global_step6", wanted(Merged.of(jobs, weights), tmp_path / "w"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_copies_of_other_dtypes_follow_from_the_means(dtype: torch.dtype, tmp_path: Path) -> None:
    jobs = [Job(dtype=dtype, step=step) for step in (5, 6, 9)]
    weights = [0.1, 0.2, 0.7]
    streamshard.merge(save(jobs, tmp_path), tmp_path / "out", weights=weights)
    compare(tmp_path / "out" / "global_step9", wanted(Merged.of(jobs, weights), tmp_path / "w"))


def weights_of(directory: Path) -> dict[str, torch.Tensor]:
    return dict(load_file(directory / "model.safetensors"))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_weights_are_exported_as_of_the_merged_checkpoint(dtype: str, tmp_path: Path) -> None:
    jobs = trained(3)
    sources = save(jobs, tmp_path)
    options = {"format": "safetensors", "dtype": dtype}
    streamshard.merge(sources, tmp_path / "direct", verify=True, **options)  # type: ignore[arg-type]
    streamshard.merge(sources, tmp_path / "run")
    streamshard.export(tmp_path / "run", tmp_path / "later", dtype=dtype)
    direct, later = (tmp_path / name / "model.safetensors" for name in ("direct", "later"))
    assert direct.read_bytes() == later.read_bytes()
    name = "block.0.mlp"
    means = mean([job.values("fp32", name) for job in jobs], [1 / 3] * 3)
    cast = means.to({"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
    assert torch.equal(weights_of(tmp_path / "direct")[name], cast)


@pytest.mark.parametrize("form", ["universal", "dcp"])
def test_older_checkpoints_may_be_of_other_kinds(form: str, tmp_path: Path) -> None:
    jobs, weights = trained(2), [0.25, 0.75]
    older, newer = save(jobs, tmp_path)
    streamshard.export(older, tmp_path / "older", format=form)
    streamshard.merge([tmp_path / "older", newer], tmp_path / "out", weights=weights, verify=True)
    compare(tmp_path / "out" / "global_step6", wanted(Merged.of(jobs, weights), tmp_path / "w"))


def test_models_without_an_optimizer_are_merged_too(tmp_path: Path) -> None:
    jobs = trained(2)
    models = [tmp_path / f"model-{n}" for n in range(2)]
    for source, model in zip(save(jobs, tmp_path), models, strict=True):
        streamshard.export(source, model)
    streamshard.merge(models, tmp_path / "out", weights=[0.25, 0.75], format="safetensors")
    found = weights_of(tmp_path / "out")
    for name in ("embed.weight", "block.1.bias"):
        both = [job.values("fp32", name) for job in jobs]
        assert torch.equal(found[name], mean(both, [0.25, 0.75]))
