"""Small file systems, made for a test and gone after it."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

DISKS: Final = ("tmpfs", "ext4")
_MIB: Final = 1 << 20


@contextmanager
def disk(kind: str, directory: Path, mib: int) -> Iterator[Path]:
    """Mount an empty file system in a directory; where that cannot be, the test is skipped."""
    where = directory / "disk"
    where.mkdir()
    if kind == "tmpfs":
        options = ["-t", "tmpfs", "-o", f"size={mib}m", "tmpfs"]
    else:
        image = directory / "image"
        with image.open("wb") as stream:
            stream.truncate(mib * _MIB)
        options = ["-o", "loop", str(image)]
        _run_or_skip([shutil.which(f"mkfs.{kind}") or f"mkfs.{kind}", "-q", str(image)])
    _run_or_skip(["mount", *options, str(where)])
    try:
        for entry in where.iterdir():
            entry.rmdir()  # lost+found
        yield where
    finally:
        subprocess.run(["umount", str(where)], check=True)


def remount(where: Path, option: str) -> None:
    """Change a mount: `ro`, `rw`."""
    subprocess.run(["mount", "-o", f"remount,{option}", str(where)], check=True)


def _run_or_skip(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        pytest.skip(f"needs a program: {error}")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"needs the right to make a file system: {error.stderr.strip()}")
