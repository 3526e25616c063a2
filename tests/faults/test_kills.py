"""Signals from outside at any instant of a run."""

from tests.faults.campaign import Benches, chosen_kills
from tests.faults.scenarios import SCENARIOS

KILLS = 42


def test_a_run_may_be_stopped_at_any_instant(tried: Benches) -> None:
    undisturbed = {scenario.name: tried.undisturbed(scenario) for scenario in SCENARIOS}
    verdicts = list(tried.judge(chosen_kills(SCENARIOS, undisturbed, KILLS)))
    wrong = [str(verdict) for verdict in verdicts if verdict.problems]
    assert not wrong, f"{len(wrong)} of {KILLS}:\n" + "\n".join(wrong)
    assert any(verdict.code != 0 for verdict in verdicts)
