"""`repartition`: native files for another world size, from shards or from a store."""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from streamshard.engine import memory
from streamshard.engine.work import TargetFile
from streamshard.errors import UnsupportedError, UsageError
from streamshard.formats import deepspeed_names as names
from streamshard.formats import ds_config, dump_names, frameworks
from streamshard.formats.checkpoint import Checkpoint
from streamshard.formats.dump_names import Template
from streamshard.formats.zero_target import ZeroTarget
from streamshard.formats.zero_writer import FileImage, dump_images, native_images
from streamshard.model import FILE, MASTER, ZeroLayout
from streamshard.operations import advice, running
from streamshard.operations.native_files import NativeFiles
from streamshard.operations.report import Progress, Report, Silent
from streamshard.operations.source import Source, flat_groups, open_source
from streamshard.operations.target import (
    PartialTarget,
    require_free,
    require_separate,
    require_space,
)
from streamshard.plan.memory import MemoryPlan
from streamshard.plan.zero import sub_groups

Path_ = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class TargetSettings:
    """What the files of a target are shaped by, and where that was found."""

    layout: ZeroLayout
    config: Mapping[str, Any]
    """DeepSpeed config that the files will hold."""
    module_dtype: str
    is_bf16: bool
    note: str


@dataclass(frozen=True, slots=True)
class RepartitionPlan:
    """A repartition that fits memory and disk, ready to run."""

    source: Source
    target: Path
    template: Template | None
    """How dumps are named, where the target is a directory of them."""
    images: Callable[[], Iterator[FileImage]]
    """Spells the torch files to be made, anew at every call."""
    files: NativeFiles
    resized: frameworks.Resized
    """What becomes of the files that come along."""
    memory: MemoryPlan
    overwrite: bool
    report: Report
    """What running it will do."""

    def run(self, progress: Progress | None = None) -> Report:
        """Write the target.

        Raises
        ------
        StreamshardError
            The source changed or the target cannot be written; no target is left then.
        """
        with PartialTarget(
            self.target, overwrite=self.overwrite, template=self.template
        ) as partial_target:

            def work() -> None:
                running.run(self.source, self._targets(), partial_target, self.memory, told)
                tag = self.source.checkpoint.tag
                partial_target.commit(latest=tag if self.template is None else None)

            told = progress or Silent()
            return running.measured(self.report, told, work)

    def _targets(self) -> Iterator[TargetFile]:
        for image in self.images():
            yield self.files.torch_target(image)
        yield from self.files.other_targets(self.resized.paths)


