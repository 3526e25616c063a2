"""Try every fault at every call of every scenario: `python -m tests.faults`.

    python -m tests.faults                         all of it; some hours
    python -m tests.faults --scenario overwriting  scenarios with that in their names
    python -m tests.faults --fault "target eio"    faults with that in their names
    python -m tests.faults --step 7                every seventh case
    python -m tests.faults --kills 500             signals at random instants, and nothing else
    python -m tests.faults --crashes               all states after a power failure, nothing else
    python -m tests.faults --list                  what there is, and how many calls

Prints the counts, and every case that went wrong with the call at which it happened; the exit code
is then 1. With `--benches` as many cases are tried at once.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.faults.campaign import Benches, Case, benches, chosen_kills, every, quick_place
from tests.faults.compact_scenarios import COMPACT_SCENARIOS, AnyScenario
from tests.faults.crashing import CrashReport
from tests.faults.scenarios import SCENARIOS
from tests.faults.shim import compile_shim
from tests.faults.table import FAULTS

_TOLD_EVERY: Final = 500
_SECOND_FAILURES: Final = 8
"""States from which a run is recorded as well, and states of each of these runs."""


def main() -> int:
    """Do what the command line asks for; returns the exit code."""
    arguments = _arguments()
    known: list[AnyScenario] = [*SCENARIOS, *COMPACT_SCENARIOS]
    scenarios = [s for s in known if arguments.scenario in s.name]
    wrong = 0
    with tempfile.TemporaryDirectory() as directory, quick_place() as place:
        library = compile_shim(Path(directory))
        with benches(library, place, arguments.benches) as tried:
            if arguments.crashes:
                reports = tried.crashes(scenarios, None, again=_SECOND_FAILURES)
                return int(sum(_say_report(report) for report in reports) > 0)
            undisturbed = {scenario.name: tried.undisturbed(scenario) for scenario in scenarios}
            if arguments.kills:
                some = [s for s in SCENARIOS if s in scenarios]
                cases = list(chosen_kills(some, undisturbed, arguments.kills))
                return int(_judge("signals", tried, cases) > 0)
            for scenario in scenarios:
                cases = every(scenario, undisturbed[scenario.name], arguments.fault)
                tries = cases[:: arguments.step]
                calls = len(undisturbed[scenario.name].calls)
                if arguments.list:
                    _say(f"{scenario.name}: {calls} calls, {len(tries)} cases")
                else:
                    wrong += _judge(f"{scenario.name}: {calls} calls", tried, tries)
    if arguments.list:
        _say("\n".join(fault.name for fault in FAULTS))
    return int(wrong > 0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tests.faults", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--scenario", default="", metavar="TEXT")
    parser.add_argument("--fault", default="", metavar="TEXT")
    parser.add_argument("--step", type=int, default=1, metavar="N")
    parser.add_argument("--kills", type=int, default=0, metavar="N")
    parser.add_argument("--benches", type=int, default=None, metavar="N")
    parser.add_argument("--crashes", action="store_true")
    parser.add_argument("--list", action="store_true")
    return parser.parse_args()


def _judge(name: str, tried: Benches, cases: Sequence[Case]) -> int:
    """Try cases and print what came of them; returns how many went wrong."""
    began = time.monotonic()
    codes: Counter[int] = Counter()
    wrong = fired = 0
    for verdict in tried.judge(cases):
        codes[verdict.code] += 1
        fired += verdict.has_fired
        if verdict.problems:
            wrong += 1
            _say(f"WRONG {verdict}")
        if codes.total() % _TOLD_EVERY == 0:
            sys.stderr.write(f"{name}: {codes.total()} of {len(cases)} cases\n")
    seconds = time.monotonic() - began
    told = ", ".join(f"{count} ended with {code}" for code, count in sorted(codes.items()))
    _say(f"{name}, {len(cases)} cases, {fired} came to it, {wrong} wrong; {told}; {seconds:.0f} s")
    return wrong


def _say_report(report: CrashReport) -> int:
    _say(str(report))
    return len(report.wrong)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
