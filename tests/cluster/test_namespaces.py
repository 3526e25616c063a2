"""Workers in network namespaces of their own, with mounts of their own, as on other machines.

Each has one link, to the process that leads the run: workers cannot reach each other.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

import streamshard
from tests.cli.conftest import tree
from tests.cluster.conftest import on, started
from tests.cluster.workers import worker
from tests.fabricated import write
from tests.job import Job

pytestmark = pytest.mark.usefixtures("many_spans")


@dataclass(frozen=True, slots=True)
class Machine:
    """A network namespace, and the addresses of both ends of its link."""

    name: str
    near: str
    far: str


@contextmanager
def machine(number: int) -> Iterator[Machine]:
    """Make a network namespace with a link to this process's; skips the test where it may not."""
    made = Machine(f"ss-{os.getpid()}-{number}", f"10.213.{number}.1", f"10.213.{number}.2")
    name, link = made.name, f"ss{os.getpid()}n{number}"
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


def mounted_anew(place: Path) -> list[str]:
    """Return what runs a program that sees a directory through a mount of its own."""
    script = f'mount --bind "{place}" "{place}" && exec "$@"'
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh"]


def test_machines_that_share_only_a_directory_make_the_same_files(tmp_path: Path) -> None:
    run = write(Job(stage=2), tmp_path / "shared" / "run")
    streamshard.repartition(run, tmp_path / "near", world_size=3)
    streamshard.convert(run, tmp_path / "near.zarr", codec="zstd")
    with ExitStack() as stack:
        machines = [stack.enter_context(machine(number)) for number in (1, 2)]
        leader = stack.enter_context(started(0, host="0.0.0.0"))  # which listens on all links
        port = leader.scheduler_info()["address"].rpartition(":")[2]
        for there in machines:
            before = ["ip", "netns", "exec", there.name, *mounted_anew(run.parent)]
            where = f"tcp://{there.near}:{port}"
            address = stack.enter_context(worker(leader, before=before, where=where))
            assert f"//{there.far}:" in address
        on(leader, "repartition", run, run.parent / "far", world_size=3, verify=True)
        on(leader, "convert", run, run.parent / "far.zarr", codec="zstd", verify=True)
        assert streamshard.diff(run, run.parent / "far.zarr").is_equal
    assert tree(run.parent / "far") == tree(tmp_path / "near")
    assert tree(run.parent / "far.zarr") == tree(tmp_path / "near.zarr")
