"""The streams that a process begins with: what is closed, full, or has nobody at its other end."""

import io
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, TextIO

from streamshard.errors import TargetError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_STDERR: Final = 2
"""The number of standard error."""


def open_what_was_closed() -> None:
    """Begin with three open streams, so that no file of ours gets the number of one of them."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        pass
    os.close(descriptor)
    # Python has None in place of a stream that was closed when it started.
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115


def forgive_standard_error() -> None:
    """Let no message fail: what cannot be written to a log is lost, the exit code is not."""
    sys.stderr = io.TextIOWrapper(
        io.BufferedWriter(_Log(_STDERR, "wb", closefd=False)),
        encoding=sys.stderr.encoding,
        errors="backslashreplace",
        line_buffering=True,
    )


class _Log(io.FileIO):
    """A file that takes everything, whether or not there is room for it and somebody to read it."""

    def write(self, data: "ReadableBuffer", /) -> int:
        """Write what can be written of it."""
        try:
            written = super().write(data)
        except OSError:
            written = None
        # None also means a pipe that is full and may not be waited for.
        return memoryview(data).nbytes if written is None else written


def write_out(text: str) -> None:
    """Write to standard output, all of it before anything else happens.

    Raises
    ------
    BrokenPipeError
        Nobody reads it any more.
    TargetError
        It cannot be written.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        give_up(sys.stdout)
        message = f"standard output: cannot be written ({error.strerror})"
        raise TargetError(message) from error


def give_up(stream: TextIO) -> None:
    """Keep the interpreter from complaining at exit of what cannot be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
