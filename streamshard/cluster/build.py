"""What must be the same in all processes of a run, so that all of them make the same bytes."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Self

from streamshard.io.entries import files_below, read_all
from streamshard.io.writable import BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class Build:
    """The program of one process."""

    version: str
    code: str
    """Digest of the package's modules: a version number may stand for more than one state."""
    python: str
    page_bytes: int
    """The size of the pages that no two machines may write to."""

    @classmethod
    def here(cls) -> Self:
        """Describe this process."""
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        return cls(_version(), _digest(), python, BLOCK_BYTES)

    def differences(self, wanted: "Build") -> Iterator[str]:
        """Describe how this build differs from the one that leads a run."""
        if self.version != wanted.version:
            yield f"has streamshard {self.version}, and {wanted.version} leads the run"
        elif self.code != wanted.code:
            yield f"has another streamshard {self.version} than the process that leads the run"
        if self.python != wanted.python:
            yield f"has Python {self.python}, and Python {wanted.python} leads the run"
        if self.page_bytes != wanted.page_bytes:
            yield (
                f"has memory pages of {self.page_bytes} bytes, and a machine with pages of "
                f"{wanted.page_bytes} bytes leads the run"
            )


def _version() -> str:
    try:
        return version("streamshard")
    except PackageNotFoundError:  # run from its sources
        return "(not installed)"


@cache
def _digest() -> str:
    root = Path(__file__).parent.parent
    digest = blake2b(digest_size=8)
    for path in sorted(path for path in files_below(root) if path.suffix == ".py"):
        content = read_all(path)
        digest.update(b"%b %d\n" % (path.relative_to(root).as_posix().encode(), len(content)))
        digest.update(content)
    return digest.hexdigest()
