"""Unpacks archives that the tests keep, with every Python."""

import tarfile
from pathlib import Path


def unpack(archive: Path, directory: Path) -> None:
    """Write the files of a tar archive into a directory."""
    with tarfile.open(archive) as files:
        # Before 3.11.4 there is no such filter.
        files.extraction_filter = getattr(tarfile, "data_filter", None)
        files.extractall(directory)
