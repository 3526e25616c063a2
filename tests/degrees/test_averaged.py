"""Parameters that are to be averaged: copies that differ are refused, or their mean is taken."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import streamshard
from streamshard.cli.main import main
from streamshard.degrees import averaged_parameters
from streamshard.errors import DisagreementError, UnsupportedError, UsageError
from tests.comparing import compare
from tests.exported import same
from tests.fabricated import write
from tests.fabricated_parts import TensorJob, edit_parts, with_degree
from tests.fabricated_pipes import CUTS, PipeJob, write_pipe
from tests.job import TAG, Job

NAMES = ("block.1.bias", "embed.bias")
TWO = TensorJob(parts=2, world_size=3, in_lists=True, averaged=NAMES).told()
MERGED: dict[str, Any] = {"tensor_parallel": 1, "world_size": 2}
DRIFTED = r"of (embed|block\.1)\.bias: 1 of \d elements differ.*with average=True, 'repartition'"


def with_means(job: TensorJob, degree: int, world_size: int) -> TensorJob:
    return with_degree(replace(job, means_of=job.parts, garbage=False), degree, world_size)


@pytest.mark.parametrize("settings", [{}, {"stage": 1}, {"stage": 3}, {"dtype": torch.float16}])
@pytest.mark.parametrize(("parts", "degree"), [(2, 1), (2, 3), (3, 2)])
def test_the_mean_is_that_of_deepspeed_s_converter(
    tmp_path: Path, settings: dict[str, Any], parts: int, degree: int
) -> None:
    job = with_degree(replace(TWO, **settings), parts, 3)
    wanted = write(with_means(job, degree, 2), tmp_path / "wanted")
    options: dict[str, Any] = {"tensor_parallel": degree, "world_size": 2 * degree, "like": wanted}
    run, store = write(job, tmp_path / "run"), tmp_path / "run.zarr"
    streamshard.convert(run, store, codec="zstd")
    for source, out in ((run, tmp_path / "direct"), (store, tmp_path / "of-store")):
        with pytest.raises(DisagreementError, match=DRIFTED):
            streamshard.repartition(source, out, **options)
        assert not out.exists()
        report = streamshard.repartition(source, out, average=True, verify=True, **options)
        if job.stage == 3:  # ours lays out its flat groups as engines do, these are simpler
            assert streamshard.diff(out, wanted).is_equal
        else:
            compare(out / TAG, wanted / TAG)
        note = f"Averaged: 2 parameters became the mean of the copies on {parts} tensor-parallel"
        assert [note in one for one in report.notes].count(True) == 1


def test_whole_tensors_in_stores_and_exports(tmp_path: Path) -> None:
    run = write(TWO, tmp_path / "run")
    wanted = write(with_means(TWO, 1, 3), tmp_path / "wanted")
    for verb, options in (("convert", {"tensor_parallel": 1}), ("export", {})):
        call, name = getattr(streamshard, verb), f"{verb}.zarr"
        with pytest.raises(DisagreementError, match=DRIFTED):
            call(run, tmp_path / name, **options)
        call(run, tmp_path / name, average=True, verify=True, **options)
        call(wanted, tmp_path / f"{verb}-wanted")
    assert streamshard.diff(tmp_path / "convert.zarr", tmp_path / "convert-wanted").is_equal
    one, other = (
        tmp_path / name / "model.safetensors" for name in ("export.zarr", "export-wanted")
    )
    assert one.read_bytes() == other.read_bytes()


@dataclass(frozen=True)
class DriftedPipe(PipeJob):
    """A pipeline on two tensor-parallel ranks for each stage, which have biases of their own."""

    has_means: bool = False
    """Whether they have the mean of these instead."""

    def _lists(self) -> dict[str, Any]:
        told = super()._lists()
        if told:
            told["tp_replicated_parameter_patterns"].remove(r".*\.bias$")
            told["parameter_to_average_patterns"] = [r".*\.bias$"]
        return told

    def values(self, state: str, name: str, expert_rank: int = 0) -> torch.Tensor:
        made = super().values(state, name)
        if name.endswith("bias"):
            made += 0.25 if self.has_means else 0.5 * (self.part % self.tensor)
        return made


def test_the_layers_of_a_pipeline(tmp_path: Path) -> None:
    job = DriftedPipe(tensor=2, cuts=CUTS)
    one = replace(job, tensor=1, has_means=True, starts=(0, 2, 4))
    run, wanted = write_pipe(job, tmp_path / "run"), write_pipe(one, tmp_path / "wanted")
    options: dict[str, Any] = {"tensor_parallel": 1, "pipeline_parallel": 3, "like": wanted}
    with pytest.raises(DisagreementError, match=r"bias: \d of \d elements differ.* average=True"):
        streamshard.repartition(run, tmp_path / "out", world_size=6, **options)
    streamshard.repartition(run, tmp_path / "out", world_size=6, average=True, **options)
    compare(tmp_path / "out" / TAG, wanted / TAG)
    streamshard.export(run, tmp_path / "a", average=True)
    streamshard.export(wanted, tmp_path / "b")
    same(*(load_file(tmp_path / place / "model.safetensors") for place in "ab"))


def test_stages_must_hold_the_same_copies(tmp_path: Path) -> None:
    job = DriftedPipe(tensor=2, cuts=CUTS, changed=("exp_avg", "tied_modules.embed.bias", 1))
    run = write_pipe(job, tmp_path / "run")
    wanted = write_pipe(replace(job, tensor=1, has_means=True), tmp_path / "wanted")
    options: dict[str, Any] = {"tensor_parallel": 1, "like": wanted, "average": True}
    with pytest.raises(DisagreementError, match=r"embed\.bias' differs between stages"):
        streamshard.repartition(run, tmp_path / "out", world_size=4, **options)


def test_the_parts_are_opened_one_by_one(tmp_path: Path) -> None:
    run = write(TWO, tmp_path / "run")
    with streamshard.open(run) as ckpt:
        for part in range(2):
            found = ckpt[f"mp_rank_{part:02d}/{NAMES[0]}"].fp32.torch()
            assert torch.equal(found, replace(TWO, part=part).values("fp32", NAMES[0]))


def test_copies_that_are_equal_need_no_mean(tmp_path: Path) -> None:
    """NaNs with a payload and negative zeros stay as they are, with the option and without it."""
    job = TensorJob(parts=2, world_size=3, in_lists=True).told()
    run = write(job, tmp_path / "run")
    wanted = write(with_degree(job, 1, 2), tmp_path / "wanted")
    edit_parts(run, average_what_is_replicated)
    for average in (False, True):
        out = tmp_path / f"out-{average}"
        streamshard.repartition(run, out, average=average, **MERGED)
        compare(out / TAG, wanted / TAG)


def average_what_is_replicated(content: dict[str, Any]) -> None:
    told = content["universal_checkpoint_info"]
    patterns = told["tp_replicated_parameter_patterns"]
    told["parameter_to_average_patterns"] = [p for p in patterns if "bias" in p and "old" not in p]
    told["tp_replicated_parameter_patterns"] = [
        p for p in patterns if p not in told["parameter_to_average_patterns"]
    ]


@pytest.mark.parametrize(
    ("job", "options"),
    [
        (TensorJob(parts=2, world_size=3, in_lists=True).told(), MERGED),
        (TensorJob(parts=2, world_size=3).told(), MERGED),
        (TWO, {"world_size": 2}),
        (Job(), {"world_size": 2}),
    ],
    ids=["nothing listed", "maps", "same degree", "no degree"],
)
def test_nothing_to_average_is_a_mistake(tmp_path: Path, job: Job, options: dict[str, Any]) -> None:
    run = write(job, tmp_path / "run")
    with pytest.raises(UsageError, match="average=True: the files list no parameter"):
        streamshard.repartition(run, tmp_path / "out", average=True, **options)


def test_a_large_parameter_is_averaged_step_by_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(averaged_parameters, "_STEP_NUMEL", 1)
    run, out = write(TWO, tmp_path / "run"), tmp_path / "out"
    streamshard.repartition(run, out, average=True, **MERGED)
    compare(out / TAG, write(with_means(TWO, 1, 2), tmp_path / "wanted") / TAG)


def test_parameters_that_take_too_much_memory_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(averaged_parameters, "_MOST_BYTES", 50)
    with pytest.raises(UnsupportedError, match="have more than 0 MiB"):
        streamshard.repartition(
            write(TWO, tmp_path / "run"), tmp_path / "out", average=True, **MERGED
        )


def test_the_command_line_and_another_run_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = write(TWO, tmp_path / "run"), tmp_path / "out"
    arguments = ["repartition", str(run), str(out), "--world-size", "2", "--tensor-parallel", "1"]
    assert main(arguments) == 3
    drifted = DRIFTED.replace("average=True", "--average")
    assert re.search(drifted, capsys.readouterr().err.replace("\n", " "))
    assert main([*arguments, "--average"]) == 0
    compare(out / TAG, write(with_means(TWO, 1, 2), tmp_path / "wanted") / TAG)
    assert main([*arguments, "--average", "--if-needed"]) == 0
    assert "Averaged: 2 parameters became the mean" in capsys.readouterr().out
