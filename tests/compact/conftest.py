"""Run directories, and where their archives go."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3  # type: ignore[import-untyped, unused-ignore]
import pytest

from tests.cloud.server import S3Server, credentials
from tests.compact.runs import make_run
from tests.compact.sides import Sides, make_sides


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory of which the oldest tag may go."""
    return make_run(tmp_path / "run")


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """Where archives go."""
    return tmp_path / "archive"


@pytest.fixture(scope="session")
def server() -> Iterator[S3Server]:
    """A server of buckets."""
    with S3Server() as started:
        yield started


@pytest.fixture
def s3(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Any:  # noqa: ANN401
    """Another client than streamshard's."""
    for name, value in credentials(server.url).items():
        monkeypatch.setenv(name, value)
    return boto3.client("s3")


@pytest.fixture
def sides(s3: Any, server: S3Server, tmp_path: Path) -> Sides:  # noqa: ANN401
    """A run directory of which the oldest tag may go, and a bucket for its archives."""
    return make_sides(s3, server, tmp_path)
