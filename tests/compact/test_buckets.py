"""Run directories and archives in buckets: what is archived, proved, marked, removed and kept."""

import re
import shlex
import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import streamshard as api
from streamshard.errors import SourceError
from streamshard.sizes import show_bytes
from tests.cloud.server import KEY, SECRET, S3Server
from tests.compact.runs import ALL, FIRST, actions, bits, later
from tests.compact.sides import MARK, ONE_IN_A_BUCKET, Side, Sides, make_sides
from tests.compact.test_families import make_output
from tests.documents import page
from tests.forked import run_forked
from tests.job import LEAN

A_MONTH = timedelta(days=30)


def test_a_tag_is_archived_and_goes_and_comes_back(
    sides: Sides, capfd: pytest.CaptureFixture[str]
) -> None:
    before, tmp = sides.run.content(), sides.tmp
    api.repartition(tmp / "made" / FIRST, tmp / "wanted", world_size=3)
    assert actions(sides.compact(dry_run=True, delete=True))[FIRST] == "deleted"
    assert (sides.run.content(), sides.archive.content()) == (before, {})
    found = sides.compact()
    assert (actions(found)[FIRST], found.exit_code) == ("archived", 0)
    archived = sides.archive.content()
    assert sides.run.content() == before
    assert actions(sides.compact())[FIRST] == "archived before"
    assert sides.archive.content() == archived  # and nothing is left of locks
    found = sides.compact(delete=True)
    assert (actions(found)[FIRST], found.exit_code) == ("deleted", 0)
    receipt = sides.receipt()
    assert receipt["state"] == "trashed"
    assert all(check["holds"] for check in receipt["checks"])
    assert sides.original() == bits(tmp / "made" / FIRST)
    found = sides.compact(7.9, delete=True)
    assert (actions(found)[FIRST], found.exit_code) == ("in the trash", 0)
    found = sides.compact(8.1, delete=True)
    assert (actions(found)[FIRST], found.exit_code) == ("purged", 0)
    assert sides.run.content() == {
        path: data for path, data in before.items() if not path.startswith(FIRST + "/")
    }
    store = f"{sides.archive.where}/{FIRST}.zarr"
    assert api.verify(store).is_good
    api.repartition(store, tmp / "back", world_size=3)
    assert bits(tmp / "back") == bits(tmp / "wanted")
    said = "".join(map(str, (found, receipt, capfd.readouterr())))
    assert KEY not in said
    assert SECRET not in said


def test_a_dry_run_tells_requests_and_bytes(sides: Sides) -> None:
    tags = sides.compact(dry_run=True).tags
    nbytes = sum(tag.source_bytes for tag in tags if tag.action == "archived")
    (told,) = [note for note in sides.compact(dry_run=True).notes if "not counting those" in note]
    read = 3 * (not sides.run.is_local) + 2 * (not sides.archive.is_local)
    assert f"down, {show_bytes(read * nbytes)}" in told
    assert f"up, {show_bytes(nbytes * (not sides.archive.is_local))}" in told


def test_a_receipt_records_what_identifies_objects(buckets: Sides) -> None:
    buckets.compact()
    receipt, archive, run = buckets.receipt(), buckets.archive, buckets.run
    store = f"{FIRST}.zarr/"
    stored = [path for path in archive.content() if path.startswith(store)]
    assert receipt["etags"] == {path.removeprefix(store): archive.etag(path) for path in stored}
    assert [(one["etag"], one["inode"], one["device"]) for one in receipt["source"]] == [
        (run.etag(one["path"]), 0, 0) for one in receipt["source"]
    ]


def test_a_tag_in_the_trash_of_a_bucket_stays_whole(buckets: Sides) -> None:
    before = buckets.run.content()
    buckets.compact(delete=True)
    assert buckets.run.content().keys() - before.keys() == {MARK}
    assert api.inspect(f"{buckets.run.where}/{FIRST}").tag == FIRST
    assert FIRST not in {tag.tag for tag in buckets.compact(2).tags if tag.action != "in the trash"}
    found = buckets.compact(undelete=[FIRST, "nobody"])
    assert [(tag.action, tag.exit_code) for tag in found.tags] == [
        ("brought back", 0), ("failed", 2)
    ]  # fmt: skip
    assert buckets.run.content() == before
    assert buckets.receipt()["state"] == "archived"
    assert actions(buckets.compact(3, delete=True))[FIRST] == "deleted"
    buckets.run.write("latest", FIRST.encode())
    with pytest.raises(SourceError, match="is in the trash; undelete="):
        buckets.compact(20, delete=True)
    assert buckets.original() == bits(buckets.tmp / "made" / FIRST)


