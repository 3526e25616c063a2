"""Run directories and archives in buckets: what is archived, proved, marked, removed and kept."""

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any

import boto3  # type: ignore[import-untyped, unused-ignore]
import pytest

import streamshard as api
from streamshard.errors import SourceError, TargetLockedError
from streamshard.io.changes import lock_at
from streamshard.io.object_path import as_path
from streamshard.io.objects.clients import client_of
from streamshard.operations.compact.removal import trash
from streamshard.operations.compact.tag_choice_review import Again
from streamshard.sizes import show_bytes
from tests.cloud.proxy import LEAKED, Fault, FaultProxy, Request
from tests.cloud.server import KEY, SECRET, S3Server, credentials
from tests.compact.runs import ALL, FIRST, RECORD, actions, bits, later, make_run, save, tag_of
from tests.compact.test_families import make_output
from tests.documents import page
from tests.forked import run_forked
from tests.job import Job

MARK = f".streamshard.trash/{FIRST}"
LAST_MARK = f".streamshard.trash/.streamshard.going/{FIRST}"
MODEL = f"{FIRST}/mp_rank_00_model_states.pt"
ALL_SHARDS = {f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2)}
VICTIM = f"{FIRST}.zarr/state/fp32/embed.weight/c/0/0"
JOB = Job(groups=((("embed.weight", (11, 4)),),), frozen=(("old", (3,)),), tied={})
A_MONTH = timedelta(days=30)


@dataclass(frozen=True)
class Side:
    """A directory, on the disk or in a bucket, as other tools see it."""

    where: str
    s3: Any

    @property
    def is_local(self) -> bool:
        """Whether it is on the disk."""
        return not self.where.startswith("s3:")

    def _key(self, path: str = "") -> dict[str, str]:
        _, _, bucket, key = self.where.split("/", 3)
        return {"Bucket": bucket, "Key": f"{key}/{path}"}

    def fill(self, directory: Path) -> None:
        """Copy a directory there."""
        if self.is_local:
            shutil.copytree(directory, self.where)
            return
        for path, data in bits(directory).items():
            self.write(path, data)

    def content(self) -> dict[str, bytes]:
        """Every file or object with its bytes, but for the record of the last night."""
        if self.is_local:
            return bits(Path(self.where))
        root = self._key()
        pages = self.s3.get_paginator("list_objects_v2")
        found = pages.paginate(Bucket=root["Bucket"], Prefix=root["Key"])
        keys = [one["Key"] for page in found for one in page.get("Contents", ())]
        paths = [key.removeprefix(root["Key"]) for key in keys]
        return {path: self.read(path) for path in paths if path != RECORD}

    def read(self, path: str) -> bytes:
        """Bytes of a file or an object."""
        if self.is_local:
            return Path(self.where, path).read_bytes()
        data: bytes = self.s3.get_object(**self._key(path))["Body"].read()
        return data

    def write(self, path: str, data: bytes) -> None:
        """Write a file or an object."""
        if self.is_local:
            Path(self.where, path).write_bytes(data)
        else:
            self.s3.put_object(**self._key(path), Body=data)

    def remove(self, path: str) -> None:
        """Remove an object."""
        self.s3.delete_object(**self._key(path))

    def etag(self, path: str) -> str:
        """Etag of an object."""
        return str(self.s3.head_object(**self._key(path))["ETag"]).strip('"')

    def write_in_parts(self, path: str) -> None:
        """Upload an object again with the bytes that it has, which gives it another etag."""
        key, body = self._key(path), self.read(path)
        upload = {**key, "UploadId": self.s3.create_multipart_upload(**key)["UploadId"]}
        part = self.s3.upload_part(**upload, PartNumber=1, Body=body)
        parts = {"Parts": [{"ETag": part["ETag"], "PartNumber": 1}]}
        self.s3.complete_multipart_upload(**upload, MultipartUpload=parts)

    def tags(self) -> set[str]:
        """List the tags that are where they were saved, with all their files."""
        names = [path.split("/")[0] for path in self.content() if "/" in path]
        return {name for name in names if name[0] != "."}


@dataclass(frozen=True)
class Sides:
    """A run directory, and where its archives go."""

    run: Side
    archive: Side
    tmp: Path

    def compact(self, days: float = 1, **options: Any) -> api.Compaction:  # noqa: ANN401
        """Run a night; objects are as old as their upload, so it is one that is still to come."""
        return api.compact(self.run.where, self.archive.where, now=later(days), **options)

    def receipt(self) -> dict[str, Any]:
        """Read the receipt of the first tag."""
        document: dict[str, Any] = json.loads(self.archive.read(f"{FIRST}.receipt.json"))
        return document

    def original(self) -> dict[str, bytes]:
        """Every file of the first tag, wherever it is."""
        content, prefixes = self.run.content(), (f"{FIRST}/", f"{MARK}/")
        return {
            path.removeprefix(prefix): data
            for path, data in content.items()
            for prefix in prefixes
            if path.startswith(prefix)
        }


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    """The server of all tests here."""
    with S3Server() as started:
        yield started


