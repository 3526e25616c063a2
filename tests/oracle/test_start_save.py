"""`--save-start` saves what a job is before its first step, and ends it there."""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
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
from tests.oracle.frameworks.accelerating import AccelerateRun
from tests.oracle.frameworks.common import IMPORTS as IMPORTS
from tests.oracle.frameworks.hf_trainer import HfTrain
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


@pytest.mark.parametrize("version", ["0.14.5", "0.16.9"])
def test_older_engines_are_saved_too(version: str, root: Path, tmp_path: Path) -> None:
    job = Begin(BF16[2], "load_checkpoint", tmp_path / "run", root / "src" / "3")
    older = older_deepspeed(version)
    save_start(job, tmp_path / "start", tmp_path / "ranks", deepspeed_at=older)
    assert streamshard.inspect(tmp_path / "start").deepspeed_version == version
    require_no_states(tmp_path / "start", 3)


def test_a_save_that_fails_ends_with_its_error(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    job = Begin(BF16[0], "forward", tmp_path / "run", closes=tmp_path / "a" / "b")
    told = save_start(job, tmp_path / "a" / "b" / "start", tmp_path / "ranks", code=1)
    assert "NotADirectoryError" in told
    assert "next: " not in told
    assert not (tmp_path / "run").exists()


# Where nobody holds the engine -------------------------------------------------------------------


@dataclass(frozen=True)
class Framework:
    """Jobs of a framework at one ZeRO stage."""

    stage: int
    saves: Callable[[Path], Job]
    """Makes a job that trains from its beginning, and keeps the truth of before its first step in
    `truth.pt` of a directory, and what it saves in `src`."""
    begins: Callable[[Path], Job]
    """Makes the same job with another place to save in."""
    resumes: Callable[[Path], Job]
    """Makes one that resumes from what was saved."""


def hf(stage: int) -> Framework:
    def job(root: Path, out: str, **more: Any) -> HfTrain:  # noqa: ANN401
        return HfTrain(stage, root / out, root / f"{out}.json", last_step=2, **more)

    return Framework(
        stage,
        lambda root: job(root, "src", loaded_truth=root / "truth.pt"),
        lambda root: job(root, "out"),
        lambda root: job(
            root, "out", resume_from=root / "src" / "checkpoint-2", arguments={"seed": 11}
        ),
    )


def accelerate(stage: int) -> Framework:
    def job(root: Path, out: str, **more: Any) -> AccelerateRun:  # noqa: ANN401
        return AccelerateRun(
            stage, root / out, root / f"{out}.json", root / f"{out}.pt", optimizer_steps=1, **more
        )

    return Framework(
        stage,
        lambda root: job(root, "src", loaded_truth=root / "truth.pt"),
        lambda root: job(root, "out"),
        lambda root: job(root, "out", load_dir=root / "src"),
    )


def lightning(stage: int) -> Framework:
    def job(root: Path, out: str, **more: Any) -> LightningFit:  # noqa: ANN401
        return LightningFit(
            stage, root / out, root / f"{out}.json", 2, batch_size=2, accumulation=1, **more
        )

    return Framework(
        stage,
        lambda root: job(root, "src", loaded_truth=root / "truth.pt"),
        lambda root: job(root, "out"),
        lambda root: job(root, "out", resume_from=root / "src"),
    )


FRAMEWORKS = {
    "hf-z2": hf(2),
    "hf-z3": hf(3),
    "accelerate-z3": accelerate(3),
    "lightning-z2": lightning(2),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where each framework's job has trained and saved, in a directory of its name."""
    root = tmp_path_factory.mktemp("frameworks")
    for name, framework in FRAMEWORKS.items():
        (root / name).mkdir()
        # Ranks of its own: HF Trainer's weights are drawn before it sets a seed.
        require_success(run_jobs(2, [framework.saves(root / name)], root / "ranks", do))
    return root


@pytest.mark.parametrize("how", ["begins", "resumes"])
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_job_whose_engine_nobody_holds(name: str, how: str, trained: Path) -> None:
    root, framework = trained / name, FRAMEWORKS[name]
    before, start = digests(root / "src"), root / f"{how}-start"
    job = framework.begins(root) if how == "begins" else framework.resumes(root)
    save_start(job, start, root / f"{how}-ranks")
    require_no_states(start, framework.stage)
    assert digests(root / "src") == before
    assert not (root / "out.json").exists(), "the job went on"
    assert [path for path in (root / "out").rglob("*") if path.is_file()] == []
    if how == "begins" or name.startswith("hf"):  # the others draw other weights when they resume
        masters = Truth.load(root / "truth.pt").states["fp32"]
        with streamshard.open(start) as opened:
            assert {name for name in opened if opened[name].tied_to is None} == masters.keys()
            for parameter, value in masters.items():
                assert opened[parameter].fp32.torch().equal(value), parameter


# On the ranks of launchers -----------------------------------------------------------------------


LAUNCHERS = {
    "torchrun": ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m"),
    "deepspeed": ("-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--module"),
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_rank_of_a_launcher_ends_well(launcher: str, tmp_path: Path) -> None:
    (tmp_path / "job").write_bytes(pickle.dumps(Begin(BF16[1], "forward", tmp_path / "run")))
    with create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    *launch, module = LAUNCHERS[launcher]
    command = [*launch, f"--master_port={port}", module, "streamshard.deepspeed"]
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
