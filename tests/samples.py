"""How much is tried of what would take long to try in full."""

import pytest
from pytest import MarkDecorator  # noqa: PT013


def sampled(one_in: int) -> MarkDecorator:
    """Have a test try one case in `one_in`, spread over all of them; in a campaign, every case."""
    every = pytest.param(1, marks=pytest.mark.campaign, id="every")
    return pytest.mark.parametrize("one_in", [pytest.param(one_in, id=f"1 in {one_in}"), every])
