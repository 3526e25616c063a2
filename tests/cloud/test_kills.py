"""A run that is killed at any request is continued by the same command, and leaves nothing over."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

import streamshard as api
from streamshard.errors import IncompleteError, TargetExistsError, TargetLockedError
from tests.cloud.conftest import Bucket, files_of
from tests.cloud.proxy import Fault, Request
from tests.cloud.test_faults import RECORD, content
from tests.fabricated import write
from tests.forked import run_forked
from tests.job import LEAN, Job

EVERY = "EVERY_REQUEST" in os.environ
"""Whether a run is killed at every request, and not at a few."""
WAIT = 60
LARGE = Job(stage=2, world_size=1, groups=((("embed.weight", (6_000_000,)),),))
"""Its optimizer file, of 72 MB, is uploaded in parts."""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write(replace(LEAN, stage=3), tmp_path / "run")


@contextmanager
def started(*words: str) -> Iterator[subprocess.Popen[str]]:
    """Start the command line."""
    command = [sys.executable, "-m", "streamshard", *words, "--progress", "none"]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, text=True, stdout=pipe, stderr=pipe, preexec_fn=_heed_interrupts
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def _heed_interrupts() -> None:
    """Undo what a shell does to programs in its background, and they to theirs."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def killed_at(bucket: Bucket, number: int, *words: str) -> bool:
    """Kill a run while its n-th request is under way; False if it has fewer requests."""
    bucket.proxy.break_nth(number, Fault.HELD)
    with bucket.proxy.settled():  # what it has sent may be carried out after its end
        with started(*words) as process:
            while not bucket.proxy.holding.wait(0.01):
                if process.poll() is not None:
                    return False
            process.kill()
            process.wait(WAIT)
        bucket.proxy.reset()
    return True


@pytest.mark.parametrize("verb", ["repartition", "convert"])
def test_the_same_command_goes_on(bucket: Bucket, run: Path, verb: str) -> None:
    source = bucket.put(run, "runs/7b")
    own = ("--world-size", "3") if verb == "repartition" else ("--codec", "zstd")
    bucket.proxy.reset()
    assert run_forked(verb, source, f"{bucket.url}/whole", *own).code == 0
    step = 1 if EVERY else 2 * len(bucket.proxy.requests) // 9
    wanted = content(bucket, "whole")
    for number in count(2, step):
        target = f"out-{number}"
        words = (verb, source, f"{bucket.url}/{target}", *own)
        if not killed_at(bucket, number, *words):
            break
        is_there = RECORD in bucket.get(target)
        if not is_there and bucket.keys(f"{target}/.streamshard.journal/"):
            with pytest.raises(IncompleteError, match="unfinished"):
                api.inspect(f"{bucket.url}/{target}")
            if verb == "repartition":
                assert "latest" not in bucket.get(target) or number > len(wanted)
        done = run_forked(*words)
        assert done.code == 0 or (is_there and "exists" in done.err), (number, done.err)
        assert content(bucket, target) == wanted, number
        assert bucket.uploads() == []
        # Who was killed as it removed its lock leaves it to the next who writes there.
        assert is_there or not bucket.keys(f".streamshard.lock.{target}")
    assert number > 2 + step, (number, step)  # it was killed twice, or oftener


def test_what_is_uploaded_is_not_uploaded_again(bucket: Bucket, run: Path) -> None:
    """The journal is written every so often, and in any case when a run ends by an error."""
    target = f"{bucket.url}/out.zarr"

    def refuse_the_manifest(request: Request) -> Fault | None:
        return Fault.DENIED if "meta/manifest/c/0" in request.path else None

    bucket.proxy.plan = refuse_the_manifest
    with pytest.raises(api.StreamshardError, match="go on"):
        api.convert(run, target)
    bucket.proxy.reset()
    report = api.convert(run, target)
    puts = [one.path for one in bucket.proxy.requests if one.method == "PUT"]
    assert sum("/c/0" in path for path in puts) == 1
    assert report.kept_bytes > report.bytes_written / 2
    api.convert(run, f"{bucket.url}/whole.zarr")
    assert content(bucket, "out.zarr") == content(bucket, "whole.zarr")


def test_an_object_that_changed_meanwhile_is_uploaded_again(bucket: Bucket, run: Path) -> None:
    target = f"{bucket.url}/out.zarr"
    bucket.proxy.plan = lambda one: Fault.DENIED if "meta/manifest/c/0" in one.path else None
    with pytest.raises(api.StreamshardError):
        api.convert(run, target)
    bucket.proxy.reset()
    chunk = min(key for key in bucket.keys("out.zarr/state") if key.endswith("/c/0/0"))
    bucket.put_bytes(chunk, bytes(len(bucket.get_bytes(chunk))))
    bucket.put_bytes("out.zarr/state/stranger", b"not ours")
    with pytest.raises(TargetExistsError, match=r"stranger: came to .* move it away"):
        api.convert(run, target)
    assert bucket.get_bytes("out.zarr/state/stranger") == b"not ours"
    assert RECORD not in bucket.get("out.zarr")
    bucket.remove("out.zarr/state/stranger")
    api.convert(run, target)
    api.convert(run, f"{bucket.url}/whole.zarr")
    assert content(bucket, "out.zarr") == content(bucket, "whole.zarr")


