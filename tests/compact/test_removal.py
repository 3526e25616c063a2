"""How tags go: to the trash, for good, and back; and what is in the way."""

import shutil
from datetime import datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import streamshard as api
from streamshard.engine.journals.journal import Journal
from streamshard.errors import TargetError, UsageError
from streamshard.operations.compact.trash import Trash
from tests.compact.runs import (
    ALL,
    FIRST,
    NO_GRACE,
    TRASH,
    actions,
    age,
    bits,
    later,
    receipt_of,
    save,
    tag_of,
    tags_in,
)
from tests.fabricated_pipes import PipeJob, write_pipe
from tests.job import TAG, Job


def test_tags_without_the_file_of_a_layer_are_no_reason_to_remove_another(
    tmp_path: Path, archive: Path
) -> None:
    run = tmp_path / "run"
    for step in (10, 20, 30):
        saved = write_pipe(PipeJob(changed=("fp32", "1.up", step % 15)), run) / TAG
        age(saved.rename(run / tag_of(step)), 30)
    (run / "latest").write_text(tag_of(30))
    for step in (20, 30):
        (run / tag_of(step) / "layer_03-model_states.pt").unlink()
        age(run / tag_of(step), 30)
    before = bits(run)
    found = api.compact(run, archive, keep_last=2, delete=True)
    assert actions(found) == {tag_of(10): "kept", tag_of(20): "ambiguous", tag_of(30): "ambiguous"}
    assert "layer_03-model_states.pt: missing" in found.tags[1].reason
    assert bits(run) == before


def test_a_time_in_the_trash_that_is_to_come_is_said_and_no_dead_end(
    run: Path, archive: Path
) -> None:
    """As if the machine's clock had been wrong when it was moved there."""
    api.compact(run, archive, delete=True, now=later(2000))
    found = api.compact(run, archive, delete=True)
    assert actions(found)[FIRST] == "in the trash"
    (one,) = (tag for tag in found.tags if tag.tag == FIRST)
    assert one.reason.startswith(f"since {later(2000).year}-")
    found = api.compact(run, archive, purge=[FIRST], grace=NO_GRACE)  # at once, as --grace 0s says
    assert actions(found) == {FIRST: "purged"}


def test_bringing_back(run: Path, archive: Path) -> None:
    before = bits(run)
    api.compact(run, archive, delete=True)
    (run / FIRST).mkdir()
    found = api.compact(run, archive, undelete=[FIRST, "../x", "nobody"])
    assert [(tag.action, tag.exit_code) for tag in found.tags] == [
        ("failed", 4), ("failed", 2), ("failed", 2)
    ]  # fmt: skip
    (run / FIRST).rmdir()
    found = api.compact(run, archive, undelete=[FIRST])
    assert (actions(found), found.exit_code) == ({FIRST: "brought back"}, 0)
    assert bits(run) == before
    assert receipt_of(archive, FIRST)["state"] == "archived"
    status = api.compact_status(run, archive)
    assert {tag.tag: tag.state for tag in status.tags}[FIRST] == "archived"
    assert status.last_run is not None
    assert "brought back" not in status.last_run.actions  # that was by hand
    assert actions(api.compact(run, archive, delete=True))[FIRST] == "trashed"


