"""Writes the native files of a target: serializes them, counts their bytes, fills them."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from streamshard.engine.run.work import TargetFile
from streamshard.formats import frameworks
from streamshard.formats.deepspeed.cut.part_cut import cut_model_part
from streamshard.formats.deepspeed.dumps.dump_names import Template
from streamshard.formats.deepspeed.write.zero_target import ZeroTarget
from streamshard.formats.deepspeed.write.zero_writer import (
    DumpImages,
    Images,
    LayerImages,
    NativeImages,
    StepImages,
    WholeImages,
)
from streamshard.layout.memory_plan import MemoryPlan
from streamshard.operations.native.native_byte_counts import count_bytes
from streamshard.operations.native.storage_regions import NativeFiles
from streamshard.operations.native.target_settings import TargetSettings
from streamshard.operations.source.source import Request, Source
from streamshard.operations.transfer import read_back
from streamshard.operations.transfer.byte_accounting import ByteCounts
from streamshard.operations.transfer.report import Progress, Report
from streamshard.operations.transfer.target_writer import Pass

_COPY_BYTES: Final = 4 * 8 * 8
"""Four integers for each copy, in each of the few files in flight."""
_LOCATE_BYTES: Final = 16 * 8
"""Temporary arrays for locating a copy."""


@dataclass(frozen=True, slots=True)
class NativeWriter:
    """Writes a checkpoint's native files, or raw dumps."""

    source: Source
    settings: TargetSettings
    template: Template | None
    """Names of the dumps, if the target is dumps."""
    resized: frameworks.Resized
    """New names of the sidecars, and those that are left out."""
    files: NativeFiles
    images: Sequence[Images]
    """Serialize the torch files."""
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
        targets, files = targets_of(source, settings)
        kind = NativeImages if layout.stage else WholeImages
        images: list[Images] = [kind(target) for target in targets]
        if template is not None:
            images = [DumpImages(targets[0], template.file_name)]
        elif checkpoint.accelerate_step is not None:
            images.append(StepImages(checkpoint.accelerate_step, resized.new_steps))
        if checkpoint.layers:
            images.append(LayerImages(checkpoint))
        counts = count_bytes(source, images, resized, has_latest=template is None)
        return cls(source, settings, template, resized, files, images, counts)

    def byte_counts(self) -> ByteCounts:
        """Return the bytes that are written, and how often each tensor is read."""
        return self.counts

    def copies_bytes(self, workers: int | None) -> int:
        """Return an upper bound of the memory for a target file's copies and for locating them.

        A rank's share of a parameter lies on at most N / M + 2 ranks of the source, for N source
        ranks and M target ranks. Of a tensor that is cut into boxes, a rank gets its share of runs.
        """
        checkpoint = self.source.checkpoint
        spread = checkpoint.layout.world_size // self.settings.layout.world_size + 2
        model_parts = [model_part.groups for model_part in checkpoint.model_parts]
        params = max(sum(len(group.params) for group in groups) for groups in model_parts)
        states = 1 + max(
            (len(g.flat_states()) for groups in model_parts for g in groups), default=0
        )
        counts = self.source.cutting.runs([t.numel for t in checkpoint.tensors])
        runs: Counter[str] = Counter()
        for tensor, count in zip(checkpoint.tensors, counts.tolist(), strict=True):
            runs[tensor.model_part] += count
        runs_of_rank = -(-max(runs.values(), default=0) // self.settings.layout.world_size)
        return params * spread * (states * _COPY_BYTES + _LOCATE_BYTES) + runs_of_rank * _COPY_BYTES

    def passes(self) -> Sequence[Pass]:
        """Return the only pass; `latest` is written by the commit."""
        return [self._targets]

    def _targets(self) -> Iterator[TargetFile]:
        for images in self.images:
            yield from map(self.files.torch_target, images.all())
        yield from self.files.other_targets(self.resized.paths)

    def differences(self, place: Path, memory: MemoryPlan, progress: Progress) -> list[str]:
        """Read the written files back as a checkpoint, and compare it with the source."""
        path = place / self.template.name if self.template else place
        config, like = self.settings.config, self.source.like
        written = Request(path, self.source.checkpoint.tag, config=config, like=like)
        return read_back.differences(written, self.source, memory, progress)

    def finish(self, report: Report) -> Report:
        """Return the report as it is."""
        return report


def targets_of(source: Source, settings: TargetSettings) -> tuple[list[ZeroTarget], NativeFiles]:
    """Cut each model part of a checkpoint according to the settings."""
    checkpoint, layout = source.checkpoint, settings.layout
    dtype, index = settings.module_dtype, checkpoint.tensor_index()
    cuts = [
        cut_model_part(checkpoint, model_part, layout, dtype)
        for model_part in checkpoint.model_parts
    ]
    targets = [
        ZeroTarget(
            checkpoint=checkpoint,
            model_part=model_part,
            mp_rank=mp_rank,
            layout=layout,
            config=settings.config,
            module_dtype=settings.module_dtype,
            is_bf16=settings.is_bf16,
            cut=cut,
            index=index,
        )
        for mp_rank, (model_part, cut) in enumerate(zip(checkpoint.model_parts, cuts, strict=True))
    ]
    return targets, NativeFiles(source)
