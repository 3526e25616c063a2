"""Where HF Trainer goes on in its data, by its `trainer_state.json`."""

import json
from pathlib import Path
from typing import Any

import pytest

import streamshard
from tests.fabricated import write
from tests.job import Job


def trainer_state(step: int, epoch: float) -> str:
    """Write what Trainer writes: keys in order, and a log that may be long."""
    log: list[dict[str, Any]] = [
        {"epoch": 9.0, "global_step": 999_999, "step": n, "loss": 1 / (n + 1)} for n in range(5000)
    ]
    state = {
        "best_metric": None,
        "epoch": epoch,
        "global_step": step,
        "is_local_process_zero": True,
        "log_history": log,
        "max_steps": 100,
        "num_train_epochs": 3,
        "stateful_callbacks": {"TrainerControl": {"args": {}, "global_step": 1}},
        "train_batch_size": 2,
    }
    return json.dumps(state, indent=2, sort_keys=True) + "\n"


def run_of(place: Path, state: str) -> Path:
    """Write a run of 4 ranks with a global batch of 24."""
    run = write(Job(stage=2, world_size=4), place / "run")
    (run / "trainer_state.json").write_text(state)
    return run


def note(source: Path, out: Path, world_size: int) -> str:
    """Return the note of the real run."""
    report = streamshard.repartition(source, out, world_size=world_size)
    (found,) = [text for text in report.notes if text.startswith("Trainer skips the data")]
    return found


def test_the_samples_are_counted(tmp_path: Path) -> None:
    run = run_of(tmp_path, trainer_state(10, 0.5))
    text = note(run, tmp_path / "out", 5)
    assert "at step 10, so 10 x 24 = 240 samples were seen." in text
    assert "global batch of 20, Trainer skips 200 samples: 40 samples are seen twice." in text
    assert "global batch of 25, Trainer skips 250 samples: 10 samples are left out." in text
    assert "global batch of 30, Trainer skips 300 samples: 60 samples are left out." in text
    kept = note(run, tmp_path / "kept", 2)
    assert "With the arguments above, Trainer skips 240 samples: none is left out" in kept
    assert "global batch of 12, Trainer skips 120 samples: 120 samples are seen twice." in kept


def test_over_several_epochs_the_place_is_told(tmp_path: Path) -> None:
    text = note(run_of(tmp_path, trainer_state(10, 2.5)), tmp_path / "out", 5)
    assert "240 samples were seen, in 2.50 epochs." in text
    assert "about 60 samples are left out, as the job goes on at epoch 3.12." in text


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_a_store_tells_the_same(codec: str, tmp_path: Path) -> None:
    run = run_of(tmp_path, trainer_state(10, 0.5))
    streamshard.convert(run, tmp_path / "a.zarr", codec=codec)
    there = note(tmp_path / "a.zarr", tmp_path / "there", 5)
    assert there == note(run, tmp_path / "here", 5)


@pytest.mark.parametrize(
    "state", ["", "{}", "[1]", '{"global_step": 10}', '{\n  "global_step": "x"\n}']
)
def test_a_step_that_is_not_told_is_not_guessed(state: str, tmp_path: Path) -> None:
    report = streamshard.repartition(run_of(tmp_path, state), tmp_path / "out", world_size=5)
    assert any("trainer_state.json does not contain the step" in text for text in report.notes)
