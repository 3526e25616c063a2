"""Something happens to a run: at a call to the file system, at any instant, or another run comes.

Here one thing each, in turn, at every 48th call, and in a campaign at every fourth;
`python -m tests.faults` tries all of them at each call.
"""

from collections.abc import Iterable

import pytest

from tests.faults.campaign import Benches, Case, chosen_kills, fault_at, rotated, second_runs
from tests.faults.ground import Verdict
from tests.faults.scenarios import SCENARIOS, Scenario
from tests.faults.shim import Action, Side
from tests.faults.table import FAULTS
from tests.samples import sampled

KEEPING = [scenario for scenario in SCENARIOS if not scenario.replaces]
"""With `--overwrite` a run begins afresh."""
NAMING = [SCENARIOS[0], *(scenario for scenario in SCENARIOS if scenario.replaces)]
STEP = 4
KILLS = 42
MOST_TOLD = 10
OWN_BYTES = 512
"""What a lock and a line of a journal take."""
LEAST_FIRED = 0.95
"""Share of the cases in which it must have come to the fault; threads change the order a little."""


def judged(tried: Benches, cases: Iterable[Case]) -> list[Verdict]:
    """Try cases, none of which may go wrong."""
    verdicts = list(tried.judge(cases))
    wrong = [str(verdict) for verdict in verdicts if verdict.problems]
    assert not wrong, f"{len(wrong)} of {len(verdicts)}:\n" + "\n".join(wrong[:MOST_TOLD])
    return verdicts


@sampled(12)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_nothing_is_lost_and_the_same_command_goes_on(
    scenario: Scenario, one_in: int, tried: Benches
) -> None:
    verdicts = judged(tried, rotated(scenario, tried.undisturbed(scenario), STEP * one_in))
    assert sum(verdict.has_fired for verdict in verdicts) >= LEAST_FIRED * len(verdicts) - 1


@pytest.mark.parametrize("scenario", NAMING, ids=lambda scenario: scenario.name)
def test_killed_where_a_name_changes_it_loses_nothing(scenario: Scenario, tried: Benches) -> None:
    """The old target or the new one is whole, and the same command makes the new one."""
    names = [call for call in tried.undisturbed(scenario).calls if call.side & Side.TARGET]
    names = [call for call in names if call.name in ("rename", "renameat2", "unlink", "rmdir")]
    deaths = [fault for fault in FAULTS if fault.is_death and fault.codes == {-9}]
    cases = [fault_at(scenario, fault, call.number) for call in names for fault in deaths]
    verdicts = judged(tried, cases)
    assert {verdict.was_whole for verdict in verdicts} == {True, False}
    assert sum(verdict.has_fired for verdict in verdicts) >= len(cases) - 1


@pytest.mark.parametrize("scenario", KEEPING, ids=lambda scenario: scenario.name)
def test_what_was_written_is_not_written_again(scenario: Scenario, tried: Benches) -> None:
    """A run that is killed where it would have put the target into its place has done its work."""
    undisturbed = tried.undisturbed(scenario)
    last = max(
        call.number
        for call in undisturbed.calls
        if call.side & Side.TARGET and call.name.startswith("rename")
    )
    fault = next(fault for fault in FAULTS if fault.action == Action.KILL_BEFORE)
    [verdict] = judged(tried, [fault_at(scenario, fault, last)])
    assert verdict.has_fired
    # What it says of itself, in its lock and the last line of its journal, is written again.
    assert verdict.written_again < undisturbed.written // 8 + OWN_BYTES


def test_a_run_may_be_stopped_at_any_instant(tried: Benches) -> None:
    undisturbed = {scenario.name: tried.undisturbed(scenario) for scenario in SCENARIOS}
    verdicts = judged(tried, chosen_kills(SCENARIOS, undisturbed, KILLS))
    assert any(verdict.code != 0 for verdict in verdicts)


@sampled(9)
def test_of_two_runs_one_makes_the_target_and_the_other_is_refused(
    one_in: int, tried: Benches
) -> None:
    """At each call of the first a second comes and goes."""
    scenario = SCENARIOS[0]
    verdicts = judged(tried, second_runs(scenario, tried.undisturbed(scenario))[::one_in])
    assert {verdict.code for verdict in verdicts} == {0, 4, -9}
