"""`--status` says what nights have done; `--notify` tells somebody when one went wrong."""

import json
import os
import re
import shlex
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import streamshard as api
from streamshard.cli.main import main
from streamshard.errors import CorruptFileError, SourceNotFoundError, TargetError
from streamshard.io.changes import write_durably
from streamshard.operations.compact import receipts
from streamshard.operations.compact.compact_report import RunRecord
from tests.compact.runs import FIRST, NO_GRACE, RECORD, STEPS, make_run, receipt_of

NOTE = """
import pathlib, sys
target = pathlib.Path(sys.argv[1])
target.write_bytes(sys.stdin.buffer.read() + (target.read_bytes() if target.exists() else b""))
print("noted")
sys.exit(int(sys.argv[2]))
"""


NOW = datetime.now(UTC)


def after(days: float) -> datetime:
    """Return the time so many days after these tests began."""
    return NOW + timedelta(days=days)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run")


def states(found: api.CompactStatus) -> dict[str, str]:
    return {tag.tag: tag.state for tag in found.tags}


def test_a_tag_from_its_archive_to_its_end(run: Path, tmp_path: Path) -> None:
    archive = tmp_path / "archive"
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

    api.compact(run, archive, now=after(1), delete=True, grace=timedelta(days=3))
    found = api.compact_status(run, archive)
    (tag,) = [tag for tag in found.tags if tag.tag == FIRST]
    assert tag.state == "in the trash"
    assert datetime.fromisoformat(tag.trash_until) == after(4)
    assert found.trash_bytes == sum(t.source_bytes for t in found.tags if t.trash_until)
    night = found.last_run
    assert night is not None
    assert (night.deletes, night.exit_code, night.needs_attention) == (True, 0, False)
    assert datetime.fromisoformat(night.began) == after(1) <= datetime.fromisoformat(night.ended)
    assert night.actions["deleted"] == sum(t.state == "in the trash" for t in found.tags)

    api.compact(run, archive, now=after(5), delete=True, grace=timedelta(days=3))
    found = api.compact_status(run, archive)
    gone = [tag for tag in found.tags if tag.state == "removed"]
    assert FIRST in {tag.tag for tag in gone}
    assert found.saved_bytes == sum(tag.source_bytes - tag.archive_bytes for tag in gone)

    api.compact(run, archive, now=after(50), weights_only_older_than=timedelta(days=30))
    assert states(api.compact_status(run, archive))[FIRST] == "weights only"


def test_what_is_brought_back_is_archived_and_no_more(run: Path, tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    api.compact(run, archive, now=after(1), delete=True)
    api.compact(run, archive, undelete=[FIRST])
    found = api.compact_status(run, archive)
    assert states(found)[FIRST] == "archived"
    assert found.last_run is not None
    assert "brought back" not in found.last_run.actions  # that was by hand


def test_a_night_that_was_killed_has_not_ended(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(RunRecord, "after", stop)
    with pytest.raises(KeyboardInterrupt):
        api.compact(run, tmp_path / "archive")
    night = api.compact_status(run, tmp_path / "archive").last_run
    assert night is not None
    assert night.ended == ""
    assert main(["compact", str(run), str(tmp_path / "archive"), "--status"]) == 0
    assert "it is running, or was killed" in capsys.readouterr().out


def test_a_record_that_cannot_be_written_is_one_result_more(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, data: bytes, temporary: Path) -> None:
        if path.name == RECORD:
            raise OSError(28, "No space left on device")
        write_durably(path, data, temporary)

    monkeypatch.setattr(receipts, "write_durably", refuse)
    found = api.compact(run, tmp_path / "archive")
    assert {tag.action for tag in found.tags if tag.tag == FIRST} == {"archived"}
    (problem,) = found.problems
    assert (problem.tag, problem.exit_code) == (RECORD, TargetError.exit_code)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"format": 2}', '{"format": 1, "actions": {}, "problems": [{}]}'],
)
def test_a_record_that_is_not_ours_is_refused(run: Path, tmp_path: Path, text: str) -> None:
    api.compact(run, tmp_path / "archive")
    (tmp_path / "archive" / RECORD).write_text(text)
    with pytest.raises(CorruptFileError, match="not as streamshard writes it"):
        api.compact_status(run, tmp_path / "archive")
    api.compact(run, tmp_path / "archive")  # a night needs no earlier one
    assert api.compact_status(run, tmp_path / "archive").last_run is not None


