"""The rules of a graft: where the values come from where SRC and START differ, one a line."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from streamshard.errors import UsageError
from streamshard.formats.name_patterns import Pattern

NEW: Final = "new"
FRESH: Final = "fresh"
ROWS: Final = "rows"
COPY: Final = "copy"
MOVE: Final = "move"
THAW: Final = "thaw"
FREEZE: Final = "freeze"
DROP: Final = "drop"
WARM: Final = "warm"
_SCHEDULER_OF_START: Final = "scheduler start"
_NAMING: Final[Mapping[str, str]] = {COPY: "<-", MOVE: "->"}
"""Rules that name a source → the arrow between their patterns."""
_MAY_BE_WARM: Final = (NEW, ROWS, FRESH, THAW)
_WORDS: Final = (NEW, FRESH, ROWS, COPY, MOVE, THAW, FREEZE, DROP)
_TOGETHER: Final = ({ROWS, THAW}, {ROWS, FREEZE}, {ROWS, FRESH})
"""Rules that name no source, of which one parameter may have both."""


@dataclass(frozen=True)
class GraftRule:
    """One line of the rules."""

    text: str
    word: str
    pattern: Pattern
    """Of names in START; for `drop` of names in SRC."""
    source: Pattern | None = None
    """Of names in SRC, for `copy` and `move`."""
    is_warm: bool = False


@dataclass(frozen=True)
class Choice:
    """What the rules say of one parameter of START."""

    source: str
    """The name in SRC whose values it takes."""
    words: frozenset[str] = frozenset()
    """The rules that it has, except those that only name its source."""
    naming: str = ""
    """`copy` or `move`, where a rule names its source."""
    is_warm: bool = False

    @property
    def label(self) -> str:
        """What tables call it: its rules, or `kept`."""
        words = [word for word in _WORDS if word in self.words or word == self.naming]
        return " ".join(words + [WARM] * self.is_warm) or "kept"


@dataclass(frozen=True)
class Rules:
    """All rules of a graft, in their order."""

    rules: tuple[GraftRule, ...] = ()
    scheduler_of_start: bool = False
    is_fresh: bool = False
    """Whether no states of the optimizer are kept."""

    @classmethod
    def of(cls, text: str, *, is_fresh: bool = False) -> "Rules":
        """Read rules, one a line; what follows a `#` is a comment."""
        lines = [line.partition("#")[0].split() for line in text.splitlines()]
        words = [line for line in lines if line]
        own = _SCHEDULER_OF_START.split()
        rules = tuple(_rule(line) for line in words if line != own)
        return cls(rules, own in words, is_fresh)

    @property
    def lines(self) -> list[str]:
        """The rules as they were written, without comments."""
        return [rule.text for rule in self.rules] + [_SCHEDULER_OF_START] * self.scheduler_of_start

    def choice(self, name: str) -> Choice:
        """Return what the rules say of a parameter, frozen weight or buffer of START."""
        rules = [r for r in self.rules if r.word != DROP and r.pattern.match(name) is not None]
        naming = [rule for rule in rules if rule.source is not None]
        words = {rule.word for rule in rules} - {*_NAMING}
        if len(naming) > 1 or (len(words) > 1 and words not in _TOGETHER):
            listed = "; ".join(rule.text for rule in rules)
            message = f"'{name}' has rules that exclude each other: {listed}. Leave one of them out"
            raise UsageError(message)
        source = name
        for rule in naming:
            source = rule.pattern.translate(name, rule.source or rule.pattern) or name
            if NEW in words:
                raise UsageError(f"'{name}' is new, and '{rule.text}' names its source: leave one")
        named = naming[0].word if naming else ""
        return Choice(source, frozenset(words), named, any(rule.is_warm for rule in rules))

    def drops(self, name: str) -> bool:
        """Tell whether a name of SRC is dropped."""
        return any(r.word == DROP and r.pattern.match(name) is not None for r in self.rules)

    def require_used(
        self,
        source: Sequence[str],
        start: Sequence[str],
        source_ties: Mapping[str, str],
        start_ties: Mapping[str, str],
    ) -> None:
        """Refuse a rule that matches no name. Ties: further names → the names that are matched."""
        for rule in self.rules:
            names, ties, where = start, start_ties, "START"
            if rule.word == DROP:
                names, ties, where = source, source_ties, "SRC"
            if not any(rule.pattern.match(name) is not None for name in names):
                message = f"'{rule.text}' matches no name of {where}"
                tied = next((n for n in ties if rule.pattern.match(n) is not None), None)
                if tied is not None:
                    message = f"{message} but '{tied}', which is tied to '{ties[tied]}'"
                    raise UsageError(f"{message}: leave the line out, or name that one")
                raise UsageError(f"{message}; one is '{next(iter(names), '')}'")


def _rule(words: Sequence[str]) -> GraftRule:
    text = " ".join(words)
    word, arguments = words[0], list(words[1:])
    if word not in _WORDS:
        message = f"'{text}': no rule; there are {', '.join(_WORDS)}, and '{_SCHEDULER_OF_START}'"
        raise UsageError(message)
    is_warm = arguments[:1] == [WARM] and word in _MAY_BE_WARM
    arguments = arguments[is_warm:]
    if word not in _NAMING:
        if len(arguments) != 1:
            raise UsageError(f"'{text}': give one pattern of names, such as '{word} layers.*'")
        return GraftRule(text, word, Pattern(arguments[0]), is_warm=is_warm)
    arrow = _NAMING[word]
    if len(arguments) != 3 or arguments[1] != arrow:
        forms = {COPY: "copy NEW <- OLD", MOVE: "move OLD -> NEW"}
        raise UsageError(f"'{text}': write it as '{forms[word]}'")
    first, last = Pattern(arguments[0]), Pattern(arguments[2])
    pattern, source = (first, last) if word == COPY else (last, first)
    pattern.require_like(source)
    return GraftRule(text, word, pattern, source)
