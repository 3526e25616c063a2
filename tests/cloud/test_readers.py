"""Stores in a bucket are read by other programs straight from there, as the page shows."""

import subprocess
import sys
from collections.abc import Callable
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
from tests.documents import ROOT
from tests.fabricated import write
from tests.job import Job


def by_zarr_python(bucket: Bucket, path: str) -> bytes:
    place = S3Store(bucket.name, client_options={"allow_http": True}, region=REGION)
    array = zarr.open_array(ObjectStore(place, read_only=True), path=path, mode="r")
    return np.asarray(array[...]).tobytes()


def by_tensorstore(bucket: Bucket, path: str) -> bytes:
    place = {
        "driver": "s3",
        "bucket": bucket.name,
        "path": f"{path}/",
        "endpoint": bucket.proxy.url,
        "aws_region": REGION,
        "aws_credentials": {"type": "environment"},
    }
    array = tensorstore.open({"driver": "zarr3", "kvstore": place}).result()
    return np.asarray(array.read().result()).tobytes()


@pytest.mark.parametrize(("codec", "read"), [("none", by_zarr_python), ("zstd", by_tensorstore)])
def test_what_other_programs_read_is_what_is_there(
    codec: str, read: Callable[[Bucket, str], bytes], bucket: Bucket, tmp_path: Path
) -> None:
    store = f"{bucket.url}/7b.zarr"
    api.convert(write(Job(stage=2), tmp_path / "run"), store, codec=codec)
    chunks = [key for key in bucket.keys("7b.zarr/state/fp32/") if "/c/" in key]
    names = {key.split("/")[3] for key in chunks}
    assert len(names) > 1
    with api.open(store) as opened:
        for name in names:
            own = np.asarray(opened[name].states["fp32"]).tobytes()
            assert read(bucket, f"7b.zarr/state/fp32/{name}") == own


@pytest.mark.parametrize("tool", ["obstore", "fsspec", "tensorstore"])
def test_python_in_the_recipe_works_as_it_stands(tool: str, bucket: Bucket, tmp_path: Path) -> None:
    shown = (ROOT / "docs" / "recipes" / f"read_bucket_{tool}.py").read_text()
    run = write(Job(stage=2, groups=((("layers.0.weight", (3000, 2)),),), tied={}), tmp_path / "7b")
    api.convert(run, f"{bucket.url}/archive/7b.zarr")
    before = len(bucket.proxy.requests)
    block = shown.replace("s3://bucket/", f"{bucket.url}/")
    block = block.replace('"bucket": "bucket"', f'"bucket": "{bucket.name}"')
    # Once in a while, threads of a Rust library abort an interpreter that is ending.
    block += "\nimport os\nos._exit(0)\n"
    subprocess.run([sys.executable, "-c", block], check=True)
    read = [one.path for one in bucket.proxy.requests[before:] if one.method == "GET"]
    assert any("layers.0.weight/c/" in path for path in read)
