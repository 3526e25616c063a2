"""Archives in buckets: what is archived, proved, removed and kept."""

import re
import shlex
from pathlib import Path

import pytest

import streamshard as api
from streamshard.errors import UsageError
from tests.cloud.server import KEY, SECRET
from tests.compact.runs import ALL, FIRST, MONTH, actions, bits
from tests.compact.sides import Sides
from tests.documents import page
from tests.forked import run_forked


def test_a_tag_is_archived_and_goes_and_comes_back(
    sides: Sides, capfd: pytest.CaptureFixture[str]
) -> None:
    before, tmp = bits(sides.run), sides.tmp
    api.repartition(tmp / "made" / FIRST, tmp / "wanted", world_size=3)
    api.export(tmp / "made" / FIRST, tmp / "weights")
    assert actions(sides.compact(dry_run=True, delete=True))[FIRST] == "deleted"
    assert (bits(sides.run), sides.archive.content()) == (before, {})
    found = sides.compact()
    assert (actions(found)[FIRST], found.exit_code) == ("archived", 0)
    archived = sides.archive.content()
    assert bits(sides.run) == before
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
    assert bits(sides.run) == {
        path: data for path, data in before.items() if not path.startswith(FIRST + "/")
    }
    store = f"{sides.archive.where}/{FIRST}.zarr"
    assert api.verify(store).is_good
    api.repartition(store, tmp / "back", world_size=3)
    assert bits(tmp / "back") == bits(tmp / "wanted")
    said = "".join(map(str, (found, receipt, capfd.readouterr())))
    assert KEY not in said
    assert SECRET not in said
    options = {"delete": True, "weights_only_older_than": MONTH}
    for dry_run in (True, False):
        found = sides.compact(50, **options, dry_run=dry_run)
        assert (actions(found)[FIRST], found.exit_code) == ("weights only", 0)
    known = {f"{FIRST}.weights.zarr", f"{FIRST}.weights.zarr.sha256", f"{FIRST}.receipt.json"}
    assert {path.split("/")[0] for path in sides.archive.content()} == known
    assert FIRST not in actions(sides.compact(51, **options))
    store = f"{sides.archive.where}/{FIRST}.weights.zarr"
    assert api.verify(store).is_good
    api.export(store, tmp / "found")
    assert bits(tmp / "found") == bits(tmp / "weights")


def test_the_line_for_cron_does_what_it_says(sides: Sides) -> None:
    (line,) = re.findall(r"^streamshard (compact /runs/7b s3://.*)$", page("archive"), re.MULTILINE)
    words = [word.replace("/runs/7b", str(sides.run)) for word in (*shlex.split(line), "-q")]
    words = [word.replace("s3://archive/7b", sides.archive.where) for word in words]
    done = run_forked(*words)
    assert (done.code, done.out, done.err) == (0, "", "")
    assert sides.tags() == ALL - {FIRST}
    assert sides.receipt()["state"] == "trashed"


@pytest.mark.parametrize("url", ["s3://runs/7b", "gs://runs/7b", "az://runs/7b"])
def test_a_run_directory_in_a_bucket_is_refused_before_it_is_asked_for(
    archive: Path, url: str
) -> None:
    for refused in (api.compact, api.compact_status):
        with pytest.raises(UsageError, match=f"{url}: .* in a bucket.* run it where the job saves"):
            refused(url, archive)
    assert not archive.exists()
