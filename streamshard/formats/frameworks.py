"""Knows the frameworks that save files next to a DeepSpeed checkpoint, by the names of these.

Checked with transformers 5.23, accelerate 1.15 and lightning 2.6.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from streamshard import registry

HF_TRAINER: Final = "HF Trainer"
ACCELERATE: Final = "Accelerate"
LIGHTNING: Final = "Lightning"
FABRIC: Final = "Lightning Fabric"
"""Saves under the same tag as Lightning, but without Lightning's own entries."""
LIGHTNING_VERSION: Final = "pytorch-lightning_version"
"""Key of the client state that Lightning's Trainer saves."""
TRAINER_STATE: Final = "trainer_state.json"

_HF_NAME: Final = re.compile(r"checkpoint-\d+")
_HF_FIRST: Final = "training_args.bin"
"""HF Trainer writes it right after the weights, before DeepSpeed saves."""
HF_RANK: Final = re.compile(r"rng_state_(\d+)\.pth")
HF_ALONE: Final = "rng_state.pth"
"""HF Trainer's file name if there is only one rank."""
_ACCELERATE_RANK: Final = re.compile(r"random_states_(\d+)\.pkl")
_ACCELERATE_TAG: Final = "pytorch_model"
_LIGHTNING_TAG: Final = "checkpoint"


@dataclass(frozen=True, slots=True)
class Resized:
    """What happens to a framework's files at another world size."""

    framework: str | None
    paths: Mapping[str, str]
    """Source file → its path in the target. Files that are not listed are left out."""
    new_steps: tuple[str, ...]
    """Files to make for new ranks. They hold only Accelerate's step."""
    notes: tuple[str, ...]
    """Notes on the random state of ranks."""
    schedule: str = ""
    """Note on the learning rate; empty if nothing has to be done."""


def accelerate_file(rank: int) -> str:
    return f"random_states_{rank}.pkl"


def accelerate_rank(path: str) -> int | None:
    """Return the rank whose random state a file of an Accelerate directory holds, or None."""
    match = _ACCELERATE_RANK.fullmatch(path)
    return int(match[1]) if match else None


def framework_of(tag: str, paths: Sequence[str]) -> str | None:
    """Return the framework that a run directory belongs to, by its file names."""
    top = {path for path in paths if "/" not in path}
    if TRAINER_STATE in top:
        return HF_TRAINER
    if any(_ACCELERATE_RANK.fullmatch(path) for path in top):
        return ACCELERATE
    return LIGHTNING if tag == _LIGHTNING_TAG else None


def written_last(directory: str, tag: str, paths: Collection[str], ranks: int) -> tuple[str, ...]:
    """Name the files that a framework writes after all others of a checkpoint.

    If one of them is missing, its save was cut off after DeepSpeed had ended its part of it.

    >>> written_last("checkpoint-5", "global_step5", ["rng_state_0.pth"], 2)
    ('trainer_state.json',)
    >>> written_last("step_5", "pytorch_model", [], 2)
    ('random_states_0.pkl', 'random_states_1.pkl')
    """
    marks = (_HF_FIRST, HF_ALONE, TRAINER_STATE)
    is_trainer = any(path in marks or HF_RANK.fullmatch(path) for path in paths)
    if is_trainer and _HF_NAME.fullmatch(directory):
        return (TRAINER_STATE,)
    if tag == _ACCELERATE_TAG or any(_ACCELERATE_RANK.fullmatch(path) for path in paths):
        return tuple(map(accelerate_file, range(ranks)))
    return ()


def is_of_rank(path: str) -> bool:
    """Tell whether a file is one that each rank saves for itself."""
    return any(known.fullmatch(path) for known in (HF_RANK, _ACCELERATE_RANK))


def resize(tag: str, paths: Sequence[str], *, source_world_size: int, world_size: int) -> Resized:
    """Say what happens to the files of a run directory; see `rank_states`."""
    framework = framework_of(tag, paths)
    if framework in (HF_TRAINER, ACCELERATE):
        found: Resized = registry.load(registry.RANK_STATES)[framework](
            paths, source_world_size, world_size
        )
        return found
    return Resized(framework, {path: path for path in paths}, (), ())
