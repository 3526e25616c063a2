"""Serializes a checkpoint as DeepSpeed would have saved it at another world size or stage.

Nothing here holds tensor data: each storage describes the content that fills it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from streamshard.formats.checkpoint import Checkpoint
from streamshard.formats.deepspeed import names
from streamshard.formats.deepspeed.write.module_writer import ModuleWriter
from streamshard.formats.deepspeed.write.optimizer_writer import OptimizerWriter
from streamshard.formats.deepspeed.write.zero_target import ZeroTarget
from streamshard.formats.pickle.inert import Node
from streamshard.formats.torch.zip_layout import Serialized, serialize


@dataclass(frozen=True, slots=True)
class FileImage:
    """A torch file to be written."""

    path: str
    """Relative to the run directory."""
    serialized: Callable[[], Serialized]
    """Serializes the object in it, or returns one that differs only in what fills its storages."""
    rank: int | None = None
    """Rank whose shares fill storages that do not say it."""
    alike: str = ""
    """The same for files that are laid out alike; empty if that is not known of any other."""


def whole_files(target: ZeroTarget) -> Iterator[FileImage]:
    """Yield the only file of a model part that was trained without ZeRO (stage 0)."""
    path = f"{target.checkpoint.tag}/{names.model_file(None, target.mp_rank)}"
    yield FileImage(path, lambda: serialize(ModuleWriter(target).file(None)))


def native_files(target: ZeroTarget) -> Iterator[FileImage]:
    """Yield the files of a model part: model files, then optimizer files."""
    yield from model_files(target)
    build, is_3, mp_rank = OptimizerWriter(target).file, target.layout.stage == 3, target.mp_rank
    for rank in range(target.layout.world_size):
        name = names.optimizer_file(rank, bf16=target.is_bf16, mp_rank=mp_rank)
        # At stage 3 all ranks own equally much. A file's content includes the file's name.
        alike = f"optimizer {mp_rank} {len(str(rank))}" if is_3 else ""
        path = f"{target.checkpoint.tag}/{name}"
        yield FileImage(path, partial(_serialize, build, rank), alike=alike)


def model_files(target: ZeroTarget) -> Iterator[FileImage]:
    """Yield the model file that all ranks share, or that of each rank in stage 3.

    There the first rank also saves the list of tied parameters, if there are any.
    """
    writer, place, mp_rank = ModuleWriter(target), target.checkpoint.tag, target.mp_rank
    if target.layout.stage < 3:
        path = f"{place}/{names.model_file(None, mp_rank)}"
        yield FileImage(path, lambda: serialize(writer.file(None)))
        return
    made: dict[bool, Serialized] = {}

    def serialized(rank: int, *, lists_tied: bool) -> Serialized:
        if lists_tied not in made:
            made[lists_tied] = serialize(writer.file(rank))
        return made[lists_tied]

    for rank in range(target.layout.world_size):
        lists_tied = bool(writer.shared_params(rank))
        alike = f"model {mp_rank} {lists_tied} {len(str(rank))}"
        path = f"{place}/{names.model_file(rank, mp_rank)}"
        yield FileImage(path, partial(serialized, rank, lists_tied=lists_tied), rank, alike)


def dump_files(target: ZeroTarget, name: Callable[[int], str]) -> Iterator[FileImage]:
    """Yield raw dumps: each rank's optimizer state, and nothing else."""
    build = OptimizerWriter(target).dump
    for rank in range(target.layout.world_size):
        yield FileImage(name(rank), partial(_serialize, build, rank))


def step_files(step: int, paths: Sequence[str]) -> Iterator[FileImage]:
    """Yield files that hold only Accelerate's step."""
    for path in paths:
        yield FileImage(path, partial(serialize, {"step": step}))


def layer_files(checkpoint: Checkpoint) -> Iterator[FileImage]:
    """Yield the files of a pipeline's layers."""
    for layer in checkpoint.layers:
        yield FileImage(f"{checkpoint.tag}/{layer.name}", partial(serialize, layer.state))


def _serialize(build: Callable[[int], Node], rank: int) -> Serialized:
    return serialize(build(rank))
