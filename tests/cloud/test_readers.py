"""Stores in a bucket are read by zarr-python and TensorStore straight from there."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tensorstore
import zarr
from obstore.store import S3Store
from zarr.storage import ObjectStore

import streamshard as api
from tests.cloud.conftest import Bucket
from tests.cloud.server import REGION
from tests.fabricated import write
from tests.job import Job


@pytest.fixture(params=["none", "zstd"])
def store(request: pytest.FixtureRequest, bucket: Bucket, tmp_path: Path) -> str:
    run = write(Job(stage=2), tmp_path / "run")
    api.convert(run, f"{bucket.url}/7b.zarr", codec=request.param)
    return f"{bucket.url}/7b.zarr"


def masters(store: str) -> dict[str, bytes]:
    """Return the master weights as streamshard reads them."""
    with api.open(store) as opened:
        return {
            name: np.asarray(opened[name].states["fp32"]).tobytes()
            for name in opened
            if "fp32" in opened[name].states
        }


def test_zarr_python(store: str, bucket: Bucket) -> None:
    place = S3Store(
        bucket.name, prefix="7b.zarr", client_options={"allow_http": True}, region=REGION
    )
    group = zarr.open_group(ObjectStore(place, read_only=True), mode="r")
    found = dict(_leaves(group["state/fp32"]))
    assert len(found) > 1
    assert found == {name: data for name, data in masters(store).items() if name in found}


def _leaves(group: object, before: str = "") -> Iterator[tuple[str, bytes]]:
    assert isinstance(group, zarr.Group)
    for name, member in group.members():
        path = f"{before}{name}"
        if isinstance(member, zarr.Array):
            yield path, np.asarray(member[...]).tobytes()
        else:
            yield from _leaves(member, f"{path}/")


def test_tensorstore(store: str, bucket: Bucket) -> None:
    wanted = masters(store)
    arrays = {key.split("/")[3] for key in bucket.keys("7b.zarr/state/fp32/") if "/c/" in key}
    assert arrays
    for name in arrays:
        opened = tensorstore.open(
            {
                "driver": "zarr3",
                "kvstore": {
                    "driver": "s3",
                    "bucket": bucket.name,
                    "path": f"7b.zarr/state/fp32/{name}/",
                    "endpoint": bucket.proxy.url,
                    "aws_region": REGION,
                    "aws_credentials": {"type": "environment"},
                },
            }
        ).result()
        assert np.asarray(opened.read().result()).tobytes() == wanted[name]
