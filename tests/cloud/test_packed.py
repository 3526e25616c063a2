"""A store in one object: written by one upload, and read by ranges, by all verbs."""

from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped, unused-ignore]
import pytest
import zarr
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper  # type: ignore[import-untyped, unused-ignore]
from obstore.fsspec import FsspecStore

import streamshard
from streamshard.errors import CorruptFileError, StreamshardError, TargetExistsError
from streamshard.io.objects import object_upload
from tests.cloud.conftest import Bucket
from tests.cloud.proxy import Request
from tests.fabricated import write
from tests.formats.conftest import files_of
from tests.job import Job

LARGE = Job(stage=2, world_size=1, groups=((("embed.weight", (1_500_000,)),),))
"""Its store, of 20 MB, is uploaded in parts."""


def test_one_object_is_read_as_a_directory(bucket: Bucket, tmp_path: Path) -> None:
    run, file = write(Job(stage=2), tmp_path / "run"), tmp_path / "7b.zarr.zip"
    streamshard.convert(run, file, codec="zstd", chunk_size=500)
    bucket.put_bytes("runs/7b.zarr.zip", file.read_bytes())
    store = f"{bucket.url}/runs/7b.zarr.zip"
    before = len(bucket.proxy.requests)
    assert streamshard.inspect(store).tag == streamshard.inspect(file).tag
    assert len(bucket.proxy.requests) - before < 12
    assert streamshard.verify(store).is_good
    assert streamshard.diff(store, run).is_equal
    for source in (store, file):
        streamshard.repartition(source, tmp_path / f"of-{len(str(source))}", world_size=3)
    made = [files_of(path) for path in sorted(tmp_path.glob("of-*"))]
    assert made[0] == made[1]
    with streamshard.open(store) as opened, streamshard.open(file) as other:
        for name in other:
            for state, tensor in other[name].tensors.items():
                assert opened[name].tensors[state].bits().tobytes() == tensor.bits().tobytes()


