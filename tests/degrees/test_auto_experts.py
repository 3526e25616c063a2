"""Experts that AutoEP fuses: on other ranks, in stores and exports, and what is refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import streamshard
from streamshard.errors import StreamshardError, UnsupportedError, UsageError
from tests.comparing import compare
from tests.fabricated import edit, edit_all, edit_optimizers, optimizer_file, wrapped
from tests.fabricated_auto_experts import ON_2, WEIGHTS, AutoExpertsJob, fused, write_auto
from tests.job import TAG, ds_config, values

COUNT = 4
VARIANTS = {
    "stage-1": (replace(ON_2, stage=1), 1),
    "round-robin": (replace(ON_2, round_robin=True, alignment=True), 2),
    "data-first": (replace(ON_2, data_before_experts=True), 4),
    "sub-groups": (replace(ON_2, stage=3, sub_group_size=30), 2),
    "stage-3-data-first": (replace(ON_2, stage=3, data_before_experts=True), 4),
}
"""Jobs, and over how many ranks their experts are spread."""
MODEL = f"{TAG}/mp_rank_00_model_states.pt"


def spread(job: AutoExpertsJob, degree: int, world_size: int) -> AutoExpertsJob:
    """Return the same job with its experts over another count of ranks."""
    return replace(
        job, world_size=world_size, experts=fused(COUNT // degree), expert_parallel=degree
    )


def drop_ids(content: dict[str, Any]) -> None:
    """Leave out the numbers by which an engine knows the ends of sub-groups.

    Those of other parameters are not known.
    """
    for master in content["optimizer_state_dict"]["fp32_flat_groups"]:
        vars(master).pop("ds_id", None)


@pytest.mark.parametrize(("job", "degree"), VARIANTS.values(), ids=VARIANTS)
def test_the_files_are_those_of_the_job_with_other_ranks(
    tmp_path: Path, job: AutoExpertsJob, degree: int
) -> None:
    """With another degree and with the same, from either road."""
    run, store = write_auto(spread(job, degree, 4), tmp_path / "run"), tmp_path / "run.zarr"
    streamshard.convert(run, store, chunk_size=100)
    targets = {1: [(2, 6), (1, 3)], 2: [(1, 3), (2, 8)], 4: [(4, 8), (2, 2)]}
    for source, (target, ranks) in zip((run, store), targets[degree], strict=True):
        wanted, out = tmp_path / f"wanted-{target}", tmp_path / f"out-{target}"
        write_auto(replace(spread(job, target, ranks), garbage=False), wanted)
        asked = None if target == degree else target
        streamshard.repartition(source, out, world_size=ranks, expert_parallel=asked)
        assert streamshard.verify(out, against=source).is_good
        if job.sub_group_size < 1000:
            for run_dir in (out, wanted):
                edit_all(run_dir, "*_optim_states.pt", drop_ids)
        compare(out / TAG, wanted / TAG)


def test_reading_verbs_see_each_expert(tmp_path: Path) -> None:
    run = write_auto(ON_2, tmp_path / "run")
    report = streamshard.inspect(run)
    assert (report.expert_parallel, report.world_size) == (2, 4)
    assert streamshard.verify(run).problems == ()
    other = write_auto(spread(ON_2, 4, 4), tmp_path / "other")
    assert streamshard.verify(run, against=other).is_good
    wanted = {
        f"{name}.{number}": values("fp32", f"{name}.{number}", shape[1:])
        for name, shape in ON_2.experts
        for number in range(COUNT)
    }
    streamshard.export(run, tmp_path / "weights")
    exported = safetensors.torch.load_file(tmp_path / "weights" / "model.safetensors")
    with streamshard.open(run) as checkpoint:
        for name, value in wanted.items():
            assert torch.equal(exported[name], value)
            assert (checkpoint[name].fp32[...] == value.numpy()).all()


def test_one_element_of_an_expert_differs(tmp_path: Path) -> None:
    run = write_auto(ON_2, tmp_path / "run")
    other = write_auto(spread(ON_2, 4, 4), tmp_path / "other")

    def add_one(content: dict[str, Any]) -> None:
        with torch.no_grad():
            content["optimizer_state_dict"]["single_partition_of_fp32_groups"][-1][7] += 1

    edit(optimizer_file(other, 3), add_one)
    report = streamshard.verify(run, against=other)
    assert [(d.name, d.count) for d in report.differences] == [("state/fp32/mlp.experts.w1.3", 1)]


def placed(change: Callable[[Any], object]) -> Callable[[Path], None]:
    """Change the layer of experts that the model file notes."""
    return lambda run: edit(run / MODEL, lambda content: change(content["ds_autoep_layers"][0]))


def place(layer: dict[str, Any], *ranks: list[Any]) -> None:
    listed = [{"rank": rank, "experts": experts} for rank, experts in enumerate(ranks)]
    layer["expert_placement"]["ranks"] = listed


def freeze(run: Path) -> None:
    """Leave the experts out of the param groups."""
    edit(run / MODEL, lambda content: content["param_shapes"][-1].pop("mlp.experts.w2"))


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "no-layers": (
        lambda run: edit(run / MODEL, lambda content: content.update(ds_autoep_layers={"a": 1})),
        r"its 'ds_autoep_layers' is no list",
    ),
    "nameless": (placed(lambda e: e.update(expert_key_prefix="moe")), "layer of experts under 'm"),
    "form": (
        placed(lambda e: e.update(checkpoint_format="zero3_partitioned")),
        "saved as 'zero3_partitioned', at stage 2",
    ),
    "no-placement": (placed(lambda e: e.pop("expert_placement")), "is of version None, not 1"),
    "version": (placed(lambda e: e["expert_placement"].update(version=2)), "of version 2, not 1"),
    "count": (placed(lambda e: e.update(num_experts=6)), "is not of 6 experts on 2 ranks"),
    "ranks": (placed(lambda e: place(e, [0, 1, 2, 3])), "lists 1 ranks, and is not of 4"),
    "huge": (placed(lambda e: place(e, [0, 10**12], [2, 3])), "some are on several ranks, or on n"),
    "no-number": (placed(lambda e: place(e, [0, "1"], [2, 3])), "has experts without a number"),
    "twice": (placed(lambda e: place(e, [0, 1], [1, 2, 3])), "the ranks have 5 experts"),
    "uneven": (placed(lambda e: place(e, [0], [1, 2, 3])), r"the ranks have \[1, 3\] experts"),
    "frozen": (freeze, "the experts 'mlp.experts.w2' are frozen"),
    "shape": (
        lambda run: edit(
            run / MODEL,
            lambda content: content["param_shapes"][-1].update({"mlp.experts.w2": (1, 8, 5)}),
        ),
        r"'mlp.experts.w2' has shape \[1, 8, 5\], and 2 experts on a rank",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_placement_that_cannot_be_is_refused(name: str, tmp_path: Path) -> None:
    run = write_auto(ON_2, tmp_path / "run")
    change, message = REFUSED[name]
    change(run)
    with pytest.raises(StreamshardError, match=message):
        streamshard.inspect(run)


def test_experts_of_a_group_that_is_not_of_experts_are_refused(tmp_path: Path) -> None:
    run = write_auto(spread(ON_2, 1, 4), tmp_path / "run")

    def share(content: dict[str, Any]) -> None:
        wrapped(content["optimizer_state_dict"])["param_groups"][-1].pop("moe")

    edit_all(run, "*_optim_states.pt", share)
    with pytest.raises(StreamshardError, match="on 1 ranks, and their param group is of no expert"):
        streamshard.inspect(run)


def test_experts_in_another_order_stay_on_their_ranks(tmp_path: Path) -> None:
    """Whichever ranks have them, each is what it is; only where they go is then unknown."""
    run = write_auto(ON_2, tmp_path / "run")
    placed(lambda layer: place(layer, [3, 0], [1, 2]))(run)
    streamshard.export(run, tmp_path / "weights")
    exported = safetensors.torch.load_file(tmp_path / "weights" / "model.safetensors")
    value = values("fp32", "mlp.experts.w1.2", WEIGHTS["w1"])  # as the third one it was written
    assert torch.equal(exported["mlp.experts.w1.1"], value)
    streamshard.repartition(run, tmp_path / "out", world_size=2)
    assert streamshard.verify(tmp_path / "out", against=run).is_good
    with pytest.raises(UnsupportedError, match="not ordered expert by expert"):
        streamshard.repartition(run, tmp_path / "more", world_size=4, expert_parallel=4)


def test_notes_that_no_engine_made_stay_as_they_are(tmp_path: Path) -> None:
    run = write_auto(ON_2, tmp_path / "run")
    placed(lambda layer: layer.update(global_expert_end=3))(run)
    streamshard.repartition(run, tmp_path / "out", world_size=2)
    with pytest.raises(UnsupportedError, match="the 'global_expert_end' of the experts"):
        streamshard.repartition(run, tmp_path / "more", world_size=4, expert_parallel=4)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"enabled": True, "autoep_size": 4}, "autoep_size 4, .* over 2 .*expert_parallel=4"),
        ({"enabled": True}, "autoep_size 1, the experts are over 2 ranks"),
        ({"enabled": False}, "does not have AutoEP on"),
        (None, "does not have AutoEP on"),
    ],
)
def test_a_job_that_spreads_them_otherwise_is_refused(
    section: dict[str, Any] | None, message: str, tmp_path: Path
) -> None:
    run, path = write_auto(ON_2, tmp_path / "run"), tmp_path / "config.json"
    given = {**ds_config(ON_2), "expert_parallel": {"enabled": True, "autoep_size": 2}}
    path.write_text(json.dumps(given))
    streamshard.repartition(run, tmp_path / "out", world_size=2, ds_config_file=path)
    path.write_text(json.dumps({**given, "expert_parallel": section}))
    with pytest.raises(UsageError, match=message):
        streamshard.repartition(run, tmp_path / "more", world_size=2, ds_config_file=path)


def test_param_groups_are_divided_between_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A parameter of two experts has 40 elements, which stay together."""
    groups = "streamshard.formats.deepspeed.model_parallel.expert_groups.GROUP_NUMEL"
    monkeypatch.setattr(groups, 100)
    job = replace(ON_2, max_group=100, rates="base_lrs")
    runs = {d: write_auto(spread(job, d, 4), tmp_path / f"on-{d}") for d in (1, 2, 4)}
    for degree in (1, 4):
        out = tmp_path / f"to-{degree}"
        streamshard.repartition(runs[2], out, world_size=4, expert_parallel=degree)
        compare(out / TAG, runs[degree] / TAG)


