"""The ways in which other tools removed what they should not have."""

import shutil
from pathlib import Path

import pytest

import streamshard as api
from tests.compact.runs import (
    ALL,
    FIRST,
    NO_GRACE,
    TRASH,
    actions,
    age,
    bits,
    later,
    make_run,
    receipt_of,
    save,
    tag_of,
    tags_in,
)
from tests.job import Job


def test_the_newest_by_number_stays_though_it_comes_first_by_name(run: Path, archive: Path) -> None:
    api.compact(run, archive, delete=True, keep_last=2)
    assert tags_in(run) == {tag_of(100), tag_of(1000)}


@pytest.mark.parametrize("keep_last", [-1, 0, 1])
def test_to_keep_one_or_none_is_refused(run: Path, archive: Path, keep_last: int) -> None:
    with pytest.raises(api.StreamshardError, match="keep_last=") as caught:
        api.compact(run, archive, delete=True, keep_last=keep_last)
    assert caught.value.exit_code == 2
    assert tags_in(run) == ALL


def test_a_save_under_way_is_not_counted_as_one_of_those_that_are_kept(
    run: Path, archive: Path
) -> None:
    save(run, 1001, days=0)
    (run / "latest").write_text(tag_of(1000))
    (run / tag_of(1001) / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    found = api.compact(run, archive, delete=True, keep_last=3)
    assert tags_in(run) == {tag_of(step) for step in (90, 100, 1000, 1001)}
    assert found.exit_code == 0  # nothing is wrong with a save under way


def test_one_that_cannot_be_read_is_no_orphan(run: Path, archive: Path) -> None:
    path = run / FIRST / "mp_rank_00_model_states.pt"
    path.write_bytes(path.read_bytes()[:1000])
    age(run / FIRST, 30)
    found = api.compact(run, archive, delete=True, keep_last=2)
    assert tags_in(run) == {FIRST, tag_of(100), tag_of(1000)}
    assert (actions(found)[FIRST], found.exit_code) == ("ambiguous", 3)
    assert str(path) in found.problems[0].reason


def test_a_name_that_is_no_text_is_told(run: Path, archive: Path) -> None:
    (run / FIRST).rename(run / "global\nstep80")
    found = api.compact(run, archive, delete=True, keep_last=2)
    assert actions(found)["global\nstep80"] == "ambiguous"
    assert (run / "global\nstep80").is_dir()


def test_a_damaged_newest_does_not_count(run: Path, archive: Path) -> None:
    path = run / tag_of(100) / "mp_rank_00_model_states.pt"
    path.write_bytes(path.read_bytes()[:1000])
    age(run / tag_of(100), 30)
    api.compact(run, archive, delete=True, keep_last=3)
    assert tags_in(run) == ALL  # 80, 90 and 1000 are the newest that are whole


def test_a_mount_that_is_gone_is_nothing_deleted(run: Path, archive: Path, tmp_path: Path) -> None:
    api.compact(run, archive)
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


def test_another_directory_in_its_place_is_noticed(
    run: Path, archive: Path, tmp_path: Path
) -> None:
    api.compact(run, archive)
    shutil.copytree(run, tmp_path / "copy")
    run.rename(tmp_path / "old")
    (tmp_path / "copy").rename(run)
    found = api.compact(run, archive, delete=True)
    assert (actions(found)[FIRST], found.exit_code) == ("ambiguous", 3)
    assert tags_in(run) == ALL


def test_an_archive_that_is_gone_is_no_reason_to_empty_the_trash(
    run: Path, archive: Path, tmp_path: Path
) -> None:
    api.compact(run, archive, delete=True)
    archive.rename(tmp_path / "elsewhere")
    with pytest.raises(api.StreamshardError, match="Is it mounted"):
        api.compact(run, archive, delete=True, now=later(30))
    found = api.compact(run, archive, grace=NO_GRACE, purge=[FIRST])
    problem = {tag.tag: tag for tag in found.problems}[FIRST]
    assert (problem.action, "mounted" in problem.reason) == ("ambiguous", True)
    assert (run / TRASH / FIRST).is_dir()


def test_into_the_place_where_archives_were_mounted_nothing_goes(
    run: Path, archive: Path, tmp_path: Path
) -> None:
    """Its disk is away: what is archived there is soon under the disk, and its original gone."""
    api.compact(run, archive, delete=True)
    archive.rename(tmp_path / "elsewhere")
    archive.mkdir()
    for dry_run in (True, False):
        with pytest.raises(api.StreamshardError, match="Is it mounted") as caught:
            api.compact(run, archive, delete=True, keep_last=2, dry_run=dry_run)
        assert caught.value.exit_code == 3
    assert tags_in(run) == ALL - {FIRST}
    assert not list(archive.iterdir())


@pytest.mark.parametrize("whose", ["another run's", "another tag's"])
def test_an_archive_of_something_else_is_no_reason_to_empty_the_trash(
    run: Path, archive: Path, tmp_path: Path, whose: str
) -> None:
    """Whole, with a list of checksums that fits it, and in the place of the one that was proved."""
    api.compact(run, archive, delete=True)
    if whose == "another run's":
        api.compact(make_run(tmp_path / "other", Job(frozen=())), tmp_path / "another", keep_last=3)
        other, name = tmp_path / "another", FIRST
    else:
        save(run, 1001)
        api.compact(run, archive)
        other, name = archive, tag_of(90)
    shutil.rmtree(archive / f"{FIRST}.zarr")
    shutil.copytree(other / f"{name}.zarr", archive / f"{FIRST}.zarr")
    sums = (other / f"{name}.zarr.sha256").read_text().replace(name, FIRST)
    (archive / f"{FIRST}.zarr.sha256").write_text(sums)
    for found in (
        api.compact(run, archive, grace=NO_GRACE, purge=[FIRST]),
        api.compact(run, archive, delete=True, now=later(30)),
    ):
        assert (actions(found)[FIRST], found.exit_code) == ("ambiguous", 3)
    assert (run / TRASH / FIRST).is_dir()


def test_a_stale_tag_of_a_higher_number_is_neither_kept_for_new_nor_removed(
    run: Path, archive: Path
) -> None:
    save(run, 9999)
    (run / "latest").write_text(tag_of(1000))
    found = api.compact(run, archive, delete=True, keep_last=2)
    assert tags_in(run) == {tag_of(step) for step in (100, 1000, 9999)}
    assert (actions(found)[tag_of(9999)], found.exit_code) == ("ambiguous", 3)


@pytest.mark.parametrize("gone", ["sha256", "receipt"])
def test_checksums_that_are_not_there_are_not_taken_for_right(
    run: Path, archive: Path, gone: str
) -> None:
    api.compact(run, archive)
    name = {"sha256": f"{FIRST}.zarr.sha256", "receipt": f"{FIRST}.receipt.json"}[gone]
    (archive / name).unlink()
    found = api.compact(run, archive, delete=True)
    assert found.tags[0].needs_attention
    assert tags_in(run) == ALL


def test_a_list_of_checksums_that_lacks_a_file_is_not_taken_for_right(
    run: Path, archive: Path
) -> None:
    api.compact(run, archive)
    sums = archive / f"{FIRST}.zarr.sha256"
    sums.write_text("".join(sums.read_text().splitlines(keepends=True)[:-1]))
    found = api.compact(run, archive, delete=True)
    assert (found.tags[0].action, found.exit_code) == ("failed", 6)
    assert tags_in(run) == ALL


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
    assert actions(found)[tag_of(90)] == "deleted"
    assert (found.exit_code, tags_in(run)) == (4, ALL - {tag_of(90)})
    assert receipt_of(archive, FIRST)["state"] == "archived"
    monkeypatch.undo()
    assert actions(api.compact(run, archive, delete=True, keep_last=2))[FIRST] == "deleted"


def test_one_archive_that_is_damaged_does_not_block_the_rest(run: Path, archive: Path) -> None:
    api.compact(run, archive, keep_last=2)
    victim = archive / f"{FIRST}.zarr" / "meta/state/c/0"
    victim.write_bytes(victim.read_bytes() + b"x")
    found = api.compact(run, archive, delete=True, keep_last=2)
    assert actions(found)[FIRST] == "failed"
    assert (found.exit_code, tags_in(run)) == (6, ALL - {tag_of(90)})
    failed = [check for check in receipt_of(archive, FIRST)["checks"] if not check["holds"]]
    assert [check["name"] for check in failed] == ["archive_bytes"]


def test_an_archive_that_somebody_removed_is_told(run: Path, archive: Path) -> None:
    api.compact(run, archive)
    shutil.rmtree(archive / f"{FIRST}.zarr")
    for delete in (False, True):
        found = api.compact(run, archive, delete=delete)
        assert (actions(found)[FIRST], found.exit_code) == ("ambiguous", 3)
        assert "gone" in found.problems[0].reason
    assert tags_in(run) == ALL
    (archive / f"{FIRST}.receipt.json").unlink()
    assert actions(api.compact(run, archive))[FIRST] == "archived"
