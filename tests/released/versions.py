"""The versions that were released, and this tree, as programs that tests can ask."""

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.asking import Asked
from tests.documents import ROOT
from tests.unpacking import unpack

_LIST: Final = Path(__file__).with_name("versions.txt")
"""A released version and its commit a line."""


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


class Version(Asked):
    """A version of streamshard; a context manager."""

    def __init__(self, name: str, place: Path) -> None:
        super().__init__("tests.released.serve", place)
        self.name = name

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
        return Ended(**self.ask({"arguments": [*map(str, arguments)], **asked}))
