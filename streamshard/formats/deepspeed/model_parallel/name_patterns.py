"""Patterns of parameter names out of files: expressions that DeepSpeed runs with `re.match`.

Some expressions take forever. Those that are run here cannot: they are single characters and
classes of them, a few of which may be repeated, and where several are, all ways of repeating them
are followed at once. AutoTP's match one name each; Megatron-DeepSpeed's have the number of a layer
in them (`\\d+`).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Generic, TypeVar

from streamshard.errors import DisagreementError, UnsupportedError
from streamshard.formats.pickle.inert import show

_V = TypeVar("_V")

_ONE: Final = r"(?:\\[^A-Za-z0-9]|\\[dDwWsS]|\[[^]\\[^]+\]|[^][\\^$.*+?{}()|]|\.)"
"""What stands for one character."""
_STEP: Final = re.compile(rf"{_ONE}([*+?]?)")
_MOST_REPEATED: Final = 3
_LONGEST: Final = 512
"""Characters of a pattern, and of a name that it is tried on."""


class NamePatterns(Generic[_V]):
    """A value for each parameter that a pattern matches."""

    def __init__(self, patterns: Mapping[str, _V] | Iterable[tuple[str, _V]]) -> None:
        self._by_name: dict[str, _V] = {}
        self._others: list[tuple[re.Pattern[str] | _Repetitions, _V]] = []
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
        """Return the value of the pattern that matches a name, if one does."""
        found = self.find_all(name)
        if len(found) > 1:
            raise DisagreementError(f"'{name}' is matched by several patterns of one kind")
        return found[0][1] if found else None

    def find_all(self, name: str) -> list[tuple[str, _V]]:
        """List the patterns that match a name, each with its value."""
        found = [(f"^{re.escape(name)}$", self._by_name[name])] if name in self._by_name else []
        if self._others and len(name) > _LONGEST:
            raise UnsupportedError(f"a name of {len(name):,} characters: {show(name)}")
        return found + [(each.pattern, value) for each, value in self._others if each.match(name)]


class _Repetitions:
    """An expression with several repetitions, matched in one pass over a name.

    The steps that could be next are the bits of a number. `re` would go back to try each count of
    one repetition with each count of the others.
    """

    def __init__(self, text: str, steps: Sequence[re.Match[str]]) -> None:
        self.pattern = text
        self._ends = text.endswith("$")
        self._steps: list[re.Pattern[str]] = []
        self._repeated = self._optional = 0
        self._known: dict[str, int] = {}
        for step in steps:
            one, many = re.compile(step[0].removesuffix(step[1])), step[1]
            if many == "+":
                self._steps.append(one)
            bit = 1 << len(self._steps)
            self._repeated |= bit if many in ("*", "+") else 0
            self._optional |= bit if many else 0
            self._steps.append(one)

    def match(self, name: str) -> bool:
        """Tell whether `re.match` finds the expression at the beginning of a name."""
        done = 1 << len(self._steps)
        possible = self._skipped(1)
        # `$` is the end of a name, and the place before a line break there.
        ends = (len(name), len(name) - name.endswith("\n"))
        for at, letter in enumerate((*name, "")):
            if possible & done and (at in ends or not self._ends):
                return True
            here = possible & self._fitting(letter)
            possible = self._skipped(here & self._repeated | (here & ~self._repeated) << 1)
        return False

    def _skipped(self, possible: int) -> int:
        for _ in range(_MOST_REPEATED):
            possible |= (possible & self._optional) << 1
        return possible

    def _fitting(self, letter: str) -> int:
        if letter not in self._known:
            fits = (bool(step.fullmatch(letter)) << n for n, step in enumerate(self._steps))
            self._known[letter] = sum(fits) if letter else 0
        return self._known[letter]


def _compiled(text: str) -> re.Pattern[str] | _Repetitions:
    body = text.removeprefix("^").removesuffix("$") if len(text) <= _LONGEST else ""
    steps = list(_STEP.finditer(body))
    repeated = sum(1 for step in steps if step[1])
    if "".join(step[0] for step in steps) != body or repeated > _MOST_REPEATED or not body:
        raise UnsupportedError(
            f"{show(text)} is not a pattern of names that is run here: single characters and "
            f"classes of them, at most {_MOST_REPEATED} of them repeated"
        )
    return _Repetitions(text, steps) if repeated > 1 else re.compile(text)
