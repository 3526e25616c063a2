"""The process of `streamshard` and `python -m streamshard`, from first line to exit code.

Whatever takes time to load is loaded when the arguments are known to ask for it, and when a signal
ends the process without a traceback.
"""

import gc
import os
import sys
from typing import Final, NoReturn

from streamshard.cli.signals import Signals

_GARBAGE_OBJECTS: Final = 20_000
"""New objects between two searches for garbage: plans are made of many objects, and hardly any."""
_YOUNG_SEARCHES: Final = 50
"""Searches among new objects for each one among those that were kept before."""


def program() -> NoReturn:
    """Be the process, which ends with its verb."""
    # The handlers stay: until the interpreter has gone, a signal ends it without a word.
    signals = Signals()
    signals.install(while_loading=True)
    gc.set_threshold(_GARBAGE_OBJECTS, _YOUNG_SEARCHES)
    # NumPy's linear algebra, of which nothing is used, else starts a spinning thread for each core.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from streamshard.cli import streams
    from streamshard.cli.parser import parse_command

    streams.open_what_was_closed()
    streams.ignore_broken_stderr()
    arguments = parse_command(sys.argv[1:])
    from streamshard.cli import main

    sys.exit(main.carry_out(arguments, signals))


if __name__ == "__main__":
    program()
