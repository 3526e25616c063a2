"""Serializes the native files of a target, and counts their bytes."""

from collections.abc import Sequence
from typing import Final

from streamshard.formats import frameworks
from streamshard.formats.deepspeed import names
from streamshard.formats.deepspeed.cut.family_cut import cut_family
from streamshard.formats.deepspeed.dumps.dump_names import Template
from streamshard.formats.deepspeed.write.zero_target import ZeroTarget
from streamshard.formats.deepspeed.write.zero_writer import (
    DumpImages,
    Images,
    NativeImages,
    StepImages,
    WholeImages,
)
from streamshard.model import FILE
from streamshard.operations.native.storage_regions import NativeFiles
from streamshard.operations.native.target_settings import TargetSettings
from streamshard.operations.source.source import Source
from streamshard.operations.transfer.byte_accounting import ByteCounts, NativeTally

_COPY_BYTES: Final = 4 * 8 * 8
"""Four integers for each copy, in each of the few files in flight."""
_LOCATE_BYTES: Final = 16 * 8
"""Temporary arrays for locating a copy."""


def serialize(
    source: Source,
    settings: TargetSettings,
    template: Template | None,
    resized: frameworks.Resized,
) -> tuple[NativeFiles, Sequence[Images]]:
    """Cut a checkpoint according to the settings, and serialize its torch files.

    Parameters
    ----------
    template
        Names of the dumps, if the target is dumps.
    resized
        New names of a framework's files, and those that are left out.
    """
    checkpoint, layout = source.checkpoint, settings.layout
    dtype = settings.module_dtype
    cuts = [cut_family(checkpoint, family, layout, dtype) for family in checkpoint.families]
    targets = [
        ZeroTarget(
            checkpoint=checkpoint,
            family=family,
            mp_rank=mp_rank,
            layout=layout,
            config=settings.config,
            module_dtype=settings.module_dtype,
            is_bf16=settings.is_bf16,
            cut=cut,
        )
        for mp_rank, (family, cut) in enumerate(zip(checkpoint.families, cuts, strict=True))
    ]
    files = NativeFiles(source, layout.world_size, cuts)
    if template is not None:
        return files, [DumpImages(targets[0], template.file_name)]
    kind = NativeImages if layout.stage else WholeImages
    images: list[Images] = [kind(target) for target in targets]
    if checkpoint.accelerate_step is not None:
        images.append(StepImages(checkpoint.accelerate_step, resized.new_steps))
    return files, images


def count_bytes(
    source: Source,
    files: NativeFiles,
    images: Sequence[Images],
    resized: frameworks.Resized,
    *,
    has_latest: bool,
) -> ByteCounts:
    """Count the bytes of the target's files, and how often each tensor is read."""
    byte_counts, checkpoint = NativeTally(source, files), source.checkpoint
    for serialized in images:
        byte_counts.add(serialized.sizes())
    numbered = ((n, t.name) for n, t in enumerate(checkpoint.tensors) if t.state == FILE)
    byte_counts.add_files({n: resized.paths[name] for n, name in numbered if name in resized.paths})
    if has_latest:
        byte_counts.add_bytes(names.LATEST, len(checkpoint.tag.encode()))
    return byte_counts.done()


def copies_bytes(source: Source, world_size: int) -> int:
    """Return an upper bound of the memory for a target file's copies and for locating them.

    A rank's share of a parameter lies on at most N / M + 2 ranks of the source, for N source ranks
    and M target ranks.
    """
    checkpoint = source.checkpoint
    spread = checkpoint.layout.world_size // world_size + 2
    families = [family.groups for family in checkpoint.families]
    params = max(sum(len(group.params) for group in groups) for groups in families)
    states = 1 + max((len(g.flat_states()) for groups in families for g in groups), default=0)
    return params * spread * (states * _COPY_BYTES + _LOCATE_BYTES)
