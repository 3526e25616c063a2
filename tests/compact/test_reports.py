"""What `--status` reports, and what a run of many directories prints."""

import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import streamshard as api
from streamshard.cli.compact_command import runs_like
from streamshard.errors import CorruptFileError, SourceNotFoundError, TargetError, UsageError
from streamshard.io.changes import write_durably
from streamshard.operations.compact import receipts
from streamshard.operations.compact.compact_report import RunRecord
from tests.cli.conftest import streamshard
from tests.compact.runs import (
    ALL,
    FIRST,
    RECORD,
    STEPS,
    TRASH,
    actions,
    bits,
    make_run,
    receipt_of,
    tags_in,
)

NOW = datetime.now(UTC)


def after(days: float) -> datetime:
    """Return the time so many days after these tests began."""
    return NOW + timedelta(days=days)


# Status -------------------------------------------------------------------------------------------


def states(found: api.CompactStatus) -> dict[str, str]:
    return {tag.tag: tag.state for tag in found.tags}


def last_run(run: Path, archive: Path) -> RunRecord:
    record = api.compact_status(run, archive).last_run
    assert record is not None
    return record


def test_a_tag_from_its_archive_to_its_end(run: Path, archive: Path) -> None:
    before, short = bits(run / FIRST), timedelta(days=3)
    found = api.compact_status(run, archive)  # it is not there yet
    assert (found.tags, found.last_run) == ((), None)
    assert not archive.exists()
    api.compact(run, archive, now=after(0))
    found = api.compact_status(run, archive)
    assert states(found)[FIRST] == "archived"
    assert (found.trash_bytes, found.saved_bytes) == (0, 0)
    receipt = receipt_of(archive, FIRST)
    own = receipt["archive_bytes"] - receipt["shared_bytes"]
    assert found.archive_bytes == sum(tag.archive_bytes for tag in found.tags) >= own > 0

    night = api.compact(run, archive, now=after(1), delete=True, grace=short)
    assert actions(night)[FIRST] == "trashed"
    assert (bits(run / TRASH / FIRST), tags_in(run)) == (before, ALL - {FIRST})
    receipt = receipt_of(archive, FIRST)
    assert receipt["state"] == "trashed"
    assert all(check["holds"] for check in receipt["checks"])
    found = api.compact_status(run, archive)
    (tag,) = [tag for tag in found.tags if tag.tag == FIRST]
    assert tag.state == "in the trash"
    assert datetime.fromisoformat(tag.trash_until) == after(4)
    assert "1 trashed" in streamshard("compact", run, archive, "--status").out
    assert found.trash_bytes == sum(t.source_bytes for t in found.tags if t.trash_until)
    record = last_run(run, archive)
    assert (record.deletes, record.exit_code, record.problems) == (True, 0, ())
    assert datetime.fromisoformat(record.began) == after(1) <= datetime.fromisoformat(record.ended)
    assert record.actions["trashed"] == sum(t.state == "in the trash" for t in found.tags)

    for days, delete in ((3.9, True), (4.1, False)):  # too early; not asked for
        night = api.compact(run, archive, now=after(days), grace=short, delete=delete)
        assert actions(night)[FIRST] == "in the trash"
    assert bits(run / TRASH / FIRST) == before
    night = api.compact(run, archive, now=after(5), delete=True, grace=short)
    assert actions(night)[FIRST] == "purged"
    assert not list((run / TRASH).iterdir())
    assert receipt_of(archive, FIRST)["state"] == "purged"
    assert api.verify(archive / f"{FIRST}.zarr").is_good
    found = api.compact_status(run, archive)
    gone = [tag for tag in found.tags if tag.state == "purged"]
    assert FIRST in {tag.tag for tag in gone}
    assert found.saved_bytes == sum(tag.source_bytes - tag.archive_bytes for tag in gone)

    api.compact(run, archive, now=after(50), weights_only_older_than=timedelta(days=30))
    assert states(api.compact_status(run, archive))[FIRST] == "weights only"


