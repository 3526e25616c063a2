"""Spells a logical checkpoint as DeepSpeed would have saved it at another world size or stage.

Nothing here holds tensor data: every storage of the trees made here says what fills it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from streamshard.formats import deepspeed_names as names
from streamshard.formats.inert import Node
from streamshard.formats.zero_module_writer import ModuleWriter
from streamshard.formats.zero_optimizer_writer import OptimizerWriter
from streamshard.formats.zero_target import ZeroTarget


@dataclass(frozen=True, slots=True)
class FileImage:
    """A torch file to be made: where it goes, and the object in it."""

    path: str
    """Relative to the run directory."""
    root: Node
    family: int = 0
    """Number of the family that its contents are of."""


def native_images(target: ZeroTarget) -> Iterator[FileImage]:
    """Spell all files of a family, one after the other: model files, then optimizer files."""
    model, optimizer = ModuleWriter(target), OptimizerWriter(target)
    ranks, tag, mp_rank = range(target.layout.world_size), target.checkpoint.tag, target.mp_rank
    for holder in ranks if target.layout.stage == 3 else (None,):
        path = f"{tag}/{names.model_file(holder, mp_rank)}"
        yield FileImage(path, model.file(holder), mp_rank)
    for rank in ranks:
        path = f"{tag}/{names.optimizer_file(rank, bf16=target.is_bf16, mp_rank=mp_rank)}"
        yield FileImage(path, optimizer.file(rank), mp_rank)


def step_images(step: int | None, paths: Sequence[str]) -> Iterator[FileImage]:
    """Spell files that hold nothing but Accelerate's step."""
    for path in paths:
        yield FileImage(path, {"step": step})


def dump_images(target: ZeroTarget, name: Callable[[int], str]) -> Iterator[FileImage]:
    """Spell raw dumps: each rank's optimizer state, and nothing else."""
    optimizer = OptimizerWriter(target)
    for rank in range(target.layout.world_size):
        yield FileImage(name(rank), optimizer.dump(rank))
