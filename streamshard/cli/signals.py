"""Signals that end a run: in good order at first, at once when asked again or when it is over."""

import os
import signal
from contextlib import suppress
from types import FrameType
from typing import Any, Final

SIGNALS: Final = {signal.SIGINT: 130, signal.SIGTERM: 143}
"""Exit code after each signal that ends a run in good order."""
PATIENCE_SECONDS: Final = 5
"""How long a run may take to end in good order."""


class StoppedBySignal(KeyboardInterrupt):
    """Raised where the program is when a signal asks it to stop."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__()
        self.number = number


class Signals:
    """The signals that a run takes: those that nobody else takes or ignores."""

    def __init__(self) -> None:
        self._before: dict[signal.Signals, Any] = {}
        self._code: int | None = None
        self._is_loading = False

    def take(self, *, while_loading: bool = False) -> None:
        """Raise `StoppedBySignal` at the first one from here on, wherever the program is.

        Parameters
        ----------
        while_loading
            End the process instead: nothing has begun yet, and an error that is raised among
            imports may be taken for one of theirs, or for none. A later call ends this.
        """
        self._is_loading = while_loading
        for number in SIGNALS:
            if signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL):
                self._before[number] = signal.signal(number, self._stop)

    def over(self, code: int) -> None:
        """Raise nothing any more: what is left to do is to end with this exit code."""
        self._code = code

    def give_back(self) -> None:
        """Leave the signals to those who had them."""
        if signal.SIGALRM in self._before:
            signal.alarm(0)  # else it is the caller's
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self._code is not None:
            os._exit(self._code)  # what is on the disk may be left as it is at any moment
        self._code = SIGNALS[signal.Signals(number)]
        if self._is_loading:
            with suppress(OSError):
                os.write(2, f"streamshard: interrupted by {signal.Signals(number).name}\n".encode())
            os._exit(self._code)
        self._before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._stop)
        signal.alarm(PATIENCE_SECONDS)
        raise StoppedBySignal(signal.Signals(number))
