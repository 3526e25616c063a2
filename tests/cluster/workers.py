"""Workers that a user starts, also where a directory is another one."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

import streamshard

ROOT = Path(streamshard.__file__).parent.parent
PAUSE = 0.02
"""Seconds between two looks at whether a process has done something."""


def addresses(client: Client) -> set[str]:
    """Return the addresses of the workers.

    `scheduler_info` lists none if the client renews what it knows of the scheduler meanwhile: that
    leaves out the workers (`Client._update_scheduler_info` of distributed 2026.8).
    """
    untyped: Any = client
    return set(untyped.nthreads())


@contextmanager
def worker(
    client: Client,
    *options: str,
    root: Path = ROOT,
    before: Sequence[str] = (),
    where: str | None = None,
) -> Iterator[str]:
    """Start a worker as a user would; yields its address."""
    known = addresses(client)
    where = where or client.scheduler_info()["address"]
    program = [sys.executable, "-m", "dask", "worker", where, "--no-dashboard"]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    process = subprocess.Popen(
        [*before, *program, "--nthreads", "1", "--no-nanny", *options],
        env=environment,
        stderr=subprocess.DEVNULL,
        cwd="/",
    )
    try:
        while not (new := addresses(client) - known):
            assert process.poll() is None
            time.sleep(PAUSE)
        yield new.pop()
    finally:
        process.kill()
        process.wait()
        while addresses(client) - known:
            time.sleep(PAUSE)


def mounted_elsewhere(place: Path) -> list[str]:
    """Return what runs a program for which an empty file system lies over a directory.

    Skips the test where that is not allowed.
    """
    command = ["unshare", "--mount", "--propagation", "private"]
    tried = subprocess.run([*command, "true"], capture_output=True, text=True)
    if tried.returncode != 0:
        pytest.skip(f"needs to be root: {tried.stderr.strip()}")
    script = f'cp -a "{place}" "{place}.copy" && mount --bind "{place}.copy" "{place}" && exec "$@"'
    return [*command, "sh", "-c", script, "sh"]
