"""`--save-start` saves what a job is before its first step, and ends it there."""

import os
import pickle
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from socket import create_server
from typing import Any, Protocol

import pytest
import torch
from torch import distributed

import streamshard
from streamshard.live.launch import launch
from tests.oracle import jobs, one_job
from tests.oracle.beginnings import Begin
from tests.oracle.cases import BF16, FP32
from tests.oracle.features import writer
from tests.oracle.files import digests, file_differences
from tests.oracle.frameworks.common import IMPORTS as IMPORTS
from tests.oracle.frameworks.lightning_trainer import LightningFit
from tests.oracle.jobs import Train
from tests.oracle.models import Case
from tests.oracle.ranks import LAUNCHED, older_deepspeed, require_success, run_jobs, start_ranks
from tests.oracle.topology.pipeline import Pipeline
from tests.oracle.truth import Truth

SECONDS = 120.0
TAG = "global_step0"


class Job(Protocol):
    def run(self) -> None: ...


@dataclass(frozen=True)
class Launched:
    """What follows `python -m streamshard.deepspeed` on every rank."""

    arguments: tuple[str, ...]


def do(job: Any) -> None:  # noqa: ANN401
    """Do what a rank is given."""
    if isinstance(job, Launched):
        sys.argv = ["streamshard/deepspeed.py", *job.arguments]
        launch()
    elif isinstance(job, Train):
        jobs.run(job)
    else:
        job.run()
        distributed.barrier()


def save_start(
    job: Job, start: Path, place: Path, *, code: int = 0, deepspeed_at: Path | None = None
) -> str:
    """Run a job's script with `--save-start` on 2 ranks; returns what rank 0 has printed.

    `place`: for the ranks' output.
    """
    place.mkdir()
    (place / "job").write_bytes(pickle.dumps(job))
    arguments = ("--save-start", str(start), one_job.__file__, str(place / "job"))
    error = start_ranks(2, [Launched(arguments)], do, place, deepspeed_at)
    told = (place / "rank0.log").read_text()
    assert (f"exit code {code}" in error) if code else (error == ""), f"{error}\n{told}"
    assert not (place / "job0.json").exists(), "the process went on"
    return told


def optimizer_files(start: Path) -> list[dict[str, Any]]:
    paths = sorted((start / TAG).glob("*_optim_states.pt"))
    return [torch.load(path, weights_only=False)["optimizer_state_dict"] for path in paths]


def require_no_states(start: Path, stage: int) -> None:
    """Hold a checkpoint to be one that `inspect` reads, of 2 ranks, before a step."""
    content = streamshard.inspect(start)
    assert (content.tag, content.zero_stage, content.world_size) == (TAG, stage, 2)
    assert (content.global_steps, content.problems) == (0, ())
    assert content.state_bytes.keys() - {"module", "file"} == {"fp32"}
    files = optimizer_files(start)
    assert len(files) == 2
    for saved in files:
        inner = saved["optimizer_state_dict"] if stage == 3 else saved["base_optimizer_state"]
        assert inner["state"] == {}


