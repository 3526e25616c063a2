"""Gives the tensors of a distributed checkpoint other names, by rules; splits and joins fused ones.

A rule is a line; what follows # is a remark::

    decoder.final_layernorm.weight -> model.norm.weight
    decoder.layers.*.linear_fc1.weight -> model.layers.*.{gate,up}_proj.weight : 1 x 1:1
    decoder.layers.*.linear_qkv.weight -> model.layers.*.{q,k,v}_proj.weight : 8 x 4:1:1

A star is anything but a dot. Names in braces are split from one tensor, or joined to one: its rows
are 8 groups, each of 4 parts for q, one for k and one for v. Stars that only the replacement has
are numbers in the tensor's first dimensions, which are taken off. A tensor that is made is a set of
boxes of the saved ones. States of the optimizer go with their parameters.
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Final

import numpy as np

from streamshard.errors import CorruptFileError, DisagreementError, UnsupportedError, UsageError
from streamshard.formats.dcp.dcp_reader import Distributed, tiled
from streamshard.formats.dcp.item_reader import TensorPlaces
from streamshard.formats.dcp.metadata_reader import Ints, SavedItems, SavedTensor
from streamshard.formats.dcp.optimizer_state import SavedGroup
from streamshard.formats.facts import RuleLines
from streamshard.formats.pickle.inert import show, show_few
from streamshard.model import ITEMSIZE
from streamshard.sizes import counted

_RULE: Final = re.compile(
    r"(\S+)\s+->\s+(\S+)(?:\s+:\s+(?:(\d{1,5})\s+x\s+)?(\d{1,9}(?::\d{1,9})*))?"
)
_BRACES: Final = re.compile(r"\{([^{}*]*)\}")
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

        >>> _rule_of(1, "a.*.{up,down} -> b.* : 1:1").matches("a.7.down")
        [(1, ('7',))]
        """
        found = (
            (n, name_pattern(pattern).fullmatch(name)) for n, pattern in enumerate(self.sources)
        )
        return [(n, match.groups()) for n, match in found if match]


def name_pattern(pattern: str) -> re.Pattern[str]:
    """Return what finds names in which a star stands for anything without a dot."""
    return re.compile(r"([^.]+)".join(map(re.escape, pattern.split("*"))))


def _with_stars(pattern: str, stars: Sequence[str]) -> str:
    """Return a pattern with text in the place of its stars.

    >>> _with_stars("layers.*.experts.*.up", ["3", "0"])
    'layers.3.experts.0.up'
    """
    first, *others = pattern.split("*")
    return first + "".join(star + other for star, other in zip(stars, others, strict=True))


def read_rules(text: str) -> tuple[Rule, ...]:
    lines = enumerate(text.splitlines(), 1)
    cut = ((number, line.partition("#")[0].strip()) for number, line in lines)
    rules = tuple(_rule_of(number, text) for number, text in cut if text)
    if not rules:
        raise UsageError(f"has no rule; a line is {_FORM}")
    return rules