@pytest.mark.parametrize(("codec", "part"), [("zstd", None), ("none", 5 << 20)])
def test_it_is_written_as_on_a_disk(
    codec: str, part: int | None, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one request, or in parts; from here and from a bucket."""
    run, file = write(LARGE if part else Job(stage=2), tmp_path / "run"), tmp_path / "7b.zarr.zip"
    (run / "zero_to_fp32.py").chmod(0o644)  # an object has no permission bits
    if part:
        monkeypatch.setattr(object_upload, "_SINGLE_BYTES", 1 << 20)
        monkeypatch.setattr(object_upload, "_PART_BYTES", part)
    options: dict[str, Any] = {"codec": codec, "chunk_size": (1 << 20) if part else 500}
    streamshard.convert(run, file, **options)
    for source, name in ((str(run), "a.zarr.zip"), (bucket.put(run, "run"), "b.zarr.zip")):
        before = len(bucket.proxy.requests)
        report = streamshard.convert(source, f"{bucket.url}/{name}", **options)
        asked = [one for one in bucket.proxy.requests[before:] if f"/{name}" in one.path]
        assert len([one for one in asked if "partNumber" in one.path]) == bool(part) * -(
            -file.stat().st_size // (part or 1)
        )
        assert bucket.get_bytes(name) == file.read_bytes()
        assert report.bytes_written == file.stat().st_size
    assert bucket.keys("a") | bucket.keys("b") == {"a.zarr.zip", "b.zarr.zip"}
    assert not bucket.uploads()


def test_zarr_python_reads_it(bucket: Bucket, tmp_path: Path) -> None:
    run, store = write(Job(stage=2), tmp_path / "run"), f"{bucket.url}/7b.zarr.zip"
    streamshard.convert(run, store)
    assert streamshard.convert(run, store, if_needed=True).found == "target"
    file = FsspecStore("s3", client_options={"allow_http": True}).open(store)
    within = AsyncFileSystemWrapper(fsspec.filesystem("zip", fo=file), asynchronous=True)
    group = zarr.open_group(zarr.storage.FsspecStore(within, read_only=True, path=""), mode="r")
    found: Any = group["state/fp32/embed.weight"]
    with streamshard.open(store) as tensors:
        wanted = tensors["embed.weight"].fp32.numpy()
    assert (found[:] == wanted).all()


def test_it_replaces_only_a_store(bucket: Bucket, tmp_path: Path) -> None:
    run, store = write(Job(stage=2), tmp_path / "run"), f"{bucket.url}/7b.zarr.zip"
    bucket.put_bytes("7b.zarr.zip", b"mine")
    with pytest.raises(TargetExistsError, match="exists"):
        streamshard.convert(run, store)
    with pytest.raises(TargetExistsError, match="no store of ours"):
        streamshard.convert(run, store, overwrite=True)
    bucket.remove("7b.zarr.zip")
    streamshard.convert(run, store, codec="zstd", verify=True)
    old = bucket.get_bytes("7b.zarr.zip")
    streamshard.convert(run, store, overwrite=True)
    assert bucket.get_bytes("7b.zarr.zip") != old
    assert bucket.keys() == {"7b.zarr.zip"}
    assert streamshard.verify(store).is_good


def test_what_comes_meanwhile_is_not_replaced(bucket: Bucket, tmp_path: Path) -> None:
    run, store = write(LARGE, tmp_path / "run"), f"{bucket.url}/7b.zarr.zip"

    def intrude(request: Request) -> None:
        if request.path.endswith("?uploads="):
            bucket.put_bytes("7b.zarr.zip", b"mine")

    bucket.proxy.plan = intrude
    with pytest.raises(TargetExistsError, match="by someone else meanwhile"):
        streamshard.convert(run, store)
    assert bucket.get_bytes("7b.zarr.zip") == b"mine"
    assert bucket.keys() == {"7b.zarr.zip"}
    assert not bucket.uploads()


def test_a_run_that_fails_leaves_nothing(bucket: Bucket, tmp_path: Path) -> None:
    run = write(LARGE, tmp_path / "run")
    source, store = bucket.put(run, "run"), f"{bucket.url}/7b.zarr.zip"
    plan = streamshard.plan_convert(source, store, chunk_size=1 << 20)
    bucket.damage(next(key for key in bucket.keys("run") if "optim_states" in key))
    with pytest.raises(CorruptFileError, match="replaced by another object"):
        plan.run()
    assert bucket.keys("7b") == set()
    assert not bucket.uploads()


def test_what_is_read_back_goes_if_it_may_not_take_its_place(
    bucket: Bucket, tmp_path: Path
) -> None:
    run, store = write(Job(stage=2), tmp_path / "run"), f"{bucket.url}/7b.zarr.zip"

    def intrude(request: Request) -> None:
        if request.range and request.path.endswith("7b.zarr.zip.partial/7b.zarr.zip"):
            bucket.put_bytes("7b.zarr.zip", b"mine")

    bucket.proxy.plan = intrude
    with pytest.raises(TargetExistsError, match="by someone else meanwhile"):
        streamshard.convert(run, store, verify=True)
    assert bucket.keys() == {"7b.zarr.zip"}


@pytest.mark.parametrize("verify", [False, True])
def test_what_a_killed_run_left_is_removed(verify: bool, bucket: Bucket, tmp_path: Path) -> None:
    run, store = write(LARGE, tmp_path / "run"), f"{bucket.url}/7b.zarr.zip"
    staged = "7b.zarr.zip.partial/7b.zarr.zip"
    bucket.put_bytes(staged, b"not read back yet")
    for key in ("7b.zarr.zip", staged):
        bucket.s3.create_multipart_upload(Bucket=bucket.name, Key=key)
    streamshard.convert(run, store, verify=verify)
    assert bucket.keys() == {"7b.zarr.zip"}
    assert not bucket.uploads()


def test_what_is_damaged_on_its_way_is_not_put_into_its_place(
    bucket: Bucket, tmp_path: Path
) -> None:
    run, store = write(Job(stage=2), tmp_path / "run"), f"{bucket.url}/7b.zarr.zip"
    staged = "7b.zarr.zip.partial/7b.zarr.zip"

    def damage(request: Request) -> None:
        if request.range and request.path.endswith(staged) and not damaged:
            data = bytearray(bucket.get_bytes(staged))
            data[len(data) // 2] ^= 1
            damaged.append(bytes(data))
            bucket.put_bytes(staged, damaged[0])

    damaged: list[bytes] = []
    bucket.proxy.plan = damage
    with pytest.raises(StreamshardError, match="read back"):
        streamshard.convert(run, store, verify=True)
    assert damaged
    assert bucket.keys() == set()
