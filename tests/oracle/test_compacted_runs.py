"""Real runs of HF Trainer are compacted, and come back from their archives."""

import json
import os
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from transformers.trainer_utils import rotate_checkpoints

import streamshard
from tests.compact.runs import TRASH, actions, age, bits
from tests.oracle.frameworks.common import Seen, run
from tests.oracle.frameworks.hf_trainer import HfTrain
from tests.oracle.ranks import require_success, run_jobs

STAGE, DAYS, LIMIT, KEPT = 2, 18, 5, 3
ONLY_ARCHIVING = range(6, 11)
"""Nights without --delete, so that the rotation finds more than its limit."""
TORN = 11
"""The night in which the rotation is at work."""


def checkpoint(step: int) -> str:
    return f"checkpoint-{step}"


def train(root: Path, name: str, resume_from: Path | None = None) -> list[Seen]:
    """Train on one rank, and save every step, or resume; returns what the rank saw."""
    strategy = "no" if resume_from else "steps"
    arguments: dict[str, Any] = {"save_strategy": strategy, "save_steps": 1, "seed": 11}
    arguments["max_steps"] = 2 * DAYS
    seen_path = root / f"{name}.json"
    job = HfTrain(STAGE, root / name, seen_path, DAYS, resume_from, arguments=arguments)
    require_success(run_jobs(1, [job], root / "ranks", run))
    seen: list[Seen] = json.loads(seen_path.read_text())
    return seen


def tear(unit: Path, now: datetime) -> None:
    """Remove what the rotation removes first, at this time."""
    (unit / "rng_state.pth").unlink()
    os.utime(unit, (now.timestamp(), now.timestamp()))


def test_a_month_of_a_real_trainer_run(tmp_path: Path) -> None:
    """Each day a step is saved at noon, Trainer's rotation keeps five; at night three are kept."""
    first = train(tmp_path, "saves")
    saves, output, archive = (tmp_path / name for name in ("saves", "output", "archive"))
    output.mkdir()
    begin, rotated, purged = datetime.now(UTC), set[int](), set[int]()
    for day in range(1, DAYS + 1):
        shutil.copytree(saves / checkpoint(day), output / checkpoint(day))
        age(output / checkpoint(day), 2 * DAYS - day)
        before = steps_in(output)
        rotate_checkpoints(str(output), save_total_limit=LIMIT)
        rotated |= before - steps_in(output)
        now = begin + timedelta(days=day)
        oldest = min(steps_in(output))
        if day == TORN:
            tear(output / checkpoint(oldest), now)
        found = streamshard.compact(
            output, archive, keep_last=KEPT, delete=day not in ONLY_ARCHIVING, now=now
        )
        assert (found.problems, found.exit_code) == ((), 0), day
        assert steps_in(output) >= {*range(max(1, day - KEPT + 1), day + 1)}
        purged |= {step_of(name) for name, act in actions(found).items() if act == "purged"}
        if day == TORN:
            assert actions(found)[checkpoint(oldest)] == "kept"  # its directory has just changed
            shutil.rmtree(output / checkpoint(oldest))
            rotated.add(oldest)
    assert rotated
    assert purged
    for step in range(1, DAYS + 1):
        original, places = saves / checkpoint(step), (output, output / TRASH)
        held = [place / checkpoint(step) for place in places if (place / checkpoint(step)).exists()]
        assert [bits(place) for place in held] == [bits(original)] * len(held)
        assert bool(held) == (step not in rotated | purged)
        store = archive / f"{checkpoint(step)}.zarr"
        assert store.exists() or (held and step > DAYS - KEPT), step
        if store.exists():
            assert streamshard.verify(store, against=original).differences == ()
    restored = tmp_path / "restored" / checkpoint(min(purged))
    restored.parent.mkdir()
    streamshard.repartition(archive / f"{restored.name}.zarr", restored)
    assert train(tmp_path, "again", restored)[0]["losses"] == first[0]["losses"]


def steps_in(directory: Path) -> set[int]:
    return {step_of(path.name) for path in directory.glob("checkpoint-*")}


def step_of(name: str) -> int:
    return int(name.rpartition("-")[2])
