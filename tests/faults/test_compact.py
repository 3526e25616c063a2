"""Whatever happens to a run of `compact`, the source is intact, or its archive is and was proved.

In a campaign the process is killed before every change of a name that tells where a tag or an
archive is, every rename among them fails once, and something happens to a few other calls. Else
some of these cases are tried. `python -m tests.faults --scenario compact` tries all calls.
"""

from pathlib import Path

import pytest

from tests.compact.runs import ARCHIVE, RUN, TRASH
from tests.faults.campaign import Benches, Case, fault_at, rotated
from tests.faults.compact_scenarios import COMPACT_SCENARIOS, CompactScenario
from tests.faults.shim import Action, Call, Kind
from tests.faults.table import FAULTS
from tests.faults.test_every_call import judged
from tests.samples import sampled

KILLED = next(fault for fault in FAULTS if fault.action == Action.KILL_BEFORE)
FAILS = next(fault for fault in FAULTS if fault.name == "target eio once")
STEP = 499
FEW = 15
"""Cases that are all tried."""
PLACES = {RUN, ARCHIVE, TRASH, ".streamshard.going"}


def moves_something(call: Call) -> bool:
    """Tell whether a call changes the name of a tag, an archive, a receipt or a list."""
    names = {Path(path).parent.name for path in (call.path, call.other) if path}
    return bool(call.kind & (Kind.MAKE | Kind.DROP)) and bool(names & PLACES)


def cases_of(scenario: CompactScenario, tried: Benches) -> list[Case]:
    """Choose what is tried."""
    undisturbed = tried.undisturbed(scenario)
    moves = [call for call in undisturbed.calls if moves_something(call)]
    killed = [fault_at(scenario, KILLED, call.number) for call in moves]
    failing = [fault_at(scenario, FAILS, call.number) for call in moves if call.name == "rename"]
    return [*killed, *failing, *rotated(scenario, undisturbed, STEP)]


@sampled(6)
@pytest.mark.parametrize("scenario", COMPACT_SCENARIOS, ids=lambda scenario: scenario.name)
def test_nothing_is_lost_and_the_next_run_finishes(
    scenario: CompactScenario, one_in: int, tried: Benches
) -> None:
    cases = cases_of(scenario, tried)
    cases = cases[:: one_in if len(cases) > FEW else 1]
    verdicts = judged(tried, cases)
    assert sum(verdict.has_fired for verdict in verdicts) > len(cases) // 2
    assert {verdict.was_whole for verdict in verdicts} == {True, False}


@pytest.mark.parametrize("scenario", COMPACT_SCENARIOS, ids=lambda scenario: scenario.name)
def test_a_move_that_may_not_be_durable_is_a_move(
    scenario: CompactScenario, tried: Benches
) -> None:
    """A rename was done and the sync of its directory fails: the next run goes on from there."""
    calls = tried.undisturbed(scenario).calls
    synced = [call for call in calls if call.kind & Kind.SYNC and Path(call.path).name in PLACES]
    last = {Path(call.path).name: call.number for call in synced}
    assert last
    judged(tried, [fault_at(scenario, FAILS, number) for number in last.values()])
