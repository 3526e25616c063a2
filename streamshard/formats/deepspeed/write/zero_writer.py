"""Serializes a checkpoint as DeepSpeed would have saved it at another world size or stage.

Nothing here holds tensor data: each storage describes the content that fills it.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath
from typing import Protocol

from streamshard.formats.checkpoint import Checkpoint
from streamshard.formats.deepspeed import names
from streamshard.formats.deepspeed.write.module_writer import ModuleWriter
from streamshard.formats.deepspeed.write.optimizer_writer import OptimizerWriter
from streamshard.formats.deepspeed.write.zero_target import ZeroTarget
from streamshard.formats.torch.torch_file import Serialized, TorchLayout, lay_out, serialize


@dataclass(frozen=True, slots=True)
class FileImage:
    """A torch file to be written: its path, and the object in it."""

    path: str
    """Relative to the run directory."""
    serialized: Serialized
    """Shared by all ranks whose objects differ only in the content of their storages."""
    rank: int | None = None
    """Rank whose content fills a shared `serialized`; else None."""

    def lay_out(self) -> TorchLayout:
        """Lay out the file, which determines its size and its pickle."""
        return lay_out(self.serialized, PurePosixPath(self.path).stem)


class WholeImages:
    """Serializes the only file of a model part that was trained without ZeRO (stage 0)."""

    def __init__(self, target: ZeroTarget) -> None:
        self._target = target

    def by_path(self) -> dict[str, Callable[[], FileImage]]:
        """Return the path of the file, with a function that serializes it."""
        target = self._target
        path = f"{target.checkpoint.tag}/{names.model_file(None, target.mp_rank)}"
        writer = ModuleWriter(target)
        return {path: lambda: FileImage(path, serialize(writer.file(None)))}

    def all(self) -> Iterator[FileImage]:
        """Yield all files."""
        yield from (image() for image in self.by_path().values())

    def sizes(self) -> Iterator[tuple[FileImage, Sequence[str]]]:
        """Yield one of each set of equally large files, with the paths of the set."""
        yield from ((image, [image.path]) for image in self.all())


class NativeImages:
    """Serializes the files of a model part one by one: model files, then optimizer files."""

    def __init__(self, target: ZeroTarget) -> None:
        self._target = target
        self._model = ModuleWriter(target)
        self._optimizer = OptimizerWriter(target)
        self._ranks = range(target.layout.world_size)
        self._of_all: dict[bool, Serialized] = {}
        """Whether the file lists the tied parameters → model file of stage 3."""

    def by_path(self) -> dict[str, Callable[[], FileImage]]:
        """Return path → function that serializes the file; model files, then optimizer files."""
        holders = self._ranks if self._target.layout.stage == 3 else (None,)
        models = {
            self._model_name(holder): partial(self._model_image, holder) for holder in holders
        }
        optimizers = {
            self._optimizer_name(rank): partial(self._optimizer_image, rank) for rank in self._ranks
        }
        return {self._path(name): image for name, image in {**models, **optimizers}.items()}

    def all(self) -> Iterator[FileImage]:
        """Yield all files."""
        yield from (image() for image in self.by_path().values())

    def models(self) -> Iterator[FileImage]:
        """Yield the model files."""
        for holder in self._ranks if self._target.layout.stage == 3 else (None,):
            yield self._model_image(holder)

    def sizes(self) -> Iterator[tuple[FileImage, Sequence[str]]]:
        """Yield one of each set of equally large files, with the paths of the set.

        At stage 3 all ranks own equally much. The first rank also saves the list of tied
        parameters, if there are any. A file's content includes the file's name.
        """
        if self._target.layout.stage < 3:
            yield from ((image, [image.path]) for image in self.all())
            return
        listed = self._model.shared_params
        for ranks in _alike(self._ranks, lambda rank: (bool(listed(rank)), len(str(rank)))):
            yield self._model_image(ranks[0]), [self._path(self._model_name(r)) for r in ranks]
        for ranks in _alike(self._ranks, lambda rank: len(str(rank))):
            paths = [self._path(self._optimizer_name(rank)) for rank in ranks]
            yield self._optimizer_image(ranks[0]), paths

    def _model_image(self, rank: int | None) -> FileImage:
        name = self._model_name(rank)
        if rank is None:
            return self._image(name, serialize(self._model.file(None)))
        lists_tied = bool(self._model.shared_params(rank))
        if lists_tied not in self._of_all:
            self._of_all[lists_tied] = serialize(self._model.file(rank))
        return self._image(name, self._of_all[lists_tied], rank)

    def _optimizer_image(self, rank: int) -> FileImage:
        return self._image(self._optimizer_name(rank), serialize(self._optimizer.file(rank)))

    def _model_name(self, rank: int | None) -> str:
        return names.model_file(rank, self._target.mp_rank)

    def _optimizer_name(self, rank: int) -> str:
        bf16, mp_rank = self._target.is_bf16, self._target.mp_rank
        return names.optimizer_file(rank, bf16=bf16, mp_rank=mp_rank)

    def _path(self, name: str) -> str:
        return f"{self._target.checkpoint.tag}/{name}"

    def _image(self, name: str, serialized: Serialized, rank: int | None = None) -> FileImage:
        return FileImage(self._path(name), serialized, rank)


def _alike(ranks: Iterable[int], key: Callable[[int], Hashable]) -> Iterator[list[int]]:
    """Yield the lists of ranks that have the same key."""
    groups: dict[Hashable, list[int]] = {}
    for rank in ranks:
        groups.setdefault(key(rank), []).append(rank)
    yield from groups.values()


@dataclass(frozen=True, slots=True)
class StepImages:
    """Serializes files that hold only Accelerate's step."""

    step: int
    paths: Sequence[str]

    def all(self) -> Iterator[FileImage]:
        """Yield all files."""
        for path in self.paths:
            yield FileImage(path, serialize({"step": self.step}))

    def sizes(self) -> Iterator[tuple[FileImage, Sequence[str]]]:
        """Yield one of each set of equally large files, with the paths of the set."""
        yield from ((image, [image.path]) for image in self.all())


