"""Tags that are whole checkpoints of a framework, and tags that a pattern chooses."""

import json
import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import streamshard as api
from streamshard.errors import IncompleteError, SourceError, UsageError
from streamshard.operations.compact.archive import archive_tag
from streamshard.operations.compact.run_context import RunContext
from tests.cli.conftest import streamshard
from tests.compact.runs import NO_GRACE, actions, age, bits, later, make_run, receipt_of, save
from tests.fabricated import client_state
from tests.job import Job

STEPS = (100, 200, 300, 900, 1000)
"""By name the newest comes second."""
LIGHTNING = "epoch=1-step={}.ckpt"


def make_output(
    output: Path,
    pattern: str = "checkpoint-{}",
    best: str | None = None,
    job: Job | None = None,
) -> Path:
    """Save as HF Trainer or, with another pattern, others would, oldest first."""
    for number, step in enumerate(STEPS):
        unit = output / pattern.format(step)
        unit.parent.mkdir(exist_ok=True)
        save(unit, step, job)
        if pattern == "checkpoint-{}":
            document = {"best_model_checkpoint": best, "loss": float("nan")}
            (unit / "trainer_state.json").write_text(json.dumps(document))
            (unit / "rng_state_0.pth").write_bytes(b"generator %d" % step)
        elif pattern != LIGHTNING:
            for rank in range(Job().world_size):
                torch.save({"step": step}, unit / f"random_states_{rank}.pkl")
        if pattern != LIGHTNING:
            (unit / "tokenizer").mkdir()
            (unit / "tokenizer" / "words.txt").write_text("a b")
        age(unit, 30 - number)
    return output


def compact(output: Path, archive: Path, **options: Any) -> api.Compaction:  # noqa: ANN401
    return api.compact(output, archive, **({"keep_last": 2} | options))


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """Where HF Trainer saved."""
    return make_output(tmp_path / "output")


@pytest.mark.parametrize("pattern", ["checkpoint-{}", LIGHTNING])
def test_a_whole_checkpoint_goes_and_comes_back(
    tmp_path: Path, archive: Path, pattern: str
) -> None:
    output = make_output(tmp_path / "output", pattern)
    first = pattern.format(100)
    before = bits(output / first)
    assert "latest" in before
    found = compact(output, archive, delete=True)
    assert actions(found)[first] == "trashed"
    assert found.exit_code == 0
    assert not (output / first).exists()
    receipt = receipt_of(archive, first)
    assert {r["path"] for r in receipt["source"]} == {f"{first}/{name}" for name in before}
    assert all(r["sha256"] for r in receipt["source"])
    assert receipt["left_out"] == []
    compact(output, archive, undelete=[first])
    assert bits(output / first) == before
    shutil.rmtree(output / first)
    api.repartition(archive / f"{first}.zarr", output / first)
    assert bits(output / first).keys() == before.keys()
    outside = {name: data for name, data in before.items() if "global_step" not in name}
    assert outside.items() <= bits(output / first).items()


def test_the_best_the_linked_and_the_newest_stay(tmp_path: Path, archive: Path) -> None:
    best = "C:\\somewhere\\checkpoint-100"
    output = make_output(tmp_path / "output", best=best)
    (output / "wanted").symlink_to("checkpoint-200")
    found = {tag.tag: tag for tag in compact(output, archive, delete=True).tags}
    assert "names it as the best" in found["checkpoint-100"].reason
    assert "symbolic link" in found["checkpoint-200"].reason
    assert found["checkpoint-1000"].reason == "saved last"
    assert [tag.tag for tag in found.values() if tag.action == "trashed"] == ["checkpoint-300"]


def test_the_best_of_any_checkpoint_stays(output: Path, archive: Path) -> None:
    state = output / "checkpoint-200" / "trainer_state.json"
    best = {"best_model_checkpoint": "output/checkpoint-100/", "best_global_step": 300}
    state.write_text(json.dumps(best))
    age(output / "checkpoint-200", 29)
    found = actions(compact(output, archive, delete=True))
    assert found["checkpoint-100"] == "kept"
    assert found["checkpoint-200"] == "trashed"  # and names the best from the trash
    assert found["checkpoint-300"] == "kept"
    again = actions(compact(output, archive, delete=True))
    assert again["checkpoint-100"] == "kept"


def save_lightning(output: Path, step: int, *, monitor: str | None, days: float) -> None:
    """Save as Lightning does, whose state calls the checkpoint of step 100 the best."""
    best = str(output / LIGHTNING.format(100 if monitor else step))
    state = {"ModelCheckpoint{}": {"monitor": monitor, "best_model_path": best}, "Timer": {}}
    unit = output / LIGHTNING.format(step)
    shutil.rmtree(unit)
    save(unit, step, Job(client_state={**client_state(), "callbacks": state}))
    age(unit, days)


