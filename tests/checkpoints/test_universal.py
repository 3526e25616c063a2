"""DeepSpeed's universal checkpoints: they hold what they were made from, or are refused by name."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import streamshard
from streamshard.errors import (
    CorruptFileError,
    DisagreementError,
    IncompleteError,
    SourceError,
    SourceNotFoundError,
    UnsupportedError,
)
from tests.cli.conftest import tree
from tests.fabricated import client_state, edit, edit_all, write
from tests.fabricated_universal import UNIVERSAL, convert, write_universal
from tests.job import TAG, Job

PARAM = "block.0.bias"

STATE = {key: value for key, value in client_state().items() if key != "keepsake"}
"""What a converter can load that does not know the training script."""
JOBS = {
    "stage 1": (Job(stage=1, frozen=(), client_state=STATE), 1),
    "stage 2": (Job(alignment=True, world_size=3, client_state=STATE), 3),
    "stage 3": (Job(stage=3, sub_group_size=20, client_state=STATE), 2),
    "one rank": (Job(world_size=1, round_robin=True, dtype=torch.float32), 2),
}


@pytest.mark.parametrize(("job", "stage"), JOBS.values(), ids=JOBS)
def test_what_is_written_is_what_the_original_gives(job: Job, stage: int, tmp_path: Path) -> None:
    made = write_universal(job, tmp_path / "run")
    for source, out in ((tmp_path / "run", "wanted"), (made, "out")):
        ranks = 2 if job.world_size > 2 else 3
        streamshard.repartition(source, tmp_path / out, world_size=ranks, zero_stage=stage)
    assert tree(tmp_path / "out") == tree(tmp_path / "wanted")
    assert streamshard.diff(tmp_path / "run", made).is_equal


def test_parameters_that_went_round_are_read_where_they_are_in_their_places(tmp_path: Path) -> None:
    """As `export` puts them, and nobody else: see `REFUSED`."""
    job = Job(alignment=True, world_size=3, round_robin=True)
    run, made = write(job, tmp_path / "run"), tmp_path / "made"
    streamshard.export(run, made, format="universal", verify=True)
    shutil.copy(run / "zero_to_fp32.py", made)
    assert streamshard.verify(made).problems == ()
    assert streamshard.diff(run, made).is_equal
    for source, out in ((run, "wanted"), (made, "out")):
        streamshard.repartition(source, tmp_path / out, world_size=4)
    assert tree(tmp_path / "out") == tree(tmp_path / "wanted")


def test_where_it_may_lie(tmp_path: Path) -> None:
    run = tmp_path / "run"
    made = write_universal(Job(), run)
    assert streamshard.inspect(run).kind == "native"
    assert streamshard.inspect(run, tag=UNIVERSAL).kind == "universal"
    (run / "latest").write_text(UNIVERSAL)
    assert streamshard.inspect(run).kind == "universal"
    (run / "latest").unlink()
    with pytest.raises(SourceNotFoundError, match="Give one of the 2 checkpoints in it"):
        streamshard.repartition(run, tmp_path / "out", world_size=3)
    shutil.rmtree(run / TAG)
    assert streamshard.inspect(run).kind == "universal"
    streamshard.repartition(run, tmp_path / "out", world_size=3)
    assert (tmp_path / "out" / "zero_to_fp32.py").is_file()
    assert streamshard.inspect(tmp_path / "out").tag == TAG
    made.rename(run / "elsewhere")
    with pytest.raises(SourceNotFoundError, match=f"Give the one in it: {run / 'elsewhere'}"):
        streamshard.inspect(run)
    shutil.rmtree(run / "elsewhere")
    with pytest.raises(IncompleteError, match=f"latest_universal: names {UNIVERSAL}, which is not"):
        streamshard.inspect(run)


def test_files_next_to_it_are_carried(tmp_path: Path) -> None:
    made = write_universal(Job(), tmp_path / "run")
    (made / "notes").mkdir()
    (made / "notes" / "seed.txt").write_text("7")
    (made / "tmp" / "embed.weight" / "0").mkdir(parents=True)
    torch.save(torch.zeros(3), made / "tmp" / "embed.weight" / "0" / "fp32.00")
    report = streamshard.repartition(made, tmp_path / "out", world_size=3)
    assert (tmp_path / "out" / TAG / "notes" / "seed.txt").read_text() == "7"
    assert not (tmp_path / "out" / TAG / "tmp").exists()
    assert any(f"Not read: {made}/tmp" in note for note in streamshard.verify(made).notes)
    assert report.files == 3 + 1 + 1 + 1 + 1


def test_compact_keeps_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_universal(Job(), run).rename(run / "global_step3")
    for step in (8, 9):
        write(Job(), run, tag=f"global_step{step}")
    (run / "latest_universal").unlink()
    report = streamshard.compact(
        run, tmp_path / "archive", keep_last=2, min_age=timedelta(0), dry_run=True
    )
    (kept,) = (tag for tag in report.tags if tag.tag == "global_step3")
    assert (kept.action, "not what an engine saved" in kept.reason) == ("ambiguous", True)


def test_masters_that_were_never_cast_are_taken(tmp_path: Path) -> None:
    """Before the first step the converter keeps the weights, which in fp32 are the masters."""
    job = Job(dtype=torch.float32)
    run = write(job, tmp_path / "run")
    forget_states(run)
    streamshard.repartition(run, tmp_path / "wanted", world_size=3)
    streamshard.repartition(convert(run), tmp_path / "out", world_size=3)
    assert tree(tmp_path / "out") == tree(tmp_path / "wanted")


def test_padding_that_older_converters_leave_is_not_read(tmp_path: Path) -> None:
    """Those of 0.14.5 and 0.16.9 take an element of a rank beyond the end of a parameter."""
    run = tmp_path / "run"
    made = write_universal(Job(stage=3, world_size=3), run)
    for path in (made / "zero" / "embed.bias").iterdir():
        torch.save(torch.cat([torch.load(path), torch.tensor([float("nan")])]), path)
    for source, out in ((run, "wanted"), (made, "out")):
        streamshard.repartition(source, tmp_path / out, world_size=2)
    assert tree(tmp_path / "out") == tree(tmp_path / "wanted")


@pytest.mark.parametrize("name", ["old.name", f"{PARAM}/more"])
def test_files_of_what_the_model_does_not_have_are_told(name: str, tmp_path: Path) -> None:
    made = write_universal(Job(), tmp_path / "run")
    assert not any("Not read" in note for note in streamshard.inspect(made).notes)
    (made / "zero" / name).mkdir()
    shutil.copy(made / "zero" / PARAM / "fp32.pt", made / "zero" / name)
    notes = streamshard.inspect(made).notes
    assert any(f"Not read: files of {name}, which the model file" in note for note in notes)


def forget_states(run: Path) -> None:
    """Leave the optimizer as it is before its first step."""
    edit_all(
        run,
        "*_optim_states.pt",
        lambda held: held["optimizer_state_dict"]["base_optimizer_state"]["state"].clear(),
    )


def param(state: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    """Return what changes the tensor, or the number, in the file of a parameter's state."""

    def apply(made: Path) -> None:
        path = made / "zero" / PARAM / f"{state}.pt"
        held = torch.load(path, weights_only=False)
        if isinstance(held, dict):
            held["param"] = change(held["param"])
        torch.save(held if isinstance(held, dict) else change(held), path)

    return apply


