"""Programs that pip does not install: without one its tests are skipped, and fail in CI."""

import os
from typing import NoReturn

import pytest


def lacking(program: str, install: str) -> NoReturn:
    """End a test that needs a program which is not there."""
    if os.environ.get("CI"):
        pytest.fail(f"no {program} on the PATH, which .ci/run installs: {install}")
    pytest.skip(f"no {program} on the PATH; it comes by: {install}")
