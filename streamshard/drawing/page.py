"""Puts a report on `page.html`, whose script draws it; the page fetches nothing.

A table is an object of columns. A column is a list of values, or says how to make it: of runs of
whole numbers, of a column that is there several times, or as the column of a number in `columns`.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pkgutil import get_data
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from streamshard.layout.cutting import Ints

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Document = dict[str, Any]
HEAD: Final = b"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="generator" content="streamshard">
"""
"""The beginning of every page, by which streamshard recognizes its pages."""
_PLACE: Final = b'<script type="application/json" id="document">'
"""The document follows it."""
_MOST_TIMES: Final = 64
_LONG: Final = 32


def page(title: str, document: Mapping[str, Any]) -> bytes:
    """Return the page of a document.

    No text of a document can end the element that it is in, and control characters are escaped.
    """
    shown = json.dumps(_finite({"title": title, **document}), separators=(",", ":"))
    data = shown.replace("<", "\\u003c").replace("\x7f", "\\u007f").encode()
    return (get_data(__package__, "page.html") or b"").replace(_PLACE, _PLACE + data, 1)


def table(rows: "Sequence[DataclassInstance]") -> Document:
    dicts = [asdict(row) for row in rows]
    return {name: column([row[name] for row in dicts]) for name in (dicts[0] if dicts else ())}


def column(values: Iterable[Any] | Ints) -> list[Any] | Document:
    """Return a column: its values, or something shorter that says them.

    A run is its first value, step and count.

    >>> column([5, 5, 5, 5, 6, 7, 8]), column([3, 1]), column(["a", "b"] * 9)
    ({'runs': [[5, 0, 4], [6, 1, 3]]}, [3, 1], {'times': 9, 'of': ['a', 'b']})
    """
    cells = list(values.tolist() if isinstance(values, np.ndarray) else values)
    runs: list[list[int]] = []
    for value in cells if all(type(value) is int for value in cells) else ():
        run = runs[-1] if runs else [value, 0, 0]
        if run[2] == 1:
            run[1] = value - run[0]
        if runs and value == run[0] + run[1] * run[2]:
            run[2] += 1
        else:
            runs.append([value, 0, 1])
    if runs and len(runs) * 3 < len(cells):
        return {"runs": runs}
    for times in range(min(_MOST_TIMES, len(cells) // 2), 1, -1):
        once = cells[: len(cells) // times]
        if once * times == cells:
            return {"times": times, "of": column(once)}
    return cells


def pooled(node: Any, pool: dict[str, int]) -> Any:  # noqa: ANN401
    """Replace long lists in a document by their numbers in a pool, which has each once, as JSON."""
    if isinstance(node, dict):
        return {key: pooled(value, pool) for key, value in node.items()}
    if not isinstance(node, list):
        return node
    if len(node) < _LONG or isinstance(node[0], dict):
        return [pooled(value, pool) for value in node]
    return {"column": pool.setdefault(json.dumps(node), len(pool))}


def _finite(value: Any) -> Any:  # noqa: ANN401
    """Return a document as JSON knows it, which has neither infinity nor NaN."""
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
