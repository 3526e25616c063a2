"""Runs that are interrupted or whose leader dies; workers that may not take part."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

import streamshard
from streamshard.cluster import dask_executor
from streamshard.cluster.dask_executor import DaskExecutor
from streamshard.engine.jobs.executor import runs_on
from streamshard.engine.run.phases import Silent
from streamshard.errors import ClusterError, MemoryLimitError, SourceError, TargetError, UsageError
from tests.cli.conftest import tree
from tests.cluster.conftest import names, started
from tests.cluster.workers import PAUSE, ROOT, dask, mounted_elsewhere, scheduler, worker
from tests.fabricated import write
from tests.job import Job

pytestmark = pytest.mark.usefixtures("many_spans")
GOLDEN = ROOT / "tests" / "compact" / "golden" / "global_step80.zarr"


@pytest.fixture(scope="module")
def empty() -> Iterator[Client]:
    """A cluster without workers."""
    with started(0) as client:
        yield client


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write(Job(stage=2), tmp_path / "run")


def refused(
    kind: type[streamshard.StreamshardError],
    match: str | None,
    client: Client,
    run: Path,
    out: Path | None = None,
    **options: Any,  # noqa: ANN401
) -> str:
    """Require that a run is refused, and leaves nothing; returns the message with its notes."""
    out = out or run.parent / "out"
    with streamshard.executor(client), pytest.raises(kind, match=match) as caught:
        streamshard.repartition(run, out, world_size=3, **options)
    assert not out.exists()
    assert not list(out.parent.glob("out.partial/.streamshard.proof*"))
    return "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])


def test_a_worker_with_another_program_is_refused(empty: Client, run: Path, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "streamshard", tmp_path / "old" / "streamshard")
    with (tmp_path / "old" / "streamshard" / "model.py").open("a") as stream:
        stream.write("# other\n")
    with worker(empty, root=tmp_path / "old") as address:
        assert address in refused(UsageError, "has another streamshard", empty, run)


def test_a_worker_without_streamshard_is_refused(empty: Client, run: Path, tmp_path: Path) -> None:
    # It may be installed where the tests run; this file comes first.
    missing = "raise ModuleNotFoundError(\"No module named 'streamshard'\")\n"
    (tmp_path / "streamshard.py").write_text(missing)
    with worker(empty, root=tmp_path) as address:
        assert address in refused(UsageError, "streamshard", empty, run)


def test_a_worker_with_too_little_memory_is_refused(empty: Client, run: Path) -> None:
    with worker(empty, "--memory-limit", "400MiB") as address:
        options: dict[str, Any] = {"workers": 100, "memory_limit": 1 << 30}
        assert address in refused(MemoryLimitError, "Give the workers more", empty, run, **options)


def test_a_worker_that_mounts_a_copy_of_the_source_is_refused(empty: Client, run: Path) -> None:
    with worker(empty, before=mounted_elsewhere(run)) as address:
        assert address in refused(SourceError, "is another file here", empty, run)


@pytest.fixture
def results(tmp_path: Path) -> Path:
    place = tmp_path / "results"
    place.mkdir()
    return place


def test_a_worker_that_mounts_another_target_is_refused(
    empty: Client, run: Path, results: Path
) -> None:
    with worker(empty, before=mounted_elsewhere(results)) as address:
        assert address in refused(TargetError, "another dir", empty, run, results / "out")
    assert names(results) == []


def test_a_worker_whose_writes_are_not_seen_is_refused(
    empty: Client, run: Path, results: Path
) -> None:
    """An overlay shows the leader's files, and keeps what is written to itself."""
    probe = mounted_elsewhere(results)
    # What is below must not change once it is mounted, so the target exists already.
    layers = f"lowerdir={results},upperdir=/run/overlay-$$/u,workdir=/run/overlay-$$/w"
    script = (
        "mount -t tmpfs none /run && mkdir -p /run/overlay-$$/u /run/overlay-$$/w && "
        f'mount -t overlay overlay -o "{layers}" "{results}" && exec "$@"'
    )
    before = [*probe[: probe.index("sh")], "sh", "-c", script, "sh"]
    if subprocess.run([*before, "true"], capture_output=True).returncode != 0:
        pytest.skip("this system has no overlay file system")
    with worker(empty, before=before) as address:
        assert address in refused(TargetError, None, empty, run, results / "out")
    assert names(results) == []


def test_a_worker_that_comes_later_is_refused_too(empty: Client, run: Path) -> None:
    """It comes when the first file is there; the worker that may goes on until then."""
    before, came = mounted_elsewhere(run), list[str]()
    journal = run.parent / "out.partial" / ".streamshard.journal"

    class Shown(Silent):
        def advance(self, nbytes: int) -> None:
            if not came and len(journal.read_bytes().splitlines()) > 2:
                came.append(later.enter_context(worker(empty, before=before)))

    with worker(empty), ExitStack() as later:
        with (
            runs_on(DaskExecutor(empty, worker_bytes_per_second=3_000)),
            pytest.raises(SourceError, match="is another file here") as caught,
        ):
            streamshard.repartition(run, run.parent / "out", world_size=9, progress=Shown())
        assert came[0] in caught.value.__notes__[0]
        later.close()
        goes_on(run, empty)


