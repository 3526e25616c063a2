"""`repartition`: writes native files for another world size, from shards or from a store."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from streamshard.engine.run import resident_memory
from streamshard.engine.run.phases import COMMITTING
from streamshard.engine.run.work import TargetFile
from streamshard.errors import UsageError
from streamshard.formats import frameworks
from streamshard.formats.deepspeed import ds_config
from streamshard.formats.deepspeed.cut import muon_order
from streamshard.formats.deepspeed.dumps import dump_names
from streamshard.formats.deepspeed.dumps.dump_names import Template
from streamshard.formats.deepspeed.write.zero_writer import Images
from streamshard.layout.memory_plan import MemoryPlan
from streamshard.operations.checks.structure import Request
from streamshard.operations.compare.comparison import EXTRA_BYTES
from streamshard.operations.native.storage_regions import NativeFiles
from streamshard.operations.native.target_files import copies_bytes, count_bytes, serialize
from streamshard.operations.native.target_settings import (
    TargetSettings,
    require_allowed,
    target_settings,
)
from streamshard.operations.resume import resizing
from streamshard.operations.resume.resizing import Change
from streamshard.operations.source.source import Source, open_source
from streamshard.operations.transfer import execution, needed, plan_file, read_back
from streamshard.operations.transfer.byte_accounting import ByteCounts
from streamshard.operations.transfer.estimate import Outlook, estimate_run
from streamshard.operations.transfer.plan_file import Asked
from streamshard.operations.transfer.report import Progress, Report, Silent
from streamshard.operations.transfer.run_identity import RunIdentity, digest_of_settings
from streamshard.operations.transfer.staging import PartialTarget
from streamshard.operations.transfer.target import (
    place_to_make,
    require_free,
    require_named,
    require_other,
    require_separate,
    require_space,
)
from streamshard.sizes import counted

Path_ = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class RepartitionPlan:
    """A repartition that fits memory and disk, ready to run."""

    asked: Asked
    source: Source
    target: Path
    purpose: RunIdentity
    template: Template | None
    """Names of the dumps, if the target is a directory of dumps."""
    images: Sequence[Images]
    """Serialize the torch files to write."""
    files: NativeFiles
    resized: frameworks.Resized
    """New names of the sidecars, and those that are left out."""
    byte_counts: ByteCounts
    changes: tuple[Change, ...]
    written: Request | None
    """How to open the written files to verify them, still without a path; None if not verified."""
    memory: MemoryPlan
    overwrite: bool
    report: Report
    """What the run will do."""
    if_needed: bool = False
    """Whether to write nothing if that is not needed."""
    may_resume: bool = False
    """Whether the job can resume from the source as it is."""

    def found(self, progress: Progress | None = None) -> Report | None:
        """Return the report of a run that has nothing to do; None if there is something to do.

        Raises
        ------
        TargetExistsError
            The target exists, holds something else, and may not be replaced.
        """
        if self.may_resume:
            is_native = self.source.kind == "native"
            place = str(self.source.path) if is_native else self.report.source
            return needed.nothing_done(self.report, "source", place)
        return needed.Wanted(
            self.report,
            self.target,
            self.source,
            self.memory,
            self.sizes(),
            [self._targets],
            self.overwrite,
            latest=self.source.checkpoint.tag if self.template is None else None,
            template=self.template,
        ).found(progress)

    def run(self, progress: Progress | None = None) -> Report:
        """Write the target.

        Raises
        ------
        StreamshardError
            The source changed, or the target cannot be written. Then there is no target, but the
            files written so far are kept beside its place, and the same plan continues with them.
        """
        if self.if_needed and (found := self.found(progress)) is not None:
            return found
        with PartialTarget(
            self.target,
            self.purpose,
            nbytes=self.report.bytes_written,
            overwrite=self.overwrite,
            template=self.template,
        ) as partial_target:

            def work() -> None:
                execution.run(self.source, self._targets(), partial_target, self.memory, told)
                latest = self.source.checkpoint.tag if self.template is None else None
                if latest is not None and not partial_target.is_written:
                    told.advance(len(latest.encode()))  # the commit writes it
                if not partial_target.is_done:
                    self._verify(partial_target.path, told)
                told.enter(COMMITTING)
                partial_target.commit(latest=latest)

            told = progress or Silent()
            return execution.measured(self.report, partial_target, told, work)

    def sizes(self) -> Mapping[str, int]:
        """Return the size of every file that will be written, by its path."""
        return self.byte_counts.sizes

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the plan to a file, for `load_plan` or `streamshard apply`."""
        plan_file.write(Path(path), self.asked, self.purpose, self.sizes())

    def outlook(self, *, measures_disk: bool = True) -> Outlook:
        """Estimate in detail what the run will do, and how long it may take."""
        return estimate_run(
            self.source,
            self.byte_counts,
            self.memory,
            self.report,
            self.target,
            changes=self.changes,
            new_files=len(self.resized.new_steps),
            measures_disk=measures_disk,
        )

    def _verify(self, place: Path, told: Progress) -> None:
        """Compare the written files with the source, if the plan says so."""
        if self.written is not None:
            path = place / self.template.name if self.template else place
            written = replace(self.written, path=path)
            read_back.require_same(written, place, self.source, self.memory, told)

    def _targets(self) -> Iterator[TargetFile]:
        for images in self.images:
            yield from map(self.files.torch_target, images.all())
        yield from self.files.other_targets(self.resized.paths)


