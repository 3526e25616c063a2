"""What the page about object stores shows works as it stands, against a bucket of another name."""

import subprocess
import sys
from pathlib import Path

import pytest

import streamshard
from tests.cloud.conftest import Bucket
from tests.documents import blocks, page
from tests.fabricated import write
from tests.job import Job


@pytest.mark.parametrize("tool", ["ObjectStore", "fsspec", "tensorstore"])
def test_python_in_the_page(tool: str, bucket: Bucket, tmp_path: Path) -> None:
    (shown,) = (block for block in blocks(page("object-stores"), "python") if tool in block)
    run = write(Job(stage=2, groups=((("layers.0.weight", (3000, 2)),),), tied={}), tmp_path / "7b")
    streamshard.convert(run, f"{bucket.url}/archive/7b.zarr")
    before = len(bucket.proxy.requests)
    block = shown.replace("s3://bucket/", f"{bucket.url}/")
    block = block.replace('"bucket": "bucket"', f'"bucket": "{bucket.name}"')
    # Once in a while, threads of a Rust library abort an interpreter that is ending.
    block += "\nimport os\nos._exit(0)\n"
    subprocess.run([sys.executable, "-c", block], check=True)
    read = [one.path for one in bucket.proxy.requests[before:] if one.method == "GET"]
    assert any("layers.0.weight/c/" in path for path in read)
