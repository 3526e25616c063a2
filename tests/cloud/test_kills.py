"""A run that is killed at any request is continued by the same command, and leaves nothing over."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
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
from tests.job import Job

EVERY = "EVERY_REQUEST" in os.environ
"""Whether a run is killed at every request, and not at a few."""
WAIT = 60
LARGE = Job(stage=2, world_size=1, groups=((("embed.weight", (6_000_000,)),),))
"""Its optimizer file, of 72 MB, is uploaded in parts."""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write(Job(stage=3), tmp_path / "run")


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
    chunk = min(key for key in bucket.keys("out.zarr/state") if key.endswith("/c/0"))
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


def test_parts_of_a_killed_upload_are_aborted(bucket: Bucket, tmp_path: Path) -> None:
    source, target = write(LARGE, tmp_path / "run"), f"{bucket.url}/out"
    words = ("repartition", str(source), target, "--world-size", "1", "--zero-stage", "1")

    def hold_third_part(request: Request) -> Fault | None:
        return Fault.HELD if "partNumber=3" in request.path else None

    bucket.proxy.plan = hold_third_part
    with bucket.proxy.settled():
        with started(*words) as process:
            assert bucket.proxy.holding.wait(WAIT)
            process.kill()
            process.wait(WAIT)
        bucket.proxy.reset()
    assert len(bucket.uploads()) == 1
    with started(*words) as process:
        assert process.wait(WAIT) == 0
    assert bucket.uploads() == []
    api.repartition(source, tmp_path / "local", world_size=1, zero_stage=1)
    wanted, found = files_of(tmp_path / "local"), content(bucket, "out")
    assert {path: data for path, data in found.items() if data != wanted[path]} == {}
    assert found.keys() == wanted.keys()


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
