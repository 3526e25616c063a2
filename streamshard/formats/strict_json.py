"""Reads JSON that all readers interpret alike: in UTF-8, each key once, no NaN, not endless."""

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NoReturn, TypeVar, cast

T = TypeVar("T")


def parse(data: bytes) -> Any:  # noqa: ANN401
    """Read a JSON document."""
    try:
        return json.loads(data.decode(), object_pairs_hook=_each_once, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def make(kind: type[T], values: Mapping[str, Any]) -> T:
    """Make a dataclass of plain values, and check those that are a number, a text or a flag."""
    made: Any = kind(**values)
    for one in fields(made):
        value = getattr(made, one.name)
        if one.type in (bool, int, str) and type(value) is not one.type:
            raise ValueError(f"{one.name} is {value!r:.80}")
    return cast(T, made)


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("holds a key twice")
    return found


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"holds {constant}, which is not JSON")