@pytest.mark.parametrize("last", ["link", "copy"])
def test_what_lightning_needs_stays(tmp_path: Path, archive: Path, last: str) -> None:
    output = make_output(tmp_path / "output", LIGHTNING)
    save_lightning(output, 300, monitor=None, days=28)  # which calls itself the best
    save_lightning(output, 1000, monitor="loss", days=26)
    if last == "link":
        (output / "last.ckpt").symlink_to(LIGHTNING.format(200))
    else:
        shutil.copytree(output / LIGHTNING.format(1000), output / "last.ckpt")
        age(output / "last.ckpt", 25)
    (output / "weights.ckpt").write_bytes(b"a file, as Lightning saves without DeepSpeed")
    found = {tag.tag: tag for tag in compact(output, archive, delete=True).tags}
    reasons = [found[LIGHTNING.format(step)].reason for step in STEPS]
    assert reasons[0].endswith(".ckpt names it as the best")
    assert ("symbolic link" in reasons[1]) == (last == "link")
    assert reasons[3:] == ["among the newest 2", "saved last"]
    assert "weights.ckpt" not in found
    deleted = {name for name, tag in found.items() if tag.action == "trashed"}
    assert deleted == {LIGHTNING.format(s) for s in ([300] if last == "link" else [200, 300])}
    if last == "copy":
        assert (found["last.ckpt"].action, found["last.ckpt"].reason) == ("kept", "tells no step")
    assert all((output / name).exists() for name, tag in found.items() if tag.action == "kept")


def test_lightning_s_names_without_steps_are_refused(tmp_path: Path, archive: Path) -> None:
    output = make_output(tmp_path / "output", "epoch={}.ckpt")
    before = bits(output)
    with pytest.raises(IncompleteError, match="has a step in its name, as in 'epoch=1-step=10"):
        compact(output, archive, delete=True)
    assert bits(output) == before


def test_one_that_is_deleted_or_saved_now_stays(output: Path, archive: Path) -> None:
    (output / "checkpoint-100" / "rng_state_0.pth").unlink()  # as Trainer's rotation begins, now
    shutil.copytree(output / "checkpoint-1000", output / "checkpoint-1100")
    (output / "checkpoint-1100" / "latest").unlink()
    found = {tag.tag: tag for tag in compact(output, archive).tags}
    assert "ago, min_age=" in found["checkpoint-100"].reason
    assert "ago, min_age=" in found["checkpoint-1100"].reason
    assert {tag.action for tag in found.values()} == {"kept", "archived"}
    assert found["checkpoint-200"].action == "archived"
    age(output / "checkpoint-1100", 10)
    found = {tag.tag: tag for tag in compact(output, archive).tags}
    assert found["checkpoint-1100"].action == "ambiguous"


def test_a_job_that_went_back_makes_later_numbers_ambiguous(output: Path, archive: Path) -> None:
    age(output / "checkpoint-300", 1)
    found = {tag.tag: tag for tag in compact(output, archive, delete=True).tags}
    for tag in ("checkpoint-900", "checkpoint-1000"):
        assert found[tag].action == "ambiguous"
        assert "checkpoint-300, saved last" in found[tag].reason


def test_a_state_that_may_name_the_best_stops_the_night(output: Path, archive: Path) -> None:
    for data in ("{", "[]", "{}", '{"best_model_checkpoint": 5}'):
        (output / "checkpoint-200" / "trainer_state.json").write_text(data)
        before = bits(output)
        with pytest.raises(SourceError, match=r"checkpoint-200/trainer_state.*its directory away"):
            compact(output, archive, delete=True, min_age=timedelta(0))
        assert before.items() <= bits(output).items(), data
    (output / "trainer_state.json").write_text("{")
    with pytest.raises(SourceError, match=r"output/trainer_state.*move it away"):
        compact(output, archive)


