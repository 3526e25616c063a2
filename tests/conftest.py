"""Settings that all tests share."""

import os
from typing import Final

import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from tests.priority import keep_priority

# A busy machine is no failure, so nothing has a deadline. In CI the same examples every time: what
# is found by chance is for a developer's machine.
settings.register_profile("here", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")
keep_priority()

ENGINES: Final = "tests/oracle/"
"""Where ranks are started."""


class ByFile(LoadScopeScheduling):  # type: ignore[misc]
    """Keeps the tests of a file in one process where several share them, and all with engines.

    Ranks of two world sizes at a time would wait for each other's turns on the cores, and what one
    file's tests train another's look at.
    """

    def _split_scope(self, nodeid: str) -> str:
        return ENGINES if nodeid.startswith(ENGINES) else nodeid.partition("::")[0]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByFile:
    """Share the tests among processes."""
    return ByFile(config, log)
