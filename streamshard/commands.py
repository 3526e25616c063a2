"""Writes the commands of this package that messages show."""

import shlex
from collections.abc import Iterator


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