def test_a_cluster_without_workers(
    empty: Client, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dask_executor, "_NO_WORKERS_SECONDS", 0.1)
    assert "has had no workers" in refused(ClusterError, "workers", empty, run)


COMMAND = """
import signal
import sys
from streamshard.transfer import file_layout
from streamshard.cluster import calls, dask_executor
from streamshard.cli.main import main
file_layout.SPAN_BYTES = 1024
plain = dask_executor.DaskExecutor.__init__
def slow(self, client, **options):
    plain(self, client, worker_bytes_per_second=2_500)
dask_executor.DaskExecutor.__init__ = slow
calls._SILENT_SECONDS = float(sys.argv.pop(1))
if __name__ == "__main__":
    # Whoever runs the tests in the background may have it ignored, which is inherited.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
"""


@contextmanager
def command(
    client: Client | str, run: Path, *, silent_seconds: int = 300
) -> Iterator[subprocess.Popen[str]]:
    """Run a slow repartition as a process of its own, until the first of many files are there."""
    address = client if isinstance(client, str) else client.scheduler_info()["address"]
    out = run.parent / "out"
    arguments = ["repartition", run, out, "--world-size", "9", "--dask", address]
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, str(silent_seconds), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        journal = run.parent / "out.partial" / ".streamshard.journal"
        while not (journal.exists() and len(journal.read_bytes().splitlines()) > 3):
            assert process.poll() is None
            time.sleep(PAUSE)
        yield process
    finally:
        process.kill()
        process.communicate()


def goes_on(run: Path, client: Client | None) -> None:
    """Require that the same command goes on."""
    out, near = run.parent / "out", run.parent / "near"
    with nullcontext() if client is None else streamshard.executor(client):
        done = streamshard.repartition(run, out, world_size=9)
    assert 0 < done.kept_bytes < done.bytes_written
    streamshard.repartition(run, near, world_size=9)
    assert tree(out) == tree(near)
    assert set(names(run.parent)) - {"run.copy"} == {"near", "out", "run"}


def test_a_run_whose_leader_was_killed_goes_on(cluster: Client, run: Path) -> None:
    with command(cluster, run) as process:
        process.kill()
        process.wait()
    goes_on(run, cluster)


@pytest.mark.parametrize(
    ("number", "reason"),
    [(signal.SIGKILL, ""), (signal.SIGSTOP, "the scheduler has not answered for 6 seconds")],
)
def test_a_run_without_its_scheduler_goes_on(
    run: Path, tmp_path_factory: pytest.TempPathFactory, number: signal.Signals, reason: str
) -> None:
    """The run's message is all that is said, and nothing of Dask's."""
    file = tmp_path_factory.mktemp("scheduler") / "scheduler.json"
    small = ("--scheduler-file", str(file), "--nthreads", "1", "--no-nanny")
    with (
        scheduler(file) as program,
        dask("worker", *small),
        command(str(file), run, silent_seconds=6) as process,
    ):
        program.send_signal(number)
        _, said = process.communicate(timeout=60)
    assert process.returncode == ClusterError.exit_code, said
    assert "Traceback" not in said
    assert "run the same command again to go on" in said
    assert reason in said
    goes_on(run, None)


def test_an_interrupt_ends_a_run_soon(cluster: Client, run: Path) -> None:
    with command(cluster, run) as process:
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "run the same command again to go on" in said
    client: Any = cluster
    while any(client.processing().values()):
        time.sleep(PAUSE)
    goes_on(run, cluster)


def test_ctrl_c_reaches_all_processes_of_a_terminal(run: Path) -> None:
    with command("local:2", run) as process:
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "streamshard: interrupted by SIGINT" in said.splitlines()
    assert "Traceback" not in said
    goes_on(run, None)


def test_the_command_line_starts_processes(run: Path) -> None:
    words = ["convert", run, run.parent / "a.zarr", "--dask", "local:2", "--verify", "--json", "-v"]
    done = subprocess.run(
        [sys.executable, "-m", "streamshard", *map(str, words)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["is_verified"]
    assert done.stderr.count("tcp://127.0.0.1") == 2
    streamshard.convert(run, run.parent / "near.zarr")
    assert tree(run.parent / "a.zarr") == tree(run.parent / "near.zarr")


@pytest.mark.parametrize(
    ("address", "kind", "match"),
    [
        ("local:none", UsageError, "local:N, with the number"),
        ("somewhere", UsageError, "not an address"),
        ("tcp://127.0.0.1:9", ClusterError, "nobody answers"),
        ("/nowhere/scheduler.json", UsageError, "no such file"),
        (f"{GOLDEN}/zarr.json", UsageError, "not a file that a Dask scheduler has written"),
    ],
)
def test_addresses_that_lead_nowhere(
    address: str, kind: type[Exception], match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamshard.cluster.connections._CONNECT_SECONDS", 0.5)
    with pytest.raises(kind, match=match), streamshard.executor(address):
        raise AssertionError("somebody answered")
