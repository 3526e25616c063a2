"""Refuses checkpoints, and states of optimizers, of which no graft can be made."""

from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Final

import numpy as np

from streamshard.errors import Option, UnsupportedError, UsageError
from streamshard.formats.checkpoint import Checkpoint, ModelPart, ParamGroup
from streamshard.formats.deepspeed import names
from streamshard.formats.deepspeed.model_parallel.parallel_degrees import known_degrees
from streamshard.grafting.job_state import COUNTED_SETTINGS, OF_SCHEDULERS
from streamshard.grafting.origins import Origin
from streamshard.grafting.schedules import tree_in
from streamshard.sizes import counted, some_of
from streamshard.source.source import Source

_FROM_ZERO: Final = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "exp_inf"}
)
"""States that are zero before the first step."""
STEP: Final = "step"
_MOST_STEPS: Final = 100_000
_WITH_A_STATE: Final = ("amsgrad", "centered", "momentum")
"""Settings of torch's optimizers that add a state, without which the next step fails."""
_UNLIKE: Final = COUNTED_SETTINGS | OF_SCHEDULERS | {"params"}
"""Keys of a param group that come and go with a scheduler, or with the first step."""


def require_alike(trained: Source, begun: Source, *, is_fresh: bool) -> None:
    """Refuse checkpoints whose parts cannot be put together."""
    source, start = trained.checkpoint, begun.checkpoint
    if not begun.kind.is_of_ranks or start.is_dumps:
        message = "is no checkpoint of a job as DeepSpeed saves it. Save one right after"
        message = f"{message} deepspeed.initialize(), before the first step"
        raise UsageError(f"{message}, with engine.save_checkpoint()", path=begun.path)
    for opened in (trained, begun):
        require_zero(opened)
    degrees = [
        known_degrees(one) or counted(len(one.model_parts), "model-parallel part")
        for one in (source, start)
    ]
    if degrees[0] != degrees[1]:
        message = f"SRC was saved with {degrees[0]}, START with {degrees[1]}: give both the same"
        message = f"{message} degrees first, with 'streamshard repartition'"
        raise UsageError(message, path=trained.path)
    if any(map(_has_taken_a_step, start.model_parts)):
        message = "has taken a step: START is what the new job saves before its first step"
        raise UsageError(message, path=begun.path)
    if is_fresh:
        return
    for opened in (trained, begun):
        if opened.checkpoint.has_muon:
            message = "trained by Muon, which makes its momentum when the engine is built; give"
            raise UnsupportedError(f"{message} {Option('fresh_states', True)}", path=opened.path)
    named = [_optimizer_of(one) for one in (source, start)]
    kinds = {"adam" if name == "adamw" else name for name in named}  # their states are the same
    if None not in named and len(kinds) > 1:
        message = f"START's optimizer is {named[1]}, SRC's {named[0]}: their states differ; give"
        raise UsageError(f"{message} {Option('fresh_states', True)}")


def require_zero(opened: Source) -> None:
    """Refuse a checkpoint without a whole optimizer."""
    checkpoint = opened.checkpoint
    opened.require_training_state()
    opened.require_states()
    opened.require_cut_states()
    if not all(part.groups for part in checkpoint.model_parts):
        message = "saved without ZeRO (stage 0), which does not name the parameters of its"
        raise UnsupportedError(
            f"{message} optimizer: give a checkpoint of stage 1, 2 or 3", path=opened.path
        )


def require_read(opened: Source) -> None:
    """Refuse files with parts of the model that are not read, which could only be copied."""
    for file in filter(is_part, (file.path for file in opened.checkpoint.files)):
        # With ZeRO, older versions of DeepSpeed save empty files of the optimizers of experts.
        if tree_in(opened, file) is None:
            message = "holds tensors of the model, and by its name it is not known of which"
            raise UnsupportedError(message, path=opened.path / file)


def is_part(path: str) -> bool:
    """Tell whether a file has a name of those of layers or experts."""
    file = names.parse(PurePosixPath(path).name)
    return file is not None and file.kind == "part"


