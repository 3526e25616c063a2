"""Run directories, and where their archives go."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import streamshard as api
from streamshard.operations.compact.run_directory import change_digest
from tests.cloud.conftest import Bucket, bucket, proxy, service, sound
from tests.compact.runs import ARCHIVE, FIRST, HEALTH, NO_GRACE, RUN, SMALL, copy_place, make_run
from tests.compact.sides import Sides
from tests.job import Job

__all__ = ["bucket", "proxy", "service", "sound"]
AfterNights = Callable[..., None]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory of which the oldest tag may go."""
    return make_run(tmp_path / RUN)


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """Where archives go."""
    return tmp_path / ARCHIVE


@pytest.fixture(scope="session")
def after_nights(tmp_path_factory: pytest.TempPathFactory) -> AfterNights:
    """Make of a place what it is after some nights; these are gone through once."""
    made: dict[str, Path] = {}

    def put(place: Path, name: str, nights: Sequence[Mapping[str, Any]], job: Job = SMALL) -> None:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            make_run(made[name] / RUN, job)
            for options in nights:
                api.compact(made[name] / RUN, made[name] / ARCHIVE, **options)
        copy_place(made[name], place)
        remember(place)

    return put


def remember(place: Path) -> None:
    """Let what runs found out of the newest tags be known of their copies too."""
    path = place / ARCHIVE / HEALTH
    document = json.loads(path.read_text())
    for tag in document["tags"]:
        tag["looks"] = change_digest(place / RUN / tag["tag"])[2]
    path.write_text(json.dumps(document))


@pytest.fixture
def archived(run: Path, after_nights: AfterNights) -> None:
    """The tag that may go has an archive."""
    after_nights(run.parent, "archived", [{}])


@pytest.fixture
def trashed(run: Path, after_nights: AfterNights) -> None:
    """It has an archive, and is in the trash."""
    after_nights(run.parent, "trashed", [{"delete": True}])


@pytest.fixture
def archived_packed(run: Path, after_nights: AfterNights) -> None:
    """It has an archive in one file."""
    after_nights(run.parent, "archived packed", [{"packed": True}])


@pytest.fixture
def trashed_packed(run: Path, after_nights: AfterNights) -> None:
    """It has an archive in one file, and is in the trash."""
    after_nights(run.parent, "trashed packed", [{"packed": True, "delete": True}])


@pytest.fixture
def purged(run: Path, after_nights: AfterNights) -> None:
    """It has an archive, and nothing else is left of it."""
    by_hand = {"grace": NO_GRACE, "purge": [FIRST]}
    after_nights(run.parent, "purged", [{"delete": True}, by_hand])


@pytest.fixture
def sides(bucket: Bucket, tmp_path: Path) -> Sides:
    """A run directory of which the oldest tag may go, and a bucket for its archives."""
    return Sides.make(bucket, tmp_path)
