"""Brings Muon's parameters into the order in which the engine of another stage keeps them."""

from dataclasses import replace

from streamshard.errors import DisagreementError, Option, UnsupportedError
from streamshard.formats.checkpoint import LIKE, Checkpoint, ModelPart


def needs_order(checkpoint: Checkpoint, stage: int) -> bool:
    """Tell whether these files lack the order in which a stage keeps Muon's parameters.

    Stages 1 and 2 sort them by size. So does stage 3, unless the model was made under `zero.Init`:
    then they stay in the order in which the training script passed them, which sorting has lost.
    """
    return stage == 3 > checkpoint.layout.stage and any(
        model_part.is_muon(group) and len({*shapes.values()}) > 1
        for model_part in checkpoint.model_parts
        for group, shapes in zip(
            model_part.groups, checkpoint.group_shapes(model_part), strict=True
        )
    )


def in_order_of(checkpoint: Checkpoint, stage: int, like: Checkpoint | None) -> Checkpoint:
    """Return a checkpoint with Muon's parameters in the order in which a stage keeps them.

    `like`: reference checkpoint of the same job at that stage, for an order that is not known.
    """
    if needs_order(checkpoint, stage):
        if like is None or like.layout.stage != stage:
            message = (
                f"trained at stage {checkpoint.layout.stage} with Muon, whose parameters stage 3 "
                "has in the order in which the training script passes them if it makes the model "
                "under zero.Init, and by size if it does not; files of stages 1 and 2 do not tell "
                f"the former. Give with {Option('like')} a checkpoint that the job saved at stage "
                "3 (before its first step will do), or stay at stages 1 and 2"
            )
            raise UnsupportedError(message)
        model_parts = [
            _ordered_as(like, model_part, n) for n, model_part in enumerate(checkpoint.model_parts)
        ]
    elif stage < 3 == checkpoint.layout.stage:
        model_parts = [_sorted(checkpoint, model_part) for model_part in checkpoint.model_parts]
    else:
        return checkpoint
    return replace(checkpoint, model_parts=tuple(model_parts))


def _sorted(checkpoint: Checkpoint, model_part: ModelPart) -> ModelPart:
    """Sort as Muon does, larger shapes first; what a stage-3 job sorted already stays as it is."""
    groups = [
        replace(group, params=tuple(sorted(shapes, key=shapes.__getitem__, reverse=True)))
        if model_part.is_muon(group)
        else group
        for group, shapes in zip(
            model_part.groups, checkpoint.group_shapes(model_part), strict=True
        )
    ]
    return replace(model_part, groups=tuple(groups))


def _ordered_as(like: Checkpoint, model_part: ModelPart, number: int) -> ModelPart:
    groups = []
    theirs = like.model_parts[number].groups if number < len(like.model_parts) else ()
    for place, group in enumerate(model_part.groups):
        params = theirs[place].params if place < len(theirs) else ()
        if {*params} != {*group.params}:
            message = f"param group {group.number} of {LIKE} has other"
            raise DisagreementError(f"{message} parameters: it is not of the same job")
        groups.append(replace(group, params=params) if model_part.is_muon(group) else group)
    return replace(model_part, groups=tuple(groups))
