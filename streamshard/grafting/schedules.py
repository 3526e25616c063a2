"""Puts the place that a training has reached on a schedule into the schedule of another job.

Both jobs have a scheduler of the same kind. The position is the training's; all settings, base
rates too, are the new job's. So its rates become those that it would have had at this place.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from fractions import Fraction
from pathlib import PurePosixPath
from typing import Final

from streamshard.formats.checkpoint import ModelPart
from streamshard.formats.deepspeed import names
from streamshard.formats.deepspeed.training_state import differing_keys
from streamshard.formats.pickle.inert import Node, show, show_few
from streamshard.formats.torch import torch_file
from streamshard.formats.torch.torch_tensor import storages_in
from streamshard.model import FILE
from streamshard.sizes import some_of
from streamshard.source.source import Source
from streamshard.source.source_access import SourceAccess, TensorBytes

_STEP: Final = "last_epoch"
_POSITION: Final = frozenset(
    {_STEP, "_step_count", "last_batch_iteration", "T_cur", "T_i", "best", "num_bad_epochs",
     "cooldown_counter"}
)  # fmt: skip
"""What schedulers count: torch's (`torch/optim/lr_scheduler.py`, 2.13; the last five are of
CosineAnnealingWarmRestarts and ReduceLROnPlateau), and DeepSpeed's, whose states have nothing else
(`deepspeed/runtime/lr_schedules.py`, 0.19.8)."""
_BASES, _LAST_RATES, _ = names.RATES_PER_GROUP
_PASSING: Final = frozenset({"verbose", "_get_lr_called_within_step", "_is_initial", _LAST_RATES})
"""What some versions of torch do not save, or save later, and no schedule depends on."""
_NESTED: Final = "_schedulers"
"""States of the schedulers that SequentialLR and ChainedScheduler run."""
_ENDS: Final = "_milestones"
"""Steps at which SequentialLR goes from one of them to the next."""
_FLOOR: Final = "eta_min"
"""Rate that a scheduler falls to: only what a rate has above it is in proportion to the base."""
BASE: Final = "initial_lr"
"""Base rate in a param group, which torch's schedulers put there."""
RATE: Final = "lr"
_OTHERWISE: Final = "The rule 'scheduler start' takes START's rates."
_MOST_NESTED: Final = 64
_ROUNDING: Final = Fraction(1, 10**9)
"""Shares that differ less are equal: chainable schedulers round at every step."""

_FILE: Final = re.compile(r"scheduler(_\d+)?\.(pt|bin)")
"""In which HF Trainer and Accelerate keep the state of a scheduler."""
_PER_GROUP: Final = ("lr_lambdas", "min_lrs", "max_lrs")
"""Other lists with an entry for each param group: of LambdaLR and MultiplicativeLR (torch saves
None for a plain function), ReduceLROnPlateau, CyclicLR."""


Origins = Sequence[int | None]
"""For each of START's param groups, the source's that its parameters come from; None: all new."""
Parts = tuple[ModelPart, ModelPart]
"""The source's and START's, as in all pairs here."""
States = tuple[Node, Node]


