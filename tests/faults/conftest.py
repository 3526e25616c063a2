"""The library, and benches that share it."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.campaign import Benches, benches, quick_place
from tests.faults.shim import compile_shim


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the library; where that cannot be, the tests are skipped, but not in CI."""
    if sys.platform != "linux":
        pytest.skip("libraries are preloaded, and processes watched, in Linux's way")
    try:
        return compile_shim(tmp_path_factory.mktemp("shim"))
    except FileNotFoundError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def place() -> Iterator[Path]:
    """A directory that any user may look into, and that is quick to sync."""
    with quick_place() as found:
        yield found


@pytest.fixture(scope="session")
def tried(shim: Path, place: Path) -> Iterator[Benches]:
    """Benches to try cases on."""
    with benches(shim, place / "benches") as found:
        yield found
