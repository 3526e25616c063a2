"""Small runs of every kind that writes, the checkpoints that they read, and what they make."""

import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import streamshard
from tests.fabricated import write
from tests.faults.shim import NO_OPTION, Option, Side
from tests.job import Job

_GROUPS: Final = ((("weight", (7, 3)), ("scale", (2,))),)

Tree = dict[str, tuple[int, bytes]]
"""Relative path → (mode, with the kind of file; content, or where a link leads)."""
Times = dict[str, tuple[int, int]]
"""Relative path → (inode, time of the last change)."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """A command line."""

    name: str
    verb: str
    source: str
    """Name of the directory to read."""
    options: tuple[str, ...]
    replaces: bool = False
    """Whether there is a target before."""
    is_empty: bool = False
    """Whether the target is an empty directory before."""
    system: Option = NO_OPTION
    own: Side = Side.SOURCE | Side.TARGET
    """What of its calls no other scenario has: all, or those on the target."""

    def arguments(self, source: Path, target: Path) -> list[str]:
        """Spell the command line for a directory with sources, and a place for the target."""
        # One worker, so that the order of the calls is almost always the same.
        fixed = ("--workers", "1", *(("--overwrite",) if self.replaces else ()))
        return [self.verb, str(source / self.source), str(target / OUT), *self.options, *fixed]


SOURCES: Final = ("stage_2", "stage_3", "store")
OUT: Final = "out"

_TO_3: Final = ("--world-size", "3")
SCENARIOS: Final[Sequence[Scenario]] = (
    Scenario("repartition, stage 2", "repartition", "stage_2", _TO_3),
    Scenario("repartition, stage 3", "repartition", "stage_3", _TO_3),
    Scenario("convert", "convert", "stage_2", ("--codec", "none"), own=Side.TARGET),
    Scenario("convert, compressed", "convert", "stage_3", ("--codec", "zstd"), own=Side.TARGET),
    Scenario("export", "export", "stage_2", (), own=Side.TARGET),
    Scenario("repartition, from a store", "repartition", "store", _TO_3),
    Scenario(
        "repartition, overwriting",
        "repartition",
        "stage_2",
        _TO_3,
        replaces=True,
        own=Side.TARGET,
    ),
    Scenario(
        "repartition, to an empty directory",
        "repartition",
        "stage_2",
        _TO_3,
        is_empty=True,
        own=Side.TARGET,
    ),
    Scenario(
        "repartition, to a network file system",
        "repartition",
        "stage_2",
        _TO_3,
        system=Option.FOREIGN,
        own=Side.TARGET,
    ),
)


def make_sources(root: Path) -> Path:
    """Make all that the scenarios read; returns the directory."""
    for stage, name in zip((2, 3), SOURCES, strict=False):
        write(Job(stage=stage, groups=_GROUPS, frozen=(), tied={}), root / name)
    streamshard.convert(root / SOURCES[0], root / SOURCES[2])
    return root


def make_old_target(sources: Path, out: Path) -> None:
    """Make the target that is to be replaced."""
    streamshard.repartition(sources / "stage_3", out, world_size=1)


def tree(root: Path) -> Tree:
    """Look at all that is below a directory."""
    found = {}
    for name, path, status in _entries(root):
        if stat.S_ISLNK(status.st_mode):
            content = os.fsencode(path.readlink())
        else:
            content = path.read_bytes() if stat.S_ISREG(status.st_mode) else b""
        found[name] = status.st_mode, content
    return found


def times(root: Path) -> Times:
    """Say of all that is below a directory which file it is, and when it was changed."""
    return {name: (status.st_ino, status.st_mtime_ns) for name, _, status in _entries(root)}


def _entries(root: Path) -> Iterator[tuple[str, Path, os.stat_result]]:
    for directory, directories, files in os.walk(root):
        for name in (*directories, *files):
            path = os.path.join(directory, name)  # noqa: PTH118 - several times as fast
            yield path.removeprefix(f"{root}/"), Path(path), os.lstat(path)


def empty(directory: Path) -> None:
    """Remove all that is in a directory."""
    for entry in directory.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
