"""`--tags`: what the pattern does not match is neither touched nor counted."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamshard.errors import UsageError
from tests.cli.conftest import streamshard
from tests.compact.runs import NO_GRACE, actions, age, bits, later, make_run, save
from tests.compact.test_families import compact

DEEP = "run*/global_step*"


@pytest.fixture
def run(tmp_path: Path) -> Path:
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


def test_only_what_matches_is_touched_and_counted(run: Path, tmp_path: Path) -> None:
    before, archive = bits(run), tmp_path / "archive"
    assert compact(run, archive, dry_run=True).exit_code == 3  # the damaged one
    found = compact(run, archive, tags=DEEP, delete=True)
    assert (actions(found), found.exit_code) == (
        {
            "run1/global_step10": "kept",
            "run2/global_step20": "deleted",
            "run2/global_step30": "kept",
            "run2/global_step40": "kept",
        },
        0,
    )
    # What a night with another pattern moved to the trash stays there.
    options: dict[str, Any] = {"delete": True, "grace": NO_GRACE, "now": later(9)}
    found = compact(run, archive, tags="run2/ema*", **options)
    assert actions(found) == {"run2/ema_step11": "kept", "run2/ema_step21": "ambiguous"}
    compact(run, archive, undelete=["run2/global_step20"])
    assert bits(run) == before


def test_the_tag_that_latest_names_stays_though_nothing_matches_it(
    run: Path, tmp_path: Path
) -> None:
    shutil.rmtree(run / "run2" / "ema_step21")
    for step, name in ((10, "global"), (12, "global"), (15, "global"), (21, "ema")):
        save(run, step).rename(run / "run2" / f"{name}_step{step}")
    (run / "latest").write_text("run2/ema_step21")
    before = bits(run / "run2" / "ema_step21")
    found = actions(compact(run, tmp_path / "archive", tags=DEEP, delete=True))
    assert [found[f"run2/global_step{step}"] for step in (10, 12, 15, 20, 30)] == [
        "deleted", "deleted", "kept", "kept", "ambiguous"
    ]  # fmt: skip
    assert bits(run / "run2" / "ema_step21") == before


@pytest.mark.parametrize(
    ("make", "code", "words"),
    [
        (lambda run: f"{run}/*", 2, "relative to RUN_DIR"),
        (lambda _: "s3://bucket/*", 2, "relative to RUN_DIR"),
        (lambda _: "", 2, "relative to RUN_DIR"),
        (lambda _: "../*", 2, "'..' and '**' are not allowed; use a '*'"),
        (lambda _: "**/global_step*", 2, "'..' and '**' are not allowed; use a '*'"),
        (lambda _: "run*", 3, "matches no tag; there are global_step9, run1/global_step10,"),
    ],
)
def test_wrong_patterns_are_told(
    run: Path, tmp_path: Path, make: Callable[[Path], str], code: int, words: str
) -> None:
    done = streamshard("compact", run, tmp_path / "archive", "--tags", make(run))
    assert (done.code, words in done.err) == (code, True), done.err


def test_names_of_tags_need_no_pattern(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="leave it out"):
        compact(run, tmp_path / "archive", tags=DEEP, undelete=["run2/global_step20"])