def plan_repartition(
    source: Path_,
    target: Path_,
    *,
    world_size: int | None = None,
    zero_stage: int | None = None,
    ds_config_file: Path_ | None = None,
    source_ds_config_file: Path_ | None = None,
    like: Path_ | None = None,
    tag: str | None = None,
    memory_limit: int | None = None,
    workers: int | None = None,
    overwrite: bool = False,
    verify: bool = False,
    if_needed: bool = False,
) -> RepartitionPlan:
    """Read the source's headers and plan a repartition; writes nothing.

    Parameters
    ----------
    source
        Run directory with `latest`, tag directory, store, or a template of raw per-rank dumps
        such as ``ckpt/optimizer.{rank:02d}.pt``.
    target
        Run directory to make; for raw dumps a template in a directory that is made.
    world_size
        Count of all ranks of the job that resumes. Tensor, pipeline and expert parallelism stay as
        they are, so with them not every count is possible. For a store the default is the count of
        ranks that saved its content; for other sources there is no default.
    zero_stage
        ZeRO stage of the job that resumes; by default the stage in the config.
    ds_config_file
        The complete DeepSpeed config of the job that resumes; by default the config kept in the
        checkpoint. A key that it leaves out has DeepSpeed's default; an "auto" in it has the last
        run's value.
    source_ds_config_file
        The DeepSpeed config of the job that saved, for raw dumps, which hold none.
    like
        Reference checkpoint: another checkpoint of the same job, which supplies what the source
        lacks. Raw dumps of stage 3 hold no shapes, files of `elastic_checkpoint` no
        hyper-parameters, and files of Muon at stages 1 and 2 not the order in which stage 3 keeps
        the parameters.
    memory_limit
        Bytes of memory beyond what the program itself takes; by default 1 GiB, but at most half of
        the remaining memory of the machine or the cgroup.
    verify
        Read the written files back from disk, and compare them with the source before they are
        renamed into place.
    if_needed
        Write nothing if the job can resume from the source's own files, or if the target already
        holds exactly the bytes that would be written. The report says so, and says which directory
        to resume from.

    Raises
    ------
    StreamshardError
        One of its subclasses, each with its own exit code; see `streamshard.errors`.
    """
    asked = Asked.of(
        "repartition",
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
        verify=verify,
    )
    floor_bytes = resident_memory.resident_bytes()
    resident_memory.restart_peak()
    template = dump_names.parse(str(target)) if dump_names.is_template(str(target)) else None
    directory = place_to_make(template.directory if template else Path(target))
    require_other(source, directory)
    if if_needed:
        require_named(directory)  # its content is compared after planning
    else:
        require_free(directory, overwrite=overwrite, template=template)
    wanted = ds_config.read_file(Path(ds_config_file)) if ds_config_file else None
    opened = open_source(source, tag, ds_config_file=source_ds_config_file, like=like)
    opened.require_states()
    require_separate(opened.path, opened.files, directory)
    _require_same_kind(opened, template, str(target))
    if world_size is None:
        world_size = _own_world_size(opened)
    dp_world_size = require_allowed(opened.checkpoint, world_size)
    settings = target_settings(opened.checkpoint, dp_world_size, zero_stage, wanted)
    stage = settings.layout.stage
    opened.require_use_of_like(needed=muon_order.needs_order(opened.checkpoint, stage))
    opened = replace(
        opened, checkpoint=muon_order.in_order_of(opened.checkpoint, stage, opened.like)
    )
    others = [file.path for file in opened.checkpoint.files]
    resized = frameworks.resize(
        opened.checkpoint.tag,
        others,
        source_world_size=opened.checkpoint.ranks,
        world_size=world_size,
    )
    files, images = serialize(opened, settings, template, resized)
    byte_counts = count_bytes(opened, files, images, resized, has_latest=template is None)
    bytes_written = sum(byte_counts.sizes.values())
    options = _options(opened, world_size, settings, template)
    purpose = RunIdentity.of(opened, options, replaces=overwrite)
    may_resume = if_needed and needed.has_files_of(opened, world_size, settings)
    resizes = resizing.explain(
        opened, world_size, resized, dp_world_size=dp_world_size, config=settings.config
    )
    limit_bytes = execution.limit_or_default(memory_limit, floor_bytes)
    memory_plan = execution.fit_memory(
        floor_bytes=floor_bytes,
        codec_bytes=opened.codec_bytes + (EXTRA_BYTES if verify else 0),
        workers=workers,
        limit_bytes=limit_bytes,
        copies_bytes=copies_bytes(opened, dp_world_size),
        reopened=-(-dp_world_size // opened.checkpoint.layout.world_size) if verify else 0,
    )
    if not if_needed:
        require_space(directory, bytes_written)
    report = Report(
        verb="repartition",
        source=str(source),
        target=str(target),
        tag=opened.checkpoint.tag,
        zero_stage=stage,
        source_world_size=opened.checkpoint.ranks,
        world_size=world_size,
        files=len(byte_counts.sizes),
        bytes_written=bytes_written,
        floor_bytes=floor_bytes,
        limit_bytes=limit_bytes,
        projected_bytes=memory_plan.projected_bytes,
        is_verified=verify,
        path=str(target),
        notes=(
            *settings.notes,
            *opened.checkpoint.notes,
            *resizes.notes,
        ),
    )
    written = Request("", opened.checkpoint.tag, config=settings.config, like=opened.like)
    return RepartitionPlan(
        asked=asked,
        source=opened,
        target=directory,
        purpose=purpose,
        template=template,
        images=images,
        files=files,
        resized=resized,
        byte_counts=byte_counts,
        changes=resizes.changes,
        written=written if verify else None,
        memory=memory_plan,
        overwrite=overwrite,
        report=report,
        if_needed=if_needed,
        may_resume=may_resume,
    )


def repartition(
    source: Path_,
    target: Path_,
    *,
    world_size: int | None = None,
    zero_stage: int | None = None,
    ds_config_file: Path_ | None = None,
    source_ds_config_file: Path_ | None = None,
    like: Path_ | None = None,
    tag: str | None = None,
    memory_limit: int | None = None,
    workers: int | None = None,
    overwrite: bool = False,
    verify: bool = False,
    if_needed: bool = False,
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
        verify=verify,
        if_needed=if_needed,
    )
    return plan.run(progress)


def _own_world_size(source: Source) -> int:
    """Return how many ranks saved the content of a store: the default world size of the target.

    Raises
    ------
    UsageError
        The source is not a store: its files are for that world size already.
    """
    if source.kind != "store":
        ranks = counted(source.checkpoint.ranks, "rank")
        message = f"{source.path}: has files for {ranks} already; say with"
        raise UsageError(f"{message} --world-size for how many they are to be written")
    return source.checkpoint.ranks


def _options(
    source: Source, world_size: int, settings: TargetSettings, template: Template | None
) -> dict[str, str]:
    """Return the options on which the target's bytes depend."""
    shaping = settings.layout, settings.config, settings.module_dtype, settings.is_bf16
    options = {
        "verb": "repartition",
        "--tag": source.checkpoint.tag,
        "--world-size": str(world_size),
        "--zero-stage": str(settings.layout.stage),
        "--ds-config": digest_of_settings(shaping),
    }
    return options if template is None else {**options, "OUT": template.name}


def _require_same_kind(source: Source, template: Template | None, target: str) -> None:
    """Refuse to make a checkpoint from dumps, which lack the model, or dumps from a checkpoint."""
    if source.checkpoint.is_dumps and template is None:
        message = f"{target}: the source is raw dumps, without the model's files; give a template"
        raise UsageError(f"{message} for the target too, such as 'out/{source.checkpoint.tag}'")
    if template is not None and not source.checkpoint.is_dumps:
        message = f"{target}: a template, but the source is no set of raw dumps; give a directory"
        raise UsageError(message)
