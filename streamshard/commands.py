"""Writes the commands of this package that messages show."""

import shlex


def command(verb: str, *arguments: object) -> str:
    """Write a command as it can be pasted into a shell; it stands at the end of a line.

    >>> command("inspect", "my runs/7b")
    "streamshard inspect 'my runs/7b'"
    """
    return shlex.join(["streamshard", verb, *map(str, arguments)])
