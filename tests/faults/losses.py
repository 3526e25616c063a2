"""What a machine may have forgotten after its power was cut: all that was not synced.

The calls of a run say what was. Nothing here knows what streamshard does; it knows what POSIX
promises: fsync of a file makes its content durable, fsync of a directory the names in it, syncfs
both for the whole file system.
"""

import enum
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

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
    for before, after in reversed(_unsynced_names(calls, known)):
        if not os.path.lexists(after):
            continue
        lost.append(after)
        if before:
            Path(after).rename(before)
        elif Path(after).is_dir():
            shutil.rmtree(after)
        else:
            Path(after).unlink()
    return lost


def _unsynced_names(calls: Sequence[Call], known: set[str]) -> list[tuple[str, str]]:
    """Find the changes of names that were not made durable: (path before, if any; path after)."""
    found: list[tuple[str, str]] = []
    for call in calls:
        if call.name == "syncfs":
            found.clear()
        elif call.kind & Kind.SYNC:
            found = _without(found, call.path)
        elif call.kind & Kind.DROP:
            # What is gone cannot be brought back, so let that be durable.
            if call.kind & Kind.EXCHANGE or call.other in known or not call.other:
                found = [pair for pair in found if pair[1] != call.path]
            else:
                found.append((call.path, call.other))
            known = (known - {call.path}) | ({call.other} if call.other else set())
        elif call.kind & Kind.MAKE and (call.other or call.path) not in known:
            found.append(("", call.other or call.path))
            known = known | {call.other or call.path}
    return found


def _without(undone: list[tuple[str, str]], directory: str) -> list[tuple[str, str]]:
    """Take out what is durable once a directory is; what was in one that moved is elsewhere now."""
    left: list[tuple[str, str]] = []
    for before, after in undone:
        if not _is_in((before, after), directory):
            left.append((before, after))
        elif before:
            left = [(_moved(a, before, after), _moved(b, before, after)) for a, b in left]
    return left


def _moved(path: str, before: str, after: str) -> str:
    return after + path.removeprefix(before) if path.startswith(f"{before}/") else path


def _is_in(pair: tuple[str, str], directory: str) -> bool:
    """Tell whether a change of names is one of a directory's own."""
    return all(str(Path(path).parent) == directory for path in pair if path)
