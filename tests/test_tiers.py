"""Every test is in one tier, so that the sessions of the noxfile together run all of them."""

import subprocess
import sys
from itertools import combinations
from pathlib import Path

TIERS = ("first", "oracle", "campaign")


def test_every_test_is_in_exactly_one_tier() -> None:
    in_two = [f"({one} and {other})" for one, other in combinations(TIERS, 2)]
    wrong = " or ".join([*in_two, f"not ({' or '.join(TIERS)})"])
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", wrong]
    ended = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    # Exit code 5: of all tests that there are, none was chosen.
    assert (ended.returncode, ended.stderr) == (5, "")
    assert " deselected" in ended.stdout
    assert "error" not in ended.stdout
