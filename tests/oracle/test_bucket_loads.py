"""Engines load what lies in a bucket, on another world size and on the same one."""

import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import streamshard
from tests.cloud.conftest import Bucket, bucket, proxy, service, sound  # noqa: F401
from tests.cloud.proxy import Request
from tests.oracle import faulty_loads
from tests.oracle.cases import BF16
from tests.oracle.compare import differences
from tests.oracle.jobs import Resume, Train
from tests.oracle.ranks import require_success, run_jobs
from tests.oracle.truth import Truth

FROM, TO = 3, 2
SAVED = BF16[1:]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What stages 2 and 3 saved, with the truth of that."""
    root = tmp_path_factory.mktemp("saved")
    train = [Train(case, root / case.name, root / f"{case.name}.pt") for case in SAVED]
    require_success(run_jobs(FROM, train, root / "ranks"))
    return root


def test_a_load_from_a_bucket_is_a_load(bucket: Bucket, saved: Path, tmp_path: Path) -> None:  # noqa: F811
    jobs: list[Any] = []
    for case in SAVED:
        run = saved / case.name
        shards, store = bucket.put(run, case.name), f"{bucket.url}/{case.name}.zarr"
        streamshard.convert(run, store, codec="zstd")
        fits = f"{bucket.url}/{case.name}-fits"
        streamshard.repartition(shards, fits, world_size=TO)
        for way, source in (("shards", shards), ("store", store), ("fits", fits)):
            truth = tmp_path / f"{case.name}-{way}.pt"
            # Not a Path, which would not survive the way into the ranks: `//` becomes `/`.
            jobs.append(Resume(case, source, truth, reshards=True))  # type: ignore[arg-type]
    require_success(run_jobs(TO, jobs, tmp_path / "ranks"))
    for job in jobs:
        wanted = Truth.load(saved / f"{job.case.name}.pt")
        assert differences(wanted, Truth.load(job.truth_path)) == [], job.truth_path


def test_an_object_that_is_replaced_during_a_load_is_named(
    bucket: Bucket,  # noqa: F811
    saved: Path,
    tmp_path: Path,
) -> None:
    """While another rank reads its data, after rank 0 has read its header."""
    case = SAVED[0]
    shards = bucket.put(saved / case.name, "run")
    victim = max(key for key in bucket.keys("run/") if key.endswith("optim_states.pt"))
    content, asked = bucket.get_bytes(victim), count(1)

    def replace(request: Request) -> None:
        if request.method == "GET" and request.path.endswith(victim) and next(asked) == 2:
            bucket.put_bytes(victim, bytes(len(content)))

    bucket.proxy.plan = replace
    results = tmp_path / "results"
    job: Any = faulty_loads.FaultyLoad(case, shards, results)  # type: ignore[arg-type]
    require_success(run_jobs(TO, [job], tmp_path / "ranks", faulty_loads.run))
    for rank in range(TO):
        kind, message = json.loads((results / f"{rank}.json").read_text())["error"]
        assert kind == "CorruptFileError", message
        assert f"{victim}: replaced by another object while it was being read" in message
