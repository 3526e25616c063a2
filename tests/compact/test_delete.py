"""What is removed, and the ways in which other tools removed what they should not have."""

import json
import os
import shutil
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import streamshard as api
from streamshard.operations.run_directory import look_at
from tests.compact.runs import STEPS, age, bits, make_run, save, tag_of
from tests.fabricated import load
from tests.fabricated import save as save_file
from tests.job import Job

FIRST = tag_of(STEPS[0])
TRASH = ".streamshard.trash"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory of which the oldest tag may go."""
    return make_run(tmp_path / "run")


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """Where archives go."""
    return tmp_path / "archive"


def tags_in(run: Path) -> set[str]:
    """List the tags that are where they were saved."""
    return {path.name for path in run.iterdir() if path.is_dir() and path.name[0] != "."}


ALL = {tag_of(step) for step in STEPS}


def actions(found: api.Compaction) -> dict[str, str]:
    return {tag.tag: tag.action for tag in found.tags}


def receipt_of(archive: Path, tag: str = FIRST) -> dict[str, object]:
    document: dict[str, object] = json.loads((archive / f"{tag}.receipt.json").read_text())
    return document


def later(days: float) -> datetime:
    return datetime.now(UTC) + timedelta(days=days)


def test_without_being_asked_nothing_goes(run: Path, archive: Path) -> None:
    before = bits(run)
    api.compact(run, archive)
    api.compact(run, archive, dry_run=True, delete=True)
    assert bits(run) == before
    assert not (run / TRASH).exists()


def test_a_tag_goes_to_the_trash_and_after_its_time_for_good(run: Path, archive: Path) -> None:
    before = bits(run / FIRST)
    found = api.compact(run, archive, delete=True)
    assert actions(found)[FIRST] == "deleted"
    assert tags_in(run) == ALL - {FIRST}
    assert bits(run / TRASH / FIRST) == before
    receipt = receipt_of(archive)
    assert receipt["state"] == "trashed"
    assert all(check["holds"] for check in receipt["checks"])  # type: ignore[attr-defined]
    found = api.compact(run, archive, delete=True, now=later(6.9))
    assert actions(found)[FIRST] == "in the trash"
    assert bits(run / TRASH / FIRST) == before
    found = api.compact(run, archive, now=later(7.1))
    assert actions(found)[FIRST] == "in the trash"  # not without being asked
    found = api.compact(run, archive, delete=True, now=later(7.1))
    assert actions(found)[FIRST] == "purged"
    assert not (run / TRASH / FIRST).exists()
    assert receipt_of(archive)["state"] == "purged"
    assert api.verify(archive / f"{FIRST}.zarr").is_good
    assert FIRST not in actions(api.compact(run, archive, delete=True, now=later(9)))


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
    assert receipt_of(archive)["state"] == "archived"
    assert actions(api.compact(run, archive, delete=True))[FIRST] == "deleted"


def test_purging_by_hand_looks_at_the_archive_too(run: Path, archive: Path) -> None:
    api.compact(run, archive, delete=True)
    victim = archive / f"{FIRST}.zarr" / "state/fp32/embed.weight/c/0/0"
    good = victim.read_bytes()
    victim.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    for asked in ({"purge": [FIRST]}, {"delete": True, "now": later(8)}):
        found = api.compact(run, archive, **asked)
        assert (actions(found)[FIRST], found.exit_code) == ("failed", 6)
        assert str(victim) in found.problems[0].reason
        assert (run / TRASH / FIRST).is_dir()
    victim.write_bytes(good)
    assert actions(api.compact(run, archive, purge=[FIRST])) == {FIRST: "purged"}
    found = api.compact(run, archive, purge=[FIRST])
    assert (actions(found)[FIRST], found.exit_code) == ("failed", 2)


# What other tools got wrong -----------------------------------------------------------------------


def test_the_newest_by_number_stays_though_it_comes_first_by_name(run: Path, archive: Path) -> None:
    api.compact(run, archive, delete=True, keep_last=2)
    assert tags_in(run) == {tag_of(100), tag_of(1000)}


@pytest.mark.parametrize("keep_last", [-1, 0, 1])
def test_to_keep_one_or_none_is_refused(run: Path, archive: Path, keep_last: int) -> None:
    with pytest.raises(api.StreamshardError, match="--keep-last") as caught:
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
    found = api.compact(run, archive, delete=True, now=later(30))
    problem = {tag.tag: tag for tag in found.problems}[FIRST]
    assert (problem.action, "mounted" in problem.reason) == ("ambiguous", True)
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
    assert found.tags[0].needs_somebody
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
    assert receipt_of(archive)["state"] == "archived"
    monkeypatch.undo()
    assert actions(api.compact(run, archive, delete=True, keep_last=2))[FIRST] == "deleted"


def test_one_archive_that_is_damaged_does_not_block_the_rest(run: Path, archive: Path) -> None:
    api.compact(run, archive, keep_last=2)
    victim = archive / f"{FIRST}.zarr" / "meta/state/c/0"
    victim.write_bytes(victim.read_bytes() + b"x")
    found = api.compact(run, archive, delete=True, keep_last=2)
    assert actions(found)[FIRST] == "failed"
    assert (found.exit_code, tags_in(run)) == (6, ALL - {tag_of(90)})
    failed = [check for check in receipt_of(archive)["checks"] if not check["holds"]]  # type: ignore[attr-defined]
    assert [check["name"] for check in failed] == ["archive_bytes"]


# What protects a tag ------------------------------------------------------------------------------


def flip(run: Path) -> None:
    """Change a byte, and nothing that can be seen without reading."""
    path = run / FIRST / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    stat = path.stat()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    with path.open("r+b") as stream:
        stream.write(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def add_file(run: Path) -> None:
    (run / FIRST / "notes.txt").write_text("learned a lot")
    age(run / FIRST, 30)


def add_link(run: Path) -> None:
    (run / "best").symlink_to(FIRST)


def add_inner_link(run: Path) -> None:
    (run / tag_of(1000) / "model.pt").symlink_to(f"../{FIRST}/mp_rank_00_model_states.pt")
    age(run / tag_of(1000), 30)


def name_universal(run: Path) -> None:
    (run / "latest_universal").write_text(FIRST)


def touch(run: Path) -> None:
    os.utime(run / FIRST / "mp_rank_00_model_states.pt")


CHANGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "bits": (flip, "ambiguous"),
    "a file": (add_file, "ambiguous"),
    "a link": (add_link, "kept"),
    "a link in a tag": (add_inner_link, "kept"),
    "latest_universal": (name_universal, "kept"),
    "time": (touch, "kept"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_changed_since_it_was_archived_stays(run: Path, archive: Path, what: str) -> None:
    change, action = CHANGES[what]
    api.compact(run, archive)
    change(run)
    found = api.compact(run, archive, delete=True)
    assert actions(found)[FIRST] == action
    assert tags_in(run) == ALL | ({"best"} if what == "a link" else set())


@pytest.mark.parametrize("what", ["a link", "latest_universal", "time"])
def test_what_is_protected_while_it_is_looked_at_stays(
    run: Path, archive: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The rules are asked again after everything that takes long."""
    times = 0

    def late(run_dir: Path) -> object:
        nonlocal times
        times += 1
        if times == 2:
            CHANGES[what][0](run)
        return look_at(run_dir)

    monkeypatch.setattr("streamshard.operations.compacting.look_at", late)
    found = api.compact(run, archive, delete=True)
    assert (found.tags[0].action, "may not go any more" in found.tags[0].reason) == (
        "ambiguous", True
    )  # fmt: skip
    assert times == 2
    assert (run / FIRST).is_dir()


