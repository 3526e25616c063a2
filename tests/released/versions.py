"""The versions that were released, and this tree, as programs that tests can ask."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from tests.documents import ROOT
from tests.unpacking import unpack

_LIST: Final = Path(__file__).with_name("versions.txt")
"""A released version and its commit a line."""
_SERVE: Final = Path(__file__).with_name("serve.py")


def released() -> dict[str, str]:
    """Return the commit of each released version."""
    return dict(line.split() for line in _LIST.read_text().splitlines())


def add_released(version: str, commit: str) -> None:
    """List a version, in place of an earlier commit of it."""
    lines = {**released(), version: commit}.items()
    _LIST.write_text("".join(f"{version} {commit}\n" for version, commit in lines))


def export(commit: str, place: Path) -> Path:
    """Write the package as it is in a commit; returns the directory that it is in.

    Raises `subprocess.CalledProcessError` or `FileNotFoundError` if there is no such commit.
    """
    command = ("git", "-C", str(ROOT), "archive", commit, "streamshard", "pyproject.toml")
    packed = subprocess.run(command, check=True, capture_output=True).stdout
    archive = place.with_name(f"{place.name}.tar")
    archive.write_bytes(packed)
    unpack(archive, place)
    archive.unlink()
    return place


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended."""

    code: int
    """Exit code, or the negative number of the signal that ended it."""
    out: str
    err: str


class Version:
    """A version of streamshard; a context manager."""

    def __init__(self, name: str, place: Path) -> None:
        self.name = name
        environment = {
            **os.environ,
            "PYTHONPATH": str(place),
            # Threads of others would be forked with their locks held.
            "OPENBLAS_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, _SERVE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.communicate()

    def __repr__(self) -> str:
        return self.name

    def warm_up(self, *arguments: object) -> None:
        """Run a command that has to succeed, so that others need not import what it needs."""
        assert self._ask(arguments, warms_up=True).code == 0, (self, arguments)

    def run(self, *arguments: object, killed_at: int = 0) -> Ended:
        """Run a command; it may be killed as it opens a file to write for the n-th time."""
        return self._ask(arguments, killed_at=killed_at)

    def _ask(self, arguments: tuple[object, ...], **more: int) -> Ended:
        asked = {"warms_up": False, "killed_at": 0, **more}
        question = json.dumps({"arguments": [*map(str, arguments)], **asked})
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(question + "\n")
        self._process.stdin.flush()
        return Ended(**json.loads(self._process.stdout.readline()))
