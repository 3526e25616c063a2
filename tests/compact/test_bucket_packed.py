"""Archives that are one object each: proved, removed, replaced, and finished after kills."""

from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

import streamshard as api
from streamshard.io.objects import object_upload
from tests.compact.runs import ALL, FIRST, MONTH, actions, age, bits, entries, later, make_run
from tests.compact.sides import Side, Sides
from tests.compact.test_bucket_races import KILLED, SCRIPT, killed
from tests.fabricated import edit
from tests.forked import run_forked
from tests.job import Job

STORE, WEIGHTS = f"{FIRST}.zarr.zip", f"{FIRST}.weights.zarr.zip"
NUMEL = 2_000_000
LARGE = Job(stage=2, world_size=1, groups=((("embed.weight", (NUMEL,)),),))
"""With random weights, its archive is uploaded in parts, and so are its weights."""
IN_PARTS = """
from streamshard.io.objects import object_upload as upload
upload._SINGLE_BYTES, upload._PART_BYTES = 1 << 20, 5 << 20
"""
KILLED_IN_PARTS = """
import os, sys, threading
from datetime import datetime, timedelta
import streamshard
run, archive, now = sys.argv[1:]
write = upload.ObjectSink._send

def send(sink):
    write(sink)
    while not parts(archive):  # it is on its way
        threading.Event().wait(0.01)
    os._exit(99)

def parts(archive):
    import boto3
    bucket = archive.split("/")[2]
    client = boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"])
    found = client.list_multipart_uploads(Bucket=bucket).get("Uploads", ())
    return [
        part
        for one in found
        for part in client.list_parts(Bucket=bucket, Key=one["Key"], UploadId=one["UploadId"]).get(
            "Parts", ()
        )
    ]

upload.ObjectSink._send = send
streamshard.compact(
    run, archive, delete=True, packed=True, weights_only_older_than=timedelta(days=30),
    now=datetime.fromisoformat(now),
)
"""


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
    assert (receipt["packed"], receipt["etags"]) == (True, {"": archive.etag(STORE)})
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


def test_one_that_was_replaced_proves_nothing(sides: Sides) -> None:
    sides.compact(delete=True, packed=True)
    sides.archive.write_in_parts(STORE)  # the same bytes, and another etag
    found = sides.compact(20, delete=True)
    assert (actions(found)[FIRST], found.exit_code) == ("ambiguous", 3)
    assert sides.archive.etag(STORE) in found.problems[0].reason
    assert sides.original() == bits(sides.tmp / "made" / FIRST)


def test_one_that_is_damaged_lets_no_tag_go(sides: Sides) -> None:
    sides.compact(packed=True)
    data = bytearray(sides.archive.read(STORE))
    data[len(data) // 2] ^= 1
    sides.archive.write(STORE, bytes(data))
    found = sides.compact(2, delete=True, packed=True)
    assert (actions(found)[FIRST], found.exit_code) == ("failed", 6)
    assert sides.tags() == ALL


@pytest.mark.parametrize("at", [3, 5, 6, 7, 9, 12])
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


def randomize(content: dict[str, Any]) -> None:
    """Give the weights values that cannot be compressed."""
    (weights,) = content["optimizer_state_dict"]["single_partition_of_fp32_groups"]
    weights.data[:NUMEL].normal_()


@pytest.mark.parametrize("of_weights", [False, True])
def test_one_that_is_killed_between_parts_leaves_none_of_them(
    sides: Sides,
    s3: Any,  # noqa: ANN401
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    of_weights: bool,
) -> None:
    sides, days = replace(sides, run=make_run(tmp_path / "large", LARGE)), 1
    (shard,) = (sides.run / FIRST).glob("*_optim_states.pt")
    edit(shard, randomize)
    age(sides.run / FIRST, 30)
    monkeypatch.setattr(object_upload, "_SINGLE_BYTES", 1 << 20)
    monkeypatch.setattr(object_upload, "_PART_BYTES", 5 << 20)
    options: dict[str, Any] = {"delete": True, "packed": True}
    if of_weights:
        sides.compact(**options)
        assert actions(sides.compact(9, **options))[FIRST] == "purged"
        options["weights_only_older_than"], days = MONTH, 50
    given = (str(sides.run), sides.archive.where, later(days).isoformat())
    assert run_forked(*given, script=IN_PARTS + KILLED_IN_PARTS).code == KILLED
    bucket = sides.archive.where.split("/")[2]
    assert s3.list_multipart_uploads(Bucket=bucket)["Uploads"]
    assert (WEIGHTS if of_weights else STORE) not in sides.archive.content()
    found = sides.compact(days, **options)
    done = {True: "weights only", False: "deleted"}[of_weights]
    assert (actions(found)[FIRST], found.exit_code) == (done, 0)
    assert not s3.list_multipart_uploads(Bucket=bucket).get("Uploads")
    made = WEIGHTS if of_weights else STORE
    assert names(sides.archive) == {made, f"{made}.sha256", f"{FIRST}.receipt.json"}
    assert api.verify(f"{sides.archive.where}/{made}").is_good
