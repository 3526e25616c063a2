"""A run that ends early is continued by the same command, and leaves nothing over."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest

import streamshard as api
from streamshard.engine.journals.journal import serialize_line
from streamshard.errors import IncompleteError, TargetExistsError, TargetLockedError
from streamshard.io.objects import object_upload
from tests.cli.conftest import tree
from tests.cloud.conftest import JOURNAL, RECORD, Bucket
from tests.cloud.proxy import Fault, Plan, Request
from tests.fabricated import write
from tests.forked import run_forked
from tests.job import Job

EVERY = "EVERY_REQUEST" in os.environ
"""Whether a run is killed at every request, and not at a few."""
WAIT = 300
"""Seconds, of which a busy machine may need many."""
COMMAND = """
from streamshard.__main__ import program
from streamshard.cli import signals
from streamshard.io.objects import object_upload
object_upload._SINGLE_BYTES = 1 << 20
signals._GRACE_SECONDS = 300
program()
"""
"""The command line; it uploads smaller files in parts, and has time to end on a busy machine."""
LARGE = Job(stage=2, world_size=1, groups=((("embed.weight", (1_500_000,)),),))
"""Its optimizer file, of 18 MB, is uploaded in three parts."""
LOCK = ".streamshard.lock.out"


@contextmanager
def started(*words: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start the command line."""
    command = [sys.executable, "-c", COMMAND, *words, "--quiet"]
    with subprocess.Popen(command, preexec_fn=_heed_interrupts) as process:
        try:
            yield process
        finally:
            process.kill()


def _heed_interrupts() -> None:
    """Undo what a shell does to programs in its background, and they to theirs."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def killed(bucket: Bucket, plan: Plan, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """Kill a run at the end of the block, which begins once a request is held, or the run over."""
    bucket.proxy.reset()
    bucket.proxy.plan = plan
    with bucket.proxy.settled():  # what it has sent may be carried out after its end
        with started(*words) as process:
            while not bucket.proxy.holding.wait(0.01) and process.poll() is None:
                pass
            yield process
            process.kill()
            process.wait(WAIT)
        bucket.proxy.reset()


def kill(bucket: Bucket, plan: Plan, *words: str) -> bool:
    """Kill a run while a request is held; False if it was over before."""
    with killed(bucket, plan, *words) as process:
        return process.poll() is None


def kill_at(bucket: Bucket, number: int, *words: str) -> bool:
    """Kill a run while its n-th request is under way; False if it has fewer requests."""
    return kill(bucket, lambda one: Fault.HELD if one.number == number else None, *words)


def end_at(bucket: Bucket, key: str, run: Callable[[], object]) -> None:
    """End a run by an error: an object of this name, or below it, cannot be put."""
    bucket.proxy.plan = lambda one: (
        Fault.DENIED if one.method == "PUT" and f"/{key}" in one.path else None
    )
    with pytest.raises(api.StreamshardError, match="go on"):
        run()
    bucket.proxy.reset()


def test_the_same_command_goes_on(bucket: Bucket, run: Path) -> None:
    source, own = bucket.put(run, "runs/7b"), ("--world-size", "3")
    assert run_forked("repartition", source, f"{bucket.url}/whole", *own).code == 0
    step = 1 if EVERY else len(bucket.proxy.requests) // 2
    wanted = bucket.content("whole")
    for number in count(2, step):
        target = f"out-{number}"
        words = ("repartition", source, f"{bucket.url}/{target}", *own)
        if not kill_at(bucket, number, *words):
            break
        is_there = RECORD in bucket.get(target)
        if not is_there and bucket.keys(f"{target}/{JOURNAL}/"):
            with pytest.raises(IncompleteError, match="unfinished"):
                api.inspect(f"{bucket.url}/{target}")
            assert "latest" not in bucket.get(target) or number > len(wanted)
        done = run_forked(*words)
        assert done.code == 0 or (is_there and "exists" in done.err), (number, done.err)
        assert bucket.content(target) == wanted, number
        assert bucket.uploads() == []
        # Who was killed as it removed its lock leaves it to the next who writes there.
        assert is_there or not bucket.keys(f".streamshard.lock.{target}")
    assert number > 2 + step, (number, step)  # it was killed twice, or oftener


def test_overwriting_keeps_one_of_both_whole(bucket: Bucket, run: Path) -> None:
    """The old target is whole until the new one is, wherever the run is killed."""
    target = f"{bucket.url}/out"
    words = ("repartition", str(run), target, "--world-size", "2")
    for name, number in (("new", 2), ("old", 3)):
        api.repartition(run, f"{bucket.url}/{name}", world_size=number)
    old, new = bucket.content("old"), bucket.content("new")
    for number in range(4, 90) if EVERY else (33, 62):
        api.repartition(run, target, world_size=3, overwrite=True)
        if not kill_at(bucket, number, *words, "--overwrite"):
            break
        found, beside = bucket.get("out"), bucket.get("out.partial")
        if found.pop(RECORD, None):
            assert found in (old, new), number
        else:
            assert beside.items() >= new.items(), number
        done = run_forked(*words, *([] if beside else ["--overwrite"]))
        assert done.code == 0, done.err
        assert bucket.content() == new, number
        assert not bucket.keys("out.partial")


def sends_part(request: Request) -> bool:
    return "partNumber=3" in request.path


def completes(request: Request) -> bool:
    """Tell whether a request makes the largest object of its parts, by S3's protocol or Azure's."""
    is_of_s3 = request.method == "POST" and "uploadId=" in request.path
    return "optim_states" in request.path and (is_of_s3 or "comp=blocklist" in request.path)


@pytest.mark.parametrize(
    ("is_at", "fault", "leaves"),
    [
        (sends_part, Fault.HELD_AND_CLOSED, True),
        (completes, Fault.HELD_AND_CLOSED, True),
        (completes, Fault.HELD, False),
    ],
)
def test_a_run_killed_in_an_upload_in_parts_goes_on(
    bucket: Bucket,
    large: Path,
    is_at: Callable[[Request], bool],
    fault: Fault,
    leaves: bool,
) -> None:
    """The service carries out the request that was under way, or never gets it."""
    words = ("repartition", str(large), f"{bucket.url}/out", "--world-size", "1")
    assert kill(bucket, lambda request: fault if is_at(request) else None, *words)
    assert bool(bucket.uploads()) == leaves
    assert RECORD not in bucket.get("out")
    with pytest.raises(IncompleteError, match="unfinished"):
        api.inspect(f"{bucket.url}/out")
    done = run_forked(*words, script=COMMAND)
    assert done.code == 0, done.err
    assert bucket.uploads() == []
    assert bucket.content() == tree(large.with_name("local"))
    assert not bucket.keys(LOCK)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose optimizer file is uploaded in parts; beside it `local`, which comes of it."""
    source = write(LARGE, tmp_path_factory.mktemp("large") / "run")
    api.repartition(source, source.with_name("local"), world_size=1)
    return source


