"""What cannot be merged is refused by name, and no target comes of it."""

import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import streamshard
from streamshard.errors import (
    DisagreementError,
    IncompleteError,
    IntegrityError,
    MemoryLimitError,
    UnsupportedError,
    UsageError,
)
from streamshard.merging.merge import coefficients
from tests.comparing import compare
from tests.fabricated import edit, edit_optimizers, without_zero, write, write_dumps
from tests.job import JOBS, TAG, Job
from tests.merging.means import Merged, save

JOBS_OF_TWO = (Job(stage=2, step=5), Job(stage=3, world_size=3, step=6))


@pytest.fixture
def two(tmp_path: Path) -> list[Path]:
    """Two tag directories."""
    return save(JOBS_OF_TWO, tmp_path)


def spoil(tag: Path, value: float) -> None:
    """Change an element of the last parameter of the second group, `block.1.bias`."""

    def change(held: dict[str, Any]) -> None:
        held["optimizer_state_dict"]["single_partition_of_fp32_groups"][1].data[3] = value

    edit(tag / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", change)


@pytest.mark.parametrize(
    ("value", "target"), [(math.nan, "out"), (math.inf, "out.zarr"), (math.nan, "model")]
)
def test_what_is_no_number_is_refused(
    value: float, target: str, two: list[Path], tmp_path: Path
) -> None:
    spoil(two[0], value)
    form = {"format": "safetensors"} if target == "model" else {}
    for _ in range(2):  # and a rerun does not go on past it
        with pytest.raises(
            IntegrityError, match=rf"'block\.\d\.bias', element \d: is {value}"
        ) as e:
            streamshard.merge(two, tmp_path / target, **form)  # type: ignore[arg-type]
        assert str(e.value).startswith(str(two[0]))
        assert e.value.exit_code == 6
        assert not (tmp_path / target).exists()
    shutil.rmtree(two[0].parent)
    save(JOBS_OF_TWO[:1], tmp_path)
    streamshard.merge(two, tmp_path / target, overwrite=True, verify=True, **form)  # type: ignore[arg-type]


def test_what_is_no_number_in_states_is_refused_only_where_they_are_merged(
    two: list[Path], tmp_path: Path
) -> None:
    def change(state: dict[str, Any]) -> None:
        state["base_optimizer_state"]["state"][0]["exp_avg_sq"][0] = math.nan

    edit(
        two[0] / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
        lambda held: change(held["optimizer_state_dict"]),
    )
    streamshard.merge(two, tmp_path / "out")
    with pytest.raises(IntegrityError, match=r"exp_avg_sq of 'embed.weight', element 0: is nan"):
        streamshard.merge(two, tmp_path / "other", states="mean")


def test_a_sum_that_is_too_large_is_refused(two: list[Path], tmp_path: Path) -> None:
    spoil(two[0], 3e38)
    with pytest.raises(IntegrityError, match="too large for float32"):
        streamshard.merge(two, tmp_path / "out", weights=[3.0, -2.0])


def test_another_sum_than_1_is_refused(two: list[Path], tmp_path: Path) -> None:
    """Weights may be negative, as to go on into the direction in which the last steps went."""
    with pytest.raises(UsageError, match=r"their sum is 0\.5, not 1; give weights that add up"):
        streamshard.merge(two, tmp_path / "out", weights=[-1.0, 1.5])
    weights = [-0.5, 1.5]
    streamshard.merge(two, tmp_path / "out", weights=weights)
    job = Merged.of(JOBS_OF_TWO, weights)
    compare(tmp_path / "out" / "global_step6", write(job, tmp_path / "w", "t") / "t")


@pytest.mark.parametrize(
    ("asked", "count", "message"),
    [
        ("0.5,0.5", 3, "2 weights, and 3 checkpoints"),
        ("0.3,0.3,0.3", 3, "their sum is 0.9, not 1"),
        ("half", 2, "choose one of mean, linear, 1-sqrt, cosine, ema:0.9, or numbers"),
        ("nan,1", 2, "choose one of"),
        ("inf,-inf", 2, "choose one of"),
        ("", 1, "choose one of"),
        ("ema:", 2, "choose one of"),
        ("ema:1", 2, "give a part that is kept"),
        ("ema:-0.1", 2, "give a part that is kept"),
    ],
)
def test_weights_that_make_no_sense(asked: str, count: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        coefficients(asked, count)


@pytest.mark.parametrize("weights", [[0.5, "half"], [0.5, None], 5, None])
def test_weights_that_are_no_numbers(weights: Any, tmp_path: Path) -> None:  # noqa: ANN401
    with pytest.raises(UsageError, match=r"weights=.*: choose one of mean"):
        streamshard.merge(["one", "other"], tmp_path / "out", weights=weights)


def test_at_least_one_checkpoint_is_given(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no checkpoint to merge is given"):
        streamshard.merge([], tmp_path / "out")


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_the_weights_of_a_decay_are_how_its_rates_fall(count: int) -> None:
    """What was learned between two checkpoints counts as its rate: by the sum of later weights."""
    rates: dict[str, Callable[[float], float]] = {
        "1-sqrt": lambda t: 1 - t**0.5,
        "linear": lambda t: 1 - t,
        "cosine": lambda t: 0.5 + math.cos(math.pi * t) / 2,
        "mean": lambda t: 1 - t,
    }
    for name, rate in rates.items():
        found = coefficients(name, count)
        assert sum(found) == pytest.approx(1)
        for first in range(count):
            assert sum(found[first:]) == pytest.approx(rate(first / count))


def test_an_exponential_mean_is_what_its_steps_make() -> None:
    values = [3.0, 1.0, 4.0, 1.0, 5.0]
    average = values[0]
    for value in values[1:]:
        average = 0.9 * average + 0.1 * value
    both = zip(coefficients("ema:0.9", 5), values, strict=True)
    assert sum(weight * value for weight, value in both) == pytest.approx(average)


@pytest.mark.parametrize("weights", ["1-sqrt", "ema:0.9"])
def test_weights_by_age_take_the_oldest_first(
    weights: str, two: list[Path], tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="the steps are 6, 5; give the oldest first"):
        streamshard.merge(two[::-1], tmp_path / "out", weights=weights)
    streamshard.merge(two, tmp_path / "out", weights=weights)


OTHERS: dict[str, tuple[Job, str]] = {
    "a name": (replace(Job(), groups=((("embed.weight", (11, 4)),),), tied={}), "lacks fp32 of 'b"),
    "one more": (
        replace(Job(), groups=(*Job().groups, (("new", (3,)),))),
        "has fp32 of 'new', which .* lacks",
    ),
    "a shape": (
        replace(Job(), groups=((("embed.weight", (4, 11)), *Job().groups[0][1:]), Job().groups[1])),
        r"fp32 of 'embed.weight' is \[4, 11\], in .* \[11, 4\]",
    ),
    "parts": (JOBS["tensor-2"], "2 tensor or pipeline parallel parts, .* has 1"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_tensors_that_do_not_match_are_named(what: str, two: list[Path], tmp_path: Path) -> None:
    job, message = OTHERS[what]
    other = write(replace(job, step=4), tmp_path / "other", "t") / "t"
    with pytest.raises(DisagreementError, match=message) as caught:
        streamshard.merge([other, *two], tmp_path / "out")
    assert str(caught.value).startswith(str(other))


KINDS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "experts": (lambda place: write(JOBS["expert-2"], place), "files of experts with weights"),
    "stage 0": (lambda place: without_zero(write(Job(), place)), "stage 0"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_copies_that_would_not_be_merged_are_refused(kind: str, tmp_path: Path) -> None:
    make, message = KINDS[kind]
    runs = [make(tmp_path / str(number)) for number in range(2)]
    for name in ("out", "out.zarr"):
        with pytest.raises(UnsupportedError, match=f"{message}.*format=safetensors"):
            streamshard.merge(runs, tmp_path / name)


def test_dumps_and_models_are_refused_where_a_job_resumes(tmp_path: Path) -> None:
    run = write(Job(), tmp_path / "run")
    dumps = write_dumps(run, tmp_path / "dumps")
    streamshard.export(run, tmp_path / "model")
    with pytest.raises(UnsupportedError, match="raw dumps, without the model's files"):
        streamshard.merge([run, dumps], tmp_path / "out")
    with pytest.raises(UnsupportedError, match="a job begins with them"):
        streamshard.merge([tmp_path / "model"], tmp_path / "out")
    both = [tmp_path / "model", run]
    for sources, message in ((both, "lacks fp32 of"), (both[::-1], "has fp32 of .* lacks")):
        with pytest.raises(DisagreementError, match=message):
            streamshard.merge(sources, tmp_path / "out", format="safetensors")


@pytest.mark.parametrize("options", [{}, {"format": "universal"}])
def test_what_a_job_lacks_is_supplied_first(options: dict[str, Any], tmp_path: Path) -> None:
    """`merge` has no option for a reference, so it advises the command that has one."""
    runs = [write(Job(step=step), tmp_path / f"run{step}") for step in (5, 6)]
    newest = tmp_path / "dcp"
    streamshard.export(runs[1], newest, format="dcp")
    with pytest.raises(UnsupportedError) as refusal:
        streamshard.merge([runs[0], newest], tmp_path / "out", **options)
    advice = f" by streamshard repartition {newest} OUT --world-size N --like RUN"
    assert str(refusal.value).endswith(advice)
    streamshard.repartition(newest, tmp_path / "OUT", world_size=2, like=runs[1])
    streamshard.merge([runs[0], tmp_path / "OUT"], tmp_path / "out", **options)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int32, torch.uint8])
def test_quantized_weights_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    """A mean of their scales alone, next to the weights of one of them, would be of no model."""
    models = [tmp_path / "one", tmp_path / "other"]
    for number, model in enumerate(models):
        model.mkdir()
        held = {"seen": torch.arange(3) + number, "scale": torch.ones(3) + number}
        held["w"] = torch.full((3, 3), number + 1.0).to(dtype)
        save_file(held, model / "model.safetensors")
    with pytest.raises(UnsupportedError, match=r"weights have no mean|which has no mean"):
        streamshard.merge(models, tmp_path / "out", format="safetensors")
    assert not (tmp_path / "out").exists()
    for model in models:
        held = load_file(model / "model.safetensors")
        save_file({**held, "w": torch.ones(3, 3).int()}, model / "model.safetensors")
    done = streamshard.merge(models, tmp_path / "out", format="safetensors")
    assert any("has other values of 'seen'" in note for note in done.notes)


def test_one_checkpoint_is_not_given_twice(two: list[Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"{two[0]}: given twice"):
        streamshard.merge([two[0], two[1], two[0].parent], tmp_path / "out")


def test_a_target_in_any_of_the_sources_is_refused(two: list[Path]) -> None:
    for place in two:
        for target in (place, place / "out", place.parent):
            with pytest.raises(UsageError, match="choose another place"):
                streamshard.merge(two, target, overwrite=True)


@pytest.mark.parametrize(
    ("target", "options"),
    [
        ("a.zarr", {"world_size": 2}),
        ("a.zarr", {"dtype": "bf16"}),
        ("a", {"codec": "zstd"}),
        ("a", {"dtype": "bf16"}),
        ("a", {"dtype": "fp32"}),
        ("a", {"format": "torch", "zero_stage": 2}),
    ],
)
def test_options_of_another_target_are_refused(
    target: str, options: dict[str, Any], two: list[Path], tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="is of no use for"):
        streamshard.merge(two, tmp_path / target, **options)


def test_states_without_a_mean_are_refused(two: list[Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="weights alone have no optimizer states"):
        streamshard.merge(two, tmp_path / "out", states="mean", format="safetensors")
    with pytest.raises(UsageError, match="a second moment may become negative"):
        streamshard.merge(two, tmp_path / "out", states="mean", weights=[-1, 2])

    def with_greatest(state: dict[str, Any]) -> None:
        for held in state["base_optimizer_state"]["state"].values():
            held["max_exp_avg_sq"] = held["exp_avg_sq"].clone()

    run = write(Job(), tmp_path / "run")
    edit_optimizers(run, with_greatest)
    with pytest.raises(UnsupportedError, match="a mean of max_exp_avg_sq has no meaning"):
        streamshard.merge([two[0], run], tmp_path / "out", states="mean")

    def with_list_in_one_group(state: dict[str, Any]) -> None:
        held = state["base_optimizer_state"]["state"][0]
        held["exp_avg"] = [held["exp_avg"]]

    run = write(Job(), tmp_path / "lists")
    edit_optimizers(run, with_list_in_one_group)
    with pytest.raises(UnsupportedError, match="not all states have a mean: optimizer state"):
        streamshard.merge([two[0], run], tmp_path / "out", states="mean")


def test_too_little_memory_is_refused_before_anything_is_read(
    two: list[Path], tmp_path: Path
) -> None:
    with pytest.raises(MemoryLimitError, match="Nothing was read or written"):
        streamshard.merge(two, tmp_path / "out", memory_limit=20 << 20, workers=1)
    assert not list(tmp_path.glob("out*"))


def test_buffers_and_frozen_weights_are_the_newest_s_and_differences_are_told(
    tmp_path: Path,
) -> None:
    jobs = [Job(step=5), Job(step=6)]
    older, newer = save(jobs, tmp_path)

    def change(model: dict[str, Any]) -> None:
        model["module"]["rotary.inv_freq"] += 1

    edit(older / "mp_rank_00_model_states.pt", change)
    done = streamshard.merge([older, newer], tmp_path / "out")
    told = [note for note in done.notes if "not averaged" in note]
    assert len(told) == 1
    assert f"{older} has other values of 'rotary.inv_freq'" in told[0]
    job = Merged.of(jobs, [0.5, 0.5])
    compare(tmp_path / "out" / "global_step6", write(job, tmp_path / "w", "t") / "t")


@pytest.mark.parametrize("other", [torch.ones(9), torch.ones(4, dtype=torch.float64)])
def test_buffers_of_another_dtype_or_shape_are_told(other: torch.Tensor, tmp_path: Path) -> None:
    older, newer = save([Job(step=5), Job(step=6)], tmp_path)

    def change(model: dict[str, Any]) -> None:
        model["module"]["rotary.inv_freq"] = other

    edit(older / "mp_rank_00_model_states.pt", change)
    done = streamshard.merge([older, newer], tmp_path / "out")
    message = f"{older} has other values, dtypes or shapes of 'rotary.inv_freq': buffers and"
    assert [note for note in done.notes if note.startswith(message)]


def test_files_of_weights_that_lie_beside_are_left_out(two: list[Path], tmp_path: Path) -> None:
    """As HF Trainer writes them next to the tag: they would be those of one checkpoint."""
    run = two[1].parent
    for name in ("model.safetensors", "pytorch_model.bin", "adapter_model.bin", "tokenizer.json"):
        (run / name).write_bytes(b"x" * 9)
    done = streamshard.merge([two[0].parent, run], tmp_path / "out")
    named = "adapter_model.bin, model.safetensors, pytorch_model.bin"
    assert any(f"weights of global_step6 alone: {named}" in note for note in done.notes)
    there = {path.name for path in (tmp_path / "out").iterdir()}
    assert there == {"global_step6", "latest", "tokenizer.json", "zero_to_fp32.py"}
    streamshard.merge([two[0].parent, run], tmp_path / "out.zarr")
    streamshard.repartition(tmp_path / "out.zarr", tmp_path / "again", world_size=3)
    assert {path.name for path in (tmp_path / "again").iterdir()} == there


def trained(run: Path, count: int) -> list[Job]:
    """Save tags one after another in a run directory."""
    jobs = [Job(step=number, world_size=1 + number % 2) for number in range(1, count + 1)]
    for job in jobs:
        write(job, run, f"global_step{job.step}")
    return jobs


def test_the_last_whole_ones_of_a_run_are_found(tmp_path: Path) -> None:
    run = tmp_path / "run"
    jobs = trained(run, 7)
    next((run / "global_step5").glob("*optim*")).unlink()
    streamshard.convert(run / "global_step4", tmp_path / "a.zarr")
    (tmp_path / "a.zarr").rename(run / "global_step4.zarr")
    plan = streamshard.plan_merge(run, tmp_path / "out", last=4, weights="1-sqrt")
    chosen = [jobs[step - 1] for step in (3, 4, 6, 7)]
    assert plan.report.source == ", ".join(str(run / f"global_step{job.step}") for job in chosen)
    done = plan.run()
    told = f"Passed over {run / 'global_step5'}: "
    assert any(note.startswith(told) and "rank" in note for note in done.notes)
    job = Merged.of(chosen, coefficients("1-sqrt", 4))
    compare(tmp_path / "out" / "global_step7", write(job, tmp_path / "w", "t") / "t")


def test_what_the_job_has_left_behind_is_not_merged(tmp_path: Path) -> None:
    run = tmp_path / "run"
    trained(run, 5)
    (run / "latest").write_text("global_step3")
    plan = streamshard.plan_merge(run, tmp_path / "out", last=2)
    assert plan.report.source == f"{run / 'global_step2'}, {run / 'global_step3'}"
    for left in ("global_step4", "global_step5"):
        told = f"Passed over {run / left}: its step is above that of global_step3"
        assert any(note.startswith(told) for note in plan.report.notes)


def test_fewer_than_asked_for_are_not_merged(two: list[Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    trained(run, 2)
    with pytest.raises(IncompleteError, match=f"{run}: last=3: it holds 2 .*; write last=2"):
        streamshard.merge(run, tmp_path / "out", last=3)
    with pytest.raises(UsageError, match="one directory of checkpoints, and there are 2 sources"):
        streamshard.merge(two, tmp_path / "out", last=2)


def test_an_estimate_counts_what_is_read_of_each_checkpoint(
    two: list[Path], tmp_path: Path
) -> None:
    plan = streamshard.plan_merge(two, tmp_path / "out", zero_stage=2, world_size=2)
    reads = {Path(one.path): one.nbytes for one in plan.estimate().reads}
    numel = sum(math.prod(shape) for shape in Job().shapes.values())
    older = {path: count for path, count in reads.items() if two[0] in path.parents}
    # For the master weights, and once more for the weights in 16 bits that follow from them.
    assert sum(older.values()) == 2 * 4 * numel
    newer = sum(reads.values()) - sum(older.values())
    assert newer >= 4 * 4 * numel


def test_tags_are_of_the_newest(two: list[Path], tmp_path: Path) -> None:
    assert streamshard.merge(two[::-1], tmp_path / "out").tag == "global_step6"
    assert (tmp_path / "out" / "latest").read_text() == "global_step6" != TAG
