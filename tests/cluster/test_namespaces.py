"""Workers in network namespaces of their own, with mounts of their own, as on other machines.

Each has one link, to the process that leads the run: workers cannot reach each other.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, LocalCluster

import streamshard
from streamshard.errors import SourceError
from tests.cli.conftest import tree
from tests.cluster.conftest import on
from tests.cluster.workers import mounted_elsewhere, worker
from tests.fabricated import write
from tests.job import Job

pytestmark = pytest.mark.usefixtures("many_spans")


@dataclass(frozen=True, slots=True)
class Machine:
    """A network namespace."""

    name: str
    near: str
    """Address of this process on the link between both."""
    far: str

    def enter(self) -> Sequence[str]:
        """Return what runs a program there."""
        return ["ip", "netns", "exec", self.name]


@contextmanager
def machine(number: int) -> Iterator[Machine]:
    """Make a network namespace with a link to this process's; skips the test where it may not."""
    name = f"streamshard-{os.getpid()}-{number}"
    link = f"ss{os.getpid()}n{number}"
    made = Machine(name, f"10.213.{number}.1", f"10.213.{number}.2")
    inside = ["ip", "-n", name]
    commands = (
        ["ip", "netns", "add", name],
        ["ip", "link", "add", link, "type", "veth", "peer", "name", "up0", "netns", name],
        ["ip", "address", "add", f"{made.near}/24", "dev", link],
        ["ip", "link", "set", link, "up"],
        [*inside, "address", "add", f"{made.far}/24", "dev", "up0"],
        [*inside, "link", "set", "up0", "up"],
        [*inside, "link", "set", "lo", "up"],
    )
    if shutil.which("ip") is None:
        pytest.skip("needs ip, of iproute2")
    try:
        for command in commands:
            tried = subprocess.run(command, capture_output=True, text=True)
            if tried.returncode != 0:
                pytest.skip(f"may not make network namespaces: {tried.stderr.strip()}")
        yield made
    finally:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True)


@pytest.fixture(scope="module")
def machines() -> Iterator[list[Machine]]:
    with ExitStack() as stack:
        yield [stack.enter_context(machine(number)) for number in (1, 2)]


@pytest.fixture(scope="module")
def scheduler() -> Iterator[Client]:
    """A cluster without workers that listens on all links."""
    start: Any = LocalCluster
    connect: Any = Client
    options = {"dashboard_address": "127.0.0.1:0", "silence_logs": "CRITICAL"}
    with (
        start(n_workers=0, host="0.0.0.0", **options) as cluster,
        connect(cluster, set_as_default=False) as client,
    ):
        yield client


def mounted_anew(place: Path) -> list[str]:
    """Return what runs a program that sees a directory through a mount of its own."""
    script = f'mount --bind "{place}" "{place}" && exec "$@"'
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh"]


def port_of(client: Client) -> str:
    """Return the port of the scheduler."""
    return str(client.scheduler_info()["address"]).rpartition(":")[2]


@contextmanager
def worker_on(there: Machine, client: Client, before: Sequence[str]) -> Iterator[str]:
    """Start a worker on a machine; yields its address."""
    where = f"tcp://{there.near}:{port_of(client)}"
    with worker(client, before=[*there.enter(), *before], where=where) as address:
        assert f"//{there.far}:" in address
        yield address


def test_machines_that_share_only_a_directory_make_the_same_files(
    machines: list[Machine], scheduler: Client, tmp_path: Path
) -> None:
    run = write(Job(stage=2), tmp_path / "shared" / "run")
    streamshard.repartition(run, tmp_path / "near", world_size=3)
    streamshard.convert(run, tmp_path / "near.zarr", codec="zstd")
    with ExitStack() as stack:
        for there in machines:
            stack.enter_context(worker_on(there, scheduler, mounted_anew(run.parent)))
        on(scheduler, "repartition", run, run.parent / "far", world_size=3, verify=True)
        on(scheduler, "convert", run, run.parent / "far.zarr", codec="zstd", verify=True)
        assert on(scheduler, "diff", run, run.parent / "far.zarr").is_equal
    assert tree(run.parent / "far") == tree(tmp_path / "near")
    assert tree(run.parent / "far.zarr") == tree(tmp_path / "near.zarr")


def test_the_machine_with_the_wrong_mount_is_named(
    machines: list[Machine], scheduler: Client, tmp_path: Path
) -> None:
    run = write(Job(stage=2), tmp_path / "shared" / "run")
    right, wrong = machines
    with (
        worker_on(right, scheduler, mounted_anew(run.parent)),
        worker_on(wrong, scheduler, mounted_elsewhere(run)) as address,
        streamshard.executor(scheduler),
        pytest.raises(SourceError, match="is another file here") as caught,
    ):
        streamshard.repartition(run, run.parent / "out", world_size=3)
    assert address in "\n".join([str(caught.value), *caught.value.__notes__])
    assert sorted(path.name for path in run.parent.iterdir()) == ["run", "run.copy"]
