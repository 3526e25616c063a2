"""Archives that are one object each: proved, removed, replaced, and finished after kills."""

from io import BytesIO
from typing import Any

import pytest

import streamshard as api
from tests.compact.runs import ALL, FIRST, MONTH, actions, bits, entries
from tests.compact.sides import Side, Sides
from tests.compact.test_bucket_races import KILLED, SCRIPT, killed

STORE, WEIGHTS = f"{FIRST}.zarr.zip", f"{FIRST}.weights.zarr.zip"


def names(side: Side) -> set[str]:
    """First parts of the names of all that is there."""
    return {path.split("/")[0] for path in side.content()}


def test_the_whole_way_of_a_tag(sides: Sides) -> None:
    """The weights that are left are those of the same way on a disk."""
    run, archive, tmp = sides.run, sides.archive, sides.tmp
    api.repartition(tmp / "made" / FIRST, tmp / "wanted", world_size=3)
    found = sides.compact(delete=True, packed=True)
    assert (actions(found)[FIRST], found.exit_code) == ("deleted", 0)
    assert names(archive) == {STORE, f"{STORE}.sha256", f"{FIRST}.receipt.json"}
    receipt = sides.receipt()
    assert receipt["packed"] is True
    assert receipt["archive_bytes"] == len(archive.read(STORE))
    assert all(check["holds"] for check in receipt["checks"])
    status = api.compact_status(run, archive.where).tags
    assert [(one.tag, one.state) for one in status] == [(FIRST, "in the trash")]
    api.repartition(f"{archive.where}/{STORE}", tmp / "back", world_size=3)
    assert bits(tmp / "back") == bits(tmp / "wanted")
    full = entries(BytesIO(archive.read(STORE)))
    assert actions(sides.compact(9, delete=True))[FIRST] == "purged"
    assert (sides.original(), sides.tags()) == ({}, ALL - {FIRST})
    options: dict[str, Any] = {"delete": True, "weights_only_older_than": MONTH}
    assert actions(sides.compact(50, **options))[FIRST] == "weights only"
    assert names(archive) == {WEIGHTS, f"{WEIGHTS}.sha256", f"{FIRST}.receipt.json"}
    kept = entries(BytesIO(archive.read(WEIGHTS)))
    assert not [path for path in kept if "exp_avg" in path]
    assert {path for path in full if path.startswith(("state/fp32", "file/"))} <= kept.keys()
    own = {path for path in kept if path.startswith("meta/") or path == "zarr.json"}
    assert all(kept[path] == full[path] for path in kept.keys() - own)
    assert api.verify(f"{archive.where}/{WEIGHTS}").is_good
    assert FIRST not in actions(sides.compact(51, **options))


@pytest.mark.parametrize("at", [3, 12])
def test_a_night_that_is_killed_is_finished_by_the_next(sides: Sides, at: int) -> None:
    whole = bits(sides.tmp / "made" / FIRST)
    script = SCRIPT.replace("delete=True", "delete=True, packed=True")
    assert killed(sides, at, days=1, script=script) == KILLED
    assert (sides.original(), sides.tags()) == (whole, ALL)
    found = sides.compact(delete=True, packed=True)
    assert (actions(found)[FIRST], found.exit_code) == ("deleted", 0)
    assert sides.original() == whole
    assert api.verify(f"{sides.archive.where}/{STORE}").is_good
    assert names(sides.archive) == {STORE, f"{STORE}.sha256", f"{FIRST}.receipt.json"}
