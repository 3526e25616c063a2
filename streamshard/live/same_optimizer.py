"""Compares the plan of a load with what the live optimizer holds.

A config may mean something else to this version of DeepSpeed, and it does not decide the order of
the parameters. The optimizer is there: nothing is loaded that it does not hold in the same way.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from deepspeed import comm

from streamshard.errors import DisagreementError, UsageError, command
from streamshard.model import ZeroLayout
from streamshard.native.files_on_demand import FilesOnDemand, HeldGroup, held_groups
from streamshard.native.resharding import Resharding
from streamshard.sizes import counted

STAGE_3: Final = "DeepSpeedZeroOptimizer_Stage3"
FLAT: Final = "DeepSpeedZeroOptimizer"
BF16: Final = "BF16_Optimizer"
_HELD_AS: Final = {
    STAGE_3: ("fp16_groups", "fp32_partitioned_groups_flat"),
    FLAT: ("round_robin_bit16_groups", "single_partition_of_fp32_groups"),
    BF16: ("bf16_groups", "fp32_groups_flat_partition"),
}
"""Class → its attributes: the parameters of each group as they are stored, a rank's masters."""
_ALIGNMENTS: Final = "round_robin_bit16_padding"
"""Attribute of `DeepSpeedZeroOptimizer` since 0.19.7."""
_SHARING: Final = "real_dp_process_group"
"""Attribute of the flat optimizers: for each group the ranks that share it."""
_SHARING_3: Final = "sub_group_process_groups"
"""The same of that of stage 3, for each sub-group; it counts for experts of AutoEP."""
_FAMILY: Final = "ds_zero_placement_family"
_AUTO_EXPERTS: Final = "autoep_expert"


def require_same_optimizer(
    names: Mapping[Any, str],
    optimizer: Any,
    resharding: Resharding,
    files: FilesOnDemand,
    ranks: tuple[int, int],
) -> None:
    """Compare the kind of an optimizer, and what it stores in which order, with the plan.

    `names`: parameter → its name.
    `ranks`: the rank's number among the model-parallel parts, and among the data-parallel ranks.
    """
    where, layout = resharding.source.path, resharding.settings.layout
    kind, planned = _kind_of(optimizer), _planned_kind(layout)
    if kind != planned:
        message = f"{where}: with its config, the engine should have a {planned} at stage"
        message = f"{message} {layout.stage}; it has a {kind}, which cuts its states otherwise"
        raise DisagreementError(f"{message}: nothing was loaded")
    if kind == FLAT and optimizer.cpu_offload != layout.offload:
        states = "offloads" if optimizer.cpu_offload else "does not offload"
        message = f"{where}: the engine {states} its optimizer, other than its config says"
        raise DisagreementError(f"{message}: nothing was loaded")
    expected = list(held_groups(resharding, files.cuts, *ranks))
    live = list(_held(names, optimizer, kind, ranks[1]))
    try:
        _require_same_groups(where, expected, live)
    except DisagreementError as error:
        way = command("graft", where, "START", "OUT")
        raise DisagreementError(
            f"{error}. If the model or its param groups were changed on purpose, let this job save "
            f"START before its first step, then: {way}"
        ) from error


def _require_same_groups(
    where: Path, expected: Sequence[HeldGroup], live: Sequence[HeldGroup]
) -> None:
    if len(expected) != len(live):
        groups = counted(len(expected), "group")
        message = f"{where}: has {groups} of parameters for this rank, the engine's optimizer has"
        raise DisagreementError(f"{message} {len(live)}")
    for number, (saved, own_group) in enumerate(zip(expected, live, strict=True)):
        _require_same_group(f"{where}: group {number}", saved, own_group)


def _planned_kind(layout: ZeroLayout) -> str:
    if layout.stage == 3:
        return STAGE_3
    return BF16 if layout.bf16_optimizer else FLAT


def _kind_of(optimizer: Any) -> str:
    """Return the known class that an optimizer is of, itself or by inheritance."""
    for kind in type(optimizer).__mro__:
        if kind.__name__ in _HELD_AS:
            return kind.__name__
    message = f"the engine's optimizer is a {type(optimizer).__name__}, which is not known"
    raise UsageError(f"{message}: give an engine of ZeRO stage 1, 2 or 3")


def _held(names: Mapping[Any, str], optimizer: Any, kind: str, dp_rank: int) -> Iterator[HeldGroup]:
    """Yield what a rank holds of each group of a live optimizer."""
    params, masters = (getattr(optimizer, attribute) for attribute in _HELD_AS[kind])
    alignments = getattr(optimizer, _ALIGNMENTS, None)
    sharing = getattr(optimizer, _SHARING_3 if kind == STAGE_3 else _SHARING, None)
    for number, (group, master) in enumerate(zip(params, masters, strict=True)):
        flat = kind != STAGE_3
        shares = flat or getattr(group[0], _FAMILY, "") == _AUTO_EXPERTS
        gaps = alignments[number] if alignments else [0] * len(group) * flat
        sharer = comm.get_rank(group=sharing[number]) if sharing and shares else dp_rank
        stored = tuple(names[param] for param in group)
        yield HeldGroup(stored, tuple(gaps), master.numel(), sharer)


def _require_same_group(where: str, saved: HeldGroup, live: HeldGroup) -> None:
    if len(saved.params) != len(live.params):
        params = counted(len(saved.params), "parameter")
        message = f"{where} of the optimizer has {params}, the engine's has"
        missing = sorted({*saved.params} ^ {*live.params})
        raise DisagreementError(f"{message} {len(live.params)}; only one has '{missing[0]}'")
    for at, (theirs, ours) in enumerate(zip(saved.params, live.params, strict=True)):
        if theirs != ours:
            message = f"{where}: parameter {at} of the optimizer is '{theirs}', of the engine's it"
            raise DisagreementError(f"{message} is '{ours}': give the parameters in the same order")
    for what, planned, actual in (
        ("a partition for this job has {} elements", saved.numel, live.numel),
        ("this rank is to hold part {}", saved.sharer, live.sharer),
        ("the padding between parameters is to add up to {}", *_gaps(saved, live)),
    ):
        if planned != actual:
            message = f"{where}: {what.format(f'{planned:,}')}, in the engine it is {actual:,}"
            raise DisagreementError(message)


def _gaps(saved: HeldGroup, live: HeldGroup) -> tuple[int, int]:
    """Return the padding up to the first parameter after which it differs, or all of it."""
    both = list(zip(saved.alignments, live.alignments, strict=True))
    differing = next((at for at, (one, other) in enumerate(both) if one != other), len(both))
    return sum(saved.alignments[: differing + 1]), sum(live.alignments[: differing + 1])
