"""Escapes what comes from files and arguments before it goes to a terminal or into a log."""

import re
from typing import Final

_SECRET: Final = re.compile(r"(?<=:/)(/*)[^/\s@]+@")
"""What is before the host of a URL: a user's name, and often a password."""


def printable(text: str) -> str:
    r"""Escape unprintable characters: a name from a file could send commands to the terminal.

    Users and passwords in URLs are left out.

    >>> printable("layer\x1b[2J"), printable("s3://me:secret@bucket/x")
    ('layer\\x1b[2J', 's3://...@bucket/x')
    """
    shown = "".join(
        letter if letter.isprintable() or letter == "\n" else repr(letter)[1:-1] for letter in text
    )
    return _SECRET.sub(r"\1...@", shown)


def one_line(text: str) -> str:
    r"""Escape line breaks too: a name with one could forge a line of a log.

    >>> one_line("a\nstreamshard: all is well")
    'a\\nstreamshard: all is well'
    """
    return printable(text).replace("\n", "\\n")
