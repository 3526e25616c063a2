"""The param groups of experts, and the order of their parameters on another count of ranks.

DeepSpeed makes of each param group one of the parameters that all ranks share, and one of the
experts; and above a count of elements it divides the latter
(`split_params_into_different_moe_groups_for_optimizer` of `deepspeed/moe/utils.py`, 0.19.8).

An engine does not notice another order when it loads, so nothing may be left open. The order is
recomputed only where the source's own is the module's, and is not sorted by something else as well.
Else a reference checkpoint of the target's job tells it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from streamshard.errors import DisagreementError, Option, UnsupportedError
from streamshard.formats.checkpoint import LIKE, Checkpoint, ModelPart, ParamGroup
from streamshard.formats.deepspeed import names
from streamshard.formats.pickle.inert import Node
from streamshard.formats.torch.tree_comparison import Disparity, compare_nodes
from streamshard.sizes import counted

GROUP_NUMEL: Final = 178_956_971
"""Elements of a rank's experts above which DeepSpeed divides their param group, by default."""
AS_SAVED: Final = "Resume with the expert parallel size of the job that saved it"


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """A layer of experts, or one of AutoEP's weights of it, as far as one param group has it."""

    name: str
    rests: tuple[str, ...]
    """What follows the expert's number in the names of its parameters, in the group's order."""
    count: int
    """Of all experts of the layer."""

    @property
    def module(self) -> str:
        return self.name.rpartition(".")[0] if all(self.rests) else self.name[:-4]


@dataclass(frozen=True, slots=True)
class UndividedGroup:
    """A param group as the training script made it, which may be several in the optimizer."""

    numbers: tuple[int, ...]
    """Its parts' numbers in the optimizer."""
    has_experts: bool
    template: ParamGroup
    """One of its parts, for what all have in common."""
    params: tuple[tuple[str, ...], ...]
    """The parameters that each expert rank has in all parts, one part after the other."""
    parts: tuple[tuple[tuple[str, ...], ...], ...]
    """The parameters that each expert rank has in each part."""

    def layers(self) -> list[ExpertLayer]:
        """List the layers of experts, in the order of the parameters."""
        rests: dict[str, dict[str, None]] = {}
        numbers: dict[str, set[int]] = {}
        for name in (name for params in self.params for name in params):
            fused = names.fused_expert_of(name)
            expert = (f"{fused[0]}.", fused[1], "") if fused else names.expert_of(name)
            if expert is None:
                message = f"'{name}' is in a param group of experts, and is not of an expert"
                raise UnsupportedError(f"{message}. {AS_SAVED}")
            layer, number, rest = expert
            rests.setdefault(layer, {})[rest] = None
            numbers.setdefault(layer, set()).add(number)
        return [ExpertLayer(name, tuple(each), len(numbers[name])) for name, each in rests.items()]


def undivided_groups(model_part: ModelPart) -> list[UndividedGroup]:
    """List a model part's param groups, those of experts that may be parts of one as one."""
    entries = model_part.hyper_parameters
    by_number: dict[int, list[ParamGroup]] = {}
    for group in model_part.groups:
        by_number.setdefault(group.number, []).append(group)
    runs: list[list[int]] = []
    for number in by_number:
        if runs and _may_be_parts(entries[runs[-1][-1]], entries[number]):
            runs[-1].append(number)
        else:
            runs.append([number])
    return [_undivided([by_number[n] for n in run], entries[run[0]]) for run in runs]


def _undivided(parts: Sequence[Sequence[ParamGroup]], entry: Mapping[str, Node]) -> UndividedGroup:
    """Make one group of its parts, each of which is there once for each expert rank."""
    first = parts[0][0]
    _require_one_state([group for part in parts for group in part])
    params = tuple(tuple(part[rank].params for part in parts) for rank in range(len(parts[0])))
    return UndividedGroup(
        numbers=tuple(part[0].number for part in parts),
        has_experts=names.is_of_experts(entry),
        template=first,
        params=tuple(tuple(name for part in each for name in part) for each in params),
        parts=params,
    )


def _may_be_parts(one: Mapping[str, Node], other: Mapping[str, Node]) -> bool:
    return names.is_of_experts(one) and names.is_of_experts(other) and is_alike(one, other)


def is_alike(one: Mapping[str, Node], other: Mapping[str, Node], *aside: str) -> bool:
    """Tell whether two param groups have the same hyper-parameters, except some entries."""
    both = [{k: v for k, v in entry.items() if k not in aside} for entry in (one, other)]
    return not any(isinstance(found, Disparity) for found in compare_nodes(both[0], both[1], ""))


def _require_one_state(groups: Sequence[ParamGroup]) -> None:
    """Refuse groups that differ in a dtype or in what a group has one of, such as `step`."""
    first, *others = groups
    for other in others:
        if other.states != first.states or other.master_dtype != first.master_dtype:
            where = [f"group {g.number} of expert rank {g.expert_rank}" for g in (first, other)]
            message = f"param {where[0]} and {where[1]} differ in the states, such as their step,"
            raise DisagreementError(f"{message} or in dtypes: they cannot become one group")