def test_what_was_begun_of_an_earlier_save_is_made_anew(
    run: Path, archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes, note_all = count(), Journal.note_all

    def be_killed(*given: Any) -> None:  # noqa: ANN401
        if next(notes) == 3:
            raise KeyboardInterrupt
        note_all(*given)

    monkeypatch.setattr(Journal, "note_all", be_killed)
    with pytest.raises(KeyboardInterrupt):
        api.compact(run, archive, delete=True, workers=1)
    monkeypatch.undo()
    assert tags_in(run) == ALL
    shutil.rmtree(run / FIRST)
    save_again(run, Job(tied={}))
    assert actions(api.compact(run, archive, delete=True))[FIRST] == "trashed"


def test_grace_counts_from_the_move_however_long_the_run_took(run: Path, archive: Path) -> None:
    grace = timedelta(minutes=30)
    api.compact(run, archive, delete=True, now=later(-1 / 24))
    assert actions(api.compact(run, archive, delete=True, grace=grace))[FIRST] == "in the trash"
    found = api.compact(run, archive, delete=True, grace=grace, now=later(1 / 24))
    assert actions(found)[FIRST] == "purged"


def test_a_trash_that_leads_elsewhere_is_not_used(run: Path, archive: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (run / TRASH).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TargetError, match="a symbolic link, where tags are moved to"):
        api.compact(run, archive, delete=True)
    assert tags_in(run) == ALL
    assert not list((tmp_path / "elsewhere").iterdir())
    assert not archive.exists()


@pytest.mark.usefixtures("trashed")
def test_of_what_is_going_the_rest_goes_later(
    run: Path, archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And cannot be brought back, as some of it may be gone."""

    def refuse(path: Path) -> None:
        (path / "mp_rank_00_model_states.pt").unlink()
        raise PermissionError(1, "Operation not permitted", str(path))

    monkeypatch.setattr(shutil, "rmtree", refuse)
    found = api.compact(run, archive, grace=NO_GRACE, purge=[FIRST])
    assert (actions(found)[FIRST], found.exit_code) == ("failed", 4)
    monkeypatch.undo()
    found = api.compact(run, archive, undelete=[FIRST])
    assert (actions(found)[FIRST], found.exit_code) == ("failed", 2)
    found = api.compact(run, archive, delete=True)
    assert (actions(found)[FIRST], found.exit_code) == ("purged", 0)
    assert not [path for path in (run / TRASH).rglob("*") if path.is_file()]


def save_again(run: Path, job: Job | None = None) -> None:
    """Save a tag again, long ago by now."""
    latest = (run / "latest").read_text()
    save(run, 80, job)
    (run / "latest").write_text(latest)


@pytest.mark.usefixtures("trashed")
def test_what_is_left_of_a_save_needs_the_archive_of_that_save(
    run: Path, archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be all of it: a run was killed before it had removed anything."""

    def be_killed(trash: Trash, tag: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Trash, "remove", be_killed)
    with pytest.raises(KeyboardInterrupt):
        api.compact(run, archive, grace=NO_GRACE, purge=[FIRST])
    monkeypatch.undo()
    left = bits(run / TRASH)
    save_again(run)
    (tmp_path / "moved").mkdir()
    for path in archive.glob(f"{FIRST}.*"):
        path.rename(tmp_path / "moved" / path.name)
    api.compact(run, archive)
    for _ in range(2):
        found = api.compact(run, archive, delete=True)
        assert {tag.action for tag in found.tags if tag.tag == FIRST} == {"ambiguous"}
        assert (bits(run / TRASH), tags_in(run)) == (left, ALL)
    assert receipt_of(archive, FIRST)["state"] == "archived"
    for path in archive.glob(f"{FIRST}.*"):
        path.rename(tmp_path / f"new.{path.name}")
        (tmp_path / "moved" / path.name).rename(path)
    found = api.compact(run, archive, delete=True)
    assert [tag.action for tag in found.tags if tag.tag == FIRST] == ["ambiguous", "purged"]
    assert (bits(run / TRASH), tags_in(run)) == ({}, ALL)


@pytest.mark.usefixtures("trashed")
def test_nothing_is_brought_back_that_is_another_save(run: Path, archive: Path) -> None:
    shutil.rmtree(run / TRASH / FIRST)
    save_again(run)
    found = api.compact(run, archive, undelete=[FIRST])
    assert (actions(found), found.exit_code) == ({FIRST: "ambiguous"}, 3)
    assert receipt_of(archive, FIRST)["state"] == "trashed"


def test_a_name_that_is_no_text_is_told(run: Path, archive: Path) -> None:
    (run / FIRST).rename(run / "global\nstep80")
    found = api.compact(run, archive, delete=True, keep_last=2)
    (problem,) = found.problems
    assert (problem.tag, problem.action) == ("global\nstep80", "ambiguous")
    assert problem.reason.endswith("rename it")  # no command line names it
    assert (run / "global\nstep80").is_dir()


@pytest.mark.usefixtures("archived")
def test_a_mount_that_is_gone_is_nothing_deleted(run: Path, archive: Path, tmp_path: Path) -> None:
    before = bits(archive)
    run.rename(tmp_path / "elsewhere")
    with pytest.raises(api.StreamshardError, match="is it mounted") as caught:
        api.compact(run, archive, delete=True)
    assert caught.value.exit_code == 3
    run.mkdir()  # the place where it was mounted
    with pytest.raises(api.StreamshardError, match="no 'latest'") as caught:
        api.compact(run, archive, delete=True)
    assert caught.value.exit_code == 3
    assert bits(archive) == before


def test_a_file_in_the_trash_is_no_tag(run: Path, archive: Path) -> None:
    (run / TRASH).mkdir()
    (run / TRASH / ".DS_Store").touch()
    assert actions(api.compact(run, archive, delete=True))[FIRST] == "trashed"


@pytest.mark.usefixtures("trashed")
def test_an_archive_that_is_gone_is_no_reason_to_empty_the_trash(
    run: Path, archive: Path, tmp_path: Path
) -> None:
    archive.rename(tmp_path / "elsewhere")
    with pytest.raises(api.StreamshardError, match="Is it mounted"):
        api.compact(run, archive, delete=True, now=later(30))
    found = api.compact(run, archive, grace=NO_GRACE, purge=[FIRST])
    problem = {tag.tag: tag for tag in found.problems}[FIRST]
    assert (problem.action, "mounted" in problem.reason) == ("ambiguous", True)
    assert (run / TRASH / FIRST).is_dir()


@pytest.mark.usefixtures("trashed")
def test_into_the_place_where_archives_were_mounted_nothing_goes(
    run: Path, archive: Path, tmp_path: Path
) -> None:
    """Its disk is away: what is archived there is soon under the disk, and its original gone."""
    archive.rename(tmp_path / "elsewhere")
    archive.mkdir()
    for dry_run in (True, False):
        with pytest.raises(api.StreamshardError, match="Is it mounted") as caught:
            api.compact(run, archive, delete=True, keep_last=2, dry_run=dry_run)
        assert caught.value.exit_code == 3
    assert tags_in(run) == ALL - {FIRST}
    assert not list(archive.iterdir())


def test_one_that_cannot_be_moved_does_not_block_the_rest(
    run: Path, archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename

    def refuse(self: Path, target: Path) -> Path:
        if self.name == FIRST:
            raise PermissionError(1, "Operation not permitted", str(self))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    found = api.compact(run, archive, delete=True, keep_last=2)
    assert actions(found)[FIRST] == "failed"
    assert actions(found)[tag_of(90)] == "trashed"
    assert (found.exit_code, tags_in(run)) == (4, ALL - {tag_of(90)})
    assert receipt_of(archive, FIRST)["state"] == "archived"
    monkeypatch.undo()
    assert actions(api.compact(run, archive, delete=True, keep_last=2))[FIRST] == "trashed"


@pytest.mark.usefixtures("archived")
def test_what_somebody_removed_with_its_receipt_is_archived_again(run: Path, archive: Path) -> None:
    shutil.rmtree(archive / f"{FIRST}.zarr")
    (archive / f"{FIRST}.receipt.json").unlink()
    assert actions(api.compact(run, archive))[FIRST] == "archived"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"keep_tags": FIRST}, "one name"),
        ({"undelete": FIRST}, "one name"),
        ({"purge": FIRST}, "one name"),
        ({"keep_last": 1}, "at least 2"),
        ({"grace": timedelta(days=-1)}, "is negative"),
        ({"min_age": timedelta(seconds=-1)}, "is negative"),
        ({"weights_only_older_than": timedelta(days=-30)}, "is negative"),
        ({"now": datetime(2030, 1, 1)}, "time zone"),
    ],
)
def test_arguments_that_mean_something_else_are_refused(
    run: Path, archive: Path, options: dict[str, Any], told: str
) -> None:
    with pytest.raises(UsageError, match=told):
        api.compact(run, archive, delete=True, **options)
    assert tags_in(run) == ALL
    assert not archive.exists()
