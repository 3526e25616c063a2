"""One exception class for each way a run can fail; the class holds the exit code.

::

    StreamshardError
    ├── UsageError              2   the command line or a call asks for something impossible
    ├── SourceError             3   the source cannot be read or is incomplete
    │   ├── SourceNotFoundError       nothing checkpoint-like at the given path
    │   ├── NotPermittedError         this user may not read it
    │   ├── CorruptFileError          a file is truncated or not what its name says
    │   ├── IncompleteError           a rank's file is missing, or one is there that should not be
    │   ├── DisagreementError         two files of one checkpoint contradict each other
    │   └── UnsupportedError          a layout that is known, and not supported
    ├── TargetError             4   the target cannot be written
    │   ├── TargetExistsError
    │   ├── TargetLockedError
    │   └── NoSpaceError
    ├── MemoryLimitError        5   more memory is needed than the limit, or than there is
    ├── IntegrityError          6   bytes differ from what was recorded
    └── ClusterError            7   the workers of a cluster are gone, or cannot be reached
"""

import shlex
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import PurePath
from typing import ClassVar, Final, NamedTuple


class Option(NamedTuple):
    """An option of a verb in a message: whoever calls the verb has a word of their own for it.

    A message names the keyword, with a value or not; `worded` decides how that reads.

    >>> f"exists; use {Option('overwrite', True)}, or leave {Option('like')} out"
    'exists; use overwrite=True, or leave like= out'
    """

    name: str
    """The keyword."""
    value: object = None
    what: str = ""
    """What the option gives, if the message is about that and not about the option."""

    def __str__(self) -> str:
        """Return the words of the caller."""
        return _WORDS[-1](self)


def keyword(option: Option) -> str:
    """Word an option as Python does."""
    value = "" if option.value is None else option.value
    text = option.name if option.name.endswith(")") else f"{option.name}={value}"
    return f"{option.what} given with {text}" if option.what else text


def command(verb: str, *arguments: object, **options: object) -> str:
    """Write a command as it can be pasted into a shell; it stands at the end of a line.

    >>> command("inspect", "my runs/7b")
    "streamshard inspect 'my runs/7b'"
    """
    return shlex.join(["streamshard", verb, *map(str, arguments), *_flags(options)])


def _flags(options: dict[str, object]) -> Iterator[str]:
    for name, value in options.items():
        yield f"--{name.replace('_', '-')}"
        if value is not True:
            yield str(value)


_WORDS: Final[list[Callable[[Option], str]]] = [keyword]
"""How options are worded: the last one counts, in all threads, as a run has several."""


@contextmanager
def worded(words: Callable[[Option], str]) -> Iterator[None]:
    """Word options in another way than Python's, in all messages that are made meanwhile."""
    _WORDS.append(words)
    try:
        yield
    finally:
        _WORDS.remove(words)


_FACTS: Final = {
    "ds_config": ("source", 'ds_config = "ds_config.json"'),
    "wrapped": ("source", 'wrapped = ["model.layers.*"]'),
    "cut_rules": ("source", r"cut_rules = ['.*norm: replicated', '.*dense\.weight: split 1']"),
    "ds_version": ("target", 'ds_version = "0.16.9"'),
}
"""Fact → its table in a file of facts, and an example."""


def lacking(fact: str) -> str:
    """Say how to give a fact that files do not say: the option, and the lines of its file.

    >>> lacking("ds_config")
    'give facts=FILE, a file with the lines [source] and ds_config = "ds_config.json"'
    """
    table, line = _FACTS[fact]
    return f"give {Option('facts', 'FILE')}, a file with the lines [{table}] and {line}"


class StreamshardError(Exception):
    """Base of every error that the input, the target or the caller causes."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: object = "", *, path: PurePath | None = None) -> None:
        super().__init__(message)
        self.path = path
        """File or directory that the error is about, where that is known."""

    def __str__(self) -> str:
        """Return the message, which begins with the path."""
        message = super().__str__()
        return message if self.path is None else f"{self.path}: {message}"


class UsageError(StreamshardError):
    """The command line or a call asks for something impossible."""

    exit_code = 2


class SourceError(StreamshardError):
    """The source cannot be read or is incomplete."""

    exit_code = 3


class SourceNotFoundError(SourceError):
    """Nothing at the given path looks like a checkpoint."""


class NotPermittedError(SourceError):
    """A file or directory of the source may not be read by this user."""


class CorruptFileError(SourceError):
    """A file is truncated, or is not what its name says it is."""


class IncompleteError(SourceError):
    """A rank's file is missing, or a file of another world size lies among the others."""


class DisagreementError(SourceError):
    """Two files of one checkpoint contradict each other."""


class UnsupportedError(SourceError):
    """The layout is recognised, but not supported."""


class TargetError(StreamshardError):
    """The target cannot be written."""

    exit_code = 4


class TargetExistsError(TargetError):
    """The target is already there and may not be replaced."""


class TargetLockedError(TargetError):
    """Another run is writing the same target."""


class NoSpaceError(TargetError):
    """The target's file system has too little free space."""


class MemoryLimitError(StreamshardError):
    """The plan needs more memory than the limit, or the run more than the system has."""

    exit_code = 5


class IntegrityError(StreamshardError):
    """Bytes differ from what was recorded when they were written."""

    exit_code = 6


class ClusterError(StreamshardError):
    """The workers of a cluster are gone, or cannot be reached."""

    exit_code = 7


def release_frames(error: BaseException) -> None:
    """Release the memory that an error's frames hold, before more is read while it is kept.

    A reader that was refused half-way through a hostile pickle holds all that it has read of it.
    """
    one: BaseException | None = error
    while one is not None:
        one.__traceback__ = None
        one = one.__cause__ or one.__context__


@contextmanager
def memory_errors() -> Iterator[None]:
    """Turn the system's refusal of memory into an error that says what to do."""
    try:
        yield
    except MemoryError as error:
        release_frames(error)
        message = "the system has no more memory for this run, whose process may be limited"
        raise MemoryLimitError(
            f"{message} (ulimit -v, a cgroup): run it where more is free, or with a lower "
            f"{Option('memory_limit')} or fewer {Option('workers')}. What was written is kept, and "
            "a rerun goes on"
        ) from None


def raise_first(errors: Iterable[StreamshardError]) -> None:
    """Raise the first of the errors that a check yields, if there is one.

    A check yields errors so that opening can stop at the first, and `verify` can list them all.
    """
    for error in errors:
        raise error
