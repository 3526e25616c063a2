"""Every test is in one tier, so that the sessions of the noxfile together run all of them."""

import pytest
from pytest import MarkDecorator  # noqa: PT013

from tests.conftest import ENGINES, TIERS, pytest_collection_modifyitems, pytest_ignore_collect


def item_with(request: pytest.FixtureRequest, *marks: MarkDecorator) -> pytest.Function:
    """Return a test of this module with these marks."""

    def of_a_tier() -> None:
        """Do nothing."""

    for mark in marks:
        mark(of_a_tier)
    made: pytest.Function = pytest.Function.from_parent(
        request.node.parent, name="of_a_tier", callobj=of_a_tier
    )
    return made


@pytest.mark.parametrize(("marks", "tier"), [((), "first"), ((pytest.mark.campaign,), "campaign")])
def test_every_test_is_in_exactly_one_tier(
    request: pytest.FixtureRequest, marks: tuple[MarkDecorator, ...], tier: str
) -> None:
    item = item_with(request, *marks)
    pytest_collection_modifyitems([item])
    assert {mark.name for mark in item.iter_markers()} & set(TIERS) == {tier}


@pytest.mark.parametrize("two", [("first", "campaign"), ("oracle", "campaign"), ("oracle",)])
def test_a_test_that_is_marked_with_two_stops_every_run(
    request: pytest.FixtureRequest, two: tuple[str, ...]
) -> None:
    item = item_with(request, *(getattr(pytest.mark, name) for name in two))
    with pytest.raises(pytest.UsageError, match="of_a_tier is in two tiers"):
        pytest_collection_modifyitems([item])


@pytest.mark.parametrize(
    ("chosen", "path", "is_ignored"),
    [
        ("first", ENGINES, True),
        ("first", "tests/smoke", None),
        ("oracle", ENGINES, None),
        ("first or oracle", ENGINES, None),
        ("", ENGINES, None),
    ],
)
def test_the_first_tier_does_not_import_what_asks_engines(
    pytestconfig: pytest.Config,
    monkeypatch: pytest.MonkeyPatch,
    chosen: str,
    path: str,
    is_ignored: bool | None,
) -> None:
    monkeypatch.setattr(pytestconfig.option, "markexpr", chosen)
    assert pytest_ignore_collect(pytestconfig.rootpath / path, pytestconfig) is is_ignored