@pytest.mark.parametrize("run", ["local", "bucket"])
def test_a_framework_s_checkpoint_is_archived_and_goes_and_comes_back(
    s3: Any,  # noqa: ANN401
    server: S3Server,
    tmp_path: Path,
    run: str,
) -> None:
    sides, first = make_sides(s3, server, tmp_path, run, "bucket"), "checkpoint-100"
    root = f"{sides.run.where}-output"
    output = Sides(Side(root, s3), sides.archive, tmp_path)
    made = make_output(tmp_path / "made-output", best="output/checkpoint-200", job=LEAN)
    for unit in sorted(made.iterdir(), key=lambda path: int(path.name.rpartition("-")[2])):
        if run == "local":
            shutil.copytree(unit, Path(root, unit.name))
        else:
            for path, data in bits(unit).items():
                output.run.write(f"{unit.name}/{path}", data)
    before, whole = output.run.content(), bits(made / first)
    rules: dict[str, Any] = {"keep_last": 2, "keep_tags": ["checkpoint-300"]}
    assert before == bits(made)
    found = output.compact(**rules, delete=True)
    kept = {f"checkpoint-{step}": "kept" for step in (200, 300, 900, 1000)}
    assert found.problems == ()
    assert actions(found) == {first: "deleted", **kept}
    left = {path: data for path, data in before.items() if not path.startswith(f"{first}/")}
    if run == "bucket":
        assert output.run.content().keys() - before.keys() == {f".streamshard.trash/{first}"}
    told = [tag.action for tag in output.compact(2, **rules).tags if tag.tag == first]
    assert told == ["in the trash"]  # where it lies in a bucket, it is not listed once more
    assert output.compact(2, undelete=[first]).exit_code == 0
    assert output.run.content() == before
    assert actions(output.compact(3, **rules, delete=True))[first] == "deleted"
    found = output.compact(20, **rules, delete=True)
    assert (actions(found)[first], found.exit_code) == ("purged", 0)
    assert output.run.content() == left
    restored = tmp_path / "restored" / first
    restored.parent.mkdir()
    api.repartition(f"{output.archive.where}/{first}.zarr", restored)
    assert bits(restored).keys() == whole.keys()
    outside = {path: data for path, data in whole.items() if "global_step" not in path}
    assert outside.items() <= bits(restored).items()
    assert api.verify(restored, against=made / first).differences == ()
    if run == "local":
        script = "zero_to_fp32.py"
        assert (restored / script).stat().st_mode == (made / first / script).stat().st_mode


def test_the_line_for_cron_does_what_it_says(
    s3: Any,  # noqa: ANN401
    server: S3Server,
    tmp_path: Path,
) -> None:
    sides = make_sides(s3, server, tmp_path, "local", "bucket")
    (line,) = re.findall(r"^streamshard (compact /runs/7b s3://.*)$", page("archive"), re.MULTILINE)
    words = [word.replace("/runs/7b", sides.run.where) for word in (*shlex.split(line), "-q")]
    words = [word.replace("s3://archive/7b", sides.archive.where) for word in words]
    done = run_forked(*words)
    assert (done.code, done.out, done.err) == (0, "", "")
    assert sides.run.tags() == ALL - {FIRST}
    assert sides.receipt()["state"] == "trashed"


@ONE_IN_A_BUCKET
def test_one_night_archives_and_removes_and_a_later_one_drops_states(sides: Sides) -> None:
    api.export(sides.tmp / "made" / FIRST, sides.tmp / "wanted")
    found = sides.compact(delete=True)  # archived and removed in one run
    assert (actions(found)[FIRST], found.exit_code) == ("deleted", 0)
    assert sides.original() == bits(sides.tmp / "made" / FIRST)
    assert actions(sides.compact(9, delete=True))[FIRST] == "purged"
    assert sides.original() == {}
    assert sides.run.tags() == ALL - {FIRST}
    options = {"delete": True, "weights_only_older_than": A_MONTH}
    for dry_run in (True, False):
        found = sides.compact(50, **options, dry_run=dry_run)
        assert (actions(found)[FIRST], found.exit_code) == ("weights only", 0)
    known = {f"{FIRST}.weights.zarr", f"{FIRST}.weights.zarr.sha256", f"{FIRST}.receipt.json"}
    assert {path.split("/")[0] for path in sides.archive.content()} == known
    assert FIRST not in actions(sides.compact(51, **options))
    store = f"{sides.archive.where}/{FIRST}.weights.zarr"
    assert api.verify(store).is_good
    api.export(store, sides.tmp / "found")
    assert bits(sides.tmp / "found") == bits(sides.tmp / "wanted")


@pytest.mark.parametrize("sides", ["local to bucket"], indirect=True)
def test_an_archive_of_one_file_that_came_to_a_bucket_loses_its_states(sides: Sides) -> None:
    here, weights = sides.tmp / "here", f"{FIRST}.weights.zarr.zip"
    for days in (1, 9):
        api.compact(sides.run.where, here, delete=True, packed=True, now=later(days))
    sides.archive.fill(here)
    before = sides.archive.content()
    found = sides.compact(50, delete=True, weights_only_older_than=A_MONTH)
    (tag,) = (one for one in found.tags if one.tag == FIRST)
    assert (tag.action, found.exit_code) == ("weights only", 0)
    assert sides.archive.content().keys() - before.keys() == {weights, f"{weights}.sha256"}
    assert api.verify(f"{sides.archive.where}/{weights}").is_good


def test_what_was_uploaded_lately_stays(buckets: Sides) -> None:
    found = api.compact(buckets.run.where, buckets.archive.where, delete=True)
    assert set(actions(found).values()) == {"kept"}
    assert "min_age= is 2h" in found.tags[0].reason
