"""Each ZeRO stage to more ranks and to fewer: converted and loaded, and loaded directly."""

import pytest

from tests.oracle.cases import BF16, Resharding
from tests.oracle.conftest import Places, carry
from tests.oracle.test_first_light import (  # noqa: F401
    test_an_engine_that_loads_directly_holds_the_same,
    test_both_roads_write_the_same_bytes,
    test_deepspeed_would_have_written_the_same_files,
    test_the_resumed_engine_holds_what_was_saved,
    test_training_goes_on_as_if_uninterrupted,
)

UP_AND_DOWN = [Resharding(case, n, m) for case in BF16 for n, m in ((2, 3), (3, 2))]


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> Places:
    """Every case trained, taken to its target world size by both roads, resumed and saved again."""
    return carry(UP_AND_DOWN, Places(tmp_path_factory.mktemp("smoke")))


@pytest.fixture(params=UP_AND_DOWN, ids=lambda one: one.name)
def one(request: pytest.FixtureRequest, light: Places) -> Resharding:
    """One resharding that was converted and resumed without an error."""
    resharding: Resharding = request.param
    assert resharding.name not in light.errors, light.errors[resharding.name]
    return resharding