@dataclass(frozen=True, slots=True)
class LayerImages:
    """Serializes the files of a pipeline's layers."""

    checkpoint: Checkpoint

    def all(self) -> Iterator[FileImage]:
        """Yield all files."""
        for layer in self.checkpoint.layers:
            yield FileImage(f"{self.checkpoint.tag}/{layer.name}", serialize(layer.state))

    def sizes(self) -> Iterator[tuple[FileImage, Sequence[str]]]:
        """Yield one of each set of equally large files, with the paths of the set."""
        yield from ((image, [image.path]) for image in self.all())


class Images(Protocol):
    """Serializes torch files, again at every call."""

    def all(self) -> Iterator[FileImage]:
        """Yield all files."""

    def sizes(self) -> Iterator[tuple[FileImage, Sequence[str]]]:
        """Yield one of each set of equally large files, with the paths of the set."""


class DumpImages:
    """Serializes raw dumps: each rank's optimizer state, and nothing else."""

    def __init__(self, target: ZeroTarget, name: Callable[[int], str]) -> None:
        self._ranks = range(target.layout.world_size)
        self._optimizer = OptimizerWriter(target)
        self._name = name

    def by_path(self) -> dict[str, Callable[[], FileImage]]:
        """Return path → function that serializes the file."""
        return {self._name(rank): partial(self._image, rank) for rank in self._ranks}

    def all(self) -> Iterator[FileImage]:
        """Yield all files."""
        yield from (image() for image in self.by_path().values())

    def sizes(self) -> Iterator[tuple[FileImage, Sequence[str]]]:
        """Yield one of each set of equally large files, with the paths of the set."""
        yield from ((image, [image.path]) for image in self.all())

    def _image(self, rank: int) -> FileImage:
        return FileImage(self._name(rank), serialize(self._optimizer.dump(rank)))
