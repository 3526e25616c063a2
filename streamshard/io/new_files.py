"""Makes small local files by the thousand, with as few calls of the system as possible."""

import os
import threading
from collections.abc import Sequence
from pathlib import Path

from streamshard.io.retry import try_again
from streamshard.io.writable import create, write_all


class NewFiles:
    """Makes files below a directory that are not there yet, and the directories that they lie in.

    `stop`: if set, failed writes are not retried.
    """

    def __init__(self, root: Path, stop: threading.Event) -> None:
        self._root = str(root)
        self._stop = stop
        self._made: set[str] = set()
        """Directories that are there."""
        self._come_second: set[str] = set()
        """Names of directories that lacked the one above; the next of that name likely do too."""

    def write(self, path: str, parts: Sequence[bytes | memoryview]) -> None:
        """Make a file of parts that follow each other."""
        directory = path.rpartition("/")[0]
        if directory not in self._made:
            self._make_directory(f"{self._root}/{directory}")
            self._made.add(directory)
        full = f"{self._root}/{path}"
        descriptor = create(full, os.O_WRONLY)
        try:
            try_again(lambda: _write(descriptor, parts), self._stop)
        except OSError as error:
            raise OSError(error.errno, error.strerror, full) from error
        finally:
            os.close(descriptor)

    def _make_directory(self, path: str) -> None:
        """Make a directory, which others may be making too, and those above it."""
        parent, _, name = path.rpartition("/")
        if name in self._come_second:
            self._make_directory(parent)
        try:
            os.mkdir(path)  # noqa: PTH102
        except FileExistsError:
            pass
        except FileNotFoundError:
            self._come_second.add(name)
            self._make_directory(path)


def _write(descriptor: int, parts: Sequence[bytes | memoryview]) -> None:
    count = os.pwritev(descriptor, parts, 0)
    if count < sum(map(len, parts)):
        write_all(descriptor, memoryview(b"".join(parts))[count:], count)
