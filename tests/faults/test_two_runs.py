"""Two runs at once on one target: at each call of the first a second comes and goes."""

from tests.faults.campaign import Benches, second_runs
from tests.faults.scenarios import SCENARIOS

MOST_TOLD = 10


def test_one_makes_the_target_and_the_other_is_refused(tried: Benches) -> None:
    cases = second_runs(SCENARIOS[0], tried.undisturbed(SCENARIOS[0]))
    verdicts = list(tried.judge(cases))
    wrong = [str(verdict) for verdict in verdicts if verdict.problems]
    assert not wrong, f"{len(wrong)} of {len(cases)}:\n" + "\n".join(wrong[:MOST_TOLD])
    assert {verdict.code for verdict in verdicts} == {0, 4, -9}
