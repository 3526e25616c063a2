"""Gives the tensors of a distributed checkpoint other names, by rules; splits and joins fused ones.

A rule is a line; what follows # is a remark::

    decoder.final_layernorm.weight -> model.norm.weight
    decoder.layers.*.linear_fc1.weight -> model.layers.*.{gate,up}_proj.weight : 1 x 1:1
    decoder.layers.*.linear_qkv.weight -> model.layers.*.{q,k,v}_proj.weight : 8 x 4:1:1

A star is anything but a dot. Names in braces are split from one tensor, or joined to one: its rows
are 8 groups, each of 4 parts for q, one for k and one for v. Stars that only the replacement has
are numbers in the tensor's first dimensions, which are taken off. A tensor that is made is rows of
the saved ones. States of the optimizer go with their parameters.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Final

import numpy as np
from numpy.typing import NDArray

from streamshard.errors import UnsupportedError, UsageError
from streamshard.formats.checkpoint import ModelPart, ModuleEntry, ParamGroup, Reading
from streamshard.formats.dcp.dcp_reader import Distributed, module_tensors, unrecorded
from streamshard.formats.deepspeed.read.model_part import optimizer_tensors
from streamshard.formats.facts import RuleLines
from streamshard.formats.foreign_checkpoint import Weight, module_entries
from streamshard.formats.pickle.inert import show, show_few
from streamshard.layout.cutting import CuttingBuilder
from streamshard.model import ITEMSIZE, MASTER, MODULE, Note, NoteKind, Slot
from streamshard.sizes import counted

Ints = NDArray[np.int64]
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

    def matches(self, name: str) -> list[tuple[str, ...]]:
        """Return for each pattern that a name matches what stands for its stars.

        >>> _rule_of(1, "a.*.{up,down} -> b.* : 1:1").matches("a.7.down")
        [('7',)]
        """
        found = (name_pattern(pattern).fullmatch(name) for pattern in self.sources)
        return [match.groups() for match in found if match]


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


def _read_rules(text: str) -> tuple[Rule, ...]:
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
_Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Made:
    """A tensor that a rule makes: rows of others, in pieces of equal length."""

    shape: _Shape
    numel: int
    """Elements of a piece."""
    sources: Ints
    """Which of the tensors each piece is of."""
    starts: Ints
    """First element of each piece there."""


@dataclass(frozen=True, slots=True)
class _Move:
    """Tensors that become others."""

    rule: Rule | None
    sources: tuple[str, ...]
    targets: Mapping[str, _Made]
    """What becomes of them, by its name."""
    unit: int = 0
    """Rows of a part."""


def renamed(reading: Reading, dcp: Distributed, rule_lines: RuleLines) -> Reading:
    """Give the tensors of a distributed checkpoint, as it was read, other names."""
    checkpoint = reading.checkpoint
    (part,) = checkpoint.model_parts
    try:
        rules = _read_rules(rule_lines.text)
        moves = list(_moves_of({entry.name: entry for entry in part.module}, rules))
        _require_distinct(moves)
    except UsageError as error:
        raise UsageError(f"{rule_lines.name}: {error}") from error
    index = {(tensor.state, tensor.name): n for n, tensor in enumerate(checkpoint.tensors)}
    targets = {name: (move, target) for move in moves for name, target in move.targets.items()}
    groups = tuple(_groups(part.groups, moves))
    trained = {name for group in groups for name in group.params}
    entries = tuple(module_entries(_weights(part, targets), trained))
    shapes = {entry.name: entry.shape for entry in entries}
    tensors = [*optimizer_tensors(groups, shapes, ""), *module_tensors(entries)]
    holders = {entry.name: entry.held_as for entry in part.module}
    of = {name: [holders[source] for source in move.sources] for name, (move, _) in targets.items()}
    rows = [[_row(index, tensor.state, name) for name in of[tensor.name]] for tensor in tensors]
    unordered = "the order of the parameters: they were renamed"
    dcp = replace(dcp, unrecorded=(*dcp.unrecorded, unordered))
    remarks = [Note(text, NoteKind.LEFT_OUT) for text in _remarks(rules, moves)]
    checkpoint = replace(
        checkpoint,
        tensors=tuple(tensors),
        model_parts=(replace(part, groups=groups, module=entries),),
        notes=(*checkpoint.notes, *remarks),
        unrecorded=tuple(unrecorded(dcp, groups, entries)),
    )
    if all(rule.is_plain for rule in rules):
        return reading.take([row for (row,) in rows], checkpoint)
    builder = CuttingBuilder([ITEMSIZE[tensor.dtype] for tensor in tensors])
    for number, tensor in enumerate(tensors):
        _, one = targets[tensor.name]
        offsets, numels = one.starts * ITEMSIZE[tensor.dtype], np.full_like(one.starts, one.numel)
        slot = builder.slot(Slot(np.array(rows[number])[one.sources], offsets, numels))
        builder.assign(number, slot, piece_numel=one.numel)
    return replace(reading, checkpoint=checkpoint, cutting=builder.build(reading.cutting))


def _row(index: Mapping[tuple[str, str], int], state: str, name: str) -> int:
    """Return the tensor of a state; a weight may be a master weight or one of the module."""
    states = (MASTER, MODULE) if state in (MASTER, MODULE) else (state,)
    return next(index[key, name] for key in states if (key, name) in index)


def _weights(part: ModelPart, targets: Mapping[str, tuple[_Move, _Made]]) -> Iterator[Weight]:
    saved = {entry.name: entry for entry in part.module}
    for name, (move, one) in targets.items():
        stored = [saved[source].held_as for source in move.sources]
        places = [*stored, one.sources.tobytes(), one.starts.tobytes()] if one.numel else []
        yield name, saved[move.sources[0]].dtype, one.shape, places


def _moves_of(names: Mapping[str, ModuleEntry], rules: Sequence[Rule]) -> Iterator[_Move]:
    """Say what becomes of each weight, in their order."""
    matched = {name: _match(name, rules) for name in names}
    used = {match[0].line for match in matched.values() if match}
    for rule in rules:
        if rule.line not in used:
            message = f"line {rule.line}: '{rule.text}' is for no tensor"
            raise UsageError(f"{message}; there are {show_few(list(names))}")
    joined: set[tuple[int, tuple[str, ...]]] = set()
    for name, match in matched.items():
        if match is None:
            yield _Move(None, (name,), {name: _whole(names[name].shape)})
            continue
        rule, stars = match
        if len(rule.sources) == 1:
            targets = tuple(_made_of(rule, stars, names[name].shape, name))
            yield _move(rule, [names[name]], targets)
        elif (rule.line, stars) not in joined:
            joined.add((rule.line, stars))
            sources = [_with_stars(pattern, stars) for pattern in rule.sources]
            for source in sources:
                if source not in names:
                    message = f"line {rule.line}: '{name}' is to be joined with"
                    raise UsageError(f"{message} {show(source)}, which is not there")
            targets = (_with_stars(rule.targets[0], stars),)
            yield _move(rule, [names[source] for source in sources], targets)


def _move(rule: Rule, sources: Sequence[ModuleEntry], targets: tuple[str, ...]) -> _Move:
    names = tuple(entry.name for entry in sources)
    if rule.is_plain:
        return _Move(rule, names, {targets[0]: _whole(sources[0].shape)})
    try:
        made, unit = _joined(rule, sources) if len(sources) > 1 else _split(rule, sources[0].shape)
    except ValueError as error:
        raise UsageError(f"line {rule.line}: {show(names[0])} {error}") from error
    return _Move(rule, names, dict(zip(targets, made, strict=True)), unit)


def _match(name: str, rules: Sequence[Rule]) -> tuple[Rule, tuple[str, ...]] | None:
    matches = [(rule, stars) for rule in rules for stars in rule.matches(name)]
    if len(matches) > 1:
        one, other = matches[0][0], matches[1][0]
        raise UsageError(f"lines {one.line} and {other.line} are both for {show(name)}")
    return matches[0] if matches else None


def _made_of(rule: Rule, stars: tuple[str, ...], shape: _Shape, name: str) -> Iterator[str]:
    """Name what a tensor becomes: for each number that is taken off, the parts."""
    lengths = shape[: rule.unstacked]
    if len(lengths) < rule.unstacked or not 0 < math.prod(lengths) <= _MOST_MADE:
        message = f"line {rule.line}: {show(name)} is {list(shape)}"
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


def _whole(shape: _Shape, start: int = 0) -> _Made:
    return _Made(shape, math.prod(shape), np.zeros(1, np.int64), np.array([start]))


def _split(rule: Rule, shape: _Shape) -> tuple[list[_Made], int]:
    """Return what a tensor becomes: for each that was stacked in it the parts; and their rows."""
    inner = shape[rule.unstacked :]
    layers = [math.prod(inner) * n for n in range(math.prod(shape[: rule.unstacked]))]
    if len(rule.targets) == 1:
        return [_whole(inner, start) for start in layers], 0
    unit = _unit(rule, inner, sum(rule.parts))
    numel = unit * math.prod(inner[1:])
    targets, common = list[_Made](), math.gcd(*rule.parts)
    for start in layers:
        before = 0
        for part in rule.parts:
            rows = _runs(rule.groups, sum(rule.parts), part, common) + before
            whole = (rule.groups * part * unit, *inner[1:])
            starts = rows.reshape(-1) * numel + start
            targets.append(_Made(whole, common * numel, np.zeros_like(starts), starts))
            before += part
    return targets, unit


def _joined(rule: Rule, sources: Sequence[ModuleEntry]) -> tuple[list[_Made], int]:
    first = sources[0]
    unit = _unit(rule, first.shape, rule.parts[0])
    for entry, part in zip(sources, rule.parts, strict=True):
        wanted = (rule.groups * part * unit, *first.shape[1:])
        if (entry.dtype, entry.shape) != (first.dtype, wanted):
            message = f"is {first.dtype} of {list(first.shape)}, so one that is joined with it is"
            other = f"{entry.dtype} of {list(entry.shape)}"
            raise ValueError(f"{message} of {list(wanted)}, not {other}")
    common, numel = math.gcd(*rule.parts), unit * math.prod(first.shape[1:])
    rows = np.concatenate([_runs(rule.groups, n, n, common) for n in rule.parts], axis=1)
    counts = np.array(rule.parts) // common
    numbers = np.tile(np.repeat(np.arange(len(counts)), counts), rule.groups)
    whole = (rule.groups * sum(rule.parts) * unit, *first.shape[1:])
    return [_Made(whole, common * numel, numbers, rows.reshape(-1) * numel)], unit


def _runs(groups: int, step: int, parts: int, common: int) -> Ints:
    """Return where runs of `common` parts begin, in each group so many parts of `step`."""
    return (np.arange(groups) * step)[:, None] + np.arange(0, parts, common)


def _unit(rule: Rule, shape: Sequence[int], parts: int) -> int:
    rows, number = (shape[0] if shape else 0), rule.groups * parts
    if not rows or rows % number:
        message = f"of {list(shape)} has rows that cannot be divided into"
        raise ValueError(f"{message} {rule.groups} groups of {parts} parts")
    return rows // number


def _groups(groups: Iterable[ParamGroup], moves: Iterable[_Move]) -> Iterator[ParamGroup]:
    """Yield param groups with the new names, each in the place of what it is made of."""
    by_source = {name: move for move in moves for name in move.sources}
    for group in groups:
        members, params = set(group.params), dict[str, None]()
        for name in group.params:
            move = by_source[name]
            for other in move.sources:
                if other not in members:
                    message = f"'{name}' and '{other}' are to be joined, and are not in one"
                    raise UnsupportedError(f"{message} param group with equal options and steps")
            params |= dict.fromkeys(move.targets)
        yield replace(group, params=tuple(params))


def _remarks(rules: Iterable[Rule], moves: Sequence[_Move]) -> Iterator[str]:
    """Say what each rule did, and what no rule was for."""
    by_line: dict[int, list[_Move]] = {}
    for move in moves:
        by_line.setdefault(move.rule.line if move.rule else 0, []).append(move)
    for rule in rules:
        own = by_line[rule.line]
        total = sum(len(move.targets) for move in own)
        count = counted(sum(len(move.sources) for move in own), "tensor")
        units = sorted({move.unit for move in own if move.unit})
        rows = f", a part has {' or '.join(map(str, units))} rows" if units else ""
        yield f"Renamed: {rule.text} ({count}{'' if rule.is_plain else f' to {total:,}'}{rows})."
    kept = [move.sources[0] for move in by_line.get(0, ())]
    if kept:
        yield f"No rule is for {counted(len(kept), 'tensor')}: {show_few(kept)}."