@pytest.fixture
def s3(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Any:  # noqa: ANN401
    """Another client than streamshard's."""
    for name, value in credentials(server.url).items():
        monkeypatch.setenv(name, value)
    return boto3.client("s3")


@pytest.fixture(params=["local to bucket", "bucket to bucket", "bucket to local"])
def sides(request: pytest.FixtureRequest, s3: Any, server: S3Server, tmp_path: Path) -> Sides:  # noqa: ANN401
    """A run directory of which the oldest tag may go, and where its archives go."""
    run, archive = request.param.split(" to ")
    return make_sides(s3, server, tmp_path, run, archive)


ONE_IN_A_BUCKET = pytest.mark.parametrize(
    "sides", ["local to bucket", "bucket to local"], indirect=True
)
"""What happens on either side has nothing to do with where the other one is."""


@pytest.fixture
def buckets(s3: Any, server: S3Server, tmp_path: Path) -> Sides:  # noqa: ANN401
    """Both in a bucket."""
    return make_sides(s3, server, tmp_path, "bucket", "bucket")


def make_sides(s3: Any, server: S3Server, tmp_path: Path, run: str, archive: str) -> Sides:  # noqa: ANN401
    bucket = server.new_bucket("nights")
    places = {"local": str(tmp_path), "bucket": f"s3://{bucket}"}
    made = Sides(Side(f"{places[run]}/runs", s3), Side(f"{places[archive]}/archive", s3), tmp_path)
    made.run.fill(make_run(tmp_path / "made", JOB))
    return made


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
    (told,) = [note for note in sides.compact(dry_run=True).notes if "besides those" in note]
    read = 2 * (not sides.run.is_local) + 2 * (not sides.archive.is_local)
    assert f"down, {show_bytes(read * nbytes)}" in told
    assert f"up, {show_bytes(nbytes * (not sides.archive.is_local))}" in told


@ONE_IN_A_BUCKET
def test_one_night_archives_and_removes(sides: Sides) -> None:
    found = sides.compact(delete=True)
    assert (actions(found)[FIRST], found.exit_code) == ("deleted", 0)
    assert sides.original() == bits(sides.tmp / "made" / FIRST)
    assert actions(sides.compact(9, delete=True))[FIRST] == "purged"
    assert sides.original() == {}
    assert sides.run.tags() == ALL - {FIRST}


def test_a_receipt_records_what_identifies_objects(buckets: Sides) -> None:
    buckets.compact()
    receipt, archive, run = buckets.receipt(), buckets.archive, buckets.run
    store = f"{FIRST}.zarr/"
    stored = [path for path in archive.content() if path.startswith(store)]
    assert receipt["etags"] == {path.removeprefix(store): archive.etag(path) for path in stored}
    assert [(one["etag"], one["inode"], one["device"]) for one in receipt["source"]] == [
        (run.etag(one["path"]), 0, 0) for one in receipt["source"]
    ]


@ONE_IN_A_BUCKET
def test_what_is_damaged_keeps_its_original(sides: Sides) -> None:
    """In every night: it has its length, and on the disk its time too."""
    sides.compact()
    good = sides.archive.read(VICTIM)
    bad = good[:-1] + bytes([good[-1] ^ 1])
    sides.archive.write(VICTIM, bad)
    found = sides.compact(2, delete=True)
    assert (actions(found)[FIRST], found.exit_code) == ("failed", 6)
    assert sides.run.tags() == ALL
    sides.archive.write(VICTIM, good)
    assert actions(sides.compact(3, delete=True))[FIRST] == "deleted"
    sides.archive.write(VICTIM, bad)
    for days in (20, 21):
        found = sides.compact(days, delete=True)
        assert found.exit_code in (3, 6)
        assert sides.original() == bits(sides.tmp / "made" / FIRST)


@pytest.mark.parametrize("sides", ["local to bucket"], indirect=True)
def test_an_object_that_was_replaced_proves_nothing_of_an_earlier_night(sides: Sides) -> None:
    sides.compact()
    sides.archive.write_in_parts(VICTIM)
    assert actions(sides.compact(2, delete=True))[FIRST] == "deleted"  # all is proved anew
    path = VICTIM.removeprefix(f"{FIRST}.zarr/")
    assert sides.receipt()["etags"][path] == sides.archive.etag(VICTIM)
    sides.archive.write(VICTIM, sides.archive.read(VICTIM))
    found = sides.compact(20, delete=True)
    assert (actions(found)[FIRST], found.exit_code) == ("ambiguous", 3)
    assert sides.archive.etag(VICTIM) in found.problems[0].reason
    assert sides.original() == bits(sides.tmp / "made" / FIRST)
    assert sides.compact(undelete=[FIRST]).exit_code == 0
    assert actions(sides.compact(21, delete=True))[FIRST] == "deleted"
    assert actions(sides.compact(40, delete=True))[FIRST] == "purged"


def test_an_object_that_is_replaced_after_it_was_read_keeps_the_original(
    buckets: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within the second, and with as many bytes."""
    good = b""
    look = trash.BucketTrash.going

    def replace_and_look(mine: trash.BucketTrash) -> list[str]:
        nonlocal good
        if not good and (VICTIM in buckets.archive.content()):
            good = buckets.archive.read(VICTIM)
            buckets.archive.write(VICTIM, bytes(len(good)))
        return look(mine)

    monkeypatch.setattr(trash.BucketTrash, "going", replace_and_look)
    found = buckets.compact(delete=True)
    assert good
    assert (actions(found)[FIRST], found.exit_code) == ("failed", 6)
    assert buckets.run.tags() == ALL
    assert MARK not in buckets.run.content()


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
    made = make_output(tmp_path / "made-output", best="output/checkpoint-200")
    for unit in sorted(made.iterdir(), key=lambda path: int(path.name.rpartition("-")[2])):
        if run == "local":
            shutil.copytree(unit, Path(root, unit.name))
        else:
            for path, data in bits(unit).items():
                output.run.write(f"{unit.name}/{path}", data)
    before, whole = output.run.content(), bits(made / first)
    assert before == bits(made)
    found = output.compact(keep_last=2, delete=True, max_delete=1)
    kept = {f"checkpoint-{step}": "kept" for step in (200, 900, 1000)}
    assert found.problems == ()
    assert actions(found) == {first: "deleted", "checkpoint-300": "archived", **kept}
    left = {path: data for path, data in before.items() if not path.startswith(f"{first}/")}
    if run == "bucket":
        assert output.run.content().keys() - before.keys() == {f".streamshard.trash/{first}"}
    told = [tag.action for tag in output.compact(2, keep_last=2).tags if tag.tag == first]
    assert told == ["in the trash"]  # where it lies in a bucket, it is not listed once more
    assert output.compact(2, undelete=[first]).exit_code == 0
    assert output.run.content() == before
    assert actions(output.compact(3, keep_last=2, delete=True, max_delete=1))[first] == "deleted"
    found = output.compact(20, keep_last=2, delete=True, max_delete=0)
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


def save_again(sides: Sides) -> dict[str, bytes]:
    """Save a tag of the same name once more, with other values."""
    other = save(sides.tmp / "other", 124, JOB)
    shutil.move(other, other.with_name(FIRST))
    files = bits(sides.tmp / "other" / FIRST)
    for path, data in files.items():
        sides.run.write(f"{FIRST}/{path}", data)
    assert sides.original() == files
    return files


def test_another_save_at_the_place_of_a_tag_in_the_trash_stays(buckets: Sides) -> None:
    buckets.compact(delete=True)
    files = save_again(buckets)
    found = buckets.compact(20, delete=True)
    assert (actions(found)[FIRST], found.exit_code) == ("ambiguous", 3)
    assert buckets.original() == files
    assert buckets.compact(undelete=[FIRST]).exit_code == 0
    found = buckets.compact(20, delete=True)
    assert (actions(found)[FIRST], found.exit_code) == ("ambiguous", 3)
    assert buckets.original() == files


def test_another_save_at_the_place_of_a_tag_that_is_going_stays(
    buckets: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    buckets.compact(delete=True)

    def be_killed(mine: object, tag: str, records: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(trash.BucketTrash, "empty", be_killed)
        with pytest.raises(KeyboardInterrupt):
            buckets.compact(20, delete=True)
    assert {LAST_MARK} == {path for path in buckets.run.content() if path[0] == "."}
    buckets.run.remove(MODEL)  # as if the killed run had begun
    files = save_again(buckets)
    found = buckets.compact(21, delete=True)
    assert (actions(found)[FIRST], found.exit_code) == ("ambiguous", 3)
    assert buckets.original() == files


def test_what_is_saved_anew_while_a_tag_is_removed_stays(
    buckets: Sides, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All objects were looked at before the first of them, the model's file, is removed."""
    buckets.compact(delete=True)
    anew: dict[str, bytes] = {}

    def save_shards(request: Request) -> None:
        is_first = request.path.endswith("?delete") and not anew
        if is_first and {MARK, LAST_MARK} & buckets.run.content().keys() == {LAST_MARK}:
            anew.update((shard, f"another {shard}".encode()) for shard in ALL_SHARDS)
            for shard, data in anew.items():
                buckets.run.write(f"{FIRST}/{shard}", data)

    with FaultProxy(server.url) as proxy, monkeypatch.context() as patch:
        proxy.plan = save_shards
        patch.setenv("AWS_ENDPOINT_URL", proxy.url)
        client_of.cache_clear()
        found = buckets.compact(9, delete=True)
    client_of.cache_clear()
    assert (actions(found)[FIRST], found.exit_code) == ("ambiguous", 3)
    assert "is it of another save" in found.problems[0].reason
    assert buckets.original() == anew != {}


@pytest.mark.parametrize("at", [2, 20, 43, 60])
def test_a_night_that_is_killed_is_finished_by_the_next(
    s3: Any,  # noqa: ANN401
    server: S3Server,
    tmp_path: Path,
    at: int,
) -> None:
    """It uploads the archive, its list and its receipt, and what is rebuilt from it."""
    sides = make_sides(s3, server, tmp_path, "local", "bucket")
    whole = bits(tmp_path / "made" / FIRST)
    assert killed(sides, at, days=1) == KILLED
    assert (sides.original(), sides.run.tags()) == (whole, ALL)
    found = sides.compact(delete=True)
    assert (actions(found)[FIRST], found.exit_code) == ("deleted", 0)
    assert sides.original() == whole
    assert api.verify(f"{sides.archive.where}/{FIRST}.zarr").is_good
    known = {f"{FIRST}.zarr", f"{FIRST}.zarr.sha256", f"{FIRST}.receipt.json"}
    assert {path.split("/")[0] for path in sides.archive.content()} == known


@pytest.mark.parametrize("at", [2, 5, 6, 8])
def test_a_night_that_is_killed_while_it_removes_is_finished_by_the_next(
    buckets: Sides, at: int
) -> None:
    buckets.compact(delete=True)
    whole, tag = bits(buckets.tmp / "made" / FIRST), f"{buckets.run.where}/{FIRST}"
    assert killed(buckets, at, days=9) == KILLED
    left = buckets.original()
    assert left.items() <= whole.items()
    if left != whole:
        assert {MODEL.removeprefix(f"{FIRST}/"), LAST_MARK}.isdisjoint(left)
        assert LAST_MARK in buckets.run.content()
        with pytest.raises(SourceError):
            api.inspect(tag)
        assert buckets.compact(undelete=[FIRST]).exit_code == 2
    found = buckets.compact(10, delete=True)
    assert found.exit_code == 0
    assert actions(found).get(FIRST, "purged") == "purged"
    assert buckets.run.tags() == ALL - {FIRST}
    assert not [path for path in buckets.run.content() if path[0] == "."]
    assert buckets.receipt()["state"] == "purged"


def test_a_tag_that_may_not_be_removed_is_no_checkpoint_once_a_part_of_it_is(
    buckets: Sides, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    buckets.compact(delete=True)

    denied = count()

    def deny(request: Request) -> Fault | None:
        if not request.path.endswith("?delete") or MODEL in buckets.run.content():
            return None
        return Fault.DENIED if next(denied) < len(ALL_SHARDS) else None

    with FaultProxy(server.url) as proxy, monkeypatch.context() as patch:
        proxy.plan = deny
        patch.setenv("AWS_ENDPOINT_URL", proxy.url)
        client_of.cache_clear()
        found = buckets.compact(9, delete=True)
    client_of.cache_clear()
    assert (actions(found)[FIRST], found.exit_code) == ("failed", 4)
    assert "access denied" in found.problems[0].reason
    assert LEAKED not in str(found)
    assert buckets.original().keys() == ALL_SHARDS
    with pytest.raises(SourceError):
        api.inspect(f"{buckets.run.where}/{FIRST}")
    found = buckets.compact(10, delete=True)
    assert (actions(found)[FIRST], found.exit_code) == ("purged", 0)
    assert buckets.run.tags() == ALL - {FIRST}


KILLED = 99
NIGHT = """
import os, sys, threading
from datetime import datetime, timedelta
from itertools import count
import streamshard
from streamshard.io.objects import clients

run, archive, at, now = sys.argv[1:]
lock, made, real = threading.Lock(), [], clients.client_of

class Watched:
    '''A client with which the process ends after so many changes, the last of them carried out.'''

    def __init__(self, client):
        self._client = client

    def __getattr__(self, name):
        method = getattr(self._client, name)
        if name not in ("put", "copy", "delete"):
            return method

        def change(*given, **options):
            with lock:
                found = method(*given, **options)
                made.append(name)
                if len(made) == int(at):
                    os._exit(99)
                return found

        return change

clients.client_of = lambda bucket: Watched(real(bucket))
streamshard.compact(run, archive, delete=True, now=datetime.fromisoformat(now))
"""


def killed(sides: Sides, at: int, *, days: float) -> int:
    """Run a night that ends at its so-manieth change in a bucket; returns its exit code."""
    now: datetime = later(days)
    given = (str(at), now.isoformat())
    return run_forked(sides.run.where, sides.archive.where, *given, script=NIGHT).code


def test_the_line_for_cron_does_what_it_says(
    s3: Any,  # noqa: ANN401
    server: S3Server,
    tmp_path: Path,
) -> None:
    sides = make_sides(s3, server, tmp_path, "local", "bucket")
    (line,) = re.findall(r"^15 4 \* \* \* (.*)$", page("archive"), re.MULTILINE)
    words = [word.replace("/runs/7b", sides.run.where) for word in shlex.split(line)[1:]]
    words = [word.replace("s3://archive/7b", sides.archive.where) for word in words]
    done = run_forked(*words)
    assert (done.code, done.out, done.err) == (0, "", "")
    assert sides.run.tags() == ALL - {FIRST}
    assert sides.receipt()["state"] == "trashed"


@ONE_IN_A_BUCKET
def test_a_second_night_ends_at_once(sides: Sides) -> None:
    for side, options in ((sides.archive, {}), (sides.run, {"delete": True})):
        place = as_path(side.where)
        if side.is_local:
            place.mkdir(exist_ok=True)
        held = lock_at(place / ".streamshard.lock", place, is_wanted=True)
        held.take()
        with pytest.raises(TargetLockedError) as caught:
            sides.compact(**options)
        assert caught.value.exit_code == 4
        assert side.where in str(caught.value)
        held.release()
    assert actions(sides.compact(delete=True))[FIRST] == "deleted"


@ONE_IN_A_BUCKET
def test_states_are_dropped(sides: Sides) -> None:
    api.export(sides.tmp / "made" / FIRST, sides.tmp / "wanted")
    sides.compact(delete=True)
    sides.compact(9, delete=True)
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


def test_what_is_ambiguous_can_be_acknowledged(buckets: Sides) -> None:
    broken = f"{tag_of(90)}/mp_rank_00_model_states.pt"
    whole = buckets.run.read(broken)
    buckets.run.remove(broken)
    found = buckets.compact()
    assert (actions(found)[tag_of(90)], found.exit_code) == ("ambiguous", 3)
    assert buckets.compact(acknowledge=[tag_of(90)]).exit_code == 0
    found = buckets.compact()
    assert (actions(found)[tag_of(90)], found.exit_code) == ("kept", 0)
    buckets.run.write(broken, whole[:-1])
    found = buckets.compact()
    assert (actions(found)[tag_of(90)], found.exit_code) == ("ambiguous", 3)


def test_what_was_uploaded_lately_stays(buckets: Sides) -> None:
    found = api.compact(buckets.run.where, buckets.archive.where, delete=True)
    assert set(actions(found).values()) == {"kept"}
    assert "min_age= is 2h" in found.tags[0].reason


def test_what_is_uploaded_during_the_night_stays(
    buckets: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = Again.still_free

    def upload_and_look(mine: Again, choice: Any) -> str:  # noqa: ANN401
        buckets.run.write(f"{FIRST}/notes.txt", b"learned a lot")
        return look(mine, choice)

    monkeypatch.setattr(Again, "still_free", upload_and_look)
    found = buckets.compact(delete=True)
    assert (actions(found)[FIRST], found.exit_code) == ("ambiguous", 3)
    assert "changed while it was watched" in found.problems[0].reason
    assert MARK not in buckets.run.content()


def test_another_run_directory_with_the_same_receipts_is_refused(buckets: Sides) -> None:
    """A copy of it has the same etags, but only its path says that it is another one."""
    buckets.compact()
    copy = Side(f"{buckets.run.where}-again", buckets.run.s3)
    copy.fill(buckets.tmp / "made")
    found = Sides(copy, buckets.archive, buckets.tmp).compact(2, delete=True)
    assert (actions(found)[FIRST], found.exit_code) == ("ambiguous", 3)
    assert copy.tags() == ALL