def test_a_run_that_was_killed_has_not_ended(
    run: Path, archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(RunRecord, "after", stop)
    with pytest.raises(KeyboardInterrupt):
        api.compact(run, archive)
    assert last_run(run, archive).ended == ""
    done = streamshard("compact", run, archive, "--status")
    assert (done.code, "it is running, or was killed" in done.out) == (0, True)


def test_a_record_that_cannot_be_written_is_one_result_more(
    run: Path, archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, data: bytes, temporary: Path) -> None:
        if path.name == RECORD:
            raise OSError(28, "No space left on device")
        write_durably(path, data, temporary)

    monkeypatch.setattr(receipts, "write_durably", refuse)
    found = api.compact(run, archive)
    assert actions(found)[FIRST] == "archived"
    (problem,) = found.problems
    assert (problem.tag, problem.exit_code) == (RECORD, TargetError.exit_code)


@pytest.mark.usefixtures("archived")
@pytest.mark.parametrize(
    "text",
    ["", '{"format": 2}', '{"format": 1, "actions": {}, "problems": [{}]}'],
)
def test_a_record_that_is_not_ours_is_refused(run: Path, archive: Path, text: str) -> None:
    (archive / RECORD).write_text(text)
    with pytest.raises(CorruptFileError, match="not as this version of streamshard writes it"):
        api.compact_status(run, archive)
    api.compact(run, archive)  # a run needs no record
    assert last_run(run, archive).exit_code == 0


@pytest.mark.usefixtures("archived")
def test_what_earlier_versions_recorded_too_is_ignored(run: Path, archive: Path) -> None:
    path, record = archive / f"{FIRST}.receipt.json", archive / RECORD
    path.write_text(json.dumps({**json.loads(path.read_text()), "repeated_bytes": 7, "etags": {}}))
    problem = {"tag": FIRST, "step": 1, "action": "failed", "reason": "-", "repeated_bytes": 7}
    record.write_text(json.dumps({**json.loads(record.read_text()), "problems": [problem]}))
    found = api.compact_status(run, archive)
    assert (states(found)[FIRST], found.problems) == ("archived", [])
    assert [one.tag for one in last_run(run, archive).problems] == [FIRST]


def test_a_damaged_receipt_hides_no_other(tmp_path: Path, archive: Path) -> None:
    run = make_run(tmp_path / "run", steps=[*STEPS, STEPS[-1] + 10])
    api.compact(run, archive)
    path = archive / f"{FIRST}.receipt.json"
    known = json.loads(path.read_text())
    bad: list[Any] = ["{", {**known, "archived": "yesterday"}, {**known, "archive_bytes": 10**400}]
    bad += [{**known, "purged": "2026-11-25T01:00:00"}, {**known, "archive_bytes": -1}, None]
    for content in bad:
        path.unlink()
        if content is None:
            os.mkfifo(path)  # nobody will write to it
        else:
            path.write_text(content if isinstance(content, str) else json.dumps(content))
        for form in ([], ["--json"]):
            done = streamshard("compact", run, archive, "--status", *form)
            assert done.code == 3, content
        assert path.name in done.err
        found = api.compact_status(run, archive)
        assert {tag.state for tag in found.tags} == {"unreadable", "archived"}
        assert [path.name in problem for problem in found.problems] == [True]


@pytest.mark.usefixtures("trashed")
def test_an_archive_that_is_lost_is_none_that_is_not_there_yet(run: Path, archive: Path) -> None:
    archive.rename(archive.with_name("elsewhere"))
    with pytest.raises(SourceNotFoundError, match="archive"):
        api.compact_status(run, archive)


@pytest.mark.usefixtures("purged")
def test_tags_that_are_gone_are_counted(
    run: Path, archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status = ("compact", "run", "archive", "--status")
    shown = streamshard(*status).out
    assert "1 tag more, whose originals are gone; -v lists them" in shown
    assert FIRST not in shown
    assert FIRST in streamshard(*status, "-v").out
    document = json.loads(streamshard(*status, "--json").out)
    assert [document[key] for key in ("run_dir", "archive_dir")] == [str(run), str(archive)]


def test_a_dry_run_shows_the_size_of_what_stays(run: Path, archive: Path) -> None:
    for tag in api.compact(run, archive, dry_run=True).tags:
        files = (path for path in (run / tag.tag).rglob("*") if path.is_file())
        assert tag.source_bytes == sum(path.stat().st_size for path in files)


@pytest.mark.parametrize(
    "options",
    [
        ["--status", "--delete"],
        ["--html", "page.html"],
    ],
)
def test_what_makes_no_sense_is_refused(run: Path, archive: Path, options: list[str]) -> None:
    assert streamshard("compact", run, archive, *options).code == 2
    assert not archive.exists()


# Many runs ----------------------------------------------------------------------------------------


def test_the_status_of_many_runs_is_a_line_each(tmp_path: Path, archive: Path) -> None:
    (tmp_path / "runs").mkdir()
    runs = [make_run(tmp_path / "runs" / name) for name in "abc"]
    for run in runs[1:]:
        (run / "latest").unlink()
    command = ("compact", tmp_path / "runs" / "*", archive)
    assert streamshard(*command).code == 3
    shown = streamshard(*command, "--status", "--json").out
    last = [json.loads(line)["last_run"] for line in shown.splitlines()]
    assert [record["run_dir"] for record in last] == [str(run) for run in runs]
    assert [(record["exit_code"], "no 'latest'" in record["error"]) for record in last] == [
        (0, False), (3, True), (3, True)
    ]  # fmt: skip


def test_one_run_that_fails_stops_no_other(tmp_path: Path, archive: Path) -> None:
    runs = tmp_path / "runs"
    (runs / "b").mkdir(parents=True)  # holds nothing
    for name in ("a", "c"):
        make_run(runs / name)
    command = ("compact", runs / "*", archive, "--keep-last", "3", "--delete")
    done = streamshard(*command)
    assert done.code == 3
    lines = done.out.splitlines()
    of_runs = [line.partition(":")[0] for line in lines if line.startswith(str(runs))]
    assert of_runs == [str(runs / name) for name in "abc"]
    assert f"{runs / 'b'}: no 'latest'" in done.err
    for name in ("a", "c"):
        assert FIRST not in tags_in(runs / name)
        assert (archive / name / f"{FIRST}.zarr").is_dir()
    found = [json.loads(line) for line in streamshard(*command, "--json").out.splitlines()]
    assert [one["run_dir"] for one in found] == [str(runs / name) for name in "abc"]
    assert ["error" in one for one in found] == [False, True, False]
    assert streamshard(*command, "--undelete", FIRST).code == 2


def test_a_pattern_gives_each_run_an_archive_of_its_own(tmp_path: Path) -> None:
    for name in ("a/output", "b/output", "b/other", ".c/output", "[d]"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "file").write_text("")
    assert runs_like(f"{tmp_path}/*/out*", "archive") == [
        (tmp_path / name / "output", Path("archive") / name / "output") for name in ("a", "b")
    ]
    assert runs_like(f"{tmp_path}/[d]", "archive") is None  # is there
    assert runs_like(f"{tmp_path}/missing", "archive") is None
    with pytest.raises(SourceNotFoundError):
        runs_like(f"{tmp_path}/z*", "archive")
    for pattern in (f"{tmp_path}/**", f"{tmp_path}/*/../a", "s3://bucket/*"):
        with pytest.raises(UsageError):
            runs_like(pattern, "archive")
