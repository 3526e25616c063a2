"""Decides what happens to the per-rank files that frameworks save next to a DeepSpeed checkpoint.

Checked with transformers 5.23, accelerate 1.15 and lightning 2.6. The policy: ranks that exist
before and after keep their files. Files of ranks that no longer exist are left out. A new rank
never gets another rank's random state, only what it needs to stay in step with the others.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from streamshard.sizes import counted, show_ranks, some_of

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
_HF_RANK: Final = re.compile(r"rng_state_(\d+)\.pth")
_HF_ALONE: Final = "rng_state.pth"
"""HF Trainer's file name if there is only one rank."""
_HF_STEP: Final = re.compile(rb'^  "global_step": (\d{1,15}),?\r?$', re.MULTILINE)
_HF_EPOCH: Final = re.compile(rb'^  "epoch": (\d{1,15}(?:\.\d*)?(?:e-?\d+)?),?\r?$', re.MULTILINE)
"""Trainer writes one key per line, in sorted order, and indents nested keys further."""
_ACCELERATE_RANK: Final = re.compile(r"random_states_(\d+)\.pkl")
_ACCELERATE_TAG: Final = "pytorch_model"
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
_LIGHTNING_TAG: Final = "checkpoint"
_STALE: Final = -1


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


@dataclass(frozen=True, slots=True)
class TrainerState:
    """The progress of HF Trainer."""

    step: int
    epoch: float | None
    """With a fraction."""


def _accelerate_file(rank: int) -> str:
    """Return the name of the file in which Accelerate saves a rank's random state and step."""
    return f"random_states_{rank}.pkl"


def accelerate_rank(path: str) -> int | None:
    """Return the rank whose random state a file of an Accelerate directory holds, or None."""
    match = _ACCELERATE_RANK.fullmatch(path)
    return int(match[1]) if match else None


def trainer_state(head: bytes) -> TrainerState | None:
    r"""Read the beginning of `trainer_state.json`; None if it does not contain the step.

    >>> trainer_state(b'{\n  "epoch": 0.5,\n  "global_step": 10,\n  "log_history": [')
    TrainerState(step=10, epoch=0.5)
    """
    step, epoch = _HF_STEP.search(head), _HF_EPOCH.search(head)
    return TrainerState(int(step[1]), float(epoch[1]) if epoch else None) if step else None


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
    marks = (_HF_FIRST, _HF_ALONE, TRAINER_STATE)
    is_trainer = any(path in marks or _HF_RANK.fullmatch(path) for path in paths)
    if is_trainer and _HF_NAME.fullmatch(directory):
        return (TRAINER_STATE,)
    if tag == _ACCELERATE_TAG or any(_ACCELERATE_RANK.fullmatch(path) for path in paths):
        return tuple(map(_accelerate_file, range(ranks)))
    return ()


def is_of_rank(path: str) -> bool:
    """Tell whether a file is one that each rank saves for itself."""
    return any(known.fullmatch(path) for known in (_HF_RANK, _ACCELERATE_RANK))


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
        path: path if rank is None else hf_random_file(rank, world_size)
        for path, rank in ranks.items()
        if rank is None or rank in range(world_size)
    }
    return Resized(HF_TRAINER, kept, (), _rank_notes(HF_TRAINER, ranks, world_size))


def _hf_rank(path: str, world_size: int) -> int | None:
    """Return the rank whose random state a file holds: None without any, -1 for a stale file."""
    match = _HF_RANK.fullmatch(path)
    if match is None and path != _HF_ALONE:
        return None
    rank = int(match[1]) if match else 0
    # A file of another world size, or with the name for one, is left over from an earlier run.
    return rank if path == hf_random_file(rank, world_size) and rank < world_size else _STALE


def hf_random_file(rank: int, world_size: int) -> str:
    """Return the name of the file in which HF Trainer saves a rank's random state."""
    return _HF_ALONE if world_size == 1 else f"rng_state_{rank}.pth"


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
    return Resized(ACCELERATE, kept, tuple(map(_accelerate_file, new)), notes, schedule)


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