def _expert_params(layers: Iterable[ExpertLayer], degree: int, rank: int) -> tuple[str, ...]:
    """Return the parameters of an expert rank, in the order of the module.

    >>> layer = ExpertLayer("moe.", (".up", ".down"), 4)
    >>> _expert_params([layer], 2, 1)
    ('moe.2.up', 'moe.2.down', 'moe.3.up', 'moe.3.down')
    """
    return tuple(
        f"{layer.name}{number}{rest}"
        for layer in layers
        for each in [layer.count // degree]
        for number in range(each * rank, each * (rank + 1))
        for rest in layer.rests
    )


def divided(
    params: Sequence[str], numels: Mapping[str, int], most: int
) -> tuple[tuple[str, ...], ...]:
    """Divide the parameters of a rank's experts into param groups, as DeepSpeed does.

    >>> divided("abc", {"a": 2, "b": 2, "c": 1}, 3)
    (('a',), ('b', 'c'))
    """
    groups: list[list[str]] = [[]]
    size = 0
    for name in params:
        if size + numels[name] > most:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += numels[name]
    return tuple(map(tuple, groups))


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
    saved_degree: int,
    degree: int,
) -> list[GroupContent]:
    """Recompute the order from that of the module.

    `numels`: element count of each trained parameter of the model part.
    """
    rule = _Rule(model_part, numels, groups, saved_degree, degree)
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
    saved_degree: int
    degree: int

    def target(self) -> list[GroupContent]:
        """Return the param groups of the target."""
        order = []
        for source, group in enumerate(self.groups):
            if group.has_experts:
                ranks = [self._parts(params) for params in self._spread(group)]
                order += [
                    GroupContent(source, [parts[n] for parts in ranks])
                    for n in range(len(ranks[0]))
                ]
            else:
                order.append(GroupContent(source, group.params))
        return order

    def doubt(self) -> str | None:
        """Say what is not sure, if anything is."""
        position = {entry.name: number for number, entry in enumerate(self.model_part.module)}
        # AutoEP's parameters are the same on any count of ranks, and so is the order of all.
        are_fused = bool(self.model_part.model_state.get(names.AUTO_EXPERTS))
        for group in self.groups:
            doubt = None
            if group.has_experts:
                doubt = self._doubt_of_experts(group)
            elif not are_fused:
                doubt = _doubt_of_shared(group, position)
            if doubt:
                return doubt
        return None if are_fused else self._other_order()

    def _spread(self, group: UndividedGroup) -> list[tuple[str, ...]]:
        layers = group.layers()
        return [_expert_params(layers, self.degree, rank) for rank in range(self.degree)]

    def _parts(self, params: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
        """Divide the parameters of a rank's experts; those that are fused stay together."""
        tensors: dict[str, list[str]] = {}
        for name in params:
            fused = names.fused_expert_of(name)
            tensors.setdefault(fused[0] if fused else name, []).append(name)
        numels = {name: sum(map(self.numels.__getitem__, own)) for name, own in tensors.items()}
        return tuple(
            tuple(name for param in part for name in tensors[param])
            for part in divided([*tensors], numels, GROUP_NUMEL)
        )

    def _doubt_of_experts(self, group: UndividedGroup) -> str | None:
        what = "param group " + ", ".join(map(str, group.numbers)) + " of experts"
        layers = group.layers()
        for rank, params in enumerate(group.params):
            if params != _expert_params(layers, self.saved_degree, rank):
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
        entries = self.model_part.hyper_parameters
        alike = [
            other.numbers[0]
            for other in self.groups
            if not other.has_experts
            and is_alike(entries[other.numbers[0]], entries[group.numbers[0]], *aside)
        ]
        if len(group.numbers) > 1 and len(alike) != 1:
            return f"{what} may be of one param group of the training script or of several"
        return None

    def _other_order(self) -> str | None:
        """Say what else than the module's order the source's may be."""
        keys: dict[str, Key] = {
            "by name": str,
            "by size": self.numels.__getitem__,
            "by size, the largest first": lambda name: -self.numels[name],
        }
        params = [group.params[0] for group in self.groups]
        for what, key in keys.items():
            if all(list(own) == sorted(own, key=key) for own in params):
                return f"the parameters may be in the order of the module, or sorted {what}"
        return None


def _doubt_of_shared(group: UndividedGroup, position: Mapping[str, int]) -> str | None:
    positions = [position.get(name, -1) for name in group.params[0]]
    if positions == sorted(positions) and -1 not in positions:
        return None
    return f"param group {group.numbers[0]} is not in the order of the module"


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
    order: list[GroupContent] = []
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
                message = f"param group {group.number} of {LIKE} has other parameters than any"
                raise DisagreementError(f"{message} here: it is not of the same job")
            order.append(GroupContent(sources.pop(), ranks))
    shapes = [one.master_shapes(one.model_parts[number]) for one in (checkpoint, like)]
    _require_same(groups, order, is_same=shapes[0] == shapes[1])
    return order


def _require_same(
    groups: Sequence[UndividedGroup], order: Sequence[GroupContent], *, is_same: bool
) -> None:
    """Refuse a reference of another job.

    `is_same`: whether its parameters have the same names and shapes.
    """
    sources = [content.source for content in order]
    shared = {s: content.params for s, content in zip(sources, order, strict=True)}
    is_same = is_same and sources == sorted(sources)
    if not is_same or any(
        not group.has_experts and tuple(shared.get(source, ())) != group.params
        for source, group in enumerate(groups)
    ):
        message = f"{LIKE} has other parameters, or in other shapes, groups or another order"
        raise DisagreementError(f"{message}: it is not of the same job")
