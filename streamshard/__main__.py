"""The process of `streamshard` and `python -m streamshard`, from first line to exit code.

Whatever takes time to load is loaded when the arguments are known to ask for it, and when a signal
ends the process without a traceback.
"""

import sys
from typing import NoReturn

from streamshard.cli.signals import Signals


def program() -> NoReturn:
    """Be the process, which ends with its verb."""
    # The handlers stay: until the interpreter has gone, a signal ends it without a word.
    signals = Signals()
    signals.install(while_loading=True)
    from streamshard.cli import streams
    from streamshard.cli.parser import parse_command

    streams.open_what_was_closed()
    streams.ignore_broken_stderr()
    arguments = parse_command(sys.argv[1:])
    from streamshard.cli import main

    sys.exit(main.carry_out(arguments, signals))


if __name__ == "__main__":
    program()