def test_one_that_the_job_removes_meanwhile_is_said_to_be_gone(
    output: Path, archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rotated = output / "checkpoint-100"

    def late(context: RunContext, tag: str, *given: Any, **named: Any) -> object:  # noqa: ANN401
        if rotated.exists():
            shutil.rmtree(rotated)
        return archive_tag(context, tag, *given, **named)

    monkeypatch.setattr("streamshard.operations.compact.compact.archive_tag", late)
    found = compact(output, archive, delete=True)
    (problem,) = found.problems
    assert (problem.tag, problem.action) == (rotated.name, "ambiguous")
    assert problem.reason == f"{rotated}: removed while this run went on"
    assert actions(found)["checkpoint-200"] == "trashed"


def test_a_file_that_no_archive_would_hold_keeps_the_checkpoint(
    output: Path, archive: Path
) -> None:
    (output / "checkpoint-100" / "link").symlink_to("rng_state_0.pth")
    (output / "checkpoint-200" / "latest_universal").write_text("global_step200_universal")
    (output / "checkpoint-300" / "latest").write_text("global_step300\n")
    for step, days in ((100, 30), (200, 29), (300, 28)):
        age(output / f"checkpoint-{step}", days)
    found = {tag.tag: tag for tag in compact(output, archive, delete=True).tags}
    assert found["checkpoint-100"].action == "kept"  # the link leads into it
    assert found["checkpoint-200"].action == "ambiguous"
    assert "would not be in an archive" in found["checkpoint-200"].reason
    assert found["checkpoint-300"].action == "trashed"


def test_two_kinds_of_numbers_are_refused(tmp_path: Path, archive: Path) -> None:
    output = make_output(make_output(tmp_path / "output", "step_{}"), "epoch_{}")
    age(output / "epoch_1000", 40)  # so that it is not the one saved last
    with pytest.raises(SourceError, match="keep them apart, or choose with tags="):
        compact(output, archive)
    found = actions(compact(output, archive, tags="epoch_*0", delete=True))
    assert found == {f"epoch_{s}": "trashed" for s in STEPS[:2]} | {
        "epoch_300": "kept",
        "epoch_900": "kept",
        "epoch_1000": "ambiguous",
    }


# What `tags` does not match is neither touched nor counted ----------------------------------------

DEEP = "run*/global_step*"


@pytest.fixture
def deep(tmp_path: Path) -> Path:
    """A run directory whose tags are paths, with one that is damaged and ones of another kind."""
    made = make_run(tmp_path / "run", steps=(10, 20, 30, 40))
    for place, step in (("run1", 10), ("run2", 20), ("run2", 30), ("run2", 40)):
        (made / place).mkdir(exist_ok=True)
        shutil.move(made / f"global_step{step}", made / place)
    for step in (11, 21):
        moved = save(made, step).rename(made / "run2" / f"ema_step{step}")
    next(moved.glob("*optim_states.pt")).unlink()
    age(moved, 20)
    save(made, 9)
    (made / "latest").write_text("run2/global_step40")
    return made


def test_only_what_matches_is_touched_and_counted(deep: Path, archive: Path) -> None:
    before = bits(deep)
    assert compact(deep, archive, dry_run=True).exit_code == 3  # the damaged one
    found = compact(deep, archive, tags=DEEP, delete=True)
    assert (actions(found), found.exit_code) == (
        {
            "run1/global_step10": "kept",
            "run2/global_step20": "trashed",
            "run2/global_step30": "kept",
            "run2/global_step40": "kept",
        },
        0,
    )
    # What a run with another pattern moved to the trash stays there.
    options: dict[str, Any] = {"delete": True, "grace": NO_GRACE, "now": later(9)}
    found = compact(deep, archive, tags="run2/ema*", **options)
    assert actions(found) == {"run2/ema_step11": "kept", "run2/ema_step21": "ambiguous"}
    compact(deep, archive, undelete=["run2/global_step20"])
    assert bits(deep) == before


@pytest.mark.parametrize(
    ("make", "code", "words"),
    [
        (lambda deep: f"{deep}/*", 2, "relative to RUN_DIR"),
        (lambda _: "s3://bucket/*", 2, "relative to RUN_DIR"),
        (lambda _: "", 2, "relative to RUN_DIR"),
        (lambda _: "../*", 2, "'..' and '**' are not allowed; use a '*'"),
        (lambda _: "**/global_step*", 2, "'..' and '**' are not allowed; use a '*'"),
        (lambda _: "run*", 3, "matches no tag; there are global_step9, run1/global_step10,"),
    ],
)
def test_wrong_patterns_are_told(
    deep: Path, archive: Path, make: Callable[[Path], str], code: int, words: str
) -> None:
    done = streamshard("compact", deep, archive, "--tags", make(deep))
    assert (done.code, words in done.err) == (code, True), done.err


def test_names_of_tags_need_no_pattern(deep: Path, archive: Path) -> None:
    with pytest.raises(UsageError, match="leave it out"):
        compact(deep, archive, tags=DEEP, undelete=["run2/global_step20"])
