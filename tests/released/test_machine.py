"""What a released version and this tree write, both read, in any order; see `machine.py`.

With `EVERY_HISTORY` in the environment, so many histories are tried.
"""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.documents import ROOT
from tests.faults.campaign import quick_place
from tests.released.machine import JOBS, STEPS, Saved, Versions
from tests.released.versions import Version, export, released

COUNT = int(os.environ.get("EVERY_HISTORY", "4"))
"""Histories that are tried."""
MOST_RULES = 8
"""Of each."""


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    with quick_place() as found:
        yield found


@pytest.fixture(params=[*released()])
def versions(request: pytest.FixtureRequest, place: Path) -> Iterator[tuple[Version, Version]]:
    """A released version and this tree; skipped where its commit is not, but not in CI."""
    name = request.param
    try:
        old = export(released()[name], place / name)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        message = f"the commit of {name} is not here: in a clone, git fetch --unshallow"
        if os.environ.get("CI"):
            raise AssertionError(message) from error
        pytest.skip(message)
    with Version(name, old) as one, Version("this tree", ROOT) as other:
        yield one, other


def test_what_was_released_and_this_tree_read_each_other(
    versions: tuple[Version, Version], place: Path
) -> None:
    saves = {
        name: [Saved.make(place / name, job, step) for step in STEPS] for name, job in JOBS.items()
    }
    for version in versions:
        warm_up(version, place)
    chosen = settings(
        max_examples=COUNT,
        stateful_step_count=MOST_RULES,
        deadline=None,
        suppress_health_check=[*HealthCheck],
        derandomize=COUNT < 100,
        print_blob=True,
    )

    class Here(Versions):
        """Histories that begin with what was made here."""

        def __init__(self) -> None:
            super().__init__(versions, saves, place)

    run_state_machine_as_test(Here, settings=chosen)


def warm_up(version: Version, place: Path) -> None:
    """Import all that the commands need, once."""
    run, root = place / "stage 2" / "saved", place / f"warm {version}"
    root.mkdir()
    version.warm_up("compact", run, root / "archive", "--workers", "1", "-q")
    version.warm_up("convert", run, root / "x.zarr.zip", "--workers", "1", "-q")
    for store in (root / "archive").glob("*.zarr"):
        version.warm_up("verify", store, "--json", "--health")
        version.warm_up("repartition", store, root / store.name, "-n")
    version.warm_up("inspect", run, "--json")
    version.warm_up("newest", run, "--json")
