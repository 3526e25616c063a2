"""A cluster reads from a bucket and writes to it; `compact` archives and proves."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

import streamshard
from streamshard.errors import UsageError
from tests.cli.conftest import tree
from tests.cloud.conftest import Bucket, bucket, proxy, service, sound
from tests.cluster.conftest import on, started
from tests.compact.runs import FIRST, actions, bits, make_run, receipt_of
from tests.fabricated import write
from tests.job import Job

__all__ = ["bucket", "proxy", "service", "sound"]


@pytest.fixture
def near(bucket: Bucket) -> Iterator[Client]:
    """Workers that have the credentials of the bucket's server."""
    with started(2, method="spawn") as client:  # of this environment
        yield client


def test_every_verb_in_a_bucket(near: Client, bucket: Bucket, tmp_path: Path) -> None:
    run = write(Job(stage=3), tmp_path / "run")
    (run / "zero_to_fp32.py").chmod(0o644)  # an object has no permission bits
    source, store = bucket.put(run, "runs/7b"), f"{bucket.url}/7b.zarr"
    streamshard.convert(run, tmp_path / "7b.zarr", codec="zstd")
    done = on(near, "convert", source, store, codec="zstd", verify=True)
    assert (done.is_verified, done.kept_bytes) == (True, 0)
    assert bucket.content("7b.zarr") == tree(tmp_path / "7b.zarr")
    assert streamshard.verify(store).is_good
    assert streamshard.diff(store, source).is_equal
    on(near, "repartition", store, f"{bucket.url}/out", world_size=3)
    streamshard.repartition(run, tmp_path / "out", world_size=3)
    assert bucket.content() == tree(tmp_path / "out")


def test_compact_archives_proves_and_deletes_on_a_cluster(cluster: Client, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    shutil.copytree(run, tmp_path / "same", copy_function=shutil.copy2)
    far = on(cluster, "compact", run, tmp_path / "far", delete=True)
    near = streamshard.compact(tmp_path / "same", tmp_path / "near", delete=True)
    assert actions(far) == actions(near)
    assert actions(far)[FIRST] == "trashed"
    store = tmp_path / "near" / f"{FIRST}.zarr"
    assert bits(tmp_path / "far" / store.name) == bits(store)
    one, other = receipt_of(tmp_path / "far", FIRST), receipt_of(tmp_path / "near", FIRST)
    told = [[(check["name"], check["holds"]) for check in side["checks"]] for side in (one, other)]
    assert told[0] == told[1]


@pytest.mark.parametrize("option", [{"packed": True}, {"bytes_per_second": 1_000}])
def test_what_a_cluster_does_not_do_is_refused(
    option: dict[str, Any], cluster: Client, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run")
    with pytest.raises(UsageError, match=f"{next(iter(option))}=.*leave it out"):
        on(cluster, "compact", run, tmp_path / "archive", **option)
    assert not (tmp_path / "archive").exists()