def test_starting_afresh_removes_nothing_of_others(bucket: Bucket, run: Path) -> None:
    """A job may have saved to the place of a run that was cut off."""
    target = f"{bucket.url}/out"
    bucket.proxy.plan = lambda one: Fault.DENIED if one.path.endswith("/latest") else None
    with pytest.raises(api.StreamshardError):
        api.repartition(run, target, world_size=3)
    bucket.proxy.reset()
    bucket.put_bytes("out/global_step2000/saved.pt", b"a month of training")
    with pytest.raises(TargetExistsError, match=r"global_step2000/saved\.pt: came to"):
        api.repartition(run, target, world_size=2, overwrite=True)
    assert bucket.get_bytes("out/global_step2000/saved.pt") == b"a month of training"


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, bytes]]:
    """A run whose optimizer file is uploaded in parts, and what its target has to hold."""
    place = tmp_path_factory.mktemp("large")
    source = write(LARGE, place / "run")
    api.repartition(source, place / "local", world_size=1, zero_stage=1)
    return str(source), files_of(place / "local")


def begins_parts(request: Request) -> bool:
    return request.method == "POST" and "?uploads" in request.path


def sends_part(request: Request) -> bool:
    return "partNumber=3" in request.path


def completes(request: Request) -> bool:
    return request.method == "POST" and "uploadId=" in request.path


def comes_after_parts(request: Request) -> bool:
    """Tell whether a request is for what is uploaded after the parts."""
    return request.method == "PUT" and request.path.endswith("/latest")


@pytest.mark.parametrize("is_carried_out", [False, True], ids=["lost", "late"])
@pytest.mark.parametrize("is_at", [begins_parts, sends_part, completes, comes_after_parts])
def test_a_run_killed_in_an_upload_in_parts_goes_on(
    bucket: Bucket,
    large: tuple[str, dict[str, bytes]],
    is_at: Callable[[Request], bool],
    is_carried_out: bool,
) -> None:
    """The service carries out the request that was under way, or never gets it."""
    source, wanted = large
    target, proxy = f"{bucket.url}/out", bucket.proxy
    words = ("repartition", source, target, "--world-size", "1", "--zero-stage", "1")

    def hold(request: Request) -> Fault | None:
        if not is_at(request):
            return None
        proxy.holding.set()
        proxy.go_on.wait()
        return None if is_carried_out else Fault.CLOSED

    proxy.plan = hold
    with proxy.settled():
        with started(*words) as process:
            assert proxy.holding.wait(WAIT)
            process.kill()
            process.wait(WAIT)
        proxy.reset()
    by_request = [
        (begins_parts, is_carried_out),
        (sends_part, True),
        (completes, not is_carried_out),
    ]
    assert bool(bucket.uploads()) == any(left for at, left in by_request if at is is_at)
    assert RECORD not in bucket.get("out")
    with pytest.raises(IncompleteError, match="unfinished"):
        api.inspect(target)
    with started(*words) as process:
        assert process.wait(WAIT) == 0
    assert bucket.uploads() == []
    assert content(bucket, "out") == wanted
    assert bucket.keys(".streamshard.lock") == set()


