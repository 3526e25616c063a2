"""The power fails at any moment of a run: what is left is safe, and the same command ends right.

Here the states at the end of each run and some others, the same ones each time;
`python -m tests.faults --crashes` tries all that are within the bound of `crash_model.py`.
"""

import pytest

from tests.faults.campaign import Benches
from tests.faults.compact_scenarios import COMPACT_SCENARIOS, AnyScenario, CompactScenario
from tests.faults.scenarios import SCENARIOS, Scenario
from tests.samples import sampled

TRIED = {Scenario: 12, CompactScenario: 6}
MOST_TOLD = 10


@sampled(6)
@pytest.mark.parametrize(
    "scenario", [*SCENARIOS, *COMPACT_SCENARIOS], ids=lambda scenario: scenario.name
)
def test_a_power_failure_loses_nothing(scenario: AnyScenario, one_in: int, tried: Benches) -> None:
    again = int(isinstance(scenario, Scenario))
    count = TRIED[type(scenario)] // one_in
    [report] = tried.crashes([scenario], count, again=again)
    assert not report.wrong, "\n".join(report.wrong[:MOST_TOLD])
    assert report.possible > report.tried > count


def test_what_an_overwrite_replaced_goes_before_what_tells_of_it(tried: Benches) -> None:
    """Else no later run would know that `OUT.replaced` is its own, and would refuse."""
    scenario = next(scenario for scenario in SCENARIOS if scenario.replaces)
    with tried.recorded(scenario) as crashing:
        looks = [{*state.tree} for state in crashing.states()]
    assert any("out.replaced" in paths for paths in looks)
    assert not any(
        "out.replaced" in paths and "out" in paths and "out/.streamshard.journal" not in paths
        for paths in looks
    )


def test_the_model_knows_what_is_not_synced(tried: Benches) -> None:
    """A journal is written without a sync, so some states have it torn, or without its lines."""
    with tried.recorded(SCENARIOS[0]) as crashing:
        journals = {
            state.tree["out.partial/.streamshard.journal"][1]
            for state in crashing.states()
            if "out.partial/.streamshard.journal" in state.tree
        }
        ends = [state for state in crashing.states() if state.is_at_end]
    assert any(b"\0" in journal for journal in journals)
    assert len(journals) > len(ends) > 0
    # Only the lock, which nobody needs any more, was given back without a sync.
    assert {path for state in ends for path in state.tree if "/" not in path} == {
        "out",
        ".streamshard.lock.out",
    }
