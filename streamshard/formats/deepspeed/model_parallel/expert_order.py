"""The order of experts' parameters in the optimizer of a job with another count of expert ranks.

An engine does not notice another order when it loads, so nothing may be left open. The order is
recomputed only where the rule gives the source's own, and where every other rule that gives it
gives the same one for the target. Else a reference checkpoint of the target's job tells it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streamshard.errors import DisagreementError, Option, UnsupportedError
from streamshard.formats.checkpoint import LIKE, Checkpoint, ModelPart
from streamshard.formats.deepspeed import names
from streamshard.formats.deepspeed.model_parallel.expert_groups import (
    GROUP_NUMEL,
    UndividedGroup,
    divided,
    expert_params,
    is_alike,
)
from streamshard.sizes import counted


def supply() -> str:
    """Say how to give the order of the parameters."""
    return (
        f"give with {Option('like')} a checkpoint that the job with this many expert ranks saved: "
        "start that job, let it save before its first step, and give what it saved"
    )


Key = Callable[[str], Any]


@dataclass(frozen=True, slots=True)
class GroupContent:
    """A param group of the target."""

    source: int
    """Index of the undivided group that it is of."""
    params: Sequence[tuple[str, ...]]
    """The parameters of each expert rank."""


def order_of_module(
    model_part: ModelPart,
    numels: Mapping[str, int],
    groups: Sequence[UndividedGroup],
    own: int,
    degree: int,
) -> list[GroupContent]:
    """Recompute the order from that of the module.

    `numels`: element count of each trained parameter of the model part.
    """
    rule = _Rule(model_part, numels, groups, own, degree)
    doubt = rule.doubt()
    if doubt:
        message = "in which order, and in which param groups, a job with"
        message = f"{message} {counted(degree, 'expert rank')} has its experts is unknown"
        raise UnsupportedError(f"{message}: {doubt}. For that, {supply()}")
    return rule.target()


@dataclass(frozen=True, slots=True)
class _Rule:
    """The rule that an optimizer lists parameters in the module's order, and what speaks for it."""

    model_part: ModelPart
    numels: Mapping[str, int]
    groups: Sequence[UndividedGroup]
    own: int
    degree: int

    def target(self) -> list[GroupContent]:
        """Return the param groups of the target."""
        found = []
        for source, group in enumerate(self.groups):
            if group.has_experts:
                ranks = [self._parts(params) for params in self._spread(group)]
                found += [
                    GroupContent(source, [parts[n] for parts in ranks])
                    for n in range(len(ranks[0]))
                ]
            else:
                found.append(GroupContent(source, group.params))
        return found

    def doubt(self) -> str | None:
        """Say what is not sure, if anything is."""
        place = {entry.name: number for number, entry in enumerate(self.model_part.module)}
        for group in self.groups:
            found = (
                self._doubt_of_experts(group)
                if group.has_experts
                else _doubt_of_shared(group, place)
            )
            if found:
                return found
        return self._other_rule()

    def _spread(self, group: UndividedGroup) -> list[tuple[str, ...]]:
        layers = group.layers()
        return [expert_params(layers, self.degree, rank) for rank in range(self.degree)]

    def _parts(self, params: Sequence[str]) -> tuple[tuple[str, ...], ...]:
        return divided(params, self.numels, GROUP_NUMEL)

    def _doubt_of_experts(self, group: UndividedGroup) -> str | None:
        what = "param group " + ", ".join(map(str, group.numbers)) + " of experts"
        layers = group.layers()
        for rank, params in enumerate(group.params):
            if params != expert_params(layers, self.own, rank):
                return f"{what} is not ordered expert by expert"
        saved = [self._parts(params) for params in group.params]
        if saved != [tuple(parts) for parts in group.parts]:
            return f"{what} is not divided as above {GROUP_NUMEL:,} elements of a rank"
        targets = [self._parts(params) for params in self._spread(group)]
        if len({len(parts) for parts in targets}) > 1 or () in targets[0]:
            return f"{what} would be divided in another way for each rank"
        if len(group.numbers) == 1 < len(targets[0]):
            return f"{what} has more than {GROUP_NUMEL:,} elements on a rank of that job"
        aside = (names.GROUP_NAME, names.IS_EXPERTS)
        entries = self.model_part.wrapped_optimizer["param_groups"]
        alike = [
            other.numbers[0]
            for other in self.groups
            if not other.has_experts
            and is_alike(entries[other.numbers[0]], entries[group.numbers[0]], *aside)
        ]
        if len(group.numbers) > 1 and len(alike) != 1:
            return f"{what} may be of one param group of the training script or of several"
        return None

    def _other_rule(self) -> str | None:
        """Look for another rule that gives the source's order, and not the target's."""
        rules: dict[str, Key] = {
            "by name": str,
            "by size": self.numels.__getitem__,
            "by size, the largest first": lambda name: -self.numels[name],
        }
        targets = [self._spread(group)[0] for group in self.groups if group.has_experts]
        for what, key in rules.items():
            saved = all(_is_sorted(group.params[0], key) for group in self.groups)
            if saved and not all(_is_sorted(params, key) for params in targets):
                return f"the parameters may be in the order of the module, or sorted {what}"
        return None


def _doubt_of_shared(group: UndividedGroup, place: Mapping[str, int]) -> str | None:
    places = [place.get(name, -1) for name in group.params[0]]
    if places == sorted(places) and -1 not in places:
        return None
    return f"param group {group.numbers[0]} is not in the order of the module"


def _is_sorted(params: Sequence[str], key: Key) -> bool:
    return list(params) == sorted(params, key=key)


def order_of_reference(
    checkpoint: Checkpoint, number: int, groups: Sequence[UndividedGroup], like: Checkpoint
) -> list[GroupContent]:
    """Take the order from a reference checkpoint, whose experts are spread as the target's.

    `number`: that of the model part in both checkpoints.
    """
    owner = {
        name: source
        for source, group in enumerate(groups)
        for params in group.params
        for name in params
    }
    model_part = like.model_parts[number]
    found: list[GroupContent] = []
    for group in model_part.groups:
        if group.expert_rank == 0:
            sources = {
                owner.get(name, -1)
                for g in model_part.groups
                if g.number == group.number
                for name in g.params
            }
            ranks = [g.params for g in model_part.groups if g.number == group.number]
            if len(sources) != 1 or -1 in sources:
                message = f"param group {group.number} of {LIKE} has not the parameters of one"
                raise DisagreementError(f"{message} here: it is not of the same job")
            found.append(GroupContent(sources.pop(), ranks))
    shapes = [
        {
            n: shape
            for each in one.group_shapes(one.model_parts[number])
            for n, shape in each.items()
        }
        for one in (checkpoint, like)
    ]
    _require_same(groups, found, is_same=shapes[0] == shapes[1])
    return found


def _require_same(
    groups: Sequence[UndividedGroup], found: Sequence[GroupContent], *, is_same: bool
) -> None:
    """Refuse a reference of another job.

    `is_same`: whether its parameters have the same names and shapes.
    """
    sources = [content.source for content in found]
    shared = {s: content.params for s, content in zip(sources, found, strict=True)}
    is_same = is_same and sources == sorted(sources)
    if not is_same or any(
        not group.has_experts and tuple(shared.get(source, ())) != group.params
        for source, group in enumerate(groups)
    ):
        message = f"{LIKE} has other parameters, or in other shapes, groups or another order"
        raise DisagreementError(f"{message}: it is not of the same job")
