"""Formats facts and tables as HTML, which notebooks show instead of a `repr`."""

from collections.abc import Iterable, Sequence
from typing import Final

_MOST_ROWS: Final = 30
"""Rows that a notebook shows of a long table; all rows are available as Python values."""


def page(facts: Iterable[tuple[str, object]], *tables: str) -> str:
    """Put a list of facts above tables."""
    rows = (f"<tr><th>{_text(name)}</th><td>{_text(value)}</td></tr>" for name, value in facts)
    return "".join(["<table>", *rows, "</table>", *tables])


def table(head: Sequence[str], rows: Sequence[Sequence[object]], more: str = "") -> str:
    """Show the first rows of a table.

    `more`: text that says where to find all rows, if there are more.
    """
    names = "".join(f"<th>{_text(name)}</th>" for name in head)
    lines = (f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows[:_MOST_ROWS])
    parts = ["<table><thead><tr>", names, "</tr></thead><tbody>", *lines, "</tbody></table>"]
    if len(rows) > _MOST_ROWS:
        parts.append(f"<p>{len(rows) - _MOST_ROWS:,} more; {_text(more)}</p>")
    return "".join(parts)


def ranks_text(ranks: Sequence[int] | None) -> str:
    """Return a short text for ranks; a store has none.

    >>> ranks_text((3,)), ranks_text(range(4)), ranks_text((1, 3, 5)), ranks_text(None)
    ('3', '0-3', '1, 3, 5', '-')
    """
    if not ranks:
        return "-"
    if len(ranks) > 1 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}-{ranks[-1]}"
    return ", ".join(map(str, ranks))


def _cell(value: object) -> str:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return f"<td>{value:,}</td>" if is_number else f"<td>{_text(value)}</td>"


def _text(value: object) -> str:
    """Return a value as escaped text: the names in a file come from its author."""
    # Not at the top: `html` loads a table of all entities, and verbs that move bytes load this
    # module.
    from html import escape

    if value is None:
        return "-"
    if isinstance(value, tuple):
        return escape(", ".join(map(str, value)))
    return escape(str(value))
