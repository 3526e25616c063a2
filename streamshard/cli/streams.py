"""The standard streams of the process, even if they are closed or full, and results on them."""

import argparse
import io
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, TextIO

from streamshard.cli.text.escaping import one_line, printable
from streamshard.errors import TargetError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance, ReadableBuffer

_STDERR: Final = 2
"""The number of standard error."""


def open_what_was_closed() -> None:
    """Open closed standard streams, so that no other file gets the number of one of them."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        pass
    os.close(descriptor)
    # Python sets a stream to None if it was closed when Python started.
    sys.stdout = sys.stdout or _Closed(os.fdopen(os.open(os.devnull, os.O_RDONLY), "wb"))
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115


def ignore_broken_stderr() -> None:
    """Ignore write errors on standard error: the message is lost, but the exit code stays."""
    sys.stderr = io.TextIOWrapper(
        io.BufferedWriter(_Log(_STDERR, "wb", closefd=False)),
        encoding=sys.stderr.encoding,
        errors="backslashreplace",
        line_buffering=True,
    )


class _Closed(io.TextIOWrapper):
    """Stands for standard output that is closed: each write fails."""


class _Log(io.FileIO):
    """A file whose writes always succeed, even if the disk is full or there is no reader."""

    def write(self, data: "ReadableBuffer", /) -> int:
        """Write as much of the data as possible; reports all of it as written on failure."""
        try:
            written = super().write(data)
        except OSError:
            written = None
        # None also means a full pipe in non-blocking mode.
        return memoryview(data).nbytes if written is None else written


def tell(*lines: str) -> None:
    """Write lines to standard error, escaped."""
    for line in lines:
        sys.stderr.write(one_line(line) + "\n")


def tell_error(error: BaseException, text: str = "") -> None:
    """Write an error, or a text in its place, and its notes to standard error."""
    tell(f"streamshard: {text or error}", *getattr(error, "__notes__", ()))


def write_path(path: str, *, is_done: bool = False) -> None:
    """Write a path in a line of its own, byte for byte, whatever the encoding of the output.

    `is_done`: see `print_text`.
    """
    if not (is_done and isinstance(sys.stdout, _Closed)):
        write_out(f"{path}\n", sys.stdout.buffer)


def write_out(text: str, raw: BinaryIO | None = None) -> None:
    """Write to standard output, and flush it; to its `raw` stream as file names are encoded."""
    try:
        sys.stdout.write(text) if raw is None else raw.write(os.fsencode(text))
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        close_quietly(sys.stdout)
        message = f"standard output: cannot be written ({error.strerror})"
        raise TargetError(message) from error


def close_quietly(stream: TextIO) -> None:
    """Discard a stream's output, so that the interpreter reports no write error at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def print_result(
    report: "DataclassInstance",
    arguments: argparse.Namespace,
    text: Callable[[], str],
    *,
    more: Mapping[str, Any] | None = None,
    indent: int | None = 2,
    is_done: bool = False,
) -> None:
    """Print a report in the form that was asked for; JSON may have `more` than its fields.

    `is_done`: whether the run wrote its result elsewhere; see `print_text`.
    """
    from dataclasses import asdict  # slow to import, and `--help` needs none

    if arguments.json:
        print_json({**asdict(report), **(more or {})}, indent)
    elif not arguments.quiet:
        print_text(text(), is_done=is_done)


def print_json(document: Mapping[str, Any], indent: int | None = 2) -> None:
    """Print a JSON document; without an indent, in one line."""
    write_out(json.dumps(document, indent=indent) + "\n")


def print_text(text: str, *, is_done: bool = False) -> None:
    """Print text, escaped. A run that `is_done` does not fail if standard output is closed."""
    if not (is_done and isinstance(sys.stdout, _Closed)):
        write_out(printable(text) + "\n")
