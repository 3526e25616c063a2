"""Views, and the readers of other packages, work on buckets as on disks."""

from pathlib import Path

import pytest

import streamshard as api
from tests.cloud.conftest import Bucket
from tests.fabricated import write
from tests.job import Job
from tests.plug_ins.test_plug_ins import VALUES, Install, _readers, install, saved
from tests.reading.test_zarr_view import CHUNK_BYTES, content

__all__ = ["_readers", "install", "saved"]


@pytest.mark.parametrize("form", ["run", "run.zarr", "run.zarr.zip"])
def test_a_view_has_the_bytes_that_it_has_on_a_disk(
    form: str, bucket: Bucket, tmp_path: Path
) -> None:
    local = write(Job(stage=3), tmp_path / "run")
    (local / "zero_to_fp32.py").chmod(0o644)  # an object has no permission bits
    url = bucket.put(local, "run")
    if form != "run":
        local, url = tmp_path / form, f"{bucket.url}/{form}"
        for target in (local, url):
            api.convert(tmp_path / "run", target, codec="zstd", chunk_size=CHUNK_BYTES)
    with api.open(local) as mine, api.open(url) as theirs:
        views = [each.zarr(chunk_size=CHUNK_BYTES) for each in (mine, theirs)]
    wanted, seen = map(content, views)
    assert len(wanted) > 9
    assert seen == wanted


def test_a_reader_of_another_package_reads_a_bucket(
    bucket: Bucket, tmp_path: Path, saved: Path, install: Install
) -> None:
    install()
    url = bucket.put(saved, "saved")
    with api.open(url) as checkpoint:
        assert checkpoint["w"].exp_avg.numpy().tobytes() == (VALUES + 100).tobytes()
        assert checkpoint["w"].fp32.numpy()[1:3].tobytes() == VALUES[1:3].tobytes()
    api.export(url, f"{bucket.url}/model")
    with api.open(f"{bucket.url}/model") as model:
        assert model["w"].tensors["module"].numpy().tobytes() == VALUES.tobytes()
    assert api.verify(url).problems == ()
