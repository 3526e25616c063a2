"""Tells errors of the world from those of a wrong call: retries after some, ignores some."""

import errno
import os
import threading
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
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
"""Errors of a server or of the network; a local disk does not cause them."""
FROM_OUTSIDE: Final = _TRANSIENT | {
    errno.ENOENT,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.EBUSY,
    errno.EIO,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.ECONNREFUSED,
    errno.EPIPE,
}
"""Errors of a disk, a network or a service, and refusals."""
UNSUPPORTED: Final = frozenset(
    {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EISDIR, errno.ENOENT}
)
"""How systems answer a call that they do not know, or not for this file."""
_PAUSES: Final = (0.1, 0.4, 1.6, 6.4)
"""Seconds before each retry."""


class StoppedError(Exception):
    """Raised in a worker that must stop because of an error elsewhere."""


def _is_transient(error: BaseException | None) -> bool:
    """Tell whether an error, or one of its causes, may be gone at the next try."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _TRANSIENT:
            return True
        error = error.__cause__
    return False


def try_again(call: Callable[[], T], stop: threading.Event | None = None) -> T:
    """Call a function, and retry it after transient errors; it must be safe to call again.

    `stop`: ends the waiting when it is set.
    """
    stop = stop or threading.Event()
    for pause in _PAUSES:
        try:
            return call()
        except Exception as error:
            if not _is_transient(error):
                raise
        if stop.wait(pause):
            raise StoppedError
    return call()


def close_unwritten(descriptor: int) -> None:
    """Close a file that nothing was written to, or that is synced: an error then loses nothing."""
    with ignored(FROM_OUTSIDE):
        os.close(descriptor)


@contextmanager
def ignored(numbers: Set[int]) -> Iterator[None]:
    """End a block at a system error of these numbers, and go on after it."""
    try:
        yield
    except OSError as error:
        if error.errno not in numbers:
            raise
