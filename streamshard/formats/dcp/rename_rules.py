"""Rules that give the tensors of a checkpoint other names, and split or join fused ones.

A file has a rule in each line; what follows # is a remark::

    decoder.final_layernorm.weight -> model.norm.weight
    decoder.layers.*.linear_fc1.weight -> model.layers.*.{gate,up}_proj.weight : 1 x 1:1
    decoder.layers.*.linear_qkv.weight -> model.layers.*.{q,k,v}_proj.weight : 8 x 4:1:1

A star is anything but a dot. Names in braces are split from one tensor, or joined to one: its rows
are 8 groups, each of 4 parts for q, one for k and one for v. Stars that only the replacement has
are numbers in the tensor's first dimensions, which are taken off.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from streamshard.errors import UsageError
from streamshard.io.entries import read_all

_RULE: Final = re.compile(
    r"(\S+)\s+->\s+(\S+)(?:\s+:\s+(?:(\d{1,5})\s+x\s+)?(\d{1,9}(?::\d{1,9})*))?"
)
_BRACES: Final = re.compile(r"\{([^{}*]*)\}")
_MOST_BYTES: Final = 1 << 20
_FORM: Final = "PATTERN -> REPLACEMENT, or with braces PATTERN -> REPLACEMENT : GROUPS x PART:PART"


@dataclass(frozen=True, slots=True)
class Rule:
    """A line of a file of rules."""

    line: int
    text: str
    sources: tuple[str, ...]
    """Patterns of names; tensors of several are joined."""
    targets: tuple[str, ...]
    """Patterns of the names that they get; several are split from one."""
    groups: int
    parts: tuple[int, ...]
    """How many parts of a group are of each name in braces."""

    @property
    def unstacked(self) -> int:
        """Count of the dimensions that are taken off."""
        return self.targets[0].count("*") - self.sources[0].count("*")

    @property
    def is_plain(self) -> bool:
        """Whether only names change."""
        return len(self.parts) == 1 and not self.unstacked

    def matches(self, name: str) -> list[tuple[int, tuple[str, ...]]]:
        """Return which patterns a name matches, and what stands for their stars.

        >>> rule_of(1, "a.*.{up,down} -> b.* : 1:1").matches("a.7.down")
        [(1, ('7',))]
        """
        found = (
            (n, name_pattern(pattern).fullmatch(name)) for n, pattern in enumerate(self.sources)
        )
        return [(n, match.groups()) for n, match in found if match]


def name_pattern(pattern: str) -> re.Pattern[str]:
    """Return what finds names in which a star stands for anything without a dot."""
    return re.compile(r"([^.]+)".join(map(re.escape, pattern.split("*"))))


def with_stars(pattern: str, stars: Sequence[str]) -> str:
    """Return a pattern with text in the place of its stars.

    >>> with_stars("layers.*.experts.*.up", ["3", "0"])
    'layers.3.experts.0.up'
    """
    first, *others = pattern.split("*")
    return first + "".join(star + other for star, other in zip(stars, others, strict=True))


def read_rules(path: Path) -> tuple[Rule, ...]:
    try:
        lines = read_all(path, _MOST_BYTES).decode().splitlines()
    except UnicodeDecodeError as error:
        raise UsageError(f"is no text in UTF-8: {error}", path=path) from error
    cut = ((number, line.partition("#")[0].strip()) for number, line in enumerate(lines, 1))
    try:
        rules = tuple(rule_of(number, text) for number, text in cut if text)
    except UsageError as error:
        raise UsageError(str(error), path=path) from error
    if not rules:
        raise UsageError(f"has no rule; a line is {_FORM}", path=path)
    return rules


def rule_of(line: int, text: str) -> Rule:
    """Read a rule.

    >>> rule_of(1, "qkv.* -> {q,k}.* : 8 x 4:1").targets
    ('q.*', 'k.*')
    """
    match = _RULE.fullmatch(text)
    if match is None:
        raise UsageError(f"line {line}: '{text}' is no rule: {_FORM}")
    pattern, replacement, groups, parts = match.groups()
    sources, targets = _expanded(pattern), _expanded(replacement)
    rule = Rule(line, text, sources, targets, int(groups or 1), _numbers(parts))
    if problem := _problem(rule, has_parts=parts is not None):
        raise UsageError(f"line {line}: {problem}: '{text}'")
    return rule


def _expanded(pattern: str) -> tuple[str, ...]:
    match = _BRACES.search(pattern)
    if match is None:
        return (pattern,)
    return tuple(pattern[: match.start()] + n + pattern[match.end() :] for n in match[1].split(","))


def _numbers(parts: str | None) -> tuple[int, ...]:
    return (1,) if parts is None else tuple(map(int, parts.split(":")))


def _problem(rule: Rule, *, has_parts: bool) -> str:
    """Say what is wrong with a rule; nothing if it is right."""
    every = (*rule.sources, *rule.targets)
    names = max(len(rule.sources), len(rule.targets))
    if any(brace in name for name in every for brace in "{}") or len(every) > names + 1:
        return "it may have one pair of braces, without stars in them"
    if any("**" in name for name in every):
        return "between two stars there must be something"
    if len(set(rule.sources)) + len(set(rule.targets)) < len(every):
        return "a name is twice in the braces"
    if names > 1 and not has_parts:
        return "braces need ': GROUPS x PART:PART', how the rows are divided"
    if len(rule.parts) != names or (has_parts and names == 1):
        return f"{names} names for {len(rule.parts)} parts"
    if not rule.groups or not all(rule.parts):
        return "groups and parts are at least 1"
    if rule.unstacked < 0 or (rule.unstacked and len(rule.sources) > 1):
        return "the replacement has too few stars" if rule.unstacked < 0 else (
            "what is joined must have as many stars on both sides"
        )  # fmt: skip
    return ""
