"""A cluster that takes only whoever has its key, set up as the documentation says."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

import streamshard
from tests.cli.conftest import tree
from tests.cluster.workers import dask, scheduler
from tests.documents import ROOT
from tests.fabricated import write
from tests.forked import run_forked
from tests.job import Job

SETTING = "DASK_DISTRIBUTED__COMM__TLS"
CLIENT_KEY = f"{SETTING}__CLIENT__KEY"


@dataclass(frozen=True)
class Cluster:
    """A scheduler and two workers that are encrypted."""

    scheduler_file: Path
    environment: Mapping[str, str]
    """Of whoever has the key."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    home = tmp_path_factory.mktemp("home")
    if shutil.which("openssl") is None:
        pytest.skip("needs the program openssl")
    recipe = ROOT / "docs" / "recipes" / "dask-tls.sh"
    script = f"set -e\nbash {recipe}\n. ~/dask-tls/environment\nenv -0"
    plain = {"HOME": str(home), "PATH": os.environ["PATH"]}
    done = subprocess.run(["bash", "-c", script], env=plain, capture_output=True, check=True)
    settings = dict(line.split("=", 1) for line in done.stdout.decode().split("\0")[:-1])
    keys = {name: value for name, value in settings.items() if name.startswith("DASK_")}
    assert all((home / "dask-tls" / name).stat().st_mode & 0o77 == 0 for name in ("key.pem", "."))
    file, tls = home / "scheduler.json", ("--protocol", "tls")
    least = (*tls, "--scheduler-file", str(file), "--nthreads", "1", "--no-nanny")
    with (
        scheduler(file, *tls, environment=keys),
        dask("worker", *least, environment=keys),
        dask("worker", *least, environment=keys),
    ):
        yield Cluster(file, keys)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write(Job(), tmp_path / "run")


def test_whoever_has_the_key_uses_it(
    cluster: Cluster, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    address = str(cluster.scheduler_file)
    words = ["repartition", str(run), str(run.parent / "far"), "--world-size", "3", "-v"]
    done = run_forked(*words, "--dask", address)
    assert done.code == 0, done.err
    assert done.err.count("tls://127.0.0.1:") > 0
    streamshard.repartition(run, run.parent / "near", world_size=3)
    assert tree(run.parent / "far") == tree(run.parent / "near")


@pytest.mark.parametrize(
    ("changes", "code", "told"),
    [
        ({SETTING: None}, 2, f"Set {SETTING}__CA_FILE, {SETTING}__CLIENT__CERT and {CLIENT_KEY}"),
        ({CLIENT_KEY: "/nowhere/key.pem"}, 2, "certificate or key cannot be read"),
        ({"tls://": "tcp://"}, 2, "does not begin with tls://"),
        ({"tls://": "tcp://", "DASK_": None}, 7, "nobody answers"),
    ],
    ids=["no key", "a key that is not there", "not encrypted", "not encrypted and no key"],
)
def test_nobody_else_does(
    changes: dict[str, str | None],
    code: int,
    told: str,
    cluster: Cluster,
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in cluster.environment.items():
        if not any(name.startswith(head) for head, other in changes.items() if other is None):
            monkeypatch.setenv(name, changes.get(name) or value)
    file = run.parent / "scheduler.json"
    written = cluster.scheduler_file.read_text()
    file.write_text(written.replace("tls://", changes.get("tls://") or "tls://"))
    done = run_forked("convert", str(run), str(run.parent / "a.zarr"), "--dask", str(file))
    assert (done.code, told in done.err) == (code, True), done.err
    assert "Traceback" not in done.err