def model(**entries: Any) -> Callable[[Path], None]:  # noqa: ANN401
    """Return what sets entries of the model files."""

    def apply(made: Path) -> None:
        for path in made.glob("*_model_states.pt"):
            edit(path, lambda held: held.update(entries))

    return apply


def state(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Return what changes the file of what belongs to no parameter."""
    return lambda made: edit(made / "zero" / "optimizer_state.pt", change)


def cut_vocabulary(made: Path) -> None:
    for path in (made / "zero" / "embed.weight").glob("*.pt"):
        if path.name != "step.pt":
            held = torch.load(path)
            torch.save({**held, "param": held["param"][:9], "vocab_tensor": True}, path)


def rename_param(made: Path) -> None:
    """Name a parameter so that its files lie elsewhere, where nothing may be read."""

    def change(held: dict[str, Any]) -> None:
        held["param_shapes"][1]["../../x"] = held["param_shapes"][1].pop(PARAM)

    edit(made / "mp_rank_00_model_states.pt", change)


MADE_FROM = "Give the checkpoint that it was made from"
REFUSED: dict[str, tuple[Job, Callable[[Path], object], type[SourceError], str]] = {
    "round robin": (
        Job(round_robin=True), lambda _: None, UnsupportedError,
        rf"round_robin_gradients, of which .* into each other's places. {MADE_FROM}",
    ),
    "part of a model": (Job(), model(mp_world_size=2), UnsupportedError, "tensor, pipeline or"),
    "two parts": (
        Job(),
        lambda made: shutil.copy(
            made / "mp_rank_00_model_states.pt", made / "mp_rank_01_model_states.pt"
        ),
        UnsupportedError, "mp_rank_01_model_states.pt: of a model with tensor, pipeline or",
    ),
    "pipeline": (Job(), model(module=None), UnsupportedError, "tensor, pipeline or expert"),
    "experts": (Job(), model(num_experts=[4]), UnsupportedError, "pipeline or expert"),
    "AutoEP": (Job(), model(ds_autoep_layers=[{}]), UnsupportedError, "trained with AutoEP"),
    "affine map": (
        Job(), model(universal_checkpoint_info={"affine_map": {"params": {"a": {}}}}),
        UnsupportedError, rf"has an 'affine_map'.*moves and scales elements. {MADE_FROM}",
    ),
    "amsgrad": (
        Job(), state(lambda held: held["param_groups"][0].update(amsgrad=True)),
        UnsupportedError, rf"a state 'max_exp_avg_sq' too, which .* not keep. {MADE_FROM}",
    ),
    "another state": (
        Job(stage=3),
        state(
            lambda held: held["optimizer_state_dict"]["state"][1].update(
                max_exp_avg_sq=torch.zeros(6)
            )
        ),
        UnsupportedError, "a state 'max_exp_avg_sq' too, which",
    ),
    "vocabulary": (
        Job(), cut_vocabulary, UnsupportedError,
        r"\[9, 4\], 'embed.weight' in the model file \[11, 4\]: .*pad the vocabulary",
    ),
    "no optimizer file": (
        Job(), lambda made: (made / "zero" / "optimizer_state.pt").unlink(),
        IncompleteError, "zero/optimizer_state.pt: missing: the conversion was cut off",
    ),
    "no model file": (
        Job(), lambda made: (made / "mp_rank_00_model_states.pt").unlink(),
        IncompleteError, "mp_rank_00_model_states.pt: missing: the conversion was cut off",
    ),
    "a rank's model file": (
        Job(stage=3), lambda made: (made / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink(),
        IncompleteError, "saved by 2 ranks, but there are model files of 1",
    ),
    "no masters": (
        Job(), lambda made: shutil.rmtree(made / "zero" / PARAM),
        IncompleteError, rf"zero/{PARAM}/exp_avg.pt: missing, where other parameters have",
    ),
    "no moment": (
        Job(stage=3), lambda made: (made / "zero" / PARAM / "exp_avg_sq.pt").unlink(),
        IncompleteError, rf"zero/{PARAM}/exp_avg_sq.pt: missing, where other",
    ),
    "no step": (
        Job(), lambda made: (made / "zero" / PARAM / "step.pt").unlink(),
        IncompleteError, rf"zero/{PARAM}/step.pt: missing, where other",
    ),
    "other steps": (
        Job(), param("step", lambda step: step + 1),
        DisagreementError, rf"{PARAM}/step.pt: .*have taken another count of steps",
    ),
    "another dtype": (
        Job(), param("exp_avg", lambda held: held.bfloat16()),
        DisagreementError, rf"{PARAM}/exp_avg.pt: bfloat16, of other parameters .* float32",
    ),
    "another shape": (
        Job(stage=3), param("fp32", lambda held: held[:-1]),
        CorruptFileError, r"has shape \[6\], 'block.0.bias' in the model file \[7\]",
    ),
    "no elements": (
        Job(), param("fp32", lambda held: held[:0].clone()),
        CorruptFileError, r"has shape \[0\], 'block.0.bias' in the model file \[7\]",
    ),
    "as many elements": (
        Job(), param("fp32", lambda held: held.reshape(7, 1)),
        CorruptFileError, r"has shape \[7, 1\], 'block.0.bias' in the model file \[7\]",
    ),
    "no tensor": (
        Job(stage=3), param("fp32", lambda held: "weights"), CorruptFileError, "not a parameter's",
    ),
    "a name that leads out": (Job(), rename_param, IncompleteError, "missing, where other"),
    "other groups": (
        Job(), state(lambda held: held["param_groups"].pop()),
        CorruptFileError, "optimizer_state.pt: param groups do not number 2 groups",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("job", "change", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_lost_or_broken_is_refused(
    job: Job,
    change: Callable[[Path], object],
    error: type[SourceError],
    message: str,
    tmp_path: Path,
) -> None:
    made = write_universal(job, tmp_path / "run")
    change(made)
    with pytest.raises(error, match=message):
        streamshard.repartition(made, tmp_path / "out", world_size=3)
    assert not (tmp_path / "out").exists()
    assert streamshard.verify(made).problems


def test_masters_that_were_not_kept_are_not_made_up(tmp_path: Path) -> None:
    run = write(Job(), tmp_path / "run")
    forget_states(run)
    made = convert(run)
    with pytest.raises(
        UnsupportedError, match=r"fp32.pt: the optimizer had no state.*is lost here"
    ):
        streamshard.repartition(made, tmp_path / "out", world_size=3)
    # What `export` writes has them.
    streamshard.export(run, tmp_path / "ours", format="universal")
    streamshard.repartition(run, tmp_path / "wanted", world_size=3)
    streamshard.repartition(tmp_path / "ours", tmp_path / "out", world_size=3)
    (tmp_path / "wanted" / "zero_to_fp32.py").unlink()
    assert tree(tmp_path / "out") == tree(tmp_path / "wanted")


def test_a_job_that_saved_again_after_the_conversion_is_seen(tmp_path: Path) -> None:
    """As with native files: the optimizer's steps are then not those of the model file."""
    made = write_universal(replace(Job(), client_state={}), tmp_path / "run")
    model(global_steps=9)(made)
    assert any("are of step 7, the model's of step 9" in n for n in streamshard.inspect(made).notes)
