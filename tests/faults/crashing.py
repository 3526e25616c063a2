"""The states in which a power failure may have left a disk: made one by one, and judged."""

import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final, Protocol

from tests.faults.compact_scenarios import AnyScenario
from tests.faults.crash_model import History, Node, State
from tests.faults.scenarios import empty

_LOCK: Final = ".streamshard.lock"


class CrashDisk:
    """A directory that is put into one state after another.

    In the directory that stays, files keep their inodes and times, by which `compact` knows them.
    They are links to those that were there first: nothing may write into them, and `is_intact`
    tells whether anything has.

    Parameters
    ----------
    keep
        Place next to the directory, for the links; what is there stays.
    stays
        Name of a directory in it that keeps its own inode, too.
    """

    def __init__(self, root: Path, keep: Path, stays: str = "") -> None:
        self._root = root
        self._stays = stays
        self.inodes: dict[int, Node] = {}
        keep.mkdir(exist_ok=True)
        self._keep = Path(tempfile.mkdtemp(dir=keep))
        self.start = self._read(root, stays=False)

    def _read(self, path: Path, *, stays: bool) -> Node:
        status = path.lstat()
        known = self.inodes.get(status.st_ino)
        if known is not None:
            return known
        node = Node(path.is_dir(), status.st_mode, times=(status.st_atime_ns, status.st_mtime_ns))
        self.inodes[status.st_ino] = node
        if node.is_directory:
            for entry in path.iterdir():
                node.names[entry.name] = self._read(entry, stays=stays or entry.name == self._stays)
            return node
        node.content = path.read_bytes()
        if stays and not path.name.startswith(_LOCK):
            node.original = self._keep / str(status.st_ino)
            os.link(path, node.original)
        return node

    def make(self, state: State) -> None:
        """Make the directory what it may be after the machine has started again."""
        self._clear()
        made: dict[int, Path] = {}
        directories = []
        for name, (mode, content, node) in state.tree.items():
            path = self._root / name
            if node.is_directory:
                path.mkdir(exist_ok=True)
                directories.append((path, mode, node))
            elif id(node) in made:
                os.link(made[id(node)], path)
            elif node.original is not None and content == node.content and mode == node.mode:
                os.link(node.original, path)
            else:
                path.write_bytes(content)
                path.chmod(stat.S_IMODE(mode))
            made.setdefault(id(node), path)
        for path, mode, node in reversed(directories):
            path.chmod(stat.S_IMODE(mode))
            if node.times is not None:
                os.utime(path, ns=node.times)

    def _clear(self) -> None:
        for entry in self._root.iterdir():
            if entry.name == self._stays:
                empty(entry)
            elif entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()

    @property
    def is_intact(self) -> bool:
        """Whether nothing has written into a file that was there first."""
        files = (node for node in self.inodes.values() if node.original is not None)
        return all(node.original.read_bytes() == node.content for node in files if node.original)


@dataclass(frozen=True, slots=True)
class Crashing:
    """What was recorded on a bench, which is to try nothing else meanwhile."""

    disk: CrashDisk
    history: History
    judge: Callable[[State], list[str]]
    """Looks at what is on the disk, runs the same command, and says what is wrong."""

    def states(self, seed: int = 0) -> list[State]:
        """List all states within the bound."""
        return list(self.history.states(seed))

    def wrong(self, states: list[State]) -> Iterator[str]:
        """Try states, and describe each that is not right."""
        for state in states:
            self.disk.make(state)
            problems = self.judge(state)
            if not self.disk.is_intact:
                problems = [*problems, "a file was written into that should only be read"]
            if problems:
                yield "\n    ".join((state.text, *problems))


@dataclass(frozen=True, slots=True)
class Crashed:
    """One of the states, from which another run is to begin."""

    disk: CrashDisk
    state: State

    def make(self) -> None:
        """Make the disk what it is then."""
        self.disk.make(self.state)


@dataclass(frozen=True, slots=True)
class CrashReport:
    """What came of a scenario's states."""

    name: str
    calls: int
    """Calls that changed something."""
    possible: int
    """States within the bound."""
    tried: int
    twice: int
    """States that were tried after a second power failure, in the run after the first one."""
    wrong: tuple[str, ...]
    seconds: float

    def __str__(self) -> str:
        """Spell the counts, and what is wrong."""
        text = f"{self.name}: {self.calls} changes, {self.possible} states, {self.tried} tried"
        text = f"{text} and {self.twice} after a second failure, {len(self.wrong)} wrong"
        return "\nWRONG ".join((f"{text}; {self.seconds:.0f} s", *self.wrong))


class Crashes(Protocol):
    """What records a run."""

    def crash(self, scenario: AnyScenario, after: Crashed | None = None) -> Crashing:
        """Record a run; see `Ground.crash`."""


def chosen(states: list[State], most: int | None, seed: int) -> list[State]:
    """Choose all states, or those at the end and so many of the others by chance."""
    ends = [state for state in states if state.is_at_end]
    others = [state for state in states if not state.is_at_end]
    if most is None or len(others) <= most:
        return states
    return [*ends, *Random(seed).sample(others, most)]


def try_crashes(
    bench: Crashes,
    scenario: AnyScenario,
    most: int | None,
    *,
    again: int = 0,
    seed: int = 0,
) -> CrashReport:
    """Have the power fail in a run, and judge what is left and what running again makes of it.

    Parameters
    ----------
    most
        States to try; None for all within the bound.
    again
        States in which the next run is recorded too, and the power fails in that: in so many
        states for each.
    """
    began = time.monotonic()
    first = bench.crash(scenario)
    possible = first.states(seed)
    states = chosen(possible, most, seed)
    wrong = list(first.wrong(states))
    twice = 0
    for turn, state in enumerate(Random(seed).sample(possible, min(again, len(possible)))):
        second = bench.crash(scenario, Crashed(first.disk, state))
        some = chosen(second.states(seed + turn), again, seed + turn)
        wrong += [f"{state.text}; then {text}" for text in second.wrong(some)]
        twice += len(some)
    return CrashReport(
        name=scenario.name,
        calls=len(first.history.changes),
        possible=len(possible),
        tried=len(states),
        twice=twice,
        wrong=tuple(wrong),
        seconds=time.monotonic() - began,
    )
