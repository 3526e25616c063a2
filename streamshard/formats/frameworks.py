"""What frameworks keep beside a DeepSpeed checkpoint for each rank, and what becomes of it.

Checked with transformers 5.23, accelerate 1.15 and lightning 2.6. The policy: ranks that exist
before and after keep their files; files of ranks that are gone are left out; a new rank never gets
another rank's random generators, only what it needs not to fall out of step with the others.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

HF_TRAINER: Final = "HF Trainer"
ACCELERATE: Final = "Accelerate"
LIGHTNING: Final = "Lightning"

_HF_RANK: Final = re.compile(r"rng_state_(\d+)\.pth")
_HF_ALONE: Final = "rng_state.pth"
"""HF Trainer's name where there is one rank only."""
_HF_MARK: Final = "trainer_state.json"
_ACCELERATE_RANK: Final = re.compile(r"random_states_(\d+)\.pkl")
_ACCELERATE_SCHEDULER: Final = re.compile(r"scheduler(_\d+)?\.bin")
_LIGHTNING_TAG: Final = "checkpoint"


@dataclass(frozen=True, slots=True)
class Resized:
    """What becomes of a framework's files at another world size."""

    framework: str | None
    paths: Mapping[str, str]
    """File of the source → its path in the target; files that are missing here are left out."""
    new_steps: tuple[str, ...]
    """Files to be made for new ranks that hold nothing but Accelerate's step."""
    notes: tuple[str, ...]


def accelerate_file(rank: int) -> str:
    """Name the file in which Accelerate keeps a rank's random generators and its step."""
    return f"random_states_{rank}.pkl"


def framework_of(tag: str, paths: Sequence[str]) -> str | None:
    """Tell which framework a run directory belongs to, by the names in it."""
    top = {path for path in paths if "/" not in path}
    if _HF_MARK in top:
        return HF_TRAINER
    if any(_ACCELERATE_RANK.fullmatch(path) for path in top):
        return ACCELERATE
    return LIGHTNING if tag == _LIGHTNING_TAG else None


def resize(tag: str, paths: Sequence[str], world_size: int) -> Resized:
    """Apply the policy to the files of a run directory."""
    framework = framework_of(tag, paths)
    if framework == HF_TRAINER:
        return _hf_trainer(paths, world_size)
    if framework == ACCELERATE:
        return _accelerate(paths, world_size)
    return Resized(framework, {path: path for path in paths}, (), ())


def _hf_trainer(paths: Sequence[str], world_size: int) -> Resized:
    ranks = {path: _hf_rank(path) for path in paths}
    kept = {
        path: path if rank is None else _hf_name(rank, world_size)
        for path, rank in ranks.items()
        if rank is None or rank < world_size
    }
    held = {rank for rank in ranks.values() if rank is not None}
    return Resized(HF_TRAINER, kept, (), _rank_notes(HF_TRAINER, held, world_size))


def _hf_rank(path: str) -> int | None:
    match = _HF_RANK.fullmatch(path)
    return int(match[1]) if match else 0 if path == _HF_ALONE else None


def _hf_name(rank: int, world_size: int) -> str:
    return _HF_ALONE if world_size == 1 else f"rng_state_{rank}.pth"


def _accelerate(paths: Sequence[str], world_size: int) -> Resized:
    matches = {path: _ACCELERATE_RANK.fullmatch(path) for path in paths}
    ranks = {path: int(match[1]) for path, match in matches.items() if match}
    kept = {path: path for path in paths if ranks.get(path, 0) < world_size}
    new = [rank for rank in range(world_size) if rank not in ranks.values()]
    notes = list(_rank_notes(ACCELERATE, set(ranks.values()), world_size))
    if any(_ACCELERATE_SCHEDULER.fullmatch(path) for path in paths):
        notes.append(
            "Accelerate's scheduler advances once per process and step unless split_batches is "
            "set: its saved position is that of the old world size. Check the learning rate."
        )
    return Resized(
        ACCELERATE,
        kept,
        tuple(map(accelerate_file, new)),
        tuple(notes),
    )


def _rank_notes(framework: str, held: set[int], world_size: int) -> tuple[str, ...]:
    if not held:
        return ()
    new = [rank for rank in range(world_size) if rank not in held]
    gone = sorted(rank for rank in held if rank >= world_size)
    notes = []
    if new:
        notes.append(
            f"{framework}: {_ranks(new)} new: the random generators are those that the job seeds, "
            "as no rank is given another one's."
        )
    if gone:
        notes.append(f"{framework}: {_ranks(gone)} gone, and so are the random generators.")
    return tuple(notes)


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} is"
    return f"ranks {ranks[0]} to {ranks[-1]} are"
