"""Settings that all tests share."""

import os

import pytest
from hypothesis import settings

# A busy machine is no failure, so nothing has a deadline. In CI the same examples every time: what
# is found by chance is for a developer's machine.
settings.register_profile("here", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")


@pytest.hookimpl(tryfirst=True)  # before xdist looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Say which tests stay together when several processes share them: those of a file.

    Those with engines all do. Ranks of two world sizes at a time would wait for each other's turns
    on the cores, and what one file's tests train another's look at.
    """
    for item in items:
        has_engines = item.get_closest_marker("engine") is not None
        group = "engines" if has_engines else item.nodeid.partition("::")[0]
        item.add_marker(pytest.mark.xdist_group(group))