def test_a_damaged_receipt_hides_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, archive = make_run(tmp_path / "run", steps=[*STEPS, STEPS[-1] + 10]), tmp_path / "archive"
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
        for form in ([], ["--prometheus"], ["--json"]):
            assert main(["compact", str(run), str(archive), "--status", *form]) == 3, content
            said = capsys.readouterr()
        found = json.loads(said.out)
        assert {tag["state"] for tag in found["tags"]} == {"unreadable", "archived"}
    assert f"{FIRST}.receipt.json" in said.err


def test_prometheus_reads_it(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = tmp_path / 'a "b" \\c'
    api.compact(run, odd, delete=True, now=after(1))
    status = api.compact_status(run, odd)
    capsys.readouterr()
    assert main(["compact", str(run), str(odd), "--status", "--prometheus"]) == 0
    lines = capsys.readouterr().out.splitlines()
    sample = re.compile(r'(\w+)\{((?:\w+="(?:[^"\\\n]|\\["\\n])*",?)+)\} (-?\d+)')
    typed: set[str] = set()
    values: dict[tuple[str, str], int] = {}
    for line in lines:
        if line.startswith("# TYPE "):
            typed.add(line.split()[2])
        elif not line.startswith("# HELP "):
            match = sample.fullmatch(line)
            assert match is not None, line
            assert match[1] in typed
            values[match[1], match[2]] = int(match[3])
    own = ",".join(
        f'{key}="{value}"'
        for key, value in (
            ("run_dir", str(run)),
            ("archive_dir", str(odd).replace("\\", "\\\\").replace('"', '\\"')),
        )
    )
    assert values["streamshard_compact_archive_bytes", own] == status.archive_bytes
    assert values["streamshard_compact_tags", f'{own},state="in_the_trash"'] == sum(
        tag.state == "in the trash" for tag in status.tags
    )
    end = values["streamshard_compact_trash_until_timestamp_seconds", own]
    assert datetime.fromtimestamp(end, UTC) == after(8).replace(microsecond=0)


def command(script: Path, target: Path, code: int = 0) -> str:
    """Return a command that writes what it gets to a file."""
    script.write_text(NOTE)
    return shlex.join([sys.executable, str(script), str(target), str(code)])


def test_somebody_is_told_once_of_all_that_went_wrong(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    told, archive = tmp_path / "told.json", tmp_path / "archive"
    note = command(tmp_path / "note.py", told)
    assert main(["compact", str(run), str(archive), "--notify", note]) == 0
    assert not told.exists()  # nothing went wrong
    for name in ("mp_rank_00_model_states.pt", "x.pt"):
        (run / FIRST / name).write_bytes(b"another save")
    with pytest.raises(SystemExit) as ended:
        main(["compact", str(run), str(archive), "--min-age", "0s", "--notify", note])
    document: dict[str, Any] = json.loads(told.read_text())
    assert document["exit_code"] == ended.value.code != 0
    (night,) = document["runs"]
    assert [one["tag"] for one in night["problems"]] == [FIRST]
    assert "noted" in capfd.readouterr().err


def test_somebody_is_told_why_nothing_was_done(run: Path, tmp_path: Path) -> None:
    told = tmp_path / "told.json"
    (run / "latest").unlink()
    note = command(tmp_path / "note.py", told)
    assert main(["compact", str(run), str(tmp_path / "archive"), "--notify", note]) == 3
    assert "no 'latest'" in json.loads(told.read_text())["runs"][0]["error"]
    night = api.compact_status(run, tmp_path / "archive").last_run
    assert night is not None
    assert (night.exit_code, "no 'latest'" in night.error) == (3, True)


def test_of_many_runs_somebody_is_told_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    told, archive = tmp_path / "told.json", tmp_path / "archive"
    note = command(tmp_path / "note.py", told)
    (tmp_path / "runs").mkdir()
    runs = [make_run(tmp_path / "runs" / name) for name in "abc"]
    for run in runs[1:]:
        (run / "latest").unlink()
    pattern = str(tmp_path / "runs" / "*")
    with pytest.raises(SystemExit, match="3"):
        main(["compact", pattern, str(archive), "--notify", note])
    nights = json.loads(told.read_text())["runs"]
    assert [night["run_dir"] for night in nights] == [str(run) for run in runs[1:]]
    capfd.readouterr()
    assert main(["compact", pattern, str(archive), "--status", "--json"]) == 0
    found = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [status["last_run"]["exit_code"] for status in found] == [0, 3, 3]
    assert main(["compact", pattern, str(archive), "--status", "--prometheus"]) == 0
    lines = capfd.readouterr().out.splitlines()
    comments = [line for line in lines if line.startswith("#")]
    assert len(set(comments)) == len(comments)  # each metric stands together, described once
    assert sum(line.startswith("streamshard_compact_last_exit_code{") for line in lines) == 3


@pytest.mark.parametrize(
    ("what", "said"),
    [("/no/such/program", "cannot be run"), ("fails", "ended with 9"), ("hangs", "killed after")],
)
def test_a_command_that_fails_changes_nothing(
    run: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    said: str,
) -> None:
    monkeypatch.setattr("streamshard.cli.notice._SECONDS", 1 if what == "hangs" else 60)
    (run / "latest").unlink()
    script = tmp_path / "note.py"
    commands = {
        "fails": command(script, tmp_path / "told", 9),
        "hangs": shlex.join([sys.executable, "-c", "import time; time.sleep(1000)"]),
    }
    arguments = ["compact", str(run), str(tmp_path / "archive"), "--notify"]
    assert main([*arguments, commands.get(what, what)]) == 3
    assert said in capfd.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        ["--prometheus"],
        ["--status", "--prometheus", "--json"],
        ["--status", "--delete"],
        ["--status", "--notify", "true"],
        ["--notify", ""],
        ["--notify", "'"],
    ],
)
def test_what_makes_no_sense_is_refused(run: Path, tmp_path: Path, options: list[str]) -> None:
    assert main(["compact", str(run), str(tmp_path / "archive"), *options]) == 2
    assert not (tmp_path / "archive").exists()


