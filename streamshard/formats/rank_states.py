"""Decides what happens to the files in which frameworks keep a state of each rank.

The policy: ranks that exist before and after keep their files. Files of ranks that no longer exist
are left out. A new rank never gets another rank's random state, only what it needs to stay in step
with the others.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from streamshard.formats.frameworks import (
    ACCELERATE,
    HF_ALONE,
    HF_RANK,
    HF_TRAINER,
    Resized,
    accelerate_file,
    accelerate_rank,
)
from streamshard.sizes import counted, show_ranks, some_of

_HF_STEP: Final = re.compile(rb'^  "global_step": (\d{1,15}),?\r?$', re.MULTILINE)
_HF_EPOCH: Final = re.compile(rb'^  "epoch": (\d{1,15}(?:\.\d*)?(?:e-?\d+)?),?\r?$', re.MULTILINE)
"""Trainer writes one key per line, in sorted order, and indents nested keys further."""
_ACCELERATE_SCHEDULER: Final = re.compile(r"scheduler(_\d+)?\.bin")
_ACCELERATE_SCHEDULE: Final = """\
At every optimizer step, Accelerate advances the scheduler once for each process: {before} in \
the old job, {now} in the new one. So the learning rate would leave the old schedule. To \
stay on it, create the scheduler with the same numbers of steps as in the old job, and write in \
the training script:
  Accelerator(step_scheduler_with_optimizer=False)
  if accelerator.sync_gradients:
      for _ in range({old}):
          scheduler.step()
Change nothing if the script has these lines already, or if the old job had \
step_scheduler_with_optimizer=False or split_batches=True."""
_STALE: Final = -1


@dataclass(frozen=True, slots=True)
class TrainerState:
    step: int
    epoch: float | None
    """With a fraction."""


def trainer_state(head: bytes) -> TrainerState | None:
    r"""Read the beginning of `trainer_state.json`; None if it does not contain the step.

    >>> trainer_state(b'{\n  "epoch": 0.5,\n  "global_step": 10,\n  "log_history": [')
    TrainerState(step=10, epoch=0.5)
    """
    step, epoch = _HF_STEP.search(head), _HF_EPOCH.search(head)
    return TrainerState(int(step[1]), float(epoch[1]) if epoch else None) if step else None


def _hf_trainer(paths: Sequence[str], source_world_size: int, world_size: int) -> Resized:
    ranks = {path: _hf_rank(path, source_world_size) for path in paths}
    kept = {
        path: path if rank is None else hf_random_file(rank, world_size)
        for path, rank in ranks.items()
        if rank is None or rank in range(world_size)
    }
    return Resized(HF_TRAINER, kept, (), _rank_notes(HF_TRAINER, ranks, world_size))


def _hf_rank(path: str, world_size: int) -> int | None:
    """Return the rank whose random state a file holds: None without any, -1 for a stale file."""
    match = HF_RANK.fullmatch(path)
    if match is None and path != HF_ALONE:
        return None
    rank = int(match[1]) if match else 0
    # A file of another world size, or with the name for one, is left over from an earlier run.
    return rank if path == hf_random_file(rank, world_size) and rank < world_size else _STALE


def hf_random_file(rank: int, world_size: int) -> str:
    return HF_ALONE if world_size == 1 else f"rng_state_{rank}.pth"


def _accelerate(paths: Sequence[str], source_world_size: int, world_size: int) -> Resized:
    ranks = {path: accelerate_rank(path) for path in paths}
    ranks = {
        path: rank if rank is None or rank < source_world_size else _STALE
        for path, rank in ranks.items()
    }
    kept = {p: p for p, rank in ranks.items() if rank is None or rank in range(world_size)}
    schedule = ""
    has_scheduler = any(_ACCELERATE_SCHEDULER.fullmatch(path) for path in paths)
    if has_scheduler and world_size != source_world_size:
        schedule = _ACCELERATE_SCHEDULE.format(
            before=counted(source_world_size, "time"),
            now=counted(world_size, "time"),
            old=source_world_size,
        )
    new = [rank for rank in range(world_size) if rank not in ranks.values()]
    notes = _rank_notes(ACCELERATE, ranks, world_size)
    return Resized(ACCELERATE, kept, tuple(map(accelerate_file, new)), notes, schedule)


def _rank_notes(
    framework: str, ranks: Mapping[str, int | None], world_size: int
) -> tuple[str, ...]:
    present = {rank for rank in ranks.values() if rank is not None and rank != _STALE}
    stale = sorted(path for path, rank in ranks.items() if rank == _STALE)
    new = [rank for rank in range(world_size) if rank not in present]
    gone = sorted(rank for rank in present if rank >= world_size)
    notes = []
    if present and new:
        notes.append(
            f"{framework}: the checkpoint has no random state for the new {show_ranks(new)}. The "
            f"job seeds {'it' if len(new) == 1 else 'them'} as at a fresh start, so dropout and "
            "other random choices there are new. Nothing has to be done."
        )
    if gone:
        notes.append(
            f"{framework}: the new job has no {show_ranks(gone)}, so the random state of "
            f"{'that rank' if len(gone) == 1 else 'these ranks'} is not used. Nothing has to be "
            "done."
        )
    if stale:
        notes.append(
            f"{framework}: not used, because a job of another world size left them there: "
            f"{some_of(stale)}."
        )
    return tuple(notes)


RESIZE: Final[Mapping[str, Callable[[Sequence[str], int, int], Resized]]] = {
    HF_TRAINER: _hf_trainer,
    ACCELERATE: _accelerate,
}
"""Framework → its policy, for the files of a run directory and the counts of ranks."""
