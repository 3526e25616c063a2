"""What targets, locks and going on need of a service, on a real server of each kind."""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from itertools import count
from pathlib import Path
from urllib.parse import unquote

import pytest

import streamshard as api
from streamshard.errors import IncompleteError, TargetError, TargetExistsError, TargetLockedError
from tests.cli.conftest import tree
from tests.cloud.conftest import JOURNAL, RECORD, Bucket
from tests.cloud.proxy import Fault, Request
from tests.cloud.server import S3Server
from tests.cloud.services import Azurite, FakeGCS, SeaweedFS, Service
from tests.cloud.test_kills import LARGE, completes, kill, killed
from tests.compact.runs import NO_GRACE, STEPS, make_run, tag_of, tags_in
from tests.engine.test_lock import dead_process
from tests.fabricated import write
from tests.forked import run_forked
from tests.job import LEAN
from tests.lacking import lacking

KINDS = (S3Server, SeaweedFS, FakeGCS, Azurite)


def on(*kinds: type[Service]) -> pytest.MarkDecorator:
    """Run a test on these services alone."""
    names = [kind.name for kind in kinds]
    return pytest.mark.parametrize("service", kinds, ids=names, indirect=True)


@pytest.fixture(scope="module", params=KINDS, ids=[kind.name for kind in KINDS])
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    kind: type[Service] = request.param
    if kind is Azurite and Azurite.PROGRAM is None:
        lacking("azurite-blob", "npm install --global azurite")
    with kind() as made:
        yield made


def local(run: Path, world_size: int) -> dict[str, bytes]:
    """Return what a run writes to a disk."""
    out = run.with_name(f"local-{world_size}")
    if not out.exists():
        api.repartition(run, out, world_size=world_size)
    return tree(out)


def test_a_target_is_replaced_when_asked(bucket: Bucket, run: Path) -> None:
    target = f"{bucket.url}/out"
    api.repartition(run, target, world_size=3)
    with pytest.raises(TargetExistsError, match="overwrite=True"):
        api.repartition(run, target, world_size=2)
    api.repartition(run, target, world_size=2, overwrite=True)
    assert bucket.content() == local(run, 2)
    assert bucket.keys() == {f"out/{path}" for path in (*local(run, 2), RECORD)}


@on(S3Server)
def test_a_record_counts(bucket: Bucket, run: Path) -> None:
    """Whatever else lies beside it, such as objects of a journal."""
    target = f"{bucket.url}/out"
    api.repartition(run, target, world_size=3)
    for name in ("7", "whole", "x"):
        bucket.put_bytes(f"out/{JOURNAL}/{name}", b"left")
    before = bucket.get("out")
    assert api.inspect(target).world_size == 3
    with pytest.raises(TargetExistsError, match="overwrite=True"):
        api.repartition(run, target, world_size=2)
    assert api.repartition(run, target, world_size=3, if_needed=True).found == "target"
    assert bucket.get("out") == before
    api.repartition(run, target, world_size=2, overwrite=True)
    assert bucket.content() == local(run, 2)


@on(SeaweedFS)
def test_a_path_is_free_once_it_is_empty(bucket: Bucket, run: Path) -> None:
    """Though the service may go on to list its directories."""
    for name in ("out", "out.partial"):
        api.repartition(run, f"{bucket.url}/{name}", world_size=3)
    bucket.remove(*bucket.keys())
    api.repartition(run, f"{bucket.url}/out", world_size=2)
    assert bucket.content() == local(run, 2)
    api.repartition(run, f"{bucket.url}/out", world_size=3, overwrite=True)
    assert bucket.content() == local(run, 3)


def test_a_killed_run_goes_on_and_meanwhile_a_second_is_refused(bucket: Bucket, run: Path) -> None:
    words = ("repartition", str(run), f"{bucket.url}/out", "--world-size", "3")

    def held(request: Request) -> Fault | None:
        is_upload = request.method == "PUT" and "optim_states.pt" in unquote(request.path)
        return Fault.HELD if is_upload else None

    with killed(bucket, held, *words) as process:
        second = run_forked(*words)
        assert second.code == TargetLockedError.exit_code
        assert f"process {process.pid} on" in second.err
    assert RECORD not in bucket.get("out")
    assert any("lock" in key for key in bucket.keys())  # noqa: SIM118
    done = run_forked(*words)
    assert done.code == 0, done.err
    assert bucket.content() == local(run, 3)
    assert len(bucket.keys()) == len(local(run, 3)) + 1