def share_otherwise(content: dict[str, Any]) -> None:
    content["optimizer_state_dict"]["ds_zero_partition_groups"][-1]["partition_ranks"] = [0, 1]


def test_experts_of_stage_3_stay_at_it(tmp_path: Path) -> None:
    """Only below it have they files of their own."""
    job = replace(ON_2, stage=3)
    run = write_auto(job, tmp_path / "run")
    for saved, stage in ((run, 2), (write_auto(ON_2, tmp_path / "other"), 3)):
        with pytest.raises(UsageError, match=f"to {stage} is not supported; keep the stage"):
            streamshard.repartition(saved, tmp_path / "out", world_size=2, zero_stage=stage)
    streamshard.export(run, tmp_path / "weights")
    exported = safetensors.torch.load_file(tmp_path / "weights" / "model.safetensors")
    value = values("fp32", "mlp.experts.w2.3", WEIGHTS["w2"])
    assert torch.equal(exported["mlp.experts.w2.3"], value)


def test_sub_groups_that_other_ranks_share_are_refused(tmp_path: Path) -> None:
    run = write_auto(replace(ON_2, stage=3), tmp_path / "run")
    edit(optimizer_file(run, 0), share_otherwise)
    with pytest.raises(
        StreamshardError, match=r"ranks \[0, 1\] share .* by its config ranks \[0, 2"
    ):
        streamshard.inspect(run)


def test_states_that_cannot_be_cut_are_archived_for_each_sub_group(tmp_path: Path) -> None:
    job = replace(ON_2, stage=3, sub_group_size=50)
    run, store = write_auto(job, tmp_path / "run"), tmp_path / "store.zarr"

    def with_lists(state: dict[str, Any]) -> None:
        for held in wrapped(state)["state"].values():
            held["exp_avg"] = [held["exp_avg"]]

    edit_optimizers(run, with_lists)
    streamshard.convert(run, store, verify=True)
    streamshard.repartition(store, tmp_path / "out")
    assert streamshard.verify(tmp_path / "out", against=run).is_good
