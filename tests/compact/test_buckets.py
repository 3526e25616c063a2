"""Archives in buckets: what is archived, proved, removed and kept."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import streamshard as api
from streamshard.errors import UsageError
from tests.cloud.server import KEY, SECRET
from tests.compact.runs import ALL, FIRST, MONTH, actions, bits
from tests.compact.sides import VICTIM, Side, Sides
from tests.documents import page
from tests.forked import run_forked

RECEIPT = ".receipt.json"


def names(side: Side) -> set[str]:
    """First parts of the names of all that is there."""
    return {path.split("/")[0] for path in side.content()}


@pytest.mark.parametrize("suffix", [".zarr", ".zarr.zip"])
def test_a_tag_is_archived_and_goes_and_comes_back(
    sides: Sides, capfd: pytest.CaptureFixture[str], suffix: str
) -> None:
    """As a store of many objects, or as one; and only if each has the bytes that it had."""
    before, archive, tmp = bits(sides.run), sides.archive, sides.tmp
    api.repartition(tmp / "made" / FIRST, tmp / "wanted", world_size=3)
    api.export(tmp / "made" / FIRST, tmp / "weights")
    how: dict[str, Any] = {"delete": True, "packed": suffix == ".zarr.zip"}
    assert actions(sides.compact(dry_run=True, **how))[FIRST] == "trashed"
    assert (bits(sides.run), archive.content()) == (before, {})
    if suffix == ".zarr":
        found = sides.compact()
        assert (actions(found)[FIRST], found.exit_code) == ("archived", 0)
        archived = archive.content()
        assert bits(sides.run) == before
        assert actions(sides.compact())[FIRST] == "archived before"
        assert archive.content() == archived  # and nothing is left of locks
    found = sides.compact(**how)
    assert (actions(found)[FIRST], found.exit_code) == ("trashed", 0)
    assert names(archive) == {*(f"{FIRST}{end}" for end in (suffix, f"{suffix}.sha256", RECEIPT))}
    receipt, store = sides.receipt(), f"{FIRST}{suffix}"
    whole = {path: data for path, data in archive.content().items() if path.startswith(store)}
    nbytes = sum(len(data) for path, data in whole.items() if not path.endswith(".sha256"))
    assert (receipt["state"], receipt["packed"]) == ("trashed", how["packed"])
    assert receipt["archive_bytes"] == nbytes
    assert all(check["holds"] for check in receipt["checks"])
    status = api.compact_status(sides.run, archive.where).tags
    assert [(one.tag, one.state) for one in status] == [(FIRST, "in the trash")]
    assert sides.original() == bits(tmp / "made" / FIRST)
    victim = store if how["packed"] else VICTIM
    archive.bucket.damage(f"{archive.name}/{victim}")
    found = sides.compact(9, **how)
    assert (actions(found)[FIRST], found.exit_code) == ("failed", 6)
    assert sides.original() == bits(tmp / "made" / FIRST)
    archive.write(victim, whole[victim])
    found = sides.compact(9, **how)
    assert (actions(found)[FIRST], found.exit_code) == ("purged", 0)
    assert bits(sides.run) == {
        path: data for path, data in before.items() if not path.startswith(FIRST + "/")
    }
    api.repartition(f"{archive.where}/{store}", tmp / "back", world_size=3)
    assert bits(tmp / "back") == bits(tmp / "wanted")
    said = "".join(map(str, (found, receipt, capfd.readouterr())))
    assert KEY not in said
    assert SECRET not in said
    how |= {"weights_only_older_than": MONTH}
    found = sides.compact(50, **how)
    assert (actions(found)[FIRST], found.exit_code) == ("weights only", 0)
    suffix = f".weights{suffix}"
    assert names(archive) == {*(f"{FIRST}{end}" for end in (suffix, f"{suffix}.sha256", RECEIPT))}
    assert FIRST not in actions(sides.compact(51, **how))
    store = f"{archive.where}/{FIRST}{suffix}"
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
