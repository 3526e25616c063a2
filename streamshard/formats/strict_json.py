"""Reads JSON that all readers interpret alike: in UTF-8, each key once, no NaN, not endless."""

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, NoReturn, TypeVar, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")


def parse(data: bytes) -> Any:  # noqa: ANN401
    try:
        return json.loads(data.decode(), object_pairs_hook=_each_once, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def make(kind: type[T], value: object) -> T:
    """Make a dataclass of parsed JSON; an error says which field has no value of its type.

    Fields may be texts, whole numbers, flags, dataclasses of these, `X | None`, `tuple[X, ...]`
    and `Mapping[str, X]`. What a class lists as `RETIRED` earlier versions wrote; it is ignored.
    """
    return cast(T, _made(kind, value, "$"))


def _made(kind: Any, value: Any, at: str) -> Any:  # noqa: ANN401
    if is_dataclass(kind):
        types = _types(cast("type", kind))
        retired = getattr(kind, "RETIRED", ())
        entries = {n: one for n, one in _of_type(dict, value, at).items() if n not in retired}
        required = [f.name for f in fields(kind) if f.default is f.default_factory is MISSING]
        for name in (*required, *entries):
            if name not in entries or name not in types:
                raise ValueError(f"{at}.{name} is {'missing' if name in types else 'unknown'}")
        return cast("Any", kind)(
            **{n: _made(types[n], one, f"{at}.{n}") for n, one in entries.items()}
        )
    if isinstance(kind, UnionType):
        return None if value is None else _made(get_args(kind)[0], value, at)
    if get_origin(kind) is tuple:
        items, inner = _of_type(list, value, at), get_args(kind)[0]
        return tuple(_made(inner, one, f"{at}[{n}]") for n, one in enumerate(items))
    if get_origin(kind) is Mapping:
        inner = get_args(kind)[1]
        return {n: _made(inner, one, f"{at}.{n}") for n, one in _of_type(dict, value, at).items()}
    return _of_type(kind, value, at)


@cache
def _types(kind: type) -> Mapping[str, Any]:
    found = get_type_hints(kind)
    return {field.name: found[field.name] for field in fields(kind)}


def _of_type(kind: type[T], value: object, at: str) -> T:
    if type(value) is not kind:
        raise ValueError(f"{at} is {value!r:.80}")
    return value


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("holds a key twice")
    return found


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"holds {constant}, which is not JSON")
