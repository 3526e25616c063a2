"""The global batch stays on another number of ranks, or the job stops and says why it cannot."""

import importlib
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed  # type: ignore[import-untyped,unused-ignore]
import pytest
from torch import distributed

from streamshard.deepspeed import load_checkpoint, resharding
from streamshard.errors import StreamshardError
from tests.oracle import elastic_training
from tests.oracle.elastic_training import GLOBAL_BATCH, new_engine, train
from tests.oracle.ranks import older_deepspeed, require_success, run_jobs
from tests.oracle.truth import Engine

TOLERANCE = 1e-4
SAVED_STEPS, STEPS = 2, 4
OFFLOAD = {
    "zero_optimization": {
        **elastic_training.CONFIG["zero_optimization"],
        "offload_optimizer": {"device": "cpu"},
    },
    "zero_force_ds_cpu_optimizer": False,
}


@dataclass(frozen=True)
class Sized:
    """One engine whose config has these sizes."""

    out: Path
    """Where the job says how it went."""
    total: int | None
    micro: int | None
    accumulation: int | None
    offloads: bool = False
    keeps: bool = True
    saves: Path | None = None
    loads: Path | None = None
    under: str = ""
    """The framework that initializes and loads."""

    def config(self) -> dict[str, Any]:
        """The DeepSpeed configuration, with the sizes that are given."""
        sizes = {
            "train_batch_size": self.total,
            "train_micro_batch_size_per_gpu": self.micro,
            "gradient_accumulation_steps": self.accumulation,
        }
        rest = {key: value for key, value in elastic_training.CONFIG.items() if key not in sizes}
        given = {key: size for key, size in sizes.items() if size is not None}
        return rest | given | (OFFLOAD if self.offloads else {})


def carry_out(job: Sized) -> None:
    calls: dict[str, Callable[[Sized], dict[str, Any]]]
    calls = {"": said_by, "Accelerate": under_accelerate, "Lightning": under_lightning}
    said = calls[job.under](job)
    if distributed.get_rank() == 0:
        job.out.write_text(json.dumps(said))


def said_by(job: Sized) -> dict[str, Any]:
    """Initialize, load, train and save; returns what is seen, or the error."""
    config = job.config()
    with resharding(keeps_global_batch=True) if job.keeps else nullcontext():
        try:
            engine = new_engine(config)
        except (StreamshardError, AssertionError) as error:
            return {"error": f"{type(error).__name__}: {error}"}
    before = sizes_of(engine)
    if job.loads is not None:
        try:
            load_checkpoint(engine, job.loads, keeps_global_batch=job.keeps)
        except StreamshardError as error:
            assert engine.global_steps == 0
            assert sizes_of(engine) == before
            return {"error": f"{type(error).__name__}: {error}"}
    sizes = sizes_of(engine)
    losses = {}
    if sizes[0] == GLOBAL_BATCH:
        for step in range(engine.global_steps + 1, STEPS + 1):
            losses[step] = train(engine, step)
            if step == SAVED_STEPS and job.saves is not None:
                engine.save_checkpoint(job.saves)
    kept = [config.get(key) for key in ("train_batch_size", *_KEYS)]
    engine.destroy()
    version = deepspeed.__version__
    return {"sizes": sizes, "losses": losses, "kept": kept, "version": version}


_KEYS = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def sizes_of(engine: Engine) -> list[int]:
    return [
        engine.train_batch_size(),
        engine.train_micro_batch_size_per_gpu(),
        engine.gradient_accumulation_steps(),
    ]


def under_accelerate(job: Sized) -> dict[str, Any]:
    """Do it in a process that has an `Accelerator`."""
    accelerate: Any = importlib.import_module("accelerate")
    accelerate.Accelerator(cpu=True)
    try:
        return said_by(job)
    finally:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def under_lightning(job: Sized) -> dict[str, Any]:
    """Do it called by a module of Lightning."""
    names: dict[str, Any] = {"__name__": "lightning.pytorch.strategies.deepspeed", "call": said_by}
    exec("def step(job): return call(job)", names)  # a frame of that module
    said: dict[str, Any] = names["step"](job)
    return said


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """What every job saw, by its name."""
    root = tmp_path_factory.mktemp("batches")
    plain, offloaded = root / "plain", root / "offloaded"

    at_2 = [
        Sized(root / "saved", None, 3, 2, saves=plain),
        Sized(root / "saved-offloaded", None, 3, 2, saves=offloaded, offloads=True),
        Sized(root / "indivisible", 9, 3, 1),
    ]
    at_1 = [
        Sized(root / "kept", None, 4, 1, loads=plain),
        Sized(root / "kept-offloaded", None, 4, 1, loads=offloaded, offloads=True),
        Sized(root / "not-asked", None, 4, 1, loads=plain, keeps=False),
        Sized(root / "micro-5", None, 5, 1, loads=plain),
        Sized(root / "accelerate", None, 4, 1, loads=plain, under="Accelerate"),
        Sized(root / "lightning", None, 4, 1, loads=plain, under="Lightning"),
        Sized(root / "same-under-accelerate", None, 4, 3, loads=plain, under="Accelerate"),
        Sized(root / "fitted", 12, 4, 1),
        Sized(root / "fitted-micro", 12, 5, None),
        Sized(root / "fitted-accumulation", 12, None, 5),
        Sized(root / "fitting", 12, None, 2),
        Sized(root / "fitted-under-accelerate", 12, 4, 1, under="Accelerate"),
    ]
    for ranks, jobs in ((2, at_2), (1, at_1)):
        require_success(run_jobs(ranks, jobs, root / "ranks", carry_out))
    return lambda name: json.loads((root / name).read_text())