def plan_repartition(
    source: Path_,
    target: Path_,
    *,
    world_size: int,
    zero_stage: int | None = None,
    ds_config_file: Path_ | None = None,
    source_ds_config_file: Path_ | None = None,
    like: Path_ | None = None,
    tag: str | None = None,
    memory_limit: int = running.DEFAULT_LIMIT_BYTES,
    workers: int | None = None,
    overwrite: bool = False,
) -> RepartitionPlan:
    """Read the source's headers and plan a repartition; writes nothing.

    Parameters
    ----------
    source
        Run directory with `latest`, tag directory, store, or a template of raw per-rank dumps
        such as ``ckpt/optimizer.{rank:02d}.pt``.
    target
        Run directory to make; for raw dumps a template, whose directory is made.
    world_size
        Count of data-parallel ranks that will resume.
    zero_stage
        ZeRO stage that will resume; by default the config's.
    ds_config_file
        The whole DeepSpeed config of the job that will resume; by default the one kept in the
        checkpoint. What it leaves out has DeepSpeed's defaults; an "auto" in it, the last run's
        value.
    source_ds_config_file
        The DeepSpeed config of the job that saved, for raw dumps, which hold none.
    like
        Another checkpoint of the same model, for raw dumps of stage 3, which hold no shapes.
    memory_limit
        Bytes allowed above what the program itself occupies.

    Raises
    ------
    StreamshardError
        One of its subclasses, each with its own exit code; see `streamshard.errors`.
    """
    floor_bytes = memory.resident_bytes()
    memory.restart_peak()
    if world_size < 1:
        raise UsageError(f"--world-size {world_size}: at least one rank is needed")
    template = dump_names.parse(str(target)) if dump_names.is_template(str(target)) else None
    directory = template.directory if template else Path(target)
    require_free(directory, overwrite=overwrite, template=template)
    wanted = ds_config.read_file(Path(ds_config_file)) if ds_config_file else None
    opened = open_source(source, tag, ds_config_file=source_ds_config_file, like=like)
    require_separate(opened.path, directory)
    _require_same_kind(opened, template, str(target))
    settings = _settings(opened, world_size, zero_stage, wanted)
    others = [file.path for file in opened.checkpoint.files]
    resized = frameworks.resize(
        opened.checkpoint.tag,
        others,
        source_world_size=opened.checkpoint.layout.world_size,
        world_size=world_size,
    )
    files, images = _spell(opened, settings, template, resized)
    sizes = [files.lay_out(image).nbytes for image in images()]
    sizes += [
        t.nbytes for t in opened.checkpoint.tensors if t.state == FILE and t.name in resized.paths
    ]
    latest = [] if template else [len(opened.checkpoint.tag.encode())]
    bytes_written = sum(sizes) + sum(latest)
    memory_plan = running.fit_memory(
        floor_bytes=floor_bytes,
        codec_bytes=opened.codec_bytes,
        workers=workers,
        limit_bytes=memory_limit,
    )
    require_space(directory, bytes_written)
    report = Report(
        verb="repartition",
        source=str(source),
        target=str(target),
        tag=opened.checkpoint.tag,
        zero_stage=settings.layout.stage,
        source_world_size=opened.checkpoint.layout.world_size,
        world_size=world_size,
        files=len(sizes) + len(latest),
        bytes_written=bytes_written,
        floor_bytes=floor_bytes,
        limit_bytes=memory_limit,
        projected_bytes=memory_plan.projected_bytes,
        notes=(
            settings.note,
            *opened.checkpoint.notes,
            *resized.notes,
            *advice.for_world_size(opened.checkpoint, world_size),
        ),
    )
    return RepartitionPlan(
        opened, directory, template, images, files, resized, memory_plan, overwrite, report
    )


