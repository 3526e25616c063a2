"""Small checkpoints of every kind that can be opened."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import streamshard
from tests.fabricated import write, write_dumps
from tests.job import Job

Made = Callable[[str], Path]
JOB = Job(
    world_size=3,
    groups=((("w", (50, 8)), ("cube", (4, 5, 6))), (("v", (7,)), ("one", (1,)))),
    frozen=(("f", (3,)),),
    tied={"t": "w"},
)
KINDS = ("native-1", "native-2", "native-3", "dumps-2", "chunks-none", "chunks-zstd")
"""In stores of chunks a tensor has several, the last of which reach past its end."""


def job_of(kind: str) -> Job:
    """Return the job of which a kind of checkpoint is, such as `native-3 on 1` of one rank."""
    name, _, ranks = kind.partition(" on ")
    stage = int(name[-1]) if name.startswith("native") else 2
    return replace(JOB, stage=stage, world_size=int(ranks or 3))


def make(kind: str, place: Path) -> Path:
    """Make a checkpoint of a kind; returns what names it."""
    run = write(job_of(kind), place / "run")
    what, detail = kind.split("-")
    if what == "native":
        return run
    if what == "dumps":
        return write_dumps(run, place / "dumps")
    chunk_size = 100 if what == "chunks" else 1 << 20
    streamshard.convert(run, place / "run.zarr", codec=detail, chunk_size=chunk_size)
    return place / "run.zarr"


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Make a checkpoint of a kind once; not to be changed."""
    found: dict[str, Path] = {}

    def of(kind: str) -> Path:
        if kind not in found:
            found[kind] = make(kind, tmp_path_factory.mktemp("made"))
        return found[kind]

    return of


def flip(path: Path) -> bytes:
    """Flip a bit of a file, whose time of change stays; returns what it held."""
    stat, data = path.stat(), path.read_bytes()
    middle = len(data) // 2
    path.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    return data
