"""What a machine may have forgotten after its power was cut: all that was not synced.

The calls of a run say what was. Nothing here knows what streamshard does; it knows what POSIX
promises: fsync of a file makes its content durable, fsync of a directory the names in it, syncfs
both for the whole file system.
"""

import enum
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from tests.faults.shim import Call, Kind, Side


class Loss(enum.Enum):
    """What is lost of that which was not synced."""

    ZEROS = "content became zeros"
    """Sizes are kept, as where a size is written before the blocks."""
    CUT = "content was cut off"
    NAMES = "names went"
    """The names that were made or changed last are as before."""


def lose(loss: Loss, calls: Sequence[Call], target: Path, before: Iterable[Path]) -> list[str]:
    """Leave of a directory what would be there after the power was cut at the end of the calls.

    Parameters
    ----------
    before
        All that was there before the first call, and is durable.

    Returns
    -------
    list of str
        What was lost.
    """
    done = [c for c in calls if c.side & Side.TARGET and c.is_done and c.error == 0]
    if loss is Loss.NAMES:
        return _lose_names(done, {str(path) for path in before})
    return _lose_content(loss, done, target)


def _lose_content(loss: Loss, calls: Sequence[Call], target: Path) -> list[str]:
    unsynced = _unsynced(calls)
    lost = []
    for path in target.rglob("*"):
        ranges = unsynced.get(path.lstat().st_ino, []) if path.is_file() else []
        if not ranges:
            continue
        lost.append(str(path))
        size = path.stat().st_size
        with path.open("r+b") as stream:
            if loss is Loss.CUT:
                stream.truncate(min(size, *(start for start, _ in ranges)))
                continue
            for start, stop in ranges:
                stream.seek(start)
                stream.write(bytes(max(0, min(stop, size) - start)))
    return lost


def _unsynced(calls: Sequence[Call]) -> dict[int, list[tuple[int, int]]]:
    """Find what was written and not made durable: byte ranges by inode."""
    found: dict[int, list[tuple[int, int]]] = {}
    inodes: dict[str, int] = {}
    for call in calls:
        if call.kind & Kind.WRITE:
            found.setdefault(call.inode, []).append((call.offset, call.offset + call.result))
        elif call.name == "syncfs":
            found.clear()
        elif call.kind & Kind.SYNC:
            found.pop(call.inode, None)
        elif call.kind & Kind.DROP:
            inodes[call.other] = inodes.pop(call.path, 0)
        elif call.kind & Kind.MAKE and inodes.get(call.path) != call.inode:
            # A new file may have the number of one that is gone.
            found.pop(call.inode, None)
            inodes[call.path] = call.inode
    return found


def _lose_names(calls: Sequence[Call], known: set[str]) -> list[str]:
    lost = []
    for change in reversed(_unsynced_names(calls, known)):
        if not os.path.lexists(change.after):
            continue
        lost.append(change.after)
        if change.before:
            Path(change.after).rename(change.before)
        elif Path(change.after).is_dir():
            shutil.rmtree(change.after)
        else:
            Path(change.after).unlink()
    return lost


@dataclass(frozen=True, slots=True)
class _Change:
    """A change of names that was not made durable."""

    before: str
    """Path that it had, if any."""
    after: str
    directories: frozenset[str]
    """Those that are still to be synced: both, where something moved from one to another."""

    @classmethod
    def of(cls, before: str, after: str) -> Self:
        """Describe a change that was just made."""
        return cls(before, after, frozenset(str(Path(p).parent) for p in (before, after) if p))


def _unsynced_names(calls: Sequence[Call], known: set[str]) -> list[_Change]:
    """Find the changes of names that were not made durable."""
    found: list[_Change] = []
    for call in calls:
        if call.name == "syncfs":
            found.clear()
        elif call.kind & Kind.SYNC:
            found = _without(found, call.path)
        elif call.kind & Kind.DROP:
            # What is gone cannot be brought back, so let that be durable.
            if call.kind & Kind.EXCHANGE or call.other in known or not call.other:
                found = [change for change in found if change.after != call.path]
            else:
                found.append(_Change.of(call.path, call.other))
            known = (known - {call.path}) | ({call.other} if call.other else set())
        elif call.kind & Kind.MAKE and (call.other or call.path) not in known:
            found.append(_Change.of("", call.other or call.path))
            known = known | {call.other or call.path}
    return found


def _without(undone: Sequence[_Change], directory: str) -> list[_Change]:
    """Take out what is durable once a directory is; what was in one that moved is elsewhere now."""
    left: list[_Change] = []
    for change in undone:
        still = replace(change, directories=change.directories - {directory})
        if still.directories:
            left.append(still)
        elif change.before:
            left = [_moved(other, change) for other in left]
    return left


def _moved(change: _Change, by: _Change) -> _Change:
    """Return a change as it is once a directory around it has another name for good."""

    def moved(path: str) -> str:
        is_inside = path.startswith(f"{by.before}/")
        return by.after + path.removeprefix(by.before) if is_inside else path

    places = (by.after if place == by.before else moved(place) for place in change.directories)
    return _Change(moved(change.before), moved(change.after), frozenset(places))
