"""Settings that all tests share."""

import os
from typing import Final

import pytest
from hypothesis import settings

SHARED: Final = frozenset({"light", "topologies"})
"""Fixtures that train for minutes: whoever asks for one of them runs in the same process."""

# A busy machine is no failure, so nothing has a deadline. In CI the same examples every time: what
# is found by chance is for a developer's machine.
settings.register_profile("here", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Say which tests stay together when several processes share them: those of a file."""
    for item in items:
        shares = SHARED & set(getattr(item, "fixturenames", ()))
        group = "engines" if shares else item.nodeid.partition("::")[0]
        item.add_marker(pytest.mark.xdist_group(group))
