"""Turns a checkpoint into the files of DeepSpeed's universal checkpoint."""

from collections.abc import Iterator, Mapping
from typing import Final

from streamshard.errors import UnsupportedError
from streamshard.formats.deepspeed import names
from streamshard.formats.deepspeed.write.universal_writer import UniversalImages
from streamshard.native.target_files import layout_of, targets_of
from streamshard.native.target_settings import TargetSettings
from streamshard.operations.export.weights import only_model_part
from streamshard.source.source import Source
from streamshard.transfer.file_layout import FileLayout, fixed_files

_NAMELESS: Final = (
    "saved without ZeRO (stage 0), whose optimizer does not name the parameters, and a universal "
    "checkpoint holds their states by name. DeepSpeed loads it as it is on any count of ranks"
)
_LOAD: Final = (
    'To load it, set "checkpoint": {{"load_universal": true}} in the DeepSpeed config, at ZeRO '
    "stage {stages}. DeepSpeed then restores neither buffers nor frozen weights: load those from "
    "the model's own files."
)
_ALIKE: Final = (
    "At stage 3 DeepSpeed gives all param groups the hyper-parameters of the first, and all "
    "sub-groups one step counter between them: `repartition` keeps each its own."
)
_ROUND_ROBIN: Final = (
    "Load it with round_robin_gradients off: with it, DeepSpeed's loader puts parameters into each "
    "other's places without a word. `repartition` knows both."
)


class UniversalFiles:
    """Lays out the files of a universal checkpoint."""

    def __init__(self, source: Source) -> None:
        checkpoint = source.checkpoint
        source.require_training_state()
        if not checkpoint.layout.stage:
            raise UnsupportedError(_NAMELESS)
        self._layout = checkpoint.layout
        self._model_part = only_model_part(checkpoint)
        own = checkpoint.config, checkpoint.module_dtype, checkpoint.is_bf16
        (target,) = targets_of(source, TargetSettings(self._layout, *own, notes=()))
        self.images = UniversalImages(target)
        self._units = max(len(target.cut.sub_groups), len(self._model_part.groups))
        self._latest = {names.LATEST_UNIVERSAL: checkpoint.tag.encode()}

    def documents(self) -> Mapping[str, bytes]:
        """Serialize the file that names the tag."""
        return self._latest

    def notes(self) -> Iterator[str]:
        """Say how to load the files, and what DeepSpeed does when it loads them."""
        yield _LOAD.format(stages="3" if self._layout.stage == 3 else "1 or 2")
        if self._layout.stage == 3 and self._units > 1:
            yield _ALIKE
        if self._layout.round_robin:
            yield _ROUND_ROBIN

    def tensors(self) -> int:
        """Count the states that get a file each."""
        groups = self._model_part.groups
        return sum(len(group.params) * len(group.tensor_states) for group in groups)

    def layouts(self) -> Iterator[FileLayout]:
        """Yield the layouts of all files; the file that names the tag is last."""
        yield from map(layout_of, self.images.all())
        yield from fixed_files(self._latest)