def _has_taken_a_step(part: ModelPart) -> bool:
    """Tell whether an optimizer has; some, as Adagrad and Muon, have states before their first."""
    steps = [group.states.get(STEP) for group in part.groups if group.states]
    counts = {part.model_state.get("global_steps") if s is None else s.number() for s in steps}
    return not counts <= {0}


def _optimizer_of(checkpoint: Checkpoint) -> str | None:
    """Return the type of the optimizer that a config names."""
    section = checkpoint.config.get("optimizer")
    name = section.get("type") if isinstance(section, dict) else None
    return name.lower() if isinstance(name, str) else None


def require_whole_rows(origins: Mapping[str, Origin], start: Source) -> None:
    """Refuse rows of tensors that may be cut among parts, where they begin elsewhere then."""
    degrees, parts = known_degrees(start.checkpoint), len(start.checkpoint.model_parts)
    if parts == 1 or (degrees is not None and degrees.tensor == 1):
        return
    for name in (n for n, origin in origins.items() if origin.rows is not None):
        message = f"'{name}' has another count of rows, which tensor parallelism may have cut:"
        message = f"{message} take SRC and START to one part first, with 'streamshard repartition'"
        raise UnsupportedError(f"{message} and {Option('tensor_parallel', 1)}", path=start.path)


def require_same_settings(
    old: ModelPart, before: ParamGroup, new: ModelPart, after: ParamGroup
) -> None:
    """Refuse states of an optimizer with other settings than START's has."""
    settings = old.hyper_parameters[before.number], new.hyper_parameters[after.number]
    unlike = sorted((settings[0].keys() ^ settings[1].keys()) - _UNLIKE)
    if unlike:
        message = f"the optimizers of SRC and START have different settings: {some_of(unlike)};"
        message = f"{message} their states may mean something else. For the weights alone give"
        raise UsageError(f"{message} {Option('fresh_states', True)}")
    more = [k for k in _WITH_A_STATE if settings[1].get(k) and not settings[0].get(k)]
    if more and before.cut_states:
        message = (
            f"START's optimizer has {more[0]}, which SRC's lacks: a state would be missing, and the"
        )
        message = f"{message} first step would fail. Leave it out in the new job, or give"
        raise UsageError(f"{message} {Option('fresh_states', True)}")


def require_zeros(group: ParamGroup, like: ParamGroup) -> None:
    """Refuse new members of a group whose states do not begin with zeros."""
    strange = sorted({*like.cut_states} - _FROM_ZERO | {*like.common_states} - {STEP})
    strange += [key for key, state in like.cut_states.items() if state.block > 1]
    if strange:
        message = f"param group {group.number} of START has new members, and its optimizer"
        message = f"{message} keeps {some_of(strange)}, which does not begin with zeros. Put"
        message = f"{message} them into a param group of their own in START, or give"
        raise UnsupportedError(f"{message} {Option('fresh_states', True)}")


def uncorrected(new: ModelPart, group: ParamGroup) -> Iterator[str]:
    """Say how large the first updates of parameters with zero states are."""
    betas = new.hyper_parameters[group.number].get("betas")
    if not isinstance(betas, tuple | list) or not all(isinstance(b, float) for b in betas):
        return
    yield (
        f"Param group {group.number} goes on from its step, so what is new in it has no bias "
        f"correction: at betas {betas[0]:g}, {betas[1]:g} its updates are up to "
        f"{_largest_update(*betas):.1f} x too large at first. A param group of its own in "
        "START begins at step 0."
    )


def _largest_update(first: float, second: float) -> float:
    """Return how many times too large Adam's updates may be without bias correction.

    For gradients that do not change.

    >>> round(_largest_update(0.9, 0.999), 1), round(_largest_update(0.9, 0.95), 1)
    (6.6, 1.1)
    """
    steps = np.arange(1, _MOST_STEPS, dtype=np.float64)
    return float(np.max((1 - first**steps) / np.sqrt(1 - second**steps)))
