"""Schedulers and workers that a user starts, also where a directory is another one."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
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
def dask(
    *words: str,
    root: Path = ROOT,
    before: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program of Dask as a user would, until the block ends."""
    process = subprocess.Popen(
        [*before, sys.executable, "-m", "dask", *words, "--no-dashboard"],
        env={**os.environ, **(environment or {}), "PYTHONPATH": str(root)},
        stderr=subprocess.DEVNULL,
        cwd="/",
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def scheduler(
    file: Path, *options: str, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a scheduler that writes to a file where it is."""
    where = ["--host", "127.0.0.1", "--port", "0", "--scheduler-file", str(file)]
    with dask("scheduler", *where, *options, environment=environment) as process:
        while not (file.exists() and file.read_text().endswith("}")):
            assert process.poll() is None
            time.sleep(PAUSE)
        yield process


@contextmanager
def worker(
    client: Client,
    *options: str,
    root: Path = ROOT,
    before: Sequence[str] = (),
    where: str | None = None,
) -> Iterator[str]:
    """Start a worker; yields its address."""
    known = addresses(client)
    where = where or client.scheduler_info()["address"]
    small = ("--nthreads", "1", "--no-nanny", *options)
    with dask("worker", where, *small, root=root, before=before) as process:
        while not (new := addresses(client) - known):
            assert process.poll() is None
            time.sleep(PAUSE)
        yield new.pop()
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