PIPE = Case("z1-pipe", 1, "bf16", topology=Pipeline())
BEGUN = {
    "z1-forward": (BF16[0], "forward"),
    "z2-load": (BF16[1], "load_checkpoint"),
    "z3-forward": (BF16[2], "forward"),
    "z3-load": (BF16[2], "load_checkpoint"),
    "z2-backward": (FP32[1], "backward"),
    "z3-step": (BF16[2], "step"),
    "pipe-train": (PIPE, "train_batch"),
    "pipe-eval": (PIPE, "eval_batch"),
    "decoupled": (replace(BF16[2], ds_overrides=writer(decoupled=True)), "forward"),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where each job saved itself before its first step, and what it is to resume from."""
    root = tmp_path_factory.mktemp("starts")
    saves = [
        *(Train(case, root / "src" / str(case.zero_stage), None, steps=2) for case in BF16[1:]),
        *(
            Begin(case, by, root / name / "plain", saves_first=True)  # type: ignore[arg-type]
            for name, (case, by) in BEGUN.items()
            if name != "decoupled"
        ),
    ]
    require_success(run_jobs(2, saves, root / "ranks", do))
    return root


@pytest.mark.parametrize("name", BEGUN)
def test_what_is_saved_is_what_the_job_would_have_saved(
    name: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, by = BEGUN[name]
    # As DeepSpeed's launcher sets them on one machine; its decoupled writer looks at them.
    monkeypatch.setenv("CROSS_RANK", "0")
    monkeypatch.setenv("CROSS_SIZE", "1")
    start, src = root / name / "start", root / "src" / str(case.zero_stage)
    (root / name).mkdir(exist_ok=True)
    before = digests(src) if src.exists() else {}
    job = Begin(case, by, root / name / "run", src)  # type: ignore[arg-type]
    told = save_start(job, start, root / name / "ranks")
    assert f"saved in {start}: the job before its first step, ZeRO stage {case.zero_stage}" in told
    assert f"\nnext: streamshard graft SRC {start} OUT\n" in told
    assert not (root / name / "run").exists(), "what catches everything has saved"
    assert not src.exists() or digests(src) == before
    if case is not PIPE:
        require_no_states(start, case.zero_stage)
    like = "z3-forward" if name == "decoupled" else name
    lines = file_differences(start / TAG, root / like / "plain" / TAG)
    assert [line for line in lines if "['ds_config']['checkpoint']" not in line] == []
    assert (start / "latest").read_text() == TAG


def test_a_model_that_does_not_train_is_not_the_job(root: Path, tmp_path: Path) -> None:
    job = Begin(BF16[0], "forward", tmp_path / "run", reference=True)
    save_start(job, tmp_path / "start", tmp_path / "ranks")
    require_no_states(tmp_path / "start", 1)


def test_older_engines_are_saved_too(root: Path, tmp_path: Path) -> None:
    job = Begin(BF16[2], "load_checkpoint", tmp_path / "run", root / "src" / "3")
    older = older_deepspeed("0.14.5")
    save_start(job, tmp_path / "start", tmp_path / "ranks", deepspeed_at=older)
    assert streamshard.inspect(tmp_path / "start").deepspeed_version == "0.14.5"
    require_no_states(tmp_path / "start", 3)


def test_a_save_that_fails_ends_with_its_error(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    job = Begin(BF16[0], "forward", tmp_path / "run", closes=tmp_path / "a" / "b")
    told = save_start(job, tmp_path / "a" / "b" / "start", tmp_path / "ranks", code=1)
    assert "NotADirectoryError" in told
    assert "next: " not in told
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("how", ["begins", "resumes"])
def test_a_job_whose_engine_nobody_holds(how: str, tmp_path: Path) -> None:
    """Of Lightning; jobs of HF Trainer and Accelerate are saved so in `test_graft_frameworks`."""

    def job(out: str, **more: Any) -> LightningFit:  # noqa: ANN401
        place, seen = tmp_path / out, tmp_path / f"{out}.json"
        return LightningFit(2, place, seen, 2, batch_size=2, accumulation=1, **more)

    truth, start = tmp_path / "truth.pt", tmp_path / "start"
    require_success(run_jobs(2, [job("src", loaded_truth=truth)], tmp_path / "work", do))
    before = digests(tmp_path / "src")
    more = {} if how == "begins" else {"resume_from": tmp_path / "src"}
    save_start(job("out", **more), start, tmp_path / "ranks")
    require_no_states(start, 2)
    assert digests(tmp_path / "src") == before
    assert not (tmp_path / "out.json").exists(), "the job went on"
    assert [path for path in (tmp_path / "out").rglob("*") if path.is_file()] == []
    if how == "begins":  # else it draws other weights
        masters = Truth.load(truth).states["fp32"]
        with streamshard.open(start) as opened:
            assert {name for name in opened if opened[name].tied_to is None} == masters.keys()
            for parameter, value in masters.items():
                assert opened[parameter].fp32.torch().equal(value), parameter


def test_every_rank_of_a_launcher_ends_well(tmp_path: Path) -> None:
    (tmp_path / "job").write_bytes(pickle.dumps(Begin(BF16[1], "forward", tmp_path / "run")))
    with create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    launch = ("-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}", "-m")
    command = [*launch, "streamshard.deepspeed"]
    ended = subprocess.run(
        [sys.executable, *command, "--save-start", "start", one_job.__file__, tmp_path / "job"],
        cwd=tmp_path,
        env={**os.environ, **LAUNCHED},
        timeout=SECONDS,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    assert ended.stderr.count(f"next: streamshard graft SRC {tmp_path / 'start'} OUT\n") == 1
    require_no_states(tmp_path / "start", 2)
