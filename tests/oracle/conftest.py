"""What the reshardings of a module of tests come to, for the tests that ask about them."""

import pytest

from tests.oracle.reshardings import Places, Resharding, carry

pytest.register_assert_rewrite("tests.oracle.laws")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Ask about every resharding of the module where a test does not say about which."""
    told = str([mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")])
    if "one" in metafunc.fixturenames and "'one'" not in told:
        ones = metafunc.module.RESHARDINGS
        metafunc.parametrize("one", ones, ids=lambda one: one.name, indirect=True)


@pytest.fixture(scope="module")
def places(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Places:
    """The module's reshardings, all of them done."""
    return carry(request.module.RESHARDINGS, tmp_path_factory.mktemp("reshardings"))


@pytest.fixture
def one(request: pytest.FixtureRequest, places: Places) -> Resharding:
    """One of them that was converted and resumed without an error."""
    resharding: Resharding = request.param
    if resharding.name in places.errors:
        pytest.fail(places.errors[resharding.name], pytrace=False)
    return resharding