def test_a_signal_aborts_what_is_under_way(bucket: Bucket, large: Path) -> None:
    words = ("repartition", str(large), f"{bucket.url}/out", "--world-size", "1")
    bucket.proxy.plan = lambda one: Fault.HELD if sends_part(one) else None
    with bucket.proxy.settled(), started(*words) as process:
        assert bucket.proxy.holding.wait(WAIT)
        process.send_signal(signal.SIGINT)
        bucket.proxy.go_on.set()
        assert process.wait(WAIT) == 128 + signal.SIGINT
    assert bucket.uploads() == []
    assert not bucket.keys(LOCK)


def test_parts_are_aborted_below_the_target_too(
    bucket: Bucket, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There copies of the largest objects are made of parts."""
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.setenv("AWS_ENDPOINT", bucket.proxy.url)
    target = f"{bucket.url}/out"
    api.repartition(run, target, world_size=3)
    end_at(bucket, "out/latest", lambda: api.repartition(run, target, world_size=2, overwrite=True))
    for key in ("out/large", "out.partial/large"):
        bucket.s3.create_multipart_upload(Bucket=bucket.name, Key=key)
    notes = api.repartition(run, target, world_size=2).notes
    assert "parts of an upload" not in " ".join(notes)
    assert bucket.uploads() == []


def test_parts_that_cannot_be_listed_are_named(
    bucket: Bucket, large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_upload, "_SINGLE_BYTES", 1 << 20)
    target = f"{bucket.url}/out"
    end_at(bucket, "out/latest", lambda: api.repartition(large, target, world_size=1))
    bucket.proxy.plan = lambda one: Fault.DENIED if "?uploads&" in one.path else None
    notes = " ".join(api.repartition(large, target, world_size=1).notes)
    assert "may have left parts of an upload" in notes
    assert "(AbortIncompleteMultipartUpload); the service answers AccessDenied" in notes
    assert bucket.content() == tree(large.with_name("local"))


def test_so_are_those_of_a_target_that_is_one_object(bucket: Bucket, large: Path) -> None:
    bucket.proxy.plan = lambda one: Fault.DENIED if "?uploads&" in one.path else None
    (note,) = api.convert(large, f"{bucket.url}/out.zarr.zip").notes[-1:]
    assert "out.zarr.zip: a run that was cut off may have left parts of an upload" in note
    assert note.endswith("; the service answers AccessDenied")


def test_a_lock_that_a_killed_run_was_removing(bucket: Bucket, run: Path) -> None:
    """The run's target is complete. The next run takes the lock over, or says how to remove it."""
    words = ("repartition", str(run), f"{bucket.url}/out", "--world-size", "3")

    def never_removed(request: Request) -> Fault | None:
        # The names of what is removed are not in the path. The journal is removed before it.
        removes = request.method == "POST" and "?delete" in request.path
        return Fault.HELD_AND_CLOSED if removes and not bucket.keys(f"out/{JOURNAL}/") else None

    assert kill(bucket, never_removed, *words)
    wanted, left = bucket.content(), bucket.get_bytes(LOCK)
    assert run_forked(*words, "--if-needed").code == 0
    assert run_forked(*words).code == TargetExistsError.exit_code
    assert run_forked(*words, "--overwrite").code == 0
    assert not bucket.keys(LOCK)
    elsewhere = {**json.loads(left), "host": "elsewhere"}
    bucket.put_bytes(LOCK, json.dumps(elsewhere).encode())
    refused = run_forked(*words, "--overwrite")
    assert refused.code == TargetLockedError.exit_code
    assert f"process {elsewhere['process']} on elsewhere, since" in refused.err
    advised = re.search(
        rf"if it is gone remove the object {bucket.url}/(\S+)$", refused.err.strip()
    )
    assert advised is not None, refused.err
    bucket.remove(advised[1])
    assert run_forked(*words, "--overwrite").code == 0
    assert bucket.content() == wanted
    assert not bucket.keys(LOCK)


@pytest.fixture
def unfinished(bucket: Bucket, run: Path) -> str:
    """A store of which all is uploaded but the manifest."""
    target = f"{bucket.url}/out"
    end_at(bucket, "out/meta/manifest/c/0", lambda: api.convert(run, target))
    return target


def of_the_disk(run: Path) -> dict[str, bytes]:
    """Return what a conversion writes to the disk."""
    api.convert(run, run.with_name("7b.zarr"))
    return tree(run.with_name("7b.zarr"))


def test_what_is_uploaded_is_not_uploaded_again(bucket: Bucket, run: Path, unfinished: str) -> None:
    report = api.convert(run, unfinished)
    puts = [one.path for one in bucket.proxy.requests if one.method == "PUT"]
    assert sum("/c/0" in path for path in puts) == 1
    assert report.kept_bytes > report.bytes_written / 2
    assert bucket.content() == of_the_disk(run)


def test_an_object_that_changed_meanwhile_is_uploaded_again(
    bucket: Bucket, run: Path, unfinished: str
) -> None:
    chunk = min(key for key in bucket.keys("out/state") if key.endswith("/c/0/0"))
    bucket.put_bytes(chunk, bytes(len(bucket.get_bytes(chunk))))
    bucket.put_bytes("out/state/stranger", b"not ours")
    with pytest.raises(TargetExistsError, match=r"stranger: came to .* move it away"):
        api.convert(run, unfinished)
    assert bucket.get_bytes("out/state/stranger") == b"not ours"
    assert RECORD not in bucket.get("out")
    bucket.remove("out/state/stranger")
    api.convert(run, unfinished)
    assert bucket.content() == of_the_disk(run)


def test_starting_afresh_removes_nothing_of_others(bucket: Bucket, run: Path) -> None:
    """A job may have saved to the place of a run that was cut off."""
    target = f"{bucket.url}/out"
    end_at(bucket, "out/latest", lambda: api.repartition(run, target, world_size=3))
    bucket.put_bytes("out/global_step2000/saved.pt", b"a month of training")
    with pytest.raises(TargetExistsError, match=r"global_step2000/saved\.pt: came to"):
        api.repartition(run, target, world_size=2, overwrite=True)
    assert bucket.get_bytes("out/global_step2000/saved.pt") == b"a month of training"


@pytest.mark.parametrize("change", ["spans", "numbers"])
def test_what_a_journal_says_wrongly_of_an_object_is_uploaded_again(
    bucket: Bucket, run: Path, unfinished: str, change: str
) -> None:
    key = f"out/{JOURNAL}/1"
    lines = [json.loads(line[9:]) for line in bucket.get_bytes(key).splitlines() if line]
    for files, _ in lines:
        for file in files:
            if file[4:]:
                others = {
                    "spans": [*file[4:], 1 << 40, 1, 2, 0],
                    "numbers": [*file[4:7], 1, 0, 5, 2, 3, 0, 0],
                }
                file[4:] = others[change]
    bucket.put_bytes(key, b"".join(map(serialize_line, lines)))
    api.convert(run, unfinished)
    assert bucket.content() == of_the_disk(run)
    assert api.verify(unfinished).is_good


def test_the_journal_of_another_version_is_refused_unless_the_target_is_overwritten(
    bucket: Bucket, run: Path
) -> None:
    target = f"{bucket.url}/out"
    for name, line in (("0", {"format": 2}), ("1", "done"), ("another/name", "done")):
        bucket.put_bytes(f"out/{JOURNAL}/{name}", serialize_line(line))
    before = bucket.get("out")
    with pytest.raises(TargetExistsError, match=r"another version of streamshard.*overwrite=True"):
        api.repartition(run, target, world_size=3)
    assert bucket.get("out") == before
    api.repartition(run, target, world_size=3, overwrite=True)
    assert bucket.content()
