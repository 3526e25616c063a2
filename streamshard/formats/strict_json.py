"""Reads JSON that all readers interpret alike: in UTF-8, each key once, no NaN, not endless."""

import json
from typing import Any, NoReturn


def parse(data: bytes) -> Any:  # noqa: ANN401
    """Read a JSON document.

    Raises
    ------
    ValueError
        The data is not JSON, or readers may interpret it in several ways.
    """
    try:
        return json.loads(data.decode(), object_pairs_hook=_each_once, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("holds a key twice")
    return found


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"holds {constant}, which is not JSON")
