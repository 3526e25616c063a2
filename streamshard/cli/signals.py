"""Signals that end a run: the first one cleanly; a second one, or one after the run, at once."""

import os
import signal
import sys
from types import FrameType
from typing import Any, Final

SIGNALS: Final = {signal.SIGINT: 130, signal.SIGTERM: 143}
"""Exit code after each signal that ends a run."""
_GRACE_SECONDS: Final = 5
"""How long a run may take to clean up and end."""
_AGAIN_SECONDS: Final = 0.01
"""How long after an error that Python ignored the next one comes."""


class StoppedBySignal(KeyboardInterrupt):
    """Raised wherever the program is when a signal tells it to stop."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__()
        self.number = number


class Signals:
    """The signals that a run handles: those that nobody else handles or ignores."""

    def __init__(self) -> None:
        self._before: dict[signal.Signals, Any] = {}
        self._code: int | None = None
        self.stopped_by: signal.Signals | None = None
        """The signal that stopped the run, if any."""
        self._is_loading = False
        self._unraisable_hook: Any = None

    def install(self, *, while_loading: bool = False) -> None:
        """Install handlers: from now on the first signal raises `StoppedBySignal`.

        `while_loading`: whether to end the process instead, as nothing has begun yet, and code that
        is being imported might mistake the error for its own, or suppress it. A later call ends
        this mode.
        """
        self._is_loading = while_loading
        for number in SIGNALS:
            if signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL):
                self._before[number] = signal.signal(number, self._stop)

    def finish(self, code: int) -> None:
        """Mark the run as done: from now on a signal ends the process with this exit code."""
        self._code = code

    def restore(self) -> None:
        """Restore the previous signal handlers."""
        if signal.SIGALRM in self._before:
            signal.alarm(0)  # otherwise a pending alarm is the caller's
            sys.unraisablehook = self._unraisable_hook
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self._code is not None:
            os._exit(self._code)  # the files on disk may be left as they are at any moment
        stopped_by = self.stopped_by or signal.Signals(number)
        self._code = SIGNALS[stopped_by]
        if self._is_loading:
            try:
                os.write(2, f"streamshard: interrupted by {stopped_by.name}\n".encode())
            finally:
                os._exit(self._code)
        if self.stopped_by is None:
            self._before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._stop)
            self._unraisable_hook, sys.unraisablehook = sys.unraisablehook, self._raise_again
        signal.alarm(_GRACE_SECONDS)
        self.stopped_by = stopped_by
        raise StoppedBySignal(stopped_by)

    def _raise_again(self, ignored: "sys.UnraisableHookArgs") -> None:
        """Raise the error once more soon: where an object is deleted, Python ignores errors."""
        if isinstance(ignored.exc_value, StoppedBySignal):
            self._code = None
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS)
        else:
            self._unraisable_hook(ignored)
