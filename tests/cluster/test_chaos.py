"""Workers are killed, retired and stopped at random instants: not a byte is wrong."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, LocalCluster

import streamshard
from streamshard.cluster import dask_executor, membership
from streamshard.cluster.dask_executor import DaskExecutor
from streamshard.engine.jobs.executor import runs_on
from tests.cli.conftest import tree
from tests.cluster.chaos import Chaos, fragile
from tests.cluster.conftest import names
from tests.fabricated import write
from tests.job import Job

RUNS = 300 if "EVERY_REQUEST" in os.environ else 12
RATE = 100_000
"""Bytes a second of each worker, so that what happens to it happens within a job."""

pytestmark = pytest.mark.usefixtures("many_spans")

VERBS: dict[str, Callable[..., Any]] = {
    "repartition": lambda run, out, shown: streamshard.repartition(
        run, out, world_size=3, zero_stage=2, progress=shown
    ),
    "convert": lambda run, out, shown: streamshard.convert(
        run, out, codec="zstd", chunk_size=2048, progress=shown
    ),
    "export": lambda run, out, shown: streamshard.export(run, out, progress=shown),
}


@pytest.fixture
def weak() -> Iterator[tuple[Client, LocalCluster]]:
    """A cluster that may be broken, and is not used again."""
    with fragile() as found:
        yield found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A checkpoint, and what each verb makes of it without a cluster."""
    place = tmp_path_factory.mktemp("saved")
    run = write(Job(stage=3), place / "run")
    wanted = {}
    for name, verb in VERBS.items():
        verb(run, place / name, None)
        wanted[name] = tree(place / name)
    return run, wanted


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.campaign) for seed in range(1, RUNS))]
)
def test_workers_that_die_leave_and_hang_do_no_harm(
    seed: int,
    weak: tuple[Client, LocalCluster],
    saved: tuple[Path, dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client, cluster = weak
    monkeypatch.setattr(dask_executor, "_SLOW_SECONDS", 2.0)
    monkeypatch.setattr(membership, "_SILENT_SECONDS", 4.0)
    run, wanted = saved
    name = list(VERBS)[seed % len(VERBS)]
    chaos = Chaos(client, cluster, seed)
    try:
        with runs_on(DaskExecutor(client, worker_bytes_per_second=RATE)):
            VERBS[name](run, tmp_path / "out", chaos)
    finally:
        chaos.wake()
    assert chaos.happened
    assert tree(tmp_path / "out") == wanted[name]
    assert names(tmp_path) == ["out"]