def test_what_ranks_keep_of_their_own_is_not_given_up(tmp_path: Path, archive: Path) -> None:
    run = make_run(tmp_path / "run", Job(stage=3))
    path = run / FIRST / "zero_pp_rank_1_mp_rank_00_model_states.pt"
    save_file({**load(path), "seed": 5}, path)
    age(run / FIRST, 30)
    found = api.compact(run, archive, delete=True)
    assert (found.tags[0].action, "differ in" in found.tags[0].reason) == ("ambiguous", True)
    assert tags_in(run) == ALL
    assert (archive / f"{FIRST}.zarr").is_dir()


def test_links_in_a_tag_are_not_given_up(run: Path, archive: Path) -> None:
    (run / "vocab.txt").write_text("a b c")
    (run / FIRST / "vocab.txt").symlink_to("../vocab.txt")
    age(run / FIRST, 30)
    found = api.compact(run, archive, delete=True)
    assert (found.tags[0].action, "vocab.txt" in found.tags[0].reason) == ("ambiguous", True)
    assert tags_in(run) == ALL


def test_no_more_than_so_many_at_once(run: Path, archive: Path) -> None:
    for count, left in ((0, 4), (1, 3), (1, 2), (1, 2)):
        api.compact(run, archive, delete=True, keep_last=2, max_delete=count)
        assert len(tags_in(run)) == left


def test_a_trash_that_leads_elsewhere_is_not_used(run: Path, archive: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (run / TRASH).symlink_to(tmp_path / "elsewhere")
    found = api.compact(run, archive, delete=True)
    assert found.exit_code == 4
    assert tags_in(run) == ALL
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_trash_that_was_changed_is_not_emptied(run: Path, archive: Path) -> None:
    api.compact(run, archive, delete=True)
    (run / TRASH / FIRST / "notes.txt").write_text("learned a lot")
    found = api.compact(run, archive, delete=True, now=later(8))
    assert (actions(found)[FIRST], found.exit_code) == ("ambiguous", 3)
    assert (run / TRASH / FIRST / "notes.txt").exists()


def test_of_what_is_going_the_rest_goes_later(
    run: Path, archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And cannot be brought back, as some of it may be gone."""
    api.compact(run, archive, delete=True)

    def refuse(path: Path) -> None:
        (path / "mp_rank_00_model_states.pt").unlink()
        raise PermissionError(1, "Operation not permitted", str(path))

    monkeypatch.setattr(shutil, "rmtree", refuse)
    found = api.compact(run, archive, purge=[FIRST])
    assert (actions(found)[FIRST], found.exit_code) == ("failed", 4)
    monkeypatch.undo()
    found = api.compact(run, archive, undelete=[FIRST])
    assert (actions(found)[FIRST], found.exit_code) == ("failed", 2)
    found = api.compact(run, archive, delete=True)
    assert (actions(found)[FIRST], found.exit_code) == ("purged", 0)
    assert not [path for path in (run / TRASH).rglob("*") if path.is_file()]
