"""Writes the native files of a target: serializes them, counts their bytes, fills them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Self

from streamshard.engine.run.phases import Progress
from streamshard.formats import frameworks
from streamshard.formats.deepspeed import names
from streamshard.formats.deepspeed.cut.part_cut import ZeroTarget, cut_model_part
from streamshard.formats.deepspeed.write.zero_writer import (
    dump_files,
    layer_files,
    native_files,
    step_files,
    whole_files,
)
from streamshard.formats.facts import Facts
from streamshard.formats.torch.zip_layout import FileImage
from streamshard.layout.memory_plan import MemoryPlan
from streamshard.model import Template
from streamshard.native.target_settings import TargetSettings
from streamshard.registry import READ_BACK, UNCUTTABLE, load
from streamshard.source.source import Request, Source
from streamshard.transfer.byte_accounting import ByteCounts
from streamshard.transfer.file_layout import FileLayout, copied_files, fixed_files
from streamshard.transfer.target_writer import Pass, TargetWriter
from streamshard.transfer.torch_layout import torch_layout


@dataclass(frozen=True, slots=True)
class NativeWriter(TargetWriter):
    """Writes a checkpoint's native files, or raw dumps."""

    source: Source
    settings: TargetSettings
    template: Template | None
    """Names of the dumps, if the target is dumps."""
    resized: frameworks.Resized
    """New names of the sidecars, and those that are left out."""
    images: Sequence[FileImage]
    """The torch files."""
    counts: ByteCounts

    @classmethod
    def of(
        cls,
        source: Source,
        settings: TargetSettings,
        template: Template | None,
        resized: frameworks.Resized,
    ) -> Self:
        """Cut a checkpoint according to the settings, and serialize its torch files."""
        checkpoint, layout = source.checkpoint, settings.layout
        targets = targets_of(source, settings)
        if template is not None:
            images = list(dump_files(targets[0], template.file_name))
        else:
            kind = native_files if layout.stage else whole_files
            images = list(chain.from_iterable(map(kind, targets)))
            if checkpoint.accelerate_step is not None:
                images += step_files(checkpoint.accelerate_step, resized.new_steps)
        images += layer_files(checkpoint)
        alike: dict[str, list[FileImage]] = {}
        for image in images:
            alike.setdefault(image.alike or image.path, []).append(image)
        counts = ByteCounts(source)
        for same in alike.values():
            counts.add(layout_of(same[0]), [image.path for image in same])
        counts.add_all(copied_files(checkpoint, resized.paths.get))
        if template is None:
            counts.add_all(fixed_files({names.LATEST: checkpoint.tag.encode()}))
        return cls(source, settings, template, resized, images, counts)

    def passes(self) -> Sequence[Pass]:
        """Return the only pass; `latest` is written by the commit."""
        checkpoint, paths = self.source.checkpoint, self.resized.paths
        return [lambda: chain(map(layout_of, self.images), copied_files(checkpoint, paths.get))]

    def differences(self, place: Path, memory: MemoryPlan, progress: Progress) -> list[str]:
        path = place / self.template.name if self.template else place
        # Raw dumps hold no config.
        facts = Facts(ds_config=self.settings.config if self.template else None)
        written = Request(path, self.source.checkpoint.tag, facts, self.source.reference)
        found: list[str] = load(READ_BACK)(written, self.source, memory, progress)
        return found


def layout_of(image: FileImage) -> FileLayout:
    """Describe a torch file."""
    return torch_layout(image.path, image.serialized(), image.rank)


def targets_of(source: Source, settings: TargetSettings) -> list[ZeroTarget]:
    """Cut each model part of a checkpoint according to the settings."""
    checkpoint, layout = source.checkpoint, settings.layout
    if objection := checkpoint.objection(layout):
        raise load(UNCUTTABLE)(objection, checkpoint, layout, source.path)
    index = checkpoint.tensor_index()
    return [
        ZeroTarget(
            checkpoint=checkpoint,
            model_part=model_part,
            mp_rank=mp_rank,
            layout=layout,
            config=settings.config,
            module_dtype=settings.module_dtype,
            is_bf16=settings.is_bf16,
            cut=cut_model_part(checkpoint, model_part, layout, settings.module_dtype),
            index=index,
        )
        for mp_rank, model_part in enumerate(checkpoint.model_parts)
    ]
