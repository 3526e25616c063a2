"""What comes between runs in a bucket, or into one: other saves, other runs, and kills."""

import shutil
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import streamshard as api
from streamshard.errors import SourceError, TargetLockedError
from streamshard.io.changes import lock_at
from streamshard.io.object_path import as_path
from streamshard.operations.compact import trash
from streamshard.operations.compact.policy import Policy
from tests.cloud.proxy import LEAKED, Fault, Request
from tests.cloud.server import S3Server
from tests.compact.runs import ALL, FIRST, actions, bits, later, save
from tests.compact.sides import MARK, ONE_IN_A_BUCKET, VICTIM, Side, Sides, disturbed, make_sides
from tests.forked import run_forked
from tests.job import LEAN

LAST_MARK = f".streamshard.trash/.streamshard.going/{FIRST}"
MODEL = f"{FIRST}/mp_rank_00_model_states.pt"
ALL_SHARDS = {f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2)}


@pytest.mark.parametrize("sides", ["local to bucket"], indirect=True)
def test_an_object_that_was_replaced_proves_nothing_of_an_earlier_night(sides: Sides) -> None:
    sides.compact()
    sides.archive.write_in_parts(VICTIM)
    assert actions(sides.compact(2, delete=True))[FIRST] == "deleted"  # all is proved again
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
    look = trash.BucketTrash.being_removed

    def replace_and_look(mine: trash.BucketTrash) -> list[str]:
        nonlocal good
        if not good and (VICTIM in buckets.archive.content()):
            good = buckets.archive.read(VICTIM)
            buckets.archive.write(VICTIM, bytes(len(good)))
        return look(mine)

    monkeypatch.setattr(trash.BucketTrash, "being_removed", replace_and_look)
    found = buckets.compact(delete=True)
    assert good
    assert (actions(found)[FIRST], found.exit_code) == ("failed", 6)
    assert buckets.run.tags() == ALL
    assert MARK not in buckets.run.content()


def save_again(sides: Sides) -> dict[str, bytes]:
    """Save a tag of the same name once more, with other values."""
    other = save(sides.tmp / "other", 124, LEAN)
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
        patch.setattr(trash.BucketTrash, "remove", be_killed)
        with pytest.raises(KeyboardInterrupt):
            buckets.compact(20, delete=True)
    assert {LAST_MARK} == {path for path in buckets.run.content() if path[0] == "."}
    buckets.run.remove(MODEL)  # as if the killed run had begun
    files = save_again(buckets)
    found = buckets.compact(21, delete=True)
    assert (actions(found)[FIRST], found.exit_code) == ("ambiguous", 3)
    assert buckets.original() == files


def test_what_is_saved_anew_while_a_tag_is_removed_stays(buckets: Sides, server: S3Server) -> None:
    """All objects were looked at before the first of them, the model's file, is removed."""
    buckets.compact(delete=True)
    anew: dict[str, bytes] = {}

    def save_shards(request: Request) -> None:
        is_first = request.path.endswith("?delete") and not anew
        if is_first and {MARK, LAST_MARK} & buckets.run.content().keys() == {LAST_MARK}:
            anew.update((shard, f"another {shard}".encode()) for shard in ALL_SHARDS)
            for shard, data in anew.items():
                buckets.run.write(f"{FIRST}/{shard}", data)

    with disturbed(server, save_shards):
        found = buckets.compact(9, delete=True)
    assert (actions(found)[FIRST], found.exit_code) == ("ambiguous", 3)
    assert "is it of another save" in found.problems[0].reason
    assert buckets.original() == anew != {}


def test_what_is_uploaded_during_the_night_stays(
    buckets: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    require = Policy.require_removable

    def upload_first(policy: Policy, choice: Any) -> str:  # noqa: ANN401
        buckets.run.write(f"{FIRST}/notes.txt", b"learned a lot")
        return require(policy, choice)

    monkeypatch.setattr(Policy, "require_removable", upload_first)
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
    buckets: Sides, server: S3Server
) -> None:
    buckets.compact(delete=True)
    denied = count()

    def deny(request: Request) -> Fault | None:
        if not request.path.endswith("?delete") or MODEL in buckets.run.content():
            return None
        return Fault.DENIED if next(denied) < len(ALL_SHARDS) else None

    with disturbed(server, deny):
        found = buckets.compact(9, delete=True)
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
SCRIPT = """
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


def killed(sides: Sides, at: int, *, days: float, script: str = SCRIPT) -> int:
    """Run until a given number of changes in a bucket; returns its exit code."""
    now: datetime = later(days)
    given = (str(at), now.isoformat())
    return run_forked(sides.run.where, sides.archive.where, *given, script=script).code