class SchedulePlace:
    """The place that a training has reached, on START's schedule."""

    def __init__(self, parts: Parts, origins: Origins, states: States | None) -> None:
        """Find it. `states`: of schedulers, without an `objection`; None if there are none."""
        self._origins = origins
        self._states = states
        pairs = list(zip(parts, states or (None, None), strict=True))
        self._source_bases, self.bases = (_bases_of(*pair) for pair in pairs)
        """Of each param group; None where no file has it."""
        self._old, starting = ([g.get(RATE) for g in part.hyper_parameters] for part in parts)
        self._begins_anew = states is None and None in (*self.bases, *self._source_bases)
        if states is None:
            # Nothing has changed START's rates before its first step: they are its base rates.
            bases = zip(self.bases, starting, strict=True)
            self.bases = [rate if base is None else base for base, rate in bases]
        self.state = None if states is None else self._scheduler(*states)
        """OUT's state of the scheduler."""
        reached = None if states is None else (states[0], self.state)
        self.rates, self._unknown = self._placed(self._old, starting, reached)
        """OUT's rate of each param group."""
        if states is None and all(base is None for base in self._source_bases):
            # Only the job itself sets rates.
            self.rates, self._unknown = starting, []

    def _scheduler(self, source: Mapping[str, Node], start: Mapping[str, Node]) -> dict[str, Node]:
        """Return START's state of a scheduler at the source's position."""
        state = {k: source[k] if k in _POSITION else value for k, value in start.items()}
        if _count(start, _NESTED):
            nested = zip(source[_NESTED], start[_NESTED], strict=True)
            state[_NESTED] = [self._scheduler(*pair) for pair in nested]
        counts = [_count(scheduler, _LAST_RATES) for scheduler in (source, start)]
        if counts == [len(self._source_bases), len(self.bases)]:
            rates = source[_LAST_RATES], start[_LAST_RATES]
            state[_LAST_RATES], _ = self._placed(*rates, (source, state))
        return state

    def _placed(
        self, rates: Sequence[Node], starting: Sequence[Node], reached: States | None
    ) -> tuple[list[Node], list[int]]:
        """Return START's rates where the source has `rates`, and the groups that are unknown.

        These keep the source's rate, or START's if their parameters are all new. Where they are
        known, new groups are taken along the schedule as all others were.

        `starting`: START's rates before its first step.
        `reached`: the states of both schedulers at the source's position.
        """
        source_floor, floor = (_number(_floor(state)) for state in reached or ({}, {}))
        pairs = zip(rates, self._source_bases, strict=True)
        shares = [_share(rate, base, source_floor) for rate, base in pairs]
        kept = {origin for origin in self._origins if origin is not None}
        common = _common([shares[origin] for origin in sorted(kept or range(len(shares)))])
        placed, unknown = [], []
        for group, origin in enumerate(self._origins):
            share, base = common if origin is None else shares[origin], _number(self.bases[group])
            if share is None or base is None or floor is None:
                unknown.append(group)
                placed.append(starting[group] if origin is None else rates[origin])
            else:
                placed.append(float(floor + share * (base - floor)))
        return placed, unknown

    def notes(self, config: Mapping[str, Node]) -> Iterator[str]:
        """Say what is not as START's job would have it here. `config`: START's `ds_config`."""
        scheduler = config.get("scheduler")
        kind = f" ({show(scheduler.get('type'))})" if isinstance(scheduler, dict) else ""
        if self._unknown:
            yield (
                f"No file tells how far the learning rate of {self._shown(self._unknown)} has "
                f"come. Until START's scheduler{kind} sets another, it is the source's, or START's "
                f"if the group's parameters are all new. {_OTHERWISE}"
            )
        pairs = [(k, self._old[n]) for k, n in enumerate(self._origins) if n is not None]
        changed = [group for group, rate in pairs if show(rate) != show(self.rates[group])]
        if changed and self._begins_anew:
            yield (
                f"No scheduler goes on. The learning rate of {self._shown(changed)} is START's: if "
                "the source had a scheduler, in the same proportion to its base as there."
            )
        if settings := self._differing_settings():
            yield (
                f"START's scheduler has other settings ({show_few(settings)}), from the source's "
                "step on. A scheduler that makes each rate of the one before, such as "
                f"CosineAnnealingLR, goes on from the source's. {_OTHERWISE}"
            )

    def _shown(self, groups: Sequence[int]) -> str:
        return "param group " + some_of([f"{k} (now {show(self.rates[k])})" for k in groups])

    def _differing_settings(self) -> list[str]:
        aside = {*_POSITION, *_PASSING, _BASES, _NESTED}
        pairs = list(_pairs(*self._states or (None, None)))
        keys = [(a[k], b[k], k) for a, b in pairs for k in a.keys() - aside if k in b]
        # A list with an entry for each param group says nothing where their counts differ.
        keys = [entry for entry in keys if _length(entry[0]) == _length(entry[1])]
        return sorted({key for one, other, key in keys if differing_keys(one, other)})


def objection(source: Node, start: Node) -> str | None:
    """Say why the source's position has no place in START's schedule; None if it has one."""
    for state, which in ((source, "the source"), (start, "START")):
        if not isinstance(state, dict):
            return f"{which} has no state of one"
    pairs = list(_pairs(source, start))
    if len(pairs) == _MOST_NESTED:
        return f"it has {_MOST_NESTED} others in it, or more"
    for mine, starting in pairs:
        keys, others = mine.keys() - _PASSING, starting.keys() - _PASSING
        if keys != others or _count(mine, _NESTED) != _count(starting, _NESTED):
            differing = show_few(sorted(map(str, keys ^ others)) or [_NESTED])
            return f"the source has one of another kind (without the same {differing})"
        if not keys & {*_POSITION, _NESTED}:
            return f"no entry is known to count steps ({show_few(sorted(map(str, keys)))})"
    return None


def _length(node: Node) -> int:
    return len(node) if isinstance(node, list) else -1


def _count(state: Mapping[str, Node], key: str) -> int:
    return len(state[key]) if isinstance(state.get(key), list) else 0


