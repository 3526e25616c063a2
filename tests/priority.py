"""Lets `compact` keep the priority that the tests have.

It takes the lowest one, so that other programs go first. In a process that runs more than it, or
beside other tests on every core, a second's work would take minutes. `tests/engine/test_throttle`
shows what it does.
"""

from streamshard.cli import compact_command


def keep_priority() -> None:
    """Leave this process's priority alone, whatever it runs."""
    vars(compact_command)["lower_priority"] = lambda _: None
