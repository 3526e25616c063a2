"""Several runs that a pattern names, compacted in one night."""

import json
from pathlib import Path

import pytest

from streamshard.errors import SourceNotFoundError, UsageError
from streamshard.operations.compact.compact import runs_like
from tests.cli.conftest import streamshard as command
from tests.compact.runs import FIRST, make_run, tags_in


def test_one_run_that_fails_stops_no_other(tmp_path: Path) -> None:
    runs, archive = tmp_path / "runs", tmp_path / "archive"
    (runs / "b").mkdir(parents=True)  # holds nothing
    for name in ("a", "c"):
        make_run(runs / name)
    options = [str(runs / "*"), str(archive), "--keep-last", "3", "--delete"]
    done = command("compact", *options)
    assert done.code == 3
    lines = done.out.splitlines()
    of_runs = [line.partition(":")[0] for line in lines if line.startswith(str(runs))]
    assert of_runs == [str(runs / name) for name in "abc"]
    assert f"{runs / 'b'}: no 'latest'" in done.err
    for name in ("a", "c"):
        assert FIRST not in tags_in(runs / name)
        assert (archive / name / f"{FIRST}.zarr").is_dir()
    again = command("compact", *options, "--json")
    found = [json.loads(line) for line in again.out.splitlines()]
    assert [one["run_dir"] for one in found] == [str(runs / name) for name in "abc"]
    assert ["error" in one for one in found] == [False, True, False]
    assert command("compact", *options, "--undelete", FIRST).code == 2


def test_a_pattern_gives_each_run_an_archive_of_its_own(tmp_path: Path) -> None:
    for name in ("a/output", "b/output", "b/other", ".c/output", "[d]"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "file").write_text("")
    found = runs_like(f"{tmp_path}/*/out*", "archive")
    assert found == [
        (tmp_path / name / "output", Path("archive") / name / "output") for name in ("a", "b")
    ]
    assert runs_like(f"{tmp_path}/[d]", "archive") is None  # is there
    assert runs_like(f"{tmp_path}/missing", "archive") is None
    with pytest.raises(SourceNotFoundError):
        runs_like(f"{tmp_path}/z*", "archive")
    for pattern in (f"{tmp_path}/**", f"{tmp_path}/*/../a", "s3://bucket/*"):
        with pytest.raises(UsageError):
            runs_like(pattern, "archive")
