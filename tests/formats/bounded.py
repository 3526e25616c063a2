"""Reads a pickle in a process of its own, and tells how that ended and what it took.

Run with a path: `python -W error -m tests.formats.bounded FILE`.
"""

import json
import resource
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from streamshard.errors import StreamshardError
from streamshard.formats.pickle import inert_dump, inert_load

SECONDS = 60
"""Longer than any of this takes on a slow machine, and much shorter than for ever."""


@dataclass(frozen=True)
class Outcome:
    """How reading and writing again went."""

    loaded: str
    """`loaded`, or the name of the error."""
    dumped: str
    """Likewise; empty if nothing was loaded."""
    message: str
    peak_bytes: int
    """Memory above what the process had before."""


def read(data: bytes, directory: Path) -> Outcome:
    """Read a pickle elsewhere; fails the test if that dies or takes for ever."""
    path = directory / "hostile.pkl"
    path.write_bytes(data)
    command = [sys.executable, "-W", "error", "-m", "tests.formats.bounded", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr[-2000:]
    return Outcome(**json.loads(done.stdout))


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _read_here(path: Path) -> Outcome:
    data = path.read_bytes()
    before, loaded, dumped, message, node = _peak_bytes(), "loaded", "", "", None
    try:
        node = inert_load.load(data, lambda identifier: identifier)
    except StreamshardError as error:
        loaded, message = type(error).__name__, str(error)
    if loaded == "loaded":
        dumped = "dumped"
        try:
            inert_dump.dump(node, lambda part: None)
        except StreamshardError as error:
            dumped, message = type(error).__name__, str(error)
    del node  # what is nested deeply has to be let go of as well
    return Outcome(loaded, dumped, message, _peak_bytes() - before)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(vars(_read_here(Path(sys.argv[1])))))
