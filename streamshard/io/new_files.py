"""Makes small local files by the thousand.

To make a `Path` of each takes a third more processor time in all.
"""

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

    def write(self, path: str, parts: Sequence[bytes | memoryview]) -> None:
        """Make a file of parts that follow each other."""
        full = f"{self._root}/{path}"
        os.makedirs(full.rpartition("/")[0], exist_ok=True)  # noqa: PTH103
        descriptor = create(full, os.O_WRONLY)
        try:
            try_again(lambda: _write(descriptor, parts), self._stop)
        except OSError as error:
            raise OSError(error.errno, error.strerror, full) from error
        finally:
            os.close(descriptor)


def _write(descriptor: int, parts: Sequence[bytes | memoryview]) -> None:
    count = os.pwritev(descriptor, parts, 0)
    if count < sum(map(len, parts)):
        write_all(descriptor, memoryview(b"".join(parts))[count:], count)
