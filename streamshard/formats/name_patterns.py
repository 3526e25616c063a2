"""Patterns of names: a star stands for any text, dots too, and `{a,b}` lists alternatives."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Final

from streamshard.errors import UsageError

_PARTS: Final = re.compile(r"\*|\{[^{}]*\}|[^*{}]+")


@dataclass(frozen=True)
class Pattern:
    """A pattern of names, as the rules of a graft and options have it."""

    text: str

    def __post_init__(self) -> None:
        if "".join(self._parts) != self.text:
            raise UsageError(f"'{self.text}': a brace is open; write alternatives as {{a,b}}")
        if any("*" in part for part in self._parts if part.startswith("{")):
            raise UsageError(f"'{self.text}': a list of alternatives has no stars; write two rules")

    @cached_property
    def _parts(self) -> list[str]:
        return _PARTS.findall(self.text)

    @cached_property
    def _expression(self) -> re.Pattern[str]:
        return re.compile("".join(map(_expression_of, self._parts)), re.DOTALL)

    def match(self, name: str) -> tuple[str, ...] | None:
        """Return what stands in place of each star and list; None if the name does not fit.

        >>> Pattern("layers.*.{q,k}").match("layers.3.k")
        ('3', 'k')
        """
        found = self._expression.fullmatch(name)
        return None if found is None else found.groups()

    def translate(self, name: str, target: "Pattern") -> str | None:
        """Return the name that `target` has for one that fits this pattern; None if none does.

        >>> Pattern("b.*.{x,y}").translate("b.3.y", Pattern("a.*.{k,l}"))
        'a.3.l'
        """
        found = self.match(name)
        return None if found is None else "".join(target._filled(self, found))

    def _filled(self, like: "Pattern", captures: Sequence[str]) -> Iterator[str]:
        """Yield this pattern's parts with what `like` found in place of stars and lists."""
        stars = (value for part, value in zip(like._open, captures, strict=True) if part == "*")
        lists = (
            _alternatives(part).index(value)
            for part, value in zip(like._open, captures, strict=True)
            if part != "*"
        )
        for part in self._parts:
            if part == "*":
                yield next(stars)
            elif part.startswith("{"):
                yield _alternatives(part)[next(lists)]
            else:
                yield part

    @property
    def _open(self) -> list[str]:
        return [part for part in self._parts if part[0] in "*{"]

    def require_like(self, other: "Pattern") -> None:
        """Refuse a pattern with other stars and lists than another one has."""
        kinds = [
            [len(_alternatives(part)) for part in pattern._open if part != "*"]
            + [part == "*" for part in pattern._open if part == "*"]
            for pattern in (self, other)
        ]
        if kinds[0] != kinds[1]:
            message = f"'{self.text}' and '{other.text}': both need as many stars and equally long"
            raise UsageError(f"{message} lists, as each star stands for what the other one does")


def is_named(name: str, patterns: Sequence[str]) -> bool:
    """Tell whether a name fits one of some patterns.

    >>> is_named("layers.0.w", ["embed", "layers.*.{w,b}"])
    True
    """
    return any(_pattern(text).match(name) is not None for text in patterns)


@cache
def _pattern(text: str) -> Pattern:
    return Pattern(text)


def _alternatives(part: str) -> list[str]:
    return part[1:-1].split(",")


def _expression_of(part: str) -> str:
    if part == "*":
        return "(.*?)"
    if part.startswith("{"):
        return f"({'|'.join(map(re.escape, _alternatives(part)))})"
    return re.escape(part)