def test_an_archive_that_is_lost_is_none_that_is_not_there_yet(run: Path, tmp_path: Path) -> None:
    api.compact(run, tmp_path / "archive", now=after(1), delete=True)
    (tmp_path / "archive").rename(tmp_path / "elsewhere")
    with pytest.raises(SourceNotFoundError, match="archive"):
        api.compact_status(run, tmp_path / "archive")


def test_tags_that_are_gone_are_counted(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = tmp_path / "archive"
    api.compact(run, archive, delete=True)
    api.compact(run, archive, grace=NO_GRACE, purge=[FIRST])
    capsys.readouterr()
    monkeypatch.chdir(tmp_path)
    status = ["compact", "run", "archive", "--status"]
    assert main(status) == 0
    shown = capsys.readouterr().out
    assert "1 tag more, whose originals are gone; -v lists them" in shown
    assert FIRST not in shown
    assert main([*status, "-v"]) == 0
    assert FIRST in capsys.readouterr().out
    assert main([*status, "--prometheus"]) == 0
    assert f'run_dir="{run}",archive_dir="{archive}"' in capsys.readouterr().out


def test_a_dry_run_shows_the_size_of_what_stays(run: Path, tmp_path: Path) -> None:
    found = api.compact(run, tmp_path / "archive", dry_run=True)
    sizes = {tag.tag: tag.source_bytes for tag in found.tags}
    for tag, nbytes in sizes.items():
        assert nbytes == sum(p.stat().st_size for p in (run / tag).rglob("*") if p.is_file())
