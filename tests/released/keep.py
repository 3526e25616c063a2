"""Keeps what the last commit writes, as what its version has written: `nox -s keep`.

It is run when a version is released. The commit is added to `versions.txt`, so that `machine.py`
can run it, and its files to `kept/`, where `test_kept.py` finds them in a clone without history.
"""

import shutil
import subprocess
import tarfile
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from tests.compact.runs import save
from tests.fabricated import client_state
from tests.job import Job
from tests.released.versions import Version, add_released, export

KEPT: Final = Path(__file__).with_name("kept")
STATES: Final = {
    "global_step10": "weights only",
    "global_step20": "purged",
    "global_step30": "in the trash",
    "global_step40": "archived",
}
"""What became of each tag of the run; two more stay."""
_JOB: Final = Job(client_state=client_state())
_GOES: Final = ("--delete", "--grace", "0h")
_NIGHTS: Final = (
    (30, _GOES),
    (30, _GOES),
    (40, (*_GOES, "--weights-only-older-than", "0h")),
    (40, _GOES),
    (50, _GOES),
    (60, ()),
)
"""Last step before each run of `compact`, and its options."""
_KILLED_AT: Final = 12


def write(version: Version, root: Path) -> None:
    """Write a file of each kind with a version."""
    run, saved = root / "run", root / "saved"
    root.mkdir()
    for last, options in _NIGHTS:
        for step in range(10, last + 1, 10):
            if not (saved / f"global_step{step}").exists():
                tag = save(saved, step, _JOB)
                shutil.copytree(tag, run / tag.name)
        tags = shutil.ignore_patterns("global_step*")
        shutil.copytree(saved, run, dirs_exist_ok=True, ignore=tags)
        _done(version, "compact", run, root / "archive", "--keep-last", "2", *options)
    _done(version, "convert", run, root / "plain.zarr")
    _done(version, "convert", run, root / "packed.zarr.zip", "--codec", "zstd")
    _done(version, "convert", run, root / "begun.zarr", killed_at=_KILLED_AT)


def _done(version: Version, *arguments: object, killed_at: int = 0) -> None:
    ended = version.run(*arguments, killed_at=killed_at)
    assert ended.code == (-9 if killed_at else 0), (arguments, ended)


def main() -> None:
    """Keep what the last commit writes."""
    command = ("git", "rev-parse", "HEAD")
    commit = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    with TemporaryDirectory() as place:
        package, root = export(commit, Path(place) / "package"), Path(place) / "root"
        name = tomllib.loads((package / "pyproject.toml").read_text())["project"]["version"]
        with Version(name, package) as version:
            write(version, root)
        KEPT.mkdir(exist_ok=True)
        with tarfile.open(KEPT / f"{name}.tar.xz", "w:xz") as files:
            files.add(root, arcname=".")
    add_released(name, commit)


if __name__ == "__main__":
    main()