def _rule_of(line: int, text: str) -> Rule:
    """Read a rule.

    >>> _rule_of(1, "qkv.* -> {q,k}.* : 8 x 4:1").targets
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


_MOST_MADE: Final = 1 << 16
"""More tensors from one than any model has layers and experts."""
Held = tuple[SavedTensor, TensorPlaces]


@dataclass(slots=True)
class _Move:
    """Tensors that become others."""

    rule: Rule | None
    sources: tuple[str, ...]
    targets: tuple[str, ...]
    unit: int = 0
    """Rows of a part."""


def renamed(found: Distributed, given: RuleLines) -> Distributed:
    """Return a checkpoint with other names for its tensors."""
    try:
        rules = read_rules(given.text)
        moves = list(_moves_of(found, rules))
        _require_distinct(moves)
        made = _Made(found)
        for move in moves:
            made.add(move)
    except UsageError as error:
        raise UsageError(f"{given.name}: {error}") from error
    return replace(
        found,
        index=replace(found.index, tensors=made.tensors),
        keys=replace(found.keys, weights=made.weights, states=made.states, groups={}, copies={}),
        places=made.places,
        groups=lambda: _groups(found.groups(), moves),
        remarks=(*found.remarks, *_remarks(rules, moves)),
        unrecorded=(*found.unrecorded, "the order of the parameters: they were renamed"),
    )


def _moves_of(found: Distributed, rules: Sequence[Rule]) -> Iterator[_Move]:
    """Say what becomes of each weight, in their order."""
    names = found.keys.weights
    matched = {name: _match(name, rules) for name in names}
    used = {match[0].line for match in matched.values() if match}
    for rule in rules:
        if rule.line not in used:
            message = f"line {rule.line}: '{rule.text}' is for no tensor"
            raise UsageError(f"{message}; there are {show_few(list(names))}")
    joined: set[tuple[int, tuple[str, ...]]] = set()
    for name, match in matched.items():
        if match is None:
            yield _Move(None, (name,), (name,))
            continue
        rule, stars = match
        if len(rule.sources) == 1:
            yield _Move(rule, (name,), tuple(_made_of(rule, stars, found.weight(name), name)))
        elif (rule.line, stars) not in joined:
            joined.add((rule.line, stars))
            sources = tuple(_with_stars(pattern, stars) for pattern in rule.sources)
            for source in sources:
                if source not in names:
                    message = f"line {rule.line}: '{name}' is to be joined with"
                    raise UsageError(f"{message} {show(source)}, which is not there")
            yield _Move(rule, sources, (_with_stars(rule.targets[0], stars),))


def _match(name: str, rules: Sequence[Rule]) -> tuple[Rule, tuple[str, ...]] | None:
    found = [(rule, stars) for rule in rules for _, stars in rule.matches(name)]
    if len(found) > 1:
        one, other = found[0][0], found[1][0]
        raise UsageError(f"lines {one.line} and {other.line} are both for {show(name)}")
    return found[0] if found else None


def _made_of(rule: Rule, stars: tuple[str, ...], saved: SavedTensor, name: str) -> Iterator[str]:
    """Name what a tensor becomes: for each number that is taken off, the parts."""
    lengths = saved.shape[: rule.unstacked]
    if len(lengths) < rule.unstacked or not 0 < math.prod(lengths) <= _MOST_MADE:
        message = f"line {rule.line}: {show(name)} is {list(saved.shape)}"
        raise UsageError(f"{message}: it cannot be taken apart by {rule.unstacked} dimensions")
    for numbers in product(*map(range, lengths)):
        for target in rule.targets:
            yield _with_stars(target, (*stars, *map(str, numbers)))


def _require_distinct(moves: Iterable[_Move]) -> None:
    made: dict[str, _Move] = {}
    for move in moves:
        for target in move.targets:
            if (other := made.setdefault(target, move)) is not move:
                message = f"{show(other.sources[0])} and {show(move.sources[0])} both become"
                raise UsageError(f"{message} {show(target)}")


@dataclass(slots=True)
class _Made:
    """What the checkpoint holds by its new names."""

    found: Distributed
    tensors: dict[str, SavedTensor] = field(default_factory=dict)
    places: dict[str, TensorPlaces] = field(default_factory=dict)
    weights: dict[str, str] = field(default_factory=dict)
    states: dict[str, dict[str, str]] = field(default_factory=dict)

    def add(self, move: _Move) -> None:
        """Add what a move makes of its weights and their states."""
        keys = self.found.keys
        self.weights |= self._moved(move, [keys.weights[name] for name in move.sources])
        first, *others = (keys.states.get(name, {}) for name in move.sources)
        for name, own in zip(move.sources[1:], others, strict=True):
            if own.keys() != first.keys():
                message = f"'{move.sources[0]}' has the states {show_few(sorted(first))}, '{name}'"
                raise DisagreementError(f"{message} {show_few(sorted(own))}: they are to be joined")
        for state in first:
            held = [keys.states[name][state] for name in move.sources]
            for target, key in self._moved(move, held).items():
                self.states.setdefault(target, {})[state] = key

    def _moved(self, move: _Move, keys: Sequence[str]) -> dict[str, str]:
        """Return target → its key; a step is that of all targets."""
        saved = self.found.index.tensors.get(keys[0])
        is_step = saved is None or (not saved.shape and self.found.weight(move.sources[0]).shape)
        if move.rule is None or move.rule.is_plain or is_step:
            self._put(keys[0], saved, self.found.places.get(keys[0]))
            return dict.fromkeys(move.targets, keys[0])
        held = [self._held(key) for key in keys]
        try:
            made, move.unit = remade(move.rule, held)
        except ValueError as error:
            message = f"line {move.rule.line}: {show(move.sources[0])} {error}"
            raise UsageError(message) from error
        named = {target: f"{keys[0]} -> {target}" for target in move.targets}
        for key, (tensor, places) in zip(named.values(), made, strict=True):
            self._put(key, tensor, places)
        return named

    def _held(self, key: str) -> Held:
        saved, places = self.found.index.tensors[key], self.found.places[key]
        # What lies outside of a tensor would go nowhere.
        tiled(self.found.root / self.found.boxes_in, key, saved, places)
        return saved, places

    def _put(self, key: str, tensor: SavedTensor | None, places: TensorPlaces | None) -> None:
        if tensor is None or places is None:
            return
        if self.tensors.setdefault(key, tensor) is not tensor:
            raise CorruptFileError(f"has two tensors {show(key)}", path=self.found.root)
        self.places[key] = places


def remade(rule: Rule, held: Sequence[Held]) -> tuple[list[Held], int]:
    """Return what a rule makes of a tensor, or of those that it joins, and the rows of a part."""
    if len(held) > 1:
        made, unit = _joined(rule, held)
        return [made], unit
    layers, made_of, unit = list(held), list[Held](), 0
    for _ in range(rule.unstacked):
        layers = [_layer(one, number) for one in layers for number in range(one[0].shape[0])]
    for layer in layers:
        if len(rule.targets) == 1:
            made_of.append(layer)
            continue
        unit = _unit(rule, layer[0].shape, sum(rule.parts))
        rows: list[list[tuple[Held, int, int]]] = [[] for _ in rule.parts]
        for part, start, stop in _runs_of(rule, unit):
            rows[part].append((layer, start, stop))
        made_of += map(_stacked, rows)
    return made_of, unit


def _joined(rule: Rule, held: Sequence[Held]) -> tuple[Held, int]:
    first = held[0][0]
    unit = _unit(rule, first.shape, rule.parts[0])
    for (saved, _), part in zip(held, rule.parts, strict=True):
        wanted = (rule.groups * part * unit, *first.shape[1:])
        if (saved.dtype, saved.shape) != (first.dtype, wanted):
            message = f"is {first.dtype} of {list(first.shape)}, so one that is joined with it is"
            other = f"{saved.dtype} of {list(saved.shape)}"
            raise ValueError(f"{message} of {list(wanted)}, not {other}")
    taken, rows = [0] * len(held), list[tuple[Held, int, int]]()
    for part, start, stop in _runs_of(rule, unit):
        rows.append((held[part], taken[part], taken[part] + stop - start))
        taken[part] += stop - start
    return _stacked(rows), unit


def _unit(rule: Rule, shape: Sequence[int], parts: int) -> int:
    rows, number = (shape[0] if shape else 0), rule.groups * parts
    if not rows or rows % number:
        message = f"of {list(shape)} has rows that cannot be divided into"
        raise ValueError(f"{message} {rule.groups} groups of {parts} parts")
    return rows // number


def _runs_of(rule: Rule, unit: int) -> Iterator[tuple[int, int, int]]:
    """Yield the runs of rows of a fused tensor: which part has it, first row, row behind it."""
    start = 0
    for _ in range(rule.groups):
        for part, count in enumerate(rule.parts):
            yield part, start, start + count * unit
            start += count * unit


def _stacked(rows: Sequence[tuple[Held, int, int]]) -> Held:
    """Return the tensor that rows of others make up: of which, first row, row behind them."""
    pieces, at = [], 0
    for held, start, stop in rows:
        pieces.append(_rows(held, start, stop, at))
        at += stop - start
    (first, _), _, _ = rows[0]
    columns = [np.concatenate(column) for column in zip(*pieces, strict=True)]
    offsets, sizes, lower, lengths, item_file, item_offset, nbytes, file, offset = columns
    items = SavedItems(item_file, item_offset, nbytes)
    tensor = SavedTensor(first.dtype, (at, *first.shape[1:]), offsets, sizes, items)
    return tensor, TensorPlaces(file, offset, holders=(lower, lengths))


def _columns(held: Held) -> tuple[Ints, ...]:
    saved, places = held
    lower, lengths = places.holders or (saved.offsets, saved.sizes)
    items = saved.items
    of_items = items.file, items.offset, items.nbytes
    return saved.offsets, saved.sizes, lower, lengths, *of_items, places.file, places.offset


def _rows(held: Held, start: int, stop: int, at: int) -> list[Ints]:
    """Return the boxes of some rows, which come to stand at others."""
    offsets, sizes, *_ = _columns(held)
    first = np.maximum(offsets[:, 0], start)
    behind = np.minimum(offsets[:, 0] + sizes[:, 0], stop)
    keep = first < behind
    offsets, sizes, lower, lengths, *others = (column[keep] for column in _columns(held))
    offsets[:, 0], sizes[:, 0] = first[keep] + at - start, (behind - first)[keep]
    lower[:, 0] += at - start
    return [offsets, sizes, lower, lengths, *others]


def _layer(held: Held, number: int) -> Held:
    """Return one of the tensors that are stacked in the first dimension."""
    saved, places = _stacked([(held, number, number + 1)])
    _, _, lower, lengths, *_ = _columns((saved, places))
    # A holder's rows before the layer's lie before its elements.
    skipped = -lower[:, 0] * np.prod(lengths[:, 1:], axis=1, dtype=np.int64)
    offset = places.offset + skipped * ITEMSIZE[saved.dtype]
    tensor = replace(
        saved, shape=saved.shape[1:], offsets=saved.offsets[:, 1:], sizes=saved.sizes[:, 1:]
    )
    return tensor, replace(places, offset=offset, holders=(lower[:, 1:], lengths[:, 1:]))


def _groups(groups: Iterable[SavedGroup], moves: Iterable[_Move]) -> list[SavedGroup]:
    """Return param groups with the new names, each in the place of what it is made of."""
    by_source = {name: move for move in moves for name in move.sources}
    made = []
    for group in groups:
        own, params = set(group.params), dict[str, None]()
        for name in group.params:
            move = by_source[name]
            for other in move.sources:
                if other not in own:
                    message = f"'{name}' and '{other}' are to be joined, and are not in one"
                    raise UnsupportedError(f"{message} param group with equal options and steps")
            params |= dict.fromkeys(move.targets)
        made.append(replace(group, params=tuple(params)))
    return made


def _remarks(rules: Iterable[Rule], moves: Sequence[_Move]) -> Iterator[str]:
    """Say what each rule did, and what no rule was for."""
    by_line: dict[int, list[_Move]] = {}
    for move in moves:
        by_line.setdefault(move.rule.line if move.rule else 0, []).append(move)
    for rule in rules:
        own = by_line[rule.line]
        made = sum(len(move.targets) for move in own)
        count = counted(sum(len(move.sources) for move in own), "tensor")
        units = sorted({move.unit for move in own if move.unit})
        rows = f", a part has {' or '.join(map(str, units))} rows" if units else ""
        yield f"Renamed: {rule.text} ({count}{'' if rule.is_plain else f' to {made:,}'}{rows})."
    kept = [move.sources[0] for move in by_line.get(0, ())]
    if kept:
        yield f"No rule is for {counted(len(kept), 'tensor')}: {show_few(kept)}."
