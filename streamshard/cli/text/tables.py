"""Lays out text for people: tables, facts, paragraphs."""

import itertools
import re
import shutil
import textwrap
import unicodedata
from collections.abc import Sequence
from typing import Final

from streamshard.cli.text.escaping import one_line
from streamshard.sizes import UNITS

_NUMBER: Final = re.compile(r"-?[0-9][0-9,.]*(e[+-]?[0-9]+)?")
_LEAST_TEXT: Final = 4
"""Columns of a table to which text is wrapped at the narrowest."""
_LEAST_WIDTH: Final = 30
"""The same for the texts of facts."""


def bold(text: str) -> str:
    """Show a line in bold on a terminal."""
    return f"\x1b[1m{text}\x1b[0m"


def facts_text(facts: Sequence[tuple[str, object]], *, wraps: bool = False) -> str:
    """Put names before their texts; if it `wraps`, a text may have lines, and gets more of them."""
    indent = max(len(name) for name, _ in facts) + 2
    width, shown = max(_width() - indent, _LEAST_WIDTH), []
    for name, value in facts:
        first, *others = _lines(str(value), width) if wraps else [one_line(str(value))]
        shown += [f"{name:{indent}}{first}", *(" " * indent + other for other in others)]
    return "\n".join(line.rstrip() for line in shown)


def paragraph(text: str) -> str:
    """Wrap text at the terminal's width."""
    return "\n".join(_lines(text, _width()))


def _width() -> int:
    return min(100, shutil.get_terminal_size((100, 24)).columns)


def _lines(text: str, width: int) -> list[str]:
    """Wrap the lines of a text; those that are indented are kept, so that they can be copied."""
    return [
        piece
        for line in text.split("\n")
        for piece in (
            [line]
            if not line or line.startswith(" ")
            else textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False)
        )
    ]


def more_text(left: int, hint: str = "-v shows all", what: str = "more") -> str:
    """Say how much is left out, and what shows it; empty if nothing is."""
    return f"{left:,} {what}: {hint}." if left > 0 else ""


def table(
    rows: Sequence[Sequence[object]], width: int | None = None, *, of_numbers: bool = False
) -> str:
    """Align columns, numbers to the right; the first row is the head.

    `width`: columns of a terminal, which gets a bold head, and in which text is wrapped, but no
    number. None for any other output: nothing is wrapped there.
    `of_numbers`: whether all columns but the first hold numbers, whatever they look like.
    """
    texts = [[one_line(str(cell)) for cell in row] for row in rows]
    columns = list(zip(*texts, strict=True))
    right = [all(map(_is_number, column[1:])) for column in columns]
    if of_numbers:
        right[1:] = [True] * len(right[1:])
    widths = [max(map(_columns, column)) for column in columns]
    if width is not None:
        widths = _narrowed(widths, right, width)
    lines = [_row_lines(row, widths, right) for row in texts]
    head = lines[0] if width is None else [bold(line) for line in lines[0]]
    dashes = "  ".join("-" * width for width in widths)
    return "\n".join([*head, dashes, *(line for row in lines[1:] for line in row)])


def _narrowed(widths: Sequence[int], is_number: Sequence[bool], most: int) -> list[int]:
    """Narrow the widest columns of text until the table fits, as far as that goes."""
    new_widths = list(widths)
    texts = [i for i, fixed in enumerate(is_number) if not fixed and new_widths[i] > _LEAST_TEXT]
    excess = sum(new_widths) + 2 * (len(new_widths) - 1) - most
    while excess > 0 and texts:
        widest = max(texts, key=new_widths.__getitem__)
        new_widths[widest] -= 1
        excess -= 1
        if new_widths[widest] == _LEAST_TEXT:
            texts.remove(widest)
    return new_widths


def _row_lines(row: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> list[str]:
    wrapped = [_wrapped(cell, width) for cell, width in zip(row, widths, strict=True)]
    lines = []
    for cells in itertools.zip_longest(*wrapped, fillvalue=""):
        gaps = [" " * (width - _columns(cell)) for cell, width in zip(cells, widths, strict=True)]
        both = zip(cells, gaps, right, strict=True)
        aligned = (gap + cell if to_right else cell + gap for cell, gap, to_right in both)
        lines.append("  ".join(aligned).rstrip())
    return lines


def _wrapped(cell: str, width: int) -> list[str]:
    if _columns(cell) <= width:
        return [cell]
    letters = width if _columns(cell) == len(cell) else width // 2
    return textwrap.wrap(cell, letters, break_on_hyphens=False)


def _columns(text: str) -> int:
    """Count the columns that a text takes in a terminal, where some letters take two.

    >>> _columns("layer"), _columns("層")
    (5, 2)
    """
    return len(text) + sum(unicodedata.east_asian_width(letter) in "WF" for letter in text)


def _is_number(text: str) -> bool:
    """Tell whether a cell is a number, a size, or the dash that stands for none.

    >>> [_is_number(text) for text in ("1,024", "1e-08", "1.5 KiB", "-", "3 files")]
    [True, True, True, True, False]
    """
    number, _, unit = text.partition(" ")
    return text == "-" or (bool(_NUMBER.fullmatch(number)) and unit in ("", *UNITS))
