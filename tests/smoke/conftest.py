"""The fixtures of `tests/oracle`."""

from tests.oracle.conftest import one, places, pytest_generate_tests  # noqa: F401
