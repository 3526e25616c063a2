"""Two runs at once on one target: at each call of the first a second comes and goes."""

import pytest

from tests.faults.campaign import Benches, second_runs
from tests.faults.scenarios import SCENARIOS, Scenario
from tests.faults.shim import Option
from tests.samples import sampled

MOST_TOLD = 10
SOME = [SCENARIOS[0], *(scenario for scenario in SCENARIOS if scenario.system & Option.LOCKLESS)]
"""With locks and without."""


@sampled(9)
@pytest.mark.parametrize("scenario", SOME, ids=lambda scenario: scenario.name)
def test_one_makes_the_target_and_the_other_is_refused(
    scenario: Scenario, one_in: int, tried: Benches
) -> None:
    cases = [*second_runs(scenario, tried.undisturbed(scenario))][::one_in]
    verdicts = list(tried.judge(cases))
    wrong = [str(verdict) for verdict in verdicts if verdict.problems]
    assert not wrong, f"{len(wrong)} of {len(cases)}:\n" + "\n".join(wrong[:MOST_TOLD])
    assert {verdict.code for verdict in verdicts} == {0, 4, -9}