@on(SeaweedFS, Azurite)
def test_a_run_killed_as_it_completes_an_upload_in_parts_goes_on(
    bucket: Bucket, tmp_path: Path
) -> None:
    run = write(LARGE, tmp_path / "run")
    words = ("repartition", str(run), f"{bucket.url}/out", "--world-size", "1")
    assert kill(bucket, lambda request: Fault.HELD if completes(request) else None, *words)
    with pytest.raises(IncompleteError, match="unfinished"):
        api.inspect(f"{bucket.url}/out")
    done = run_forked(*words)
    assert done.code == 0, done.err
    assert bucket.content() == local(run, 1)


def unconditional(request: Request) -> Fault | None:
    """Leave the condition out; other services than these sign it, so that no proxy can do so."""
    return Fault.UNCONDITIONAL if request.method == "PUT" else None


@on(S3Server, FakeGCS)
def test_no_lock_where_conditions_are_ignored(
    bucket: Bucket, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = f"{bucket.url}/out"
    bucket.proxy.plan = unconditional
    with pytest.raises(TargetError, match=r"ignores conditions of uploads.*NO_LOCK=1"):
        api.repartition(run, target, world_size=3)
    assert bucket.keys() == set()
    monkeypatch.setenv("STREAMSHARD_NO_LOCK", "1")
    api.repartition(run, target, world_size=3)
    assert bucket.content() == local(run, 3)


@on(S3Server, FakeGCS)
def test_no_lock_is_taken_over_where_the_version_is_ignored(bucket: Bucket, run: Path) -> None:
    """Two runs could take it over at once."""
    name, lock = ".streamshard.lock.out", json.dumps(asdict(dead_process())).encode()
    bucket.put_bytes(name, lock)
    puts = count()
    bucket.proxy.plan = lambda request: (
        unconditional(request) if request.method == "PUT" and next(puts) else None
    )
    with pytest.raises(TargetError, match="ignores conditions of uploads"):
        api.repartition(run, f"{bucket.url}/out", world_size=3)
    assert (bucket.keys(), bucket.get_bytes(name)) == ({name}, lock)
    bucket.proxy.reset()
    api.repartition(run, f"{bucket.url}/out", world_size=3)
    assert bucket.content() == local(run, 3)


@on(S3Server, Azurite)
def test_directories_are_passed_over(bucket: Bucket, run: Path) -> None:
    """Consoles make empty objects for them; where Azure has some, it keeps such objects itself."""
    for key in ("out", "out/global_step7", "out/empty", "out.partial"):
        if bucket.s3 is None:
            bucket.put_bytes(key, b"", hdi_isfolder="true")
        else:
            bucket.put_odd(f"{key}/")
    target = f"{bucket.url}/out"
    api.repartition(run, target, world_size=3)
    api.repartition(run, target, world_size=2, overwrite=True)
    assert api.inspect(target).world_size == 2
    for path, data in local(run, 2).items():
        assert bucket.get_bytes(f"out/{path}") == data


USER = {"type": "authorized_user", "client_id": "a", "client_secret": "b", "refresh_token": "c"}


@on(FakeGCS)
@pytest.mark.parametrize(
    "way", ["GOOGLE_BASE_URL", "STORAGE_EMULATOR_HOST", "host", "host of a user", "account"]
)
def test_an_emulator_of_google_s_service_is_reached_without_tls(
    bucket: Bucket, run: Path, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is written to, and gets no token of an account."""
    source, url = bucket.put(run, "runs/7b"), bucket.proxy.url
    account = os.environ["GOOGLE_SERVICE_ACCOUNT_KEY"]
    monkeypatch.delenv("GOOGLE_SERVICE_ACCOUNT_KEY")
    if way == "account":
        (tmp_path / "account.json").write_text(account)
        monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(tmp_path / "account.json"))
    elif way.startswith("host"):
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url.removeprefix("http://"))
    else:
        monkeypatch.setenv(way, url)
        monkeypatch.setenv("GOOGLE_SKIP_SIGNATURE", "true")
    if way == "host of a user":
        (tmp_path / "user.json").write_text(json.dumps(USER))
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "user.json"))
    api.repartition(source, f"{bucket.url}/out", world_size=3)
    assert bucket.content() == local(run, 3)


@on(FakeGCS, Azurite)  # those by S3's protocol are in tests/compact
def test_nights(bucket: Bucket, tmp_path: Path) -> None:
    """Tags are archived in the bucket, and their originals removed."""
    run, archive = make_run(tmp_path / "run", LEAN), f"{bucket.url}/archive"
    for _ in range(3):
        found = api.compact(run, archive, min_age=NO_GRACE, grace=NO_GRACE, delete=True)
        assert found.exit_code == 0, found
    assert tags_in(run) == {*map(tag_of, STEPS[1:])}
    assert api.verify(f"{archive}/{tag_of(STEPS[0])}.zarr").problems == ()
