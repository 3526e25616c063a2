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
_STALE: Final = -1


@dataclass(frozen=True, slots=True)
class Resized:
    """What becomes of a framework's files at another world size."""

    framework: str | None
    paths: Mapping[str, str]
    """File of the source → its path in the target; files that are missing here are left out."""
    new_steps: tuple[str, ...]
    """Files to be made for new ranks that hold nothing but Accelerate's step."""
    notes: tuple[str, ...]
    schedule: str = ""
    """The one of the notes that is about the learning rate, if there is one."""


def accelerate_file(rank: int) -> str:
    """Name the file in which Accelerate keeps a rank's random generators and its step."""
    return f"random_states_{rank}.pkl"


def accelerate_rank(path: str) -> int | None:
    """Tell whose random generators a file of an Accelerate directory holds, if any rank's."""
    match = _ACCELERATE_RANK.fullmatch(path)
    return int(match[1]) if match else None


def framework_of(tag: str, paths: Sequence[str]) -> str | None:
    """Tell which framework a run directory belongs to, by the names in it."""
    top = {path for path in paths if "/" not in path}
    if _HF_MARK in top:
        return HF_TRAINER
    if any(_ACCELERATE_RANK.fullmatch(path) for path in top):
        return ACCELERATE
    return LIGHTNING if tag == _LIGHTNING_TAG else None


def resize(tag: str, paths: Sequence[str], *, source_world_size: int, world_size: int) -> Resized:
    """Apply the policy to the files of a run directory."""
    framework = framework_of(tag, paths)
    if framework == HF_TRAINER:
        return _hf_trainer(paths, source_world_size, world_size)
    if framework == ACCELERATE:
        return _accelerate(paths, source_world_size, world_size)
    return Resized(framework, {path: path for path in paths}, (), ())


def _hf_trainer(paths: Sequence[str], source_world_size: int, world_size: int) -> Resized:
    ranks = {path: _hf_rank(path, source_world_size) for path in paths}
    kept = {
        path: path if rank is None else _hf_name(rank, world_size)
        for path, rank in ranks.items()
        if rank is None or rank in range(world_size)
    }
    return Resized(HF_TRAINER, kept, (), _rank_notes(HF_TRAINER, ranks, world_size))


def _hf_rank(path: str, world_size: int) -> int | None:
    """Tell whose generators a file holds: a rank's, nobody's (None), or a stale rank's (-1)."""
    match = _HF_RANK.fullmatch(path)
    if match is None and path != _HF_ALONE:
        return None
    rank = int(match[1]) if match else 0
    # A file of another world size, or spelled as for one, was left behind by an earlier run.
    return rank if path == _hf_name(rank, world_size) and rank < world_size else _STALE


def _hf_name(rank: int, world_size: int) -> str:
    return _HF_ALONE if world_size == 1 else f"rng_state_{rank}.pth"


def _accelerate(paths: Sequence[str], source_world_size: int, world_size: int) -> Resized:
    ranks = {path: accelerate_rank(path) for path in paths}
    ranks = {
        path: rank if rank is None or rank < source_world_size else _STALE
        for path, rank in ranks.items()
    }
    kept = {p: p for p, rank in ranks.items() if rank is None or rank in range(world_size)}
    notes, schedule = list(_rank_notes(ACCELERATE, ranks, world_size)), ""
    if any(_ACCELERATE_SCHEDULER.fullmatch(path) for path in paths):
        schedule = (
            "Accelerate's scheduler advances once per process and step unless split_batches is "
            "set: its saved position is that of the old world size. Check the learning rate."
        )
        notes.append(schedule)
    new = [rank for rank in range(world_size) if rank not in ranks.values()]
    return Resized(ACCELERATE, kept, tuple(map(accelerate_file, new)), tuple(notes), schedule)


def _rank_notes(
    framework: str, ranks: Mapping[str, int | None], world_size: int
) -> tuple[str, ...]:
    held = {rank for rank in ranks.values() if rank is not None and rank != _STALE}
    stale = sorted(path for path, rank in ranks.items() if rank == _STALE)
    new = [rank for rank in range(world_size) if rank not in held]
    gone = sorted(rank for rank in held if rank >= world_size)
    notes = []
    if held and new:
        notes.append(
            f"{framework}: {_ranks(new)} new: the random generators are those that the job seeds, "
            "as no rank is given another one's."
        )
    if gone:
        notes.append(f"{framework}: {_ranks(gone)} gone, and so are the random generators.")
    if stale:
        notes.append(f"{framework}: left out, as of another world size: {', '.join(stale)}.")
    return tuple(notes)


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} is"
    return f"ranks {', '.join(map(str, ranks))} are"
