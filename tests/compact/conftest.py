"""A run directory, and where its archives go."""

from pathlib import Path

import pytest

from tests.compact.runs import make_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory of which the oldest tag may go."""
    return make_run(tmp_path / "run")


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """Where archives go."""
    return tmp_path / "archive"
