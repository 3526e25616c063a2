"""The param groups of experts: which are parts of one, and which layers they hold.

DeepSpeed makes of each param group one of the parameters that all ranks share, and one of the
experts; and above a count of elements it divides the latter
(`split_params_into_different_moe_groups_for_optimizer` of `deepspeed/moe/utils.py`, 0.19.8).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from streamshard.errors import DisagreementError, UnsupportedError
from streamshard.formats.checkpoint import ModelPart, ParamGroup
from streamshard.formats.deepspeed import names
from streamshard.formats.pickle.inert import Node
from streamshard.formats.torch.tree_comparison import Disparity, compare_nodes

GROUP_NUMEL: Final = 178_956_971
"""Elements of a rank's experts above which DeepSpeed divides their param group, by default."""
AS_SAVED: Final = "Resume with the expert parallel size of the job that saved it"


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """A layer of experts, as far as one param group has it."""

    name: str
    rests: tuple[str, ...]
    """What follows the expert's number in the names of its parameters, in the group's order."""
    count: int
    """Of all experts of the layer."""


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
            found = names.expert_of(name)
            if found is None:
                message = f"'{name}' is in a param group of experts, and is not of an expert"
                raise UnsupportedError(f"{message}. {AS_SAVED}")
            layer, number, rest = found
            rests.setdefault(layer, {})[rest] = None
            numbers.setdefault(layer, set()).add(number)
        return [ExpertLayer(name, tuple(each), len(numbers[name])) for name, each in rests.items()]


def undivided_groups(model_part: ModelPart) -> list[UndividedGroup]:
    """List a model part's param groups, those of experts that may be parts of one as one."""
    entries = model_part.wrapped_optimizer["param_groups"] if model_part.groups else []
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
    held = tuple(tuple(part[rank].params for part in parts) for rank in range(len(parts[0])))
    return UndividedGroup(
        numbers=tuple(part[0].number for part in parts),
        has_experts=names.is_of_experts(entry),
        template=first,
        params=tuple(tuple(name for part in each for name in part) for each in held),
        parts=held,
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


def expert_params(layers: Iterable[ExpertLayer], degree: int, rank: int) -> tuple[str, ...]:
    """Return the parameters of an expert rank, in the order of the module.

    >>> layer = ExpertLayer("moe.", (".up", ".down"), 4)
    >>> expert_params([layer], 2, 1)
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
    found: list[list[str]] = [[]]
    held = 0
    for name in params:
        if held + numels[name] > most:
            found.append([])
            held = 0
        found[-1].append(name)
        held += numels[name]
    return tuple(map(tuple, found))
