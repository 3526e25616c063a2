"""A store in one object: read by ranges, by all verbs, and not written."""

from pathlib import Path

import pytest

import streamshard
from streamshard.errors import SourceError, UsageError
from tests.cloud.conftest import Bucket
from tests.fabricated import write
from tests.formats.conftest import files_of
from tests.job import Job


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_one_object_is_read_as_a_directory(codec: str, bucket: Bucket, tmp_path: Path) -> None:
    run, file = write(Job(stage=2), tmp_path / "run"), tmp_path / "7b.zarr.zip"
    streamshard.convert(run, file, codec=codec, chunk_size=500)
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


def test_an_object_that_is_replaced_meanwhile_is_refused(bucket: Bucket, tmp_path: Path) -> None:
    run, file = write(Job(stage=2), tmp_path / "run"), tmp_path / "7b.zarr.zip"
    streamshard.convert(run, file)
    bucket.put_bytes("7b.zarr.zip", file.read_bytes())
    with streamshard.open(f"{bucket.url}/7b.zarr.zip") as opened:
        bucket.put_bytes("7b.zarr.zip", file.read_bytes()[:-1] + b"\1")
        with pytest.raises(SourceError):
            opened["embed.weight"].fp32.numpy()


def test_it_is_written_to_a_disk_alone(bucket: Bucket, tmp_path: Path) -> None:
    run = write(Job(stage=2), tmp_path / "run")
    with pytest.raises(UsageError, match="to a disk alone"):
        streamshard.convert(run, f"{bucket.url}/7b.zarr.zip")
    assert not list(bucket.keys(""))
