"""Small runs of every kind that writes, the checkpoints that they read, and what they make."""

import os
import shutil
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import streamshard
from tests.fabricated import write
from tests.faults.shim import NO_OPTION, Option, Side
from tests.job import Job

_GROUPS: Final = ((("weight", (7, 3)), ("scale", (2,))), (("bias", (3,)),))

Tree = dict[str, tuple[int, bytes]]
"""Relative path → (mode, with the kind of file; content, or where a link leads)."""


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
    system: Option = NO_OPTION
    own: Side = Side.SOURCE | Side.TARGET
    """What of its calls no other scenario has: all, or those on the target."""

    def arguments(self, source: Path, target: Path) -> list[str]:
        """Spell the command line for a directory with sources, and a place for the target."""
        # One worker, so that the order of the calls is almost always the same.
        fixed = ("--workers", "1", *(("--overwrite",) if self.replaces else ()))
        return [self.verb, str(source / self.source), str(target / OUT), *self.options, *fixed]


OUT: Final = "out"

_TO_3: Final = ("--world-size", "3")
SCENARIOS: Final[Sequence[Scenario]] = (
    Scenario("repartition, stage 2", "repartition", "stage_2", _TO_3),
    Scenario("repartition, stage 3", "repartition", "stage_3", _TO_3),
    Scenario("convert", "convert", "stage_2", ("--codec", "none")),
    Scenario("convert, compressed", "convert", "stage_3", ("--codec", "zstd"), own=Side.TARGET),
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
    for stage in (2, 3):
        write(Job(stage=stage, groups=_GROUPS, frozen=(), tied={}), root / f"stage_{stage}")
    streamshard.convert(root / "stage_2", root / "store")
    return root


def make_old_target(sources: Path, out: Path) -> None:
    """Make the target that is to be replaced."""
    streamshard.repartition(sources / "stage_3", out, world_size=1)


def tree(root: Path) -> Tree:
    """Look at all that is below a directory."""
    found = {}
    for directory, directories, files in os.walk(root):
        for name in (*directories, *files):
            path = Path(directory, name)
            mode = path.lstat().st_mode
            if stat.S_ISLNK(mode):
                content = os.fsencode(path.readlink())
            else:
                content = path.read_bytes() if stat.S_ISREG(mode) else b""
            found[str(path.relative_to(root))] = mode, content
    return found


def times(root: Path) -> dict[str, tuple[int, int]]:
    """Say of all that is below a directory which file it is, and when it was changed."""
    paths = [root, *root.rglob("*")]
    return {str(path): (path.lstat().st_ino, path.lstat().st_mtime_ns) for path in paths}


def empty(directory: Path) -> None:
    """Remove all that is in a directory."""
    for entry in directory.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
