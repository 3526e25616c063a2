"""Engines load what lies in a bucket, on another world size and on the same one."""

from pathlib import Path
from typing import Any

import streamshard
from tests.cloud.conftest import Bucket, bucket, proxy, server  # noqa: F401
from tests.oracle.cases import BF16
from tests.oracle.compare import differences
from tests.oracle.jobs import Resume, Train
from tests.oracle.ranks import require_success, run_jobs
from tests.oracle.truth import Truth

FROM, TO = 3, 2
SAVED = BF16[1:]


def test_a_load_from_a_bucket_is_a_load(bucket: Bucket, tmp_path: Path) -> None:  # noqa: F811
    train = [Train(case, tmp_path / case.name, tmp_path / f"{case.name}.pt") for case in SAVED]
    require_success(run_jobs(FROM, train, tmp_path / "ranks"))
    ways: dict[tuple[str, str], list[Any]] = {}
    for case in SAVED:
        run = tmp_path / case.name
        shards, store = bucket.put(run, case.name), f"{bucket.url}/{case.name}.zarr"
        streamshard.convert(run, store, codec="zstd")
        fits = f"{bucket.url}/{case.name}-fits"
        streamshard.repartition(shards, fits, world_size=TO)
        for way, source in (("disk", run), ("shards", shards), ("store", store), ("fits", fits)):
            truth = tmp_path / f"{case.name}-{way}.pt"
            # Not a Path, which would not survive the way into the ranks: `//` becomes `/`.
            job: Any = Resume(case, source, truth, reshards=True)  # type: ignore[arg-type]
            ways[case.name, way] = [job, truth]
    require_success(run_jobs(TO, [job for job, _ in ways.values()], tmp_path / "ranks"))
    for case in SAVED:
        wanted = Truth.load(ways[case.name, "disk"][1])
        for way in ("shards", "store", "fits"):
            assert differences(wanted, Truth.load(ways[case.name, way][1])) == [], (case.name, way)
