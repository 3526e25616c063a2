"""A lock in a bucket: refreshed as long as its run lives, taken over half an hour after that."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path

import pytest

import streamshard as api
from streamshard.errors import IncompleteError, TargetLockedError
from streamshard.io.changes import lock_at
from streamshard.io.lock import AnyLock, Holder
from streamshard.io.object_path import as_path
from streamshard.io.objects import object_lock
from tests.cloud.conftest import RECORD, Bucket
from tests.cloud.proxy import Request

LOCK = ".streamshard.lock.out"
ELSEWHERE = replace(Holder.this_process(), host="elsewhere")


def lock_of(bucket: Bucket) -> AnyLock:
    target = as_path(f"{bucket.url}/out")
    return lock_at(target.with_name(LOCK), target)


def left_by(bucket: Bucket, holder: Holder) -> bytes:
    """Leave a lock as a run does that was killed; returns its content."""
    content = json.dumps(asdict(holder) | {"token": "0"}).encode()
    bucket.put_bytes(LOCK, content)
    return content


def comes(is_so: Callable[[], bool]) -> bool:
    """Wait for something, as long as a busy machine may take."""
    end = time.monotonic() + 60
    while not is_so() and time.monotonic() < end:
        time.sleep(0.05)
    return is_so()


def test_it_is_refreshed_until_it_is_released(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_lock, "_REFRESH_SECONDS", 0.01)
    lock = lock_of(bucket)
    lock.take()
    first = bucket.get_bytes(LOCK)
    assert comes(lambda: bucket.get_bytes(LOCK) != first)
    lock.require_held()
    with pytest.raises(TargetLockedError, match=r"on .*until .* UTC.*remove .*lock\.out"):
        lock_of(bucket).take()
    lock.release()
    assert bucket.keys() == set()
    asked = len(bucket.proxy.requests)
    time.sleep(0.1)
    assert len(bucket.proxy.requests) == asked


def test_one_that_was_not_refreshed_for_long_is_taken_over(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = left_by(bucket, ELSEWHERE)
    with pytest.raises(TargetLockedError, match="on elsewhere"):
        lock_of(bucket).take()
    assert bucket.get_bytes(LOCK) == left
    monkeypatch.setattr(object_lock, "_DEAD_AFTER", timedelta(0))
    lock = lock_of(bucket)
    lock.take()
    lock.require_held()
    lock.release()
    assert bucket.keys() == set()


def test_one_that_is_refreshed_as_another_takes_it_over_stays(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_by(bucket, ELSEWHERE)
    again = json.dumps(asdict(ELSEWHERE) | {"token": "1"}).encode()
    require_gone = object_lock.ObjectLock._require_gone

    def refreshed(lock: object_lock.ObjectLock, *found: object) -> None:
        monkeypatch.setattr(object_lock.ObjectLock, "_require_gone", require_gone)
        bucket.put_bytes(LOCK, again)

    monkeypatch.setattr(object_lock.ObjectLock, "_require_gone", refreshed)
    with pytest.raises(TargetLockedError, match="on elsewhere"):
        lock_of(bucket).take()
    assert bucket.get_bytes(LOCK) == again


@pytest.mark.parametrize("is_there", [True, False])
def test_a_run_that_has_lost_it_completes_nothing(
    bucket: Bucket, run: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    monkeypatch.setattr(object_lock, "_LATE_SECONDS", -1.0)

    def lose(request: Request) -> None:
        if request.method == "PUT" and request.path.endswith("/out/latest"):
            if is_there:
                left_by(bucket, ELSEWHERE)
            else:
                bucket.remove(LOCK)

    bucket.proxy.plan = lose
    with pytest.raises(TargetLockedError, match=r"/out: another run took its lock over"):
        api.repartition(run, f"{bucket.url}/out", world_size=3)
    assert not bucket.keys(f"out/{RECORD}")
    with pytest.raises(IncompleteError, match="unfinished"):
        api.inspect(f"{bucket.url}/out")
    assert bool(bucket.keys(LOCK)) == is_there
    bucket.remove(*bucket.keys(LOCK))
    bucket.proxy.reset()
    monkeypatch.undo()
    api.repartition(run, f"{bucket.url}/out", world_size=3)
    assert bucket.keys(f"out/{RECORD}")
