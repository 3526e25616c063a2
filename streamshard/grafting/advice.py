"""Advises rules for differences, as few lines as possible.

Parameters may have another name because a wrapper was put around a module, or taken off:
`base_model.model.layers.0.q.base_layer.weight` of PEFT is `layers.0.q.weight`; torch.compile and
data-parallel wrappers put `_orig_mod` or `module` in between.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from streamshard.formats.name_patterns import Pattern

Shape = tuple[int, ...]
_SIGNS: Final = re.compile(r"[\s#*{}]+")
"""What has a meaning in the file of rules."""


def renames(new: Mapping[str, Shape], old: Mapping[str, Shape]) -> dict[str, str]:
    """Return new name → old name, where one is the other with further parts, and no third fits.

    >>> renames({"base.q.layer.weight": (4,), "a": (2,)}, {"q.weight": (4,), "b": (2,)})
    {'base.q.layer.weight': 'q.weight'}
    """
    fitting = _fitting(new, old)
    uses = Counter(other for others in fitting.values() for other in others)
    return {
        name: others[0]
        for name, others in fitting.items()
        if len(others) == 1 and uses[others[0]] == 1
    }


def comment_on(new: Mapping[str, Shape], old: Mapping[str, Shape]) -> list[str]:
    """Return a comment if several new names are an old one with further parts."""
    several: dict[str, list[str]] = {}
    for name, others in _fitting(new, old).items():
        for other in others:
            several.setdefault(other, []).append(name)
    for other, names in several.items():
        if len(names) > 1:
            message = f"# SRC's '{other}' may be '{names[0]}' or '{names[1]}': to keep what it"
            message = f"{message} learned, write 'copy {names[0]} <- {other}' in place of 'new' and"
            return [f"{message} 'drop'."]
    return []


def _fitting(new: Mapping[str, Shape], old: Mapping[str, Shape]) -> dict[str, list[str]]:
    """Return new name → the old names of which it may be one."""
    alike: dict[object, list[str]] = {}
    for name, shape in old.items():
        alike.setdefault(_key(name, shape), []).append(name)
    return {
        name: [other for other in alike.get(_key(name, shape), ()) if _is_wrapped(name, other)]
        for name, shape in new.items()
    }


def lines_of_moves(moves: Mapping[str, str], names: Sequence[str]) -> list[str]:
    """Return `move` rules, as few as possible. `moves`: new → old name. `names`: all of START."""
    alike: dict[tuple[str, str], dict[str, str]] = {}
    for new, old in moves.items():
        alike.setdefault((_with_stars(old), _with_stars(new)), {})[new] = old
    lines = []
    for (old_shown, new_shown), group in alike.items():
        old_pattern, new_pattern = Pattern(old_shown), Pattern(new_shown)
        matched = {
            name: new_pattern.translate(name, old_pattern)
            for name in names
            if new_pattern.match(name) is not None
        }
        is_short = (len(group) > 1 or _has_signs(group)) and matched == group
        pairs = [(new_shown, old_shown)] if is_short else group.items()
        lines += [f"move {old} -> {new}" for new, old in pairs]
    return lines


def lines_for(needed: Mapping[str, Iterable[str]], names: Mapping[str, Sequence[str]]) -> list[str]:
    """Return rules that would name differences, as few lines as possible.

    `needed`: rule → the names that need it. `names`: rule → all names that it could match.
    """
    return [
        f"{word} {pattern}"
        for word, wanted in needed.items()
        for pattern in _patterns_for(wanted, names[word])
    ]


def _patterns_for(wanted: Iterable[str], names: Sequence[str]) -> Iterator[str]:
    """Yield patterns that match these names and no others."""
    alike: dict[str, list[str]] = {}
    for name in wanted:
        alike.setdefault(_with_stars(name), []).append(name)
    for shown, group in alike.items():
        pattern = Pattern(shown)
        matched = {name: found for name in names if (found := pattern.match(name)) is not None}
        if _has_signs(group) and {*matched} == {*group}:
            yield shown
        elif len(group) == 1 or (shown.count("*") > 1 and {*matched} != {*group}):
            yield from group
        elif {*matched} == {*group}:
            yield shown
        else:
            yield shown.replace("*", f"{{{','.join(matched[name][0] for name in group)}}}")


def _key(name: str, shape: Shape) -> object:
    parts = name.split(".")
    return shape, parts[-1], tuple(part for part in parts if _with_stars(part) != part)


def _is_wrapped(name: str, other: str) -> bool:
    """Tell whether all parts of one name are in the other, in their order."""
    shorter, longer = sorted((name.split("."), other.split(".")), key=len)
    rest = iter(longer)
    return all(part in rest for part in shorter)


def _has_signs(names: Iterable[str]) -> bool:
    return any(map(_SIGNS.search, names))


def _with_stars(name: str) -> str:
    """Put a star in place of numbers, and of signs that no pattern can have."""
    parts = name.split(".")
    return ".".join("*" if part.isdigit() else _SIGNS.sub("*", part) for part in parts)
