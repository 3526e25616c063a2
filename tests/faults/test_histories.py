"""Nothing that a job saved is ever lost, whatever happens; see `histories.py`.

Here a few histories, in a campaign some dozens; with `EVERY_HISTORY` in the environment thousands.
"""

import os
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.faults.histories import MOST_STEPS, Histories, Saved
from tests.faults.server import Server
from tests.samples import sampled

COUNT = int(os.environ.get("EVERY_HISTORY", "24"))
"""Histories that are tried."""
STEPS = 10
"""Most steps of each."""


@sampled(4)
def test_no_save_is_lost(shim: Path, place: Path, one_in: int) -> None:
    root = place / f"histories-{one_in}"
    root.mkdir()
    saves = [Saved.make(root / f"saved{step}", step) for step in range(1, MOST_STEPS + 1)]
    chosen = settings(
        max_examples=COUNT // one_in,
        stateful_step_count=STEPS,
        deadline=None,
        suppress_health_check=[*HealthCheck],
        derandomize=COUNT < 100,
        print_blob=True,
    )
    with Server(shim) as server:
        # Imported once, in the process from which the runs are forked.
        server.warm_up("compact", saves[0].place, root / "warm", "--workers", "1")

        class There(Histories):
            """Histories that begin with what was made here."""

            def __init__(self) -> None:
                super().__init__(server, saves, root)

        run_state_machine_as_test(There, settings=chosen)