def _pairs(source: Node, start: Node) -> Iterator[tuple[dict[str, Node], dict[str, Node]]]:
    """Yield the states of schedulers that are nested alike, the outer first, at most 64."""
    waiting = [(source, start)]
    for _ in range(_MOST_NESTED):
        if waiting:
            mine, starting = (state if isinstance(state, dict) else {} for state in waiting.pop(0))
            yield mine, starting
            if _count(mine, _NESTED) and _count(starting, _NESTED):
                waiting += zip(mine[_NESTED], starting[_NESTED], strict=False)


def _bases_of(part: ModelPart, state: Node) -> list[Node]:
    """Return the base rate of each param group; None where no file has it."""
    groups = part.hyper_parameters
    lists = [found[_BASES] for found, _ in _pairs(state, state) if _count(found, _BASES)]
    listed = next((bases for bases in lists if len(bases) == len(groups)), [None] * len(groups))
    return [group.get(BASE, base) for group, base in zip(groups, listed, strict=True)]


def _share(rate: Node, base: Node, bottom: Fraction | None) -> Fraction | None:
    """Return which share of its way from the floor to the base a rate has; None if unknown."""
    at, top = _number(rate), _number(base)
    if at is None or top is None or bottom is None or top == bottom:
        return None
    return (at - bottom) / (top - bottom)


def _common(shares: Sequence[Fraction | None]) -> Fraction | None:
    """Return the share that all have of which one is known, except for rounding; else None."""
    known = [share for share in shares if share is not None]
    if not known or max(known) - min(known) > abs(known[0]) * _ROUNDING:
        return None
    return known[0]


def _number(node: Node) -> Fraction | None:
    """Return a number as it is, so that a rate is rounded once; None for what can be no rate."""
    is_number = isinstance(node, int | float) and not isinstance(node, bool)
    return Fraction(node) if is_number and (not node or 1e-60 < abs(node) < 1e60) else None


def _floor(state: Mapping[str, Node]) -> Node:
    """Return the rate that a schedule falls to in the part of it that it has reached."""
    while _count(state, _ENDS) and _count(state, _NESTED):
        at, steps = state.get(_STEP), [end for end in state[_ENDS] if isinstance(end, int)]
        ended = sum(isinstance(at, int) and end <= at for end in steps)
        state = state[_NESTED][min(ended, len(state[_NESTED]) - 1)]
    return state.get(_FLOOR, 0)


def scheduler_files(source: Source, start: Source) -> dict[str, States]:
    """Return path → what SRC and START have in such a file; None where they have none.

    An engine saves no such file. If START lacks it, its state is SRC's, with the rates that START's
    param groups begin with.
    """
    states = {}
    for file in source.checkpoint.files:
        if _FILE.fullmatch(PurePosixPath(file.path).name):
            state = tree_in(source, file.path)
            new_state = tree_in(start, file.path)
            if new_state is None:
                new_state = starting_state(state, start.checkpoint.model_parts[0].hyper_parameters)
            states[file.path] = state, new_state
    return states


def tree_in(source: Source, path: str) -> Node | None:
    """Read what a file holds; None if there is no such file, or if it holds tensors."""
    number = source.checkpoint.tensor_index().get(("", FILE, path))
    if number is None:
        return None
    with closing(SourceAccess(source)) as access:
        file = TensorBytes(source, access, number)
        root = torch_file.read_content(file, source.path / path, -1).root
    return root if next(storages_in(root), None) is None else None


def starting_state(state: Node, groups: Sequence[Mapping[str, Node]]) -> dict[str, Node] | None:
    """Return a scheduler's state with START's param groups; None if their entries are unknown."""
    bases = [group.get(BASE) for group in groups]
    is_small = len([*_pairs(state, state)]) < _MOST_NESTED
    if not isinstance(state, dict) or None in bases or not is_small:
        return None
    rates = {_BASES: bases, _LAST_RATES: [group.get(RATE) for group in groups]}
    starting = {**state, **{key: value for key, value in rates.items() if key in state}}
    for key in _PER_GROUP:
        entries = state.get(key)
        if isinstance(entries, list) and len(entries) != len(groups):
            if any(entry != entries[0] for entry in entries):
                return None
            starting[key] = entries[:1] * len(groups)
    if isinstance(state.get(_NESTED), list):
        starting[_NESTED] = [starting_state(nested, groups) for nested in state[_NESTED]]
    return starting


def grafted_scheduler_file(
    states: States, parts: Parts, origins: Origins, *, scheduler_of_start: bool
) -> Node:
    """Return what OUT's `scheduler.pt` or `scheduler.bin` holds. `states`: None without a file."""
    if scheduler_of_start or objection(*states) is not None:
        return states[1]
    return SchedulePlace(parts, origins, states).state
