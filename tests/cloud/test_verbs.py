"""All verbs do with buckets what they do with directories, to the byte."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import streamshard as api
from streamshard.errors import IntegrityError
from streamshard.io.object_path import as_path, object_of
from streamshard.io.objects import object_upload
from tests.checkpoints.test_dcp_repartition import saved
from tests.cli.conftest import tree
from tests.cloud.conftest import RECORD, Bucket
from tests.fabricated import optimizer_file, write
from tests.grafting.jobs import Jobs
from tests.job import LEAN, Job
from tests.verify.conftest import flip_data


def test_repartition(run: Path, bucket: Bucket, tmp_path: Path) -> None:
    source = bucket.put(run, "runs/7b")
    api.repartition(run, tmp_path / "local", world_size=3)
    wanted = tree(tmp_path / "local")
    report = api.repartition(source, f"{bucket.url}/out", world_size=3, verify=True)
    assert (report.target, report.kept_bytes) == (f"{bucket.url}/out", 0)
    assert bucket.content() == wanted
    puts = [
        one.path for one in bucket.proxy.requests if one.method == "PUT" and "/out/" in one.path
    ]
    assert [path.rpartition("/")[2] for path in puts[-2:]] == ["latest", RECORD]
    api.repartition(source, tmp_path / "down", world_size=3)
    assert tree(tmp_path / "down") == wanted
    api.repartition(run, f"{bucket.url}/up", world_size=3)
    assert bucket.content("up") == wanted


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_convert(run: Path, bucket: Bucket, tmp_path: Path, codec: str) -> None:
    source, store = bucket.put(run, "runs/7b"), f"{bucket.url}/7b.zarr"
    api.convert(run, tmp_path / "local.zarr", codec=codec)
    api.convert(source, store, codec=codec, verify=True)
    assert bucket.content("7b.zarr") == tree(tmp_path / "local.zarr")
    puts = [one.path for one in bucket.proxy.requests if one.method == "PUT"]
    written = [path for path in puts if "/7b.zarr/" in path and ".streamshard." not in path]
    assert written[-1].endswith("/7b.zarr/zarr.json")
    assert api.verify(store).problems == ()
    assert api.verify(source, against=store).differences == ()
    for name, place in (("from-store", store), ("direct", run)):
        api.repartition(place, tmp_path / name, world_size=2)
    assert tree(tmp_path / "from-store") == tree(tmp_path / "direct")


def test_content_may_grow_while_somebody_refers_to_what_was_sent_before(bucket: Bucket) -> None:
    """Compressed content may be longer than was expected of it."""
    buffer, data = bytearray(1000), bytes(range(250)) * 40
    sent = memoryview(buffer)
    object_upload._worker_buffer.give_back(buffer)
    sink = object_upload.ObjectSink(object_of(as_path(f"{bucket.url}/chunk")), len(sent))
    sink.write(memoryview(data), 0)
    sink.finish(None)
    sink.close()
    assert bucket.get_bytes("chunk") == data


@pytest.mark.parametrize("form", ["safetensors", "universal"])
def test_export(run: Path, bucket: Bucket, tmp_path: Path, form: str) -> None:
    source = bucket.put(run, "runs/7b")
    api.export(run, tmp_path / "local", format=form)
    api.export(source, f"{bucket.url}/weights", format=form, verify=True)
    assert bucket.content("weights") == tree(tmp_path / "local")


def test_merge(bucket: Bucket, tmp_path: Path) -> None:
    """Of runs and stores, here and there, into a run and into a store."""
    jobs = [replace(LEAN, step=step, world_size=step - 3) for step in (5, 6)]
    older, newer = (write(job, tmp_path / f"run-{job.step}") for job in jobs)
    for run in (older, newer):
        (run / "zero_to_fp32.py").chmod(0o644)
    api.convert(older, tmp_path / "old.zarr", codec="zstd")
    near = [tmp_path / "old.zarr", newer]
    far: list[Path | str] = [bucket.put(near[0], "old.zarr"), newer]
    api.merge(near, tmp_path / "out", weights="ema:0.5")
    api.merge(far, f"{bucket.url}/out", weights="ema:0.5", verify=True)
    assert bucket.content("out") == tree(tmp_path / "out")
    api.merge([older, bucket.put(newer, "newer")], tmp_path / "down", weights="ema:0.5")
    assert tree(tmp_path / "down") == tree(tmp_path / "out")


def test_graft(bucket: Bucket, tmp_path: Path) -> None:
    jobs = Jobs.write(tmp_path, stage=3, frozen=())
    for path in (jobs.source, jobs.start):
        (path / "zero_to_fp32.py").chmod(0o644)
    (tmp_path / "rules").write_text("drop old.*\nfresh embed.weight")
    rules = tmp_path / "rules"
    source, start = (bucket.put(path, path.name) for path in (jobs.source, jobs.start))
    api.graft(jobs.source, jobs.start, tmp_path / "out", rules=rules)
    api.graft(source, start, f"{bucket.url}/out", rules=rules, verify=True)
    far, near = bucket.content("out"), tree(tmp_path / "out")
    record = f"{api.inspect(tmp_path / 'out').tag}/graft.json"
    assert far.pop(record) != near.pop(record)  # they name their sources
    assert far == near


def test_open_and_diff(run: Path, bucket: Bucket) -> None:
    source = bucket.put(run, "runs/7b")
    with api.open(run) as here, api.open(source) as there:
        assert list(there) == list(here)
        for name in here:
            for state, tensor in here[name].states.items():
                one, other = np.asarray(tensor), np.asarray(there[name].states[state])
                assert one.tobytes() == other.tobytes()
    assert {tensor.distance.changed for tensor in api.diff(run, source).tensors} == {0}


def test_if_needed(bucket: Bucket, tmp_path: Path) -> None:
    source = bucket.put(write(LEAN, tmp_path / "run"), "runs/7b")
    target = f"{bucket.url}/out"
    plan = api.plan_repartition(source, target, world_size=3)
    assert bucket.keys("out") == set()
    plan.run()
    found = api.repartition(source, target, world_size=3, if_needed=True)
    assert (found.found, found.bytes_written) == ("target", 0)
    same = api.repartition(source, f"{bucket.url}/other", world_size=2, if_needed=True)
    assert same.found == "source"


def test_file_urls_are_paths(tmp_path: Path) -> None:
    run = write(LEAN, tmp_path / "run")
    api.repartition(f"file://{run}", f"file://{tmp_path}/out", world_size=3)
    api.repartition(run, tmp_path / "too", world_size=3)
    assert tree(tmp_path / "out") == tree(tmp_path / "too")


def test_checkpoints_of_other_programs(bucket: Bucket, tmp_path: Path) -> None:
    run = write(Job(), tmp_path / "run")
    made = saved(Job())
    made.write(tmp_path / "dcp")
    source, like = bucket.put(tmp_path / "dcp", "fsdp/dcp"), bucket.put(run, "runs/7b")
    api.repartition(tmp_path / "dcp", tmp_path / "local", world_size=3, like=run)
    api.repartition(source, tmp_path / "down", world_size=3, like=like)
    # Headers of all items of a file are got side by side, and those near each other as one.
    items = len(made.values) + sum(len(boxes) for _, boxes in made.tensors.values())
    assert sum("fsdp/dcp/__" in one.path for one in bucket.proxy.requests) < items / 2
    assert tree(tmp_path / "down") == tree(tmp_path / "local")
    assert api.verify(source).problems == ()
    api.export(run, tmp_path / "model", dtype="fp32")
    weights = bucket.put(tmp_path / "model", "models/7b")
    assert api.inspect(weights).kind == "weights"
    assert not api.diff(weights, run).changed


def test_a_flipped_bit_is_not_carried(bucket: Bucket, tmp_path: Path) -> None:
    """There is no target then, in the bucket or out of it."""
    run = write(Job(stage=2), tmp_path / "run")
    flip_data(optimizer_file(run, 1))
    source = bucket.put(run, "runs/7b")
    for target in (f"{bucket.url}/out", tmp_path / "down"):
        with pytest.raises(IntegrityError, match="was recorded when they were saved"):
            api.repartition(source, target, world_size=3)
    assert bucket.get("out") == {}
    assert not (tmp_path / "down").exists()
