"""Tries again what a network file system has refused for the moment."""

import errno
import threading
from collections.abc import Callable
from typing import Final, TypeVar

T = TypeVar("T")

_TRANSIENT: Final = frozenset(
    {
        errno.ESTALE,
        errno.ETIMEDOUT,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETDOWN,
        errno.ENETRESET,
        errno.ENETUNREACH,
        errno.ECONNABORTED,
        errno.ECONNRESET,
        errno.ENOTCONN,
    }
)
"""What a server, or the way to it, brings about; a disk does not."""
_PAUSES: Final = (0.1, 0.4, 1.6, 6.4)
"""Seconds before each further try."""


class StoppedError(Exception):
    """Raised in a worker that is to stop because something else went wrong."""


def is_transient(error: BaseException | None) -> bool:
    """Tell whether an error, or what has brought it about, may be gone the next time."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _TRANSIENT:
            return True
        error = error.__cause__
    return False


def try_again(call: Callable[[], T], stop: threading.Event | None = None) -> T:
    """Call something that may be called again, until it does not fail for the moment only.

    Parameters
    ----------
    stop
        Tells that there is no use in waiting any longer.

    Raises
    ------
    StoppedError
        While waiting it was told to stop.
    """
    stop = stop or threading.Event()
    for pause in _PAUSES:
        try:
            return call()
        except Exception as error:
            if not is_transient(error):
                raise
        if stop.wait(pause):
            raise StoppedError
    return call()
