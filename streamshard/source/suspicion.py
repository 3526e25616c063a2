"""Says what is suspicious about a checkpoint that holds no NaN: a job may go on, and badly."""

from collections.abc import Iterator, Mapping
from typing import Final

from streamshard.formats.checkpoint import Checkpoint
from streamshard.formats.deepspeed import names
from streamshard.formats.pickle.inert import Call, Node
from streamshard.formats.zarr.array_paths import array_path
from streamshard.formats.zarr.store_manifest import health_of_all
from streamshard.health import TensorHealth
from streamshard.model import NoteKind
from streamshard.source.source import Source

_SECOND_MOMENT: Final = "exp_avg_sq"
_NOT_ZERO_AFTER: Final = 1
"""Steps after which a second moment that is all zeros is suspicious."""
StepCounts = tuple[Node, Node]
"""Steps and skipped steps, as they are recorded."""


def suspicions(checkpoint: Checkpoint, health: Mapping[str, TensorHealth]) -> list[str]:
    """List what is suspicious; `health` may lack tensors."""
    return [*_loss_scale(checkpoint), *_moments(checkpoint, health), *_two_saves(checkpoint)]


def known_health(source: Source) -> dict[str, TensorHealth] | None:
    """Return what was measured of a source when it was made; None unless it is of each tensor."""
    known = source.kind.health(source)
    return None if known is None else health_of_all(source.checkpoint.tensors, known)


def steps_of(checkpoint: Checkpoint) -> StepCounts:
    """Return how many steps a job had taken, and how many of them were skipped."""
    state = checkpoint.model_parts[0].model_state
    return state.get("global_steps"), state.get("skipped_steps")


def skipped_since(before: str, older: StepCounts, newer: StepCounts) -> list[str]:
    """Say whether all steps since the checkpoint `before` were skipped, as gradients overflowed.

    DeepSpeed skips such steps, also in bf16: a job that has diverged saves the same weights.
    """
    counts = [
        new - old
        for old, new in zip(older, newer, strict=True)
        if isinstance(old, int) and isinstance(new, int)
    ]
    if len(counts) != len(newer) or not 0 < counts[0] == counts[1]:
        return []
    steps = "The step" if counts[0] == 1 else f"All {counts[0]:,} steps"
    were = "was" if counts[0] == 1 else "were"
    return [f"{steps} since {before} {were} skipped, as gradients overflowed."]


def _loss_scale(checkpoint: Checkpoint) -> Iterator[str]:
    for part in checkpoint.model_parts[:1]:
        state = part.optimizer_file.get(names.OPTIMIZER)
        scaler = state.get("loss_scaler") if isinstance(state, Mapping) else None
        known = scaler.state if isinstance(scaler, Call) else None
        if not isinstance(known, Mapping) or known.get("dynamic") is not True:
            continue
        scale, least = known.get("cur_scale"), known.get("min_scale")
        if isinstance(scale, int | float) and isinstance(least, int | float) and scale <= least:
            yield (
                f"The loss scale is at its minimum, {least:g}: gradients overflowed at every step "
                "for a while."
            )


def _moments(checkpoint: Checkpoint, health: Mapping[str, TensorHealth]) -> Iterator[str]:
    steps = checkpoint.model_parts[0].model_state.get("global_steps")
    if not isinstance(steps, int) or steps <= _NOT_ZERO_AFTER:
        return
    moments = [array_path(t) for t in checkpoint.tensors if t.state == _SECOND_MOMENT]
    known = [health[name] for name in moments if name in health and health[name].numel]
    if known and len(known) == len(moments) and all(one.is_zero for one in known):
        yield f"All second moments ({_SECOND_MOMENT}) are zero after {steps:,} steps."


def _two_saves(checkpoint: Checkpoint) -> Iterator[str]:
    yield from (note.text for note in checkpoint.notes if note.kind is NoteKind.MIXED)