def repartition(
    source: Path_,
    target: Path_,
    *,
    world_size: int,
    zero_stage: int | None = None,
    ds_config_file: Path_ | None = None,
    source_ds_config_file: Path_ | None = None,
    like: Path_ | None = None,
    tag: str | None = None,
    memory_limit: int = running.DEFAULT_LIMIT_BYTES,
    workers: int | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Write a checkpoint's files for another world size; see `plan_repartition`."""
    plan = plan_repartition(
        source,
        target,
        world_size=world_size,
        zero_stage=zero_stage,
        ds_config_file=ds_config_file,
        source_ds_config_file=source_ds_config_file,
        like=like,
        tag=tag,
        memory_limit=memory_limit,
        workers=workers,
        overwrite=overwrite,
    )
    return plan.run(progress)


def _require_same_kind(source: Source, template: Template | None, target: str) -> None:
    """Refuse to make a checkpoint of dumps, which lack the model, or dumps of a checkpoint."""
    if source.checkpoint.is_dumps and template is None:
        message = f"{target}: the source is raw dumps, without the model's files; give a template"
        raise UsageError(f"{message} for the target too, such as 'out/{source.checkpoint.tag}'")
    if template is not None and not source.checkpoint.is_dumps:
        message = f"{target}: a template, but the source is no set of raw dumps; give a directory"
        raise UsageError(message)


def _settings(
    source: Source, world_size: int, zero_stage: int | None, wanted: ds_config.Config | None
) -> TargetSettings:
    """Decide what shapes the target: the flags, else the given config, else the kept one."""
    checkpoint = source.checkpoint
    kept = checkpoint.optimizer_file.get(names.DS_CONFIG)
    kept = kept if isinstance(kept, dict) else {}
    stage, dtype = zero_stage or checkpoint.layout.stage, checkpoint.module_dtype
    config, is_bf16 = dict(kept), checkpoint.is_bf16
    if wanted is not None:
        config = ds_config.resolved(wanted, kept)
        stage = _agreed_stage(ds_config.zero_stage(config), zero_stage)
        dtype = ds_config.module_dtype(config)
        is_bf16 = dtype == "bfloat16"
        _require_same_scaling(checkpoint, dtype)
    if config:
        config = ds_config.with_stage(config, stage)
    if checkpoint.is_dumps and (stage == 3) != (checkpoint.layout.stage == 3):
        message = f"raw dumps of ZeRO stage {checkpoint.layout.stage} lack what stage {stage} needs"
        raise UsageError(f"{message}; reshard a whole checkpoint instead")
    _require_whole_momentum(checkpoint, stage)
    layout = ds_config.zero_layout(config, stage=stage, world_size=world_size)
    if wanted is None and stage == checkpoint.layout.stage:
        layout = replace(layout, bf16_optimizer=checkpoint.layout.bf16_optimizer)
    if wanted is None and not kept:
        layout = replace(checkpoint.layout, stage=stage, world_size=world_size)
    return TargetSettings(
        layout, config, dtype, is_bf16, _settings_note(layout, dtype, wanted, kept)
    )


def _require_whole_momentum(checkpoint: Checkpoint, stage: int) -> None:
    """Refuse to write Muon's momentum for stages 1 and 2, where it is that of whole parameters."""
    groups = checkpoint.wrapped_optimizer["param_groups"]
    if stage < 3 and any(group.get("use_muon") is True for group in groups):
        message = f"trained with Muon, whose 'momentum_buffer' stage {stage} keeps in another way"
        raise UnsupportedError(f"{message}; that is not supported yet. Stay at stage 3")


def _agreed_stage(in_config: int | None, asked: int | None) -> int:
    """Take the stage from the given config, and hold it against the flag if there is one."""
    if in_config is not None and asked is not None and in_config != asked:
        message = f"--zero-stage {asked}, but the given config says stage {in_config}"
        raise UsageError(f"{message}; make them agree")
    stage = asked or in_config
    if stage not in (1, 2, 3):
        message = f"the given config asks for ZeRO stage {stage or 0}, which partitions nothing"
        raise UsageError(f"{message}; give the whole config of the job that will resume")
    return stage


def _require_same_scaling(checkpoint: Checkpoint, target: str) -> None:
    source = checkpoint.module_dtype
    if checkpoint.is_dumps and not checkpoint.optimizer_file.get(names.DS_CONFIG):
        # Dumps tell fp16 by its loss scale, and nothing else.
        dynamic = checkpoint.optimizer_file[names.OPTIMIZER].get("dynamic_loss_scale") is True
        source = "float16" if dynamic else target
    if source != target and "float16" in (source, target):
        message = (
            f"the checkpoint was trained in {source}, the given config trains in {target}: "
            "the loss scale that fp16 training needs cannot be made up"
        )
        raise UsageError(message)


def _settings_note(
    layout: ZeroLayout, dtype: str, wanted: ds_config.Config | None, kept: Mapping[str, Any]
) -> str:
    where = "the config kept in the checkpoint, then DeepSpeed's defaults"
    if wanted is not None:
        where = "the given --ds-config, then DeepSpeed's defaults"
    elif not kept:
        where = "DeepSpeed's defaults, as the checkpoint keeps no config"
    shape = (
        f"sub_group_size {layout.sub_group_size:,}"
        if layout.stage == 3
        else f"round_robin_gradients {_switch(layout.round_robin)}, "
        f"parameter_alignment {_switch(layout.parameter_alignment)}"
    )
    return f"ZeRO stage {layout.stage}, {dtype}, {shape}: from {where}."


def _switch(on: bool) -> str:
    return "on" if on else "off"


def _spell(
    source: Source,
    settings: TargetSettings,
    template: Template | None,
    resized: frameworks.Resized,
) -> tuple[NativeFiles, Callable[[], Iterator[FileImage]]]:
    checkpoint, layout = source.checkpoint, settings.layout
    numels = {t.name: t.numel for t in checkpoint.tensors if t.state == MASTER}
    flat = flat_groups(checkpoint, layout, settings.module_dtype) if layout.stage < 3 else []
    units = sub_groups(
        [[numels[name] for name in group.params] for group in checkpoint.groups],
        world_size=layout.world_size,
        sub_group_size=layout.sub_group_size,
    )
    zero_target = ZeroTarget(
        checkpoint=checkpoint,
        layout=layout,
        config=settings.config,
        module_dtype=settings.module_dtype,
        is_bf16=settings.is_bf16,
        flat_cuts=[group.spell() for group in flat],
        sub_groups=units if layout.stage == 3 else (),
    )
    files = NativeFiles(source, layout.world_size, flat, units)
    if template is not None:
        return files, partial(dump_images, zero_target, template.file_name)
    steps = resized.new_steps if checkpoint.accelerate_step is not None else ()
    return files, partial(native_images, zero_target, steps)
