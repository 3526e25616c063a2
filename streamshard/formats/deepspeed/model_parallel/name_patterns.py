"""Patterns of parameter names out of files: expressions that DeepSpeed runs with `re.match`.

Some expressions take forever. Those that are run here cannot: they are single characters and
classes of them, a few of which may be repeated. AutoTP's match one name each; Megatron-DeepSpeed's
have the number of a layer in them (`\\d+`).
"""

import re
from collections.abc import Iterable, Mapping
from typing import Final, Generic, TypeVar

from streamshard.errors import DisagreementError, UnsupportedError
from streamshard.formats.pickle.inert import show

_V = TypeVar("_V")

_ONE: Final = r"(?:\\[^A-Za-z0-9]|\\[dDwWsS]|\[[^]\\[^]+\]|[^][\\^$.*+?{}()|]|\.)"
"""What stands for one character."""
_STEP: Final = re.compile(rf"{_ONE}([*+?]?)")
_MOST_REPEATED: Final = 3
_LONGEST: Final = 512
"""Characters of a pattern, and of a name that one with repetitions is tried on: so tens of millions
of steps are the most that one takes."""


class NamePatterns(Generic[_V]):
    """A value for each parameter that a pattern matches."""

    def __init__(self, patterns: Mapping[str, _V] | Iterable[tuple[str, _V]]) -> None:
        """Take the patterns.

        Raises
        ------
        UnsupportedError
            One is not of the kind that is run here.
        DisagreementError
            Two match the same single name.
        """
        self._by_name: dict[str, _V] = {}
        self._others: list[tuple[re.Pattern[str], _V]] = []
        for pattern, value in patterns.items() if isinstance(patterns, Mapping) else patterns:
            text = str(pattern)
            name = re.sub(r"\\(.)", r"\1", text[1:-1])
            if text != f"^{re.escape(name)}$":
                self._others.append((_compiled(text), value))
            elif name in self._by_name:
                raise DisagreementError(f"'{name}' is matched by two patterns")
            else:
                self._by_name[name] = value

    def find(self, name: str) -> _V | None:
        """Return the value of the pattern that matches a name, if one does.

        Raises
        ------
        DisagreementError
            Several match.
        UnsupportedError
            The name is too long to be tried.
        """
        found = self.find_all(name)
        if len(found) > 1:
            raise DisagreementError(f"'{name}' is matched by several patterns of one kind")
        return found[0][1] if found else None

    def find_all(self, name: str) -> list[tuple[str, _V]]:
        """List the patterns that match a name, each with its value.

        Raises
        ------
        UnsupportedError
            The name is too long to be tried.
        """
        found = [(f"^{re.escape(name)}$", self._by_name[name])] if name in self._by_name else []
        if self._others and len(name) > _LONGEST:
            raise UnsupportedError(f"a name of {len(name):,} characters: {show(name)}")
        return found + [(each.pattern, value) for each, value in self._others if each.match(name)]


def _compiled(text: str) -> re.Pattern[str]:
    body = text.removeprefix("^").removesuffix("$") if len(text) <= _LONGEST else ""
    steps = list(_STEP.finditer(body))
    repeated = sum(1 for step in steps if step[1])
    if "".join(step[0] for step in steps) != body or repeated > _MOST_REPEATED or not body:
        raise UnsupportedError(
            f"{show(text)} is not a pattern of names that is run here: single characters and "
            f"classes of them, at most {_MOST_REPEATED} of them repeated"
        )
    return re.compile(text)
