"""What `newest` names is what engines go on from: after saves that were killed, and after NaN."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
from torch import distributed

import streamshard
from streamshard.deepspeed import resharding
from tests.oracle.frameworks.common import run
from tests.oracle.frameworks.hf_trainer import HfTrain
from tests.oracle.jobs import Resume, start_engine, take_step
from tests.oracle.jobs import run as run_job
from tests.oracle.models import Case
from tests.oracle.ranks import require_success, run_jobs

RANKS = 2
BEFORE, LAST = 2, 3
"""Steps of two checkpoints of a Trainer, of which the second is cut off."""
GOOD_STEPS, STEPS = 2, 5
CASES = [
    Case("bf16", 2, "bf16", warms_up=False),
    Case("sharded", 3, "bf16", warms_up=False),
    Case("fp16", 1, "fp16", {"fp16": {"initial_scale_power": 2}}, warms_up=False),
]


@dataclass(frozen=True)
class Killed:
    """What is left of a checkpoint when its save is killed."""

    when: str
    place: Path


def in_order(checkpoint: Path) -> list[Path]:
    """List the files of a checkpoint in the order in which their saves ended."""
    files = [path for path in checkpoint.rglob("*") if path.is_file()]
    return sorted(files, key=lambda path: path.stat().st_mtime_ns)


def killed_saves(output: Path, root: Path) -> Iterator[Killed]:
    """Copy an output directory as it was before, and in the middle of, each file's save."""
    files = in_order(output / f"checkpoint-{LAST}")
    for number, path in enumerate(files):
        for what in ("absent", "cut off"):
            place = root / f"{number}-{what.replace(' ', '-')}"
            shutil.copytree(output, place, symlinks=True)
            for later in files[number:]:
                (place / later.relative_to(output)).unlink()
            if what == "cut off":
                data = path.read_bytes()
                (place / path.relative_to(output)).write_bytes(data[: len(data) // 2])
            yield Killed(f"{path.relative_to(output).as_posix()} {what}", place)


def train(output: Path, seen: Path, step: int, resume_from: Path | None = None) -> HfTrain:
    return HfTrain(2, output, seen, step, resume_from=resume_from)


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a Trainer has saved two checkpoints."""
    root = tmp_path_factory.mktemp("trainer")
    output, seen = root / "output", root / "seen.json"
    jobs = [
        train(output, seen, BEFORE),
        train(output, seen, LAST, output / f"checkpoint-{BEFORE}"),
    ]
    require_success(run_jobs(RANKS, jobs, root / "ranks", do=run))
    return output


def test_a_trainer_goes_on_from_what_is_named_wherever_its_save_is_killed(
    output: Path, tmp_path: Path
) -> None:
    """From one that was passed over it does not: it fails, or begins anew without a word."""
    killed = [*killed_saves(output, tmp_path / "killed")]
    assert len(killed) > 20
    named = {one.when: streamshard.newest(one.place).path or "" for one in killed}
    steps = {when: int(path.rpartition("-")[2]) for when, path in named.items()}
    # All states differ to the Trainer by the files that it needs: a sixth of them is tried.
    tried = [one for number, one in enumerate(killed) if number % 6 == 0 or steps[one.when] == LAST]
    passed = [one for one in tried if steps[one.when] == BEFORE]
    assert passed
    bad = [
        train(one.place, tmp_path / f"bad{number}", LAST + 1, one.place / f"checkpoint-{LAST}")
        for number, one in enumerate(passed[:: max(1, len(passed) // 4)])
    ]
    for finished, job in zip(run_jobs(RANKS, bad, tmp_path / "bad", do=run), bad, strict=True):
        if finished.error is None:
            found = json.loads(job.seen_path.read_text())
            steps_of = {(one["first_step"], one["engine_step"]) for one in found}
            assert steps_of != {(LAST, LAST)}, job.output_dir
    good = [
        train(one.place, tmp_path / f"{number}.json", steps[one.when] + 1, Path(named[one.when]))
        for number, one in enumerate(tried)
    ]
    require_success(run_jobs(RANKS, good, tmp_path / "good", do=run))
    for number, one in enumerate(tried):
        for rank in json.loads((tmp_path / f"{number}.json").read_text()):
            assert rank["first_step"] == rank["engine_step"] == steps[one.when]


@dataclass(frozen=True)
class Diverge:
    """Train, and save after each step; after some good ones the learning rate is far too large."""

    case: Case
    save_dir: Path


@dataclass(frozen=True)
class LoadNewest:
    """Load what is newest and good where a script asks for a run, and note its tag."""

    case: Case
    run_dir: Path
    note: Path


def do(job: Diverge | Resume | LoadNewest) -> None:
    if isinstance(job, Resume):
        run_job(job)
        return
    if isinstance(job, LoadNewest):
        engine = start_engine(job.case, 77)
        with resharding(takes_newest=True) as reports:
            engine.load_checkpoint(str(job.run_dir))
        if distributed.get_rank() == 0:
            job.note.write_text(" ".join(report.tag for report in reports))
        engine.destroy()
        return
    engine = start_engine(job.case, 11)
    for step in range(STEPS):
        if step == GOOD_STEPS:
            for group in engine.optimizer.param_groups:
                group |= {"lr": 5e37, "weight_decay": 2.0}
        take_step(engine, job.case, step)
        engine.save_checkpoint(str(job.save_dir))
    engine.destroy()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_engine_that_diverges_goes_back_to_before_its_first_nan(
    case: Case, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    require_success(run_jobs(RANKS, [Diverge(case, run_dir)], tmp_path / "ranks", do=do))
    found = streamshard.newest(run_dir)
    assert found.passed_over
    assert all(one.is_healthy is False for one in found.passed_over)
    resume = Resume(case, run_dir, tmp_path / "truth.pt", tag=Path(found).name, further_steps=1)
    none = tmp_path / "none"
    none.mkdir()
    loads = [
        LoadNewest(case, run_dir, tmp_path / "loaded"),
        LoadNewest(case, none, tmp_path / "anew"),
    ]
    require_success(run_jobs(RANKS, [resume, *loads], tmp_path / "again", do=do))
    assert (tmp_path / "loaded").read_text() == Path(found).name
    assert not (tmp_path / "anew").read_text()  # the job begins
    compacted = streamshard.compact(
        run_dir, tmp_path / "archive", keep_last=2, min_age=timedelta(0), delete=True
    )
    assert Path(found).name in {path.name for path in run_dir.iterdir()}
    told = {one.tag for one in compacted.tags if one.unhealthy}
    assert told == {Path(one.path).name for one in found.passed_over}
