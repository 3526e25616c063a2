"""Whatever happens to a request, a run ends with the right bytes or a clear error."""

import os
import socket
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

import streamshard as api
from streamshard.errors import CorruptFileError, SourceError, StreamshardError, TargetError
from streamshard.io.objects import clients
from tests.cloud.conftest import RECORD, Bucket
from tests.cloud.proxy import LEAKED, Fault, Request

STEP = 1 if "EVERY_REQUEST" in os.environ else 15
"""Every so manieth request is broken; `nox -s faults` breaks all of them."""
PASSING = (
    Fault.RESET, Fault.LOST, Fault.CLOSED, Fault.SLOW_DOWN, Fault.TOO_MANY, Fault.INTERNAL,
    Fault.TRUNCATED,
)  # fmt: skip
Run = Callable[[str], object]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeat requests after milliseconds, and not for minutes."""
    backoff = {"init_backoff": timedelta(milliseconds=5), "max_backoff": timedelta(milliseconds=20)}
    monkeypatch.setitem(clients.RETRIES, "backoff", {**backoff, "base": 2})
    monkeypatch.setitem(clients.RETRIES, "max_retries", 4)


@pytest.fixture
def way(bucket: Bucket, run: Path) -> Run:
    """Make a target in a bucket of a source in it."""
    source = bucket.put(run, "runs/7b")
    return lambda target: api.repartition(source, target, world_size=3)


def broken(bucket: Bucket, number: int, fault: Fault, way: Run, target: str) -> str | None:
    """Run with one broken request; returns the message of the error, if there is one."""
    bucket.proxy.break_nth(number, fault)
    try:
        way(target)
    except StreamshardError as error:
        message = "\n".join([str(error), *getattr(error, "__notes__", ())])
        assert LEAKED not in message
        assert "s3://" in message
        return message
    finally:
        bucket.proxy.reset()
    return None


def test_what_passes_is_repeated(bucket: Bucket, way: Run) -> None:
    """Each request is broken in each way, or one request after the other in another way."""
    way(f"{bucket.url}/whole")
    total, wanted = len(bucket.proxy.requests), bucket.content("whole")
    cases = [(number, fault) for number in range(1, total + 1) for fault in PASSING]
    tried = cases if STEP == 1 else cases[:: 4 * len(PASSING) + 1]
    assert {fault for _, fault in tried} == {*PASSING}
    for number, fault in tried:
        target = f"out-{number}-{fault.name}"
        message = broken(bucket, number, fault, way, f"{bucket.url}/{target}")
        assert message is None, (number, fault)
        assert bucket.content(target) == wanted, (number, fault)


@pytest.mark.parametrize("fault", [Fault.DENIED, Fault.WRONG_RANGE, Fault.STALE_LISTING])
def test_what_does_not_pass_is_a_clear_error(bucket: Bucket, way: Run, fault: Fault) -> None:
    way(f"{bucket.url}/whole")
    before = bucket.get("runs/7b")
    wanted, requests = bucket.content("whole"), list(bucket.proxy.requests)
    ended = []
    for request in [one for one in requests if _is_broken_by(fault, one)][::STEP]:
        target = f"out-{request.number}"
        message = broken(bucket, request.number, fault, way, f"{bucket.url}/{target}")
        ended.append(message)
        if message is not None:
            way(f"{bucket.url}/{target}")
        assert bucket.content(target) == wanted, request
        assert bucket.get("runs/7b") == before
    assert ended


def _is_broken_by(fault: Fault, request: Request) -> bool:
    if fault is Fault.WRONG_RANGE:
        return request.range is not None
    return fault is Fault.DENIED or request.is_listing


def test_a_service_that_stays_down_ends_the_run(bucket: Bucket, way: Run) -> None:
    bucket.proxy.plan = lambda request: Fault.SLOW_DOWN
    with pytest.raises(StreamshardError, match="503") as caught:
        way(f"{bucket.url}/out")
    assert LEAKED not in str(caught.value)


def test_an_address_where_nobody_answers_is_named_soon(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamshard.io.retry._PAUSES", (0.01, 0.01))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    with pytest.raises(SourceError, match=r"does not answer; look at .*AWS_ENDPOINT_URL"):
        api.inspect("s3://nobody-has-asked-for-this/run")


def test_a_service_without_ranges_is_named_at_once(bucket: Bucket, run: Path) -> None:
    source = bucket.put(run, "runs/7b")
    bucket.proxy.plan = lambda request: Fault.NO_RANGE if request.range else None
    with pytest.raises(SourceError, match="without ranges nothing can be read from it"):
        api.inspect(source)
    asked = Counter((one.path, one.range) for one in bucket.proxy.requests if one.range)
    # None was repeated, but that what could not be read ahead is asked for again.
    assert max(asked.values()) <= 2


def test_a_bucket_that_is_not_there_is_named(bucket: Bucket, run: Path) -> None:
    missing = f"{bucket.url}-that-nobody-made"
    named = rf"{missing}: cannot be (read|written) \(no such bucket\)"
    for kind, verb in (
        (SourceError, lambda: api.inspect(f"{missing}/runs/7b")),
        (SourceError, lambda: api.verify(f"{missing}/7b.zarr")),
        (TargetError, lambda: api.compact(run, f"{missing}/archive")),
        (TargetError, lambda: api.convert(run, f"{missing}/7b.zarr")),
        (TargetError, lambda: api.repartition(run, f"{missing}/runs/7b", world_size=3)),
    ):
        with pytest.raises(kind, match=named):
            verb()


@pytest.mark.parametrize("change", ["replaced", "removed"])
def test_a_source_that_changes_ends_the_run(bucket: Bucket, run: Path, change: str) -> None:
    """It changes after its headers are read, before its tensors are."""
    source, name = bucket.put(run, "runs/7b"), "zero_pp_rank_1_mp_rank_00_model_states.pt"
    key = next(key for key in bucket.keys("runs") if key.endswith(name))
    plan = api.plan_repartition(source, f"{bucket.url}/out", world_size=3)
    if change == "removed":
        bucket.remove(key)
    else:
        bucket.damage(key)
    with pytest.raises(CorruptFileError if change == "replaced" else SourceError, match=name):
        plan.run()
    assert RECORD not in bucket.get("out")


def test_who_comes_between_is_not_overwritten(bucket: Bucket, run: Path) -> None:
    """Somebody else writes a root document while a run uploads its chunks."""
    target = f"{bucket.url}/7b.zarr"

    def intrude(request: Request) -> None:
        if request.method == "PUT" and "/c/0" in request.path:
            bucket.put_bytes("7b.zarr/zarr.json", b"another store")

    bucket.proxy.plan = intrude
    with pytest.raises(TargetError, match=r"zarr.json: cannot be written \(exists already"):
        api.convert(run, target)
    assert bucket.get_bytes("7b.zarr/zarr.json") == b"another store"
    assert f"7b.zarr/{RECORD}" not in bucket.keys("7b.zarr/.")


def test_bytes_that_were_damaged_on_their_way_are_found(bucket: Bucket, run: Path) -> None:
    """A chunk is replaced by other bytes of the same length before it is read back."""
    damaged: list[str] = []

    def damage(request: Request) -> None:
        if request.method == "PUT" and request.path.endswith("/7b.zarr/zarr.json") and not damaged:
            damaged.extend(sorted(k for k in bucket.keys("7b.zarr/state") if "/c/" in k)[:1])
            for key in damaged:
                bucket.damage(key)

    bucket.proxy.plan = damage
    with pytest.raises(StreamshardError, match="read back"):
        api.convert(run, f"{bucket.url}/7b.zarr", verify=True)
    assert damaged
    assert bucket.keys("7b.zarr") == set()
