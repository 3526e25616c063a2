"""Reads a pickle in a process of its own, and tells how that ended and what it took."""

import json
from dataclasses import dataclass
from pathlib import Path

from tests.forked import run_forked

SCRIPT = """
import json, sys
from streamshard.errors import StreamshardError
from streamshard.formats.pickle import inert_dump, inert_load

loaded, dumped, message = "loaded", "", ""
with open(sys.argv[1], "rb") as file:
    data = file.read()
try:
    node = inert_load.load(data, lambda identifier: identifier)
except StreamshardError as error:
    loaded, message = type(error).__name__, str(error)
else:
    dumped = "dumped"
    try:
        inert_dump.dump(node, lambda part: None)
    except StreamshardError as error:
        dumped, message = type(error).__name__, str(error)
    del node  # what is nested deeply has to be let go of as well
print(json.dumps([loaded, dumped, message]))
"""


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
    done = run_forked(str(path), script=SCRIPT)
    assert (done.code, done.err) == (0, ""), done.err[-2000:]
    loaded, dumped, message = json.loads(done.out)
    return Outcome(loaded, dumped, message, done.own_bytes)
