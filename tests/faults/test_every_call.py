"""Each call of a run to the file system has something happen to it: an error, a part, the end.

Here one thing each, in turn, at every 32nd call, and in a campaign at every fourth;
`python -m tests.faults` tries all of them at each call.
"""

import pytest

from tests.faults.campaign import Benches, Case, rotated
from tests.faults.losses import Loss
from tests.faults.scenarios import SCENARIOS, Scenario
from tests.faults.shim import Action, Side
from tests.faults.table import FAULTS
from tests.samples import sampled

KEEPING = [scenario for scenario in SCENARIOS if not scenario.replaces]
"""With `--overwrite` a run begins afresh."""
STEP = 4
MOST_TOLD = 10
OWN_BYTES = 512
"""What a lock and a line of a journal take."""
LEAST_FIRED = 0.95
"""Share of the cases in which it must have come to the fault; threads change the order a little."""


@sampled(12)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_nothing_is_lost_and_the_same_command_goes_on(
    scenario: Scenario, one_in: int, tried: Benches
) -> None:
    cases = rotated(scenario, tried.undisturbed(scenario), STEP * one_in)
    verdicts = list(tried.judge(cases))
    wrong = [str(verdict) for verdict in verdicts if verdict.problems]
    assert not wrong, f"{len(wrong)} of {len(cases)}:\n" + "\n".join(wrong[:MOST_TOLD])
    assert sum(verdict.has_fired for verdict in verdicts) >= LEAST_FIRED * len(cases) - 1


@pytest.mark.parametrize("loss", Loss, ids=lambda loss: loss.name.lower())
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_what_is_done_stays_done(scenario: Scenario, loss: Loss, tried: Benches) -> None:
    """A machine whose power is cut has all that a run said it has made."""
    assert tried.lost_when_done(scenario, loss) == []


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
    [verdict] = tried.judge([Case(scenario, fault, last)])
    assert verdict.has_fired
    assert not verdict.problems
    # What it says of itself, in its lock and the last line of its journal, is written again.
    assert verdict.written_again < undisturbed.written // 8 + OWN_BYTES, (
        f"{verdict.written_again} bytes of {undisturbed.written}"
    )