def test_offloaded_gradients_accumulate_in_older_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There the ZeRO optimizer itself counts the micro batches of a step."""
    older = older_deepspeed("0.14.5")
    saves, saved, kept = (tmp_path / name for name in ("saves", "saved", "kept"))
    jobs = [
        Sized(saved, None, 4, 3, offloads=True, saves=saves),
        Sized(kept, None, 4, 1, offloads=True, loads=saves),
    ]
    # The ranks meet this module, and with it DeepSpeed, before they are told where it is.
    monkeypatch.setattr(sys, "path", [str(older), *sys.path])
    require_success(run_jobs(1, jobs, tmp_path / "ranks", carry_out, deepspeed_at=older))
    before, after = (json.loads(out.read_text()) for out in (saved, kept))
    assert after["version"] == "0.14.5"
    assert after["sizes"] == [12, 4, 3]
    assert [*after["losses"]] == ["3", "4"]
    for step, loss in after["losses"].items():
        assert loss == pytest.approx(before["losses"][step], rel=TOLERANCE)


@pytest.mark.parametrize("offload", ["", "-offloaded"])
def test_a_load_sets_the_accumulation(said: Callable[[str], Any], offload: str) -> None:
    saved, kept = said(f"saved{offload}"), said(f"kept{offload}")
    assert saved["sizes"] == [12, 3, 2]
    assert kept["sizes"] == kept["kept"] == [12, 4, 3]
    assert [*kept["losses"]] == ["3", "4"]
    for step, loss in kept["losses"].items():
        assert loss == pytest.approx(saved["losses"][step], rel=TOLERANCE)


def test_nothing_changes_unless_it_is_asked_for(said: Callable[[str], Any]) -> None:
    assert said("not-asked")["sizes"] == [4, 4, 1]
    assert said("same-under-accelerate")["sizes"] == [12, 4, 3]


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        pytest.param("fitted", [12, 4, 3], id="all three given"),
        pytest.param("fitted-micro", [12, 4, 3], id="micro batch that does not divide"),
        pytest.param("fitted-accumulation", [12, 2, 6], id="accumulation that does not divide"),
        pytest.param("fitting", [12, 6, 2], id="sizes that fit"),
    ],
)
def test_a_config_is_fitted_when_the_engine_is_made(
    said: Callable[[str], Any], name: str, sizes: list[int]
) -> None:
    seen = said(name)
    assert seen["sizes"] == sizes
    if "fitted" in name:
        assert seen["kept"] == sizes


@pytest.mark.parametrize(
    ("name", "words"),
    [
        pytest.param(
            "indivisible",
            ["train_batch_size of 9", "2 ranks", "not a multiple of 2", "1 or 3 would keep it"],
            id="ranks that do not divide the batch",
        ),
        pytest.param(
            "micro-5",
            ["global batch of 12", "the engine's is 5", "micro batch of 5", "1 rank"],
            id="micro batch that does not divide the batch",
        ),
        pytest.param("accelerate", ["Accelerate counts the accumulation"], id="Accelerate"),
        pytest.param("lightning", ["Lightning counts the accumulation"], id="Lightning"),
        pytest.param(
            "fitted-under-accelerate",
            ["train_batch_size of 12", "Accelerate", "micro batch of 4 and an accumulation of 3"],
            id="Accelerate's config",
        ),
    ],
)
def test_what_cannot_be_kept_is_said(
    said: Callable[[str], Any], name: str, words: list[str]
) -> None:
    message = said(name)["error"]
    assert [word for word in words if word not in message] == [], message