@pytest.mark.parametrize("variable", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT"])
def test_parts_are_aborted_below_the_target_too(
    bucket: Bucket, run: Path, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There copies of the largest objects are made of parts."""
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.setenv(variable, bucket.proxy.url)
    target = f"{bucket.url}/out"
    api.repartition(run, target, world_size=3)
    puts_latest = ("PUT", f"/{bucket.name}/out/latest")
    bucket.proxy.plan = lambda one: Fault.DENIED if (one.method, one.path) == puts_latest else None
    with pytest.raises(api.StreamshardError):
        api.repartition(run, target, world_size=2, overwrite=True)
    bucket.proxy.reset()
    for key in ("out/large", "out.partial/large"):
        bucket.begin_upload(key)
    notes = api.repartition(run, target, world_size=2).notes
    assert "parts of an upload" not in " ".join(notes)
    assert bucket.uploads() == []


def test_parts_that_cannot_be_listed_are_named(
    bucket: Bucket, large: tuple[str, dict[str, bytes]]
) -> None:
    source, wanted = large
    target = f"{bucket.url}/out"

    def denied(*parts: str) -> Callable[[Request], Fault | None]:
        return lambda one: Fault.DENIED if any(part in one.path for part in parts) else None

    bucket.proxy.plan = denied("/latest")
    with pytest.raises(api.StreamshardError):
        api.repartition(source, target, world_size=1, zero_stage=1)
    bucket.proxy.plan = denied("?uploads&")
    done = run_forked("repartition", source, target, "--world-size", "1", "--zero-stage", "1")
    assert done.code == 0, done.err
    said = " ".join(done.out.split())
    assert "may have left parts of an upload" in said
    assert "(AbortIncompleteMultipartUpload); the service answers AccessDenied" in said
    assert content(bucket, "out") == wanted


def test_a_lock_that_a_killed_run_was_removing(bucket: Bucket, run: Path) -> None:
    """The run's target is complete. The next run takes the lock over, or says how to remove it."""
    target, proxy, lock = f"{bucket.url}/out", bucket.proxy, ".streamshard.lock.out"
    words = ("repartition", str(run), target, "--world-size", "3")

    def never_removed(request: Request) -> Fault | None:
        # The names of what is removed are not in the path. The journal is removed before it.
        removes = request.method == "POST" and "?delete" in request.path
        if not removes or bucket.keys("out/.streamshard.journal/"):
            return None
        proxy.holding.set()
        proxy.go_on.wait()
        return Fault.CLOSED

    proxy.plan = never_removed
    with proxy.settled(), started(*words) as process:
        assert proxy.holding.wait(WAIT)
        process.kill()
        process.wait(WAIT)
        proxy.reset()
    wanted, left = content(bucket, "out"), bucket.get_bytes(lock)
    assert run_forked(*words, "--if-needed").code == 0
    assert run_forked(*words).code == TargetExistsError.exit_code
    assert run_forked(*words, "--overwrite").code == 0
    assert not bucket.keys(lock)
    elsewhere = {**json.loads(left), "host": "elsewhere", "boot": "another", "namespace": "pid:[1]"}
    bucket.put_bytes(lock, json.dumps(elsewhere).encode())
    refused = run_forked(*words, "--overwrite")
    assert refused.code == TargetLockedError.exit_code
    assert f"process {elsewhere['process']} on elsewhere, since" in refused.err
    advised = re.search(
        rf"if it is gone remove the object {bucket.url}/(\S+)$", refused.err.strip()
    )
    assert advised is not None, refused.err
    bucket.remove(advised[1])
    assert run_forked(*words, "--overwrite").code == 0
    assert content(bucket, "out") == wanted
    assert not bucket.keys(lock)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_aborts_what_is_under_way(
    bucket: Bucket, tmp_path: Path, number: signal.Signals
) -> None:
    source, target = write(LARGE, tmp_path / "run"), f"{bucket.url}/out"
    words = ("repartition", str(source), target, "--world-size", "1", "--zero-stage", "1")
    bucket.proxy.plan = lambda one: Fault.HELD if "partNumber=3" in one.path else None
    with bucket.proxy.settled(), started(*words) as process:
        assert bucket.proxy.holding.wait(WAIT)
        process.send_signal(number)
        bucket.proxy.go_on.set()
        assert process.wait(WAIT) == 128 + number
    assert bucket.uploads() == []
    assert not bucket.keys(".streamshard.lock")


def test_the_second_of_two_runs_is_refused(bucket: Bucket, run: Path) -> None:
    target = f"{bucket.url}/out"
    bucket.proxy.plan = lambda one: Fault.HELD if "optim_states.pt" in one.path else None
    with started("repartition", str(run), target, "--world-size", "3") as process:
        assert bucket.proxy.holding.wait(WAIT)
        with pytest.raises(TargetLockedError, match=f"process {process.pid} on"):
            api.repartition(run, target, world_size=3)
        bucket.proxy.go_on.set()
        assert process.wait(WAIT) == 0
    with pytest.raises(TargetExistsError):
        api.repartition(run, target, world_size=3)


def test_overwriting_keeps_one_of_both_whole(bucket: Bucket, run: Path) -> None:
    """The old target is whole until the new one is, wherever the run is killed."""
    target, words = f"{bucket.url}/out", ("repartition", str(run))
    api.repartition(run, f"{bucket.url}/new", world_size=2)
    api.repartition(run, f"{bucket.url}/old", world_size=3)
    old, new = content(bucket, "old"), content(bucket, "new")
    for number in range(4, 90, 1 if EVERY else 17):
        api.repartition(run, target, world_size=3, overwrite=True)
        if not killed_at(bucket, number, *words, target, "--world-size", "2", "--overwrite"):
            break
        found, beside = bucket.get("out"), bucket.get("out.partial")
        is_whole = RECORD in found
        if is_whole:
            found.pop(RECORD)
            assert found in (old, new), number
        else:
            assert {path: beside.get(path) for path in new} == new, number
        options = [] if beside else ["--overwrite"]
        done = run_forked(*words, target, "--world-size", "2", *options)
        assert done.code == 0, done.err
        assert content(bucket, "out") == new, number
        assert not bucket.keys("out.partial")
