"""`export`: writes the weights for `from_pretrained`, or DeepSpeed's universal checkpoint."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from streamshard.defaults import DEFAULT_SHARD_BYTES, DTYPES, FORMATS
from streamshard.engine.run import resident_memory
from streamshard.engine.run.phases import COMMITTING
from streamshard.engine.run.work import TargetFile
from streamshard.errors import UnsupportedError, UsageError
from streamshard.formats import pretrained
from streamshard.layout.memory_plan import MemoryPlan
from streamshard.operations.compare.comparison import EXTRA_BYTES
from streamshard.operations.export import export_read_back
from streamshard.operations.export.model_sidecars import Companions, find_companions
from streamshard.operations.export.universal_files import UniversalFiles
from streamshard.operations.export.weight_files import WeightFiles
from streamshard.operations.export.weights import Selection, Weights, choose_weights
from streamshard.operations.source.source import Source, open_source
from streamshard.operations.transfer import execution, needed, plan_file
from streamshard.operations.transfer.byte_accounting import ByteCounts
from streamshard.operations.transfer.estimate import Outlook, estimate_run
from streamshard.operations.transfer.plan_file import Asked
from streamshard.operations.transfer.report import Progress, Report, Silent
from streamshard.operations.transfer.run_identity import RunIdentity
from streamshard.operations.transfer.staging import PartialTarget
from streamshard.operations.transfer.target import (
    place_to_make,
    require_free,
    require_named,
    require_other,
    require_separate,
    require_space,
)

Path_ = str | os.PathLike[str]

UNIVERSAL: Final = "universal"
_MOST_NAMED: Final = 4


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """An export that fits memory and disk, ready to run."""

    asked: Asked
    target: Path
    purpose: RunIdentity
    companions: Companions
    """The sidecars, and the source to read from."""
    files: WeightFiles | UniversalFiles
    byte_counts: ByteCounts
    memory: MemoryPlan
    overwrite: bool
    report: Report
    """What the run will do."""
    if_needed: bool = False
    """Whether to write nothing if the target holds the result already."""

    def found(self, progress: Progress | None = None) -> Report | None:
        """Return the report of a run that has nothing to do; None if there is something to do.

        Raises
        ------
        TargetExistsError
            The target exists, holds something else, and may not be replaced.
        """
        return needed.Wanted(
            self.report,
            self.target,
            self.companions.source,
            self.memory,
            self.sizes(),
            [self._targets],
            self.overwrite,
        ).found(progress)

    def run(self, progress: Progress | None = None) -> Report:
        """Write the model's directory.

        Raises
        ------
        StreamshardError
            The source changed, or the target cannot be written. Then there is no directory, but the
            files written so far are kept beside its place, and the same plan continues with them.
        """
        if self.if_needed and (found := self.found(progress)) is not None:
            return found
        if isinstance(self.files, WeightFiles):
            self.files.overflowed.clear()
        source = self.companions.source
        with PartialTarget(
            self.target, self.purpose, nbytes=self.report.bytes_written, overwrite=self.overwrite
        ) as partial_target:
            told = progress or Silent()

            def work() -> None:
                execution.run(source, self._targets(), partial_target, self.memory, told)
                if self.report.is_verified and not partial_target.is_done:
                    export_read_back.require_exported(
                        partial_target.path, self.files, self.companions, self.memory, told
                    )
                told.enter(COMMITTING)
                partial_target.commit()

            return self._with_overflow(execution.measured(self.report, partial_target, told, work))

    def sizes(self) -> Mapping[str, int]:
        """Return the size of every file that will be written, by its path."""
        return self.byte_counts.sizes

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the plan to a file, for `load_plan` or `streamshard apply`."""
        plan_file.write(Path(path), self.asked, self.purpose, self.sizes())

    def outlook(self, *, measures_disk: bool = True) -> Outlook:
        """Estimate in detail what the run will do, and how long it may take."""
        return estimate_run(
            self.companions.source,
            self.byte_counts,
            self.memory,
            self.report,
            self.target,
            measures_disk=measures_disk,
        )

    def _targets(self) -> Iterator[TargetFile]:
        yield from self.companions.targets()
        yield from self.files.targets()

    def _with_overflow(self, done: Report) -> Report:
        """Add to the report the elements that became infinite."""
        found = sorted(self.files.overflowed.items(), key=lambda item: (-item[1], item[0]))
        count = sum(number for _, number in found)
        if not count:
            return replace(done, overflowed=0)
        named = ", ".join(f"{name} ({number:,})" for name, number in found[:_MOST_NAMED])
        more = f" and {len(found) - _MOST_NAMED:,} more" if len(found) > _MOST_NAMED else ""
        note = (
            f"{count:,} finite elements are too large for {done.dtype} and became infinite, in "
            f"{named}{more}: use bf16, or leave them as they are with --keep-dtype."
        )
        return replace(done, overflowed=count, notes=(note, *done.notes))


def plan_export(
    source: Path_,
    target: Path_,
    *,
    dtype: str = "fp32",
    format: str = pretrained.SAFETENSORS,
    max_shard_size: int = DEFAULT_SHARD_BYTES,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    keep_dtype: Sequence[str] = (),
    strip_prefix: Sequence[str] = (),
    frozen: bool = True,
    source_ds_config_file: Path_ | None = None,
    like: Path_ | None = None,
    tag: str | None = None,
    memory_limit: int | None = None,
    workers: int | None = None,
    overwrite: bool = False,
    verify: bool = False,
    if_needed: bool = False,
) -> ExportPlan:
    """Read the source's headers and plan an export; writes nothing.

    Trained weights are exported from the master weights. Tied weights are stored once, as
    transformers stores them.

    Parameters
    ----------
    source
        Run directory with `latest`, tag directory, a framework's checkpoint, or a store.
    target
        Directory to make.
    dtype
        `fp32`, `bf16` or `fp16`: the dtype to which floating-point tensors are cast, including
        buffers.
    format
        `safetensors`; `torch` for `pytorch_model.bin`; or `universal` for DeepSpeed's universal
        checkpoint, which holds the optimizer's states too, and accepts no other option from `dtype`
        to `frozen`.
    max_shard_size
        Most bytes of tensors in one file; only a tensor that is larger by itself exceeds it.
    include, exclude
        Shell patterns of complete tensor names to export, or to leave out.
    keep_dtype
        Patterns of names that are not cast; a trained weight then has its master weights' dtype.
    strip_prefix
        Prefixes to remove from the names that have them: each once, in this order.
    frozen
        Whether to export weights that were not trained.
    source_ds_config_file, like
        For sources that lack information; see `plan_repartition`.
    memory_limit
        Bytes of memory beyond what the program itself takes; by default 1 GiB, but at most half of
        the remaining memory of the machine or the cgroup.
    verify
        Read the written files back from disk, and compare them with the source before they are
        renamed into place.
    if_needed
        Write nothing if the target already holds exactly the bytes that would be written; the
        report says so.

    Raises
    ------
    StreamshardError
        One of its subclasses, each with its own exit code; see `streamshard.errors`.
    """
    asked = Asked.of(
        "export",
        source,
        target,
        dtype=dtype,
        format=format,
        max_shard_size=max_shard_size,
        include=tuple(include),
        exclude=tuple(exclude),
        keep_dtype=tuple(keep_dtype),
        strip_prefix=tuple(strip_prefix),
        frozen=frozen,
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
    _require_known(dtype, format, max_shard_size, Path(target))
    target = place_to_make(Path(target))
    require_other(source, target)
    if if_needed:
        require_named(target)  # its content is compared after planning
    else:
        require_free(target, overwrite=overwrite)
    opened = open_source(source, tag, ds_config_file=source_ds_config_file, like=like)
    if format == UNIVERSAL:
        opened.require_states()
    require_separate(opened.path, opened.files, target)
    opened.require_use_of_like()
    selection = Selection(
        dtype=DTYPES[dtype],
        include=tuple(include),
        exclude=tuple(exclude),
        keep_dtype=tuple(keep_dtype),
        strip_prefix=tuple(strip_prefix),
        frozen=frozen,
    )
    try:
        prepared = (
            _prepare_universal(opened, selection, max_shard_size)
            if format == UNIVERSAL
            else _prepare_weights(opened, selection, format, max_shard_size)
        )
    except (UsageError, UnsupportedError) as error:
        raise type(error)(f"{opened.path}: {error}") from error
    files, companions = prepared.files, prepared.companions
    byte_counts = companions.added_to(files.byte_counts())
    bytes_written = sum(byte_counts.sizes.values())
    options = _options(opened, selection, format, max_shard_size)
    purpose = RunIdentity.of(companions.source, options, replaces=overwrite)
    limit_bytes = execution.limit_or_default(memory_limit, floor_bytes)
    memory_plan = execution.fit_memory(
        floor_bytes=floor_bytes,
        codec_bytes=opened.codec_bytes + (EXTRA_BYTES if verify else 0),
        workers=workers,
        limit_bytes=limit_bytes,
        copies_bytes=files.copies_bytes(workers or execution.default_workers()),
        reopened=int(verify),
    )
    if not if_needed:
        require_space(target, bytes_written)
    report = Report(
        verb="export",
        source=str(source),
        target=str(target),
        tag=opened.checkpoint.tag,
        zero_stage=opened.checkpoint.layout.stage,
        source_world_size=opened.checkpoint.ranks,
        world_size=None,
        files=len(byte_counts.sizes),
        bytes_written=bytes_written,
        floor_bytes=floor_bytes,
        limit_bytes=limit_bytes,
        projected_bytes=memory_plan.projected_bytes,
        is_verified=verify,
        path=str(target),
        tensors=prepared.tensors,
        dtype=dtype if format != UNIVERSAL else None,
        notes=(*prepared.notes, *companions.notes, *opened.checkpoint.remarks),
    )
    return ExportPlan(
        asked=asked,
        target=target,
        purpose=purpose,
        companions=companions,
        files=files,
        byte_counts=byte_counts,
        memory=memory_plan,
        overwrite=overwrite,
        report=report,
        if_needed=if_needed,
    )


def export(
    source: Path_,
    target: Path_,
    *,
    dtype: str = "fp32",
    format: str = pretrained.SAFETENSORS,
    max_shard_size: int = DEFAULT_SHARD_BYTES,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    keep_dtype: Sequence[str] = (),
    strip_prefix: Sequence[str] = (),
    frozen: bool = True,
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
    """Export a checkpoint's weights; see `plan_export`."""
    plan = plan_export(
        source,
        target,
        dtype=dtype,
        format=format,
        max_shard_size=max_shard_size,
        include=include,
        exclude=exclude,
        keep_dtype=keep_dtype,
        strip_prefix=strip_prefix,
        frozen=frozen,
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


def _options(
    source: Source, selection: Selection, form: str, max_shard_size: int
) -> dict[str, str]:
    """Return the options on which the target's bytes depend."""
    return {
        "verb": "export",
        "--tag": source.checkpoint.tag,
        "--format": form,
        "--dtype": selection.dtype,
        "--max-shard-size": str(max_shard_size),
        "--include": " ".join(selection.include),
        "--exclude": " ".join(selection.exclude),
        "--keep-dtype": " ".join(selection.keep_dtype),
        "--strip-prefix": " ".join(selection.strip_prefix),
        "--no-frozen": str(not selection.frozen),
    }


@dataclass(frozen=True, slots=True)
class _Prepared:
    """The files that an export in some format consists of."""

    files: WeightFiles | UniversalFiles
    companions: Companions
    tensors: int
    notes: tuple[str, ...]


def _prepare_weights(
    source: Source, selection: Selection, form: str, max_shard_size: int
) -> _Prepared:
    chosen = choose_weights(source.checkpoint, selection)
    companions = find_companions(source)
    files = WeightFiles(companions.source, chosen.weights, form, max_shard_size)
    notes = (*chosen.notes, *_tied(chosen, form))
    return _Prepared(files, companions, len(chosen.weights), notes)


def _prepare_universal(source: Source, selection: Selection, max_shard_size: int) -> _Prepared:
    if selection != Selection() or max_shard_size != DEFAULT_SHARD_BYTES:
        message = f"--format {UNIVERSAL}: holds the whole checkpoint as it is, in files of its own"
        raise UsageError(f"{message}; of the options that shape weights none has a meaning")
    files = UniversalFiles(source)
    return _Prepared(files, Companions(source, (), ()), files.tensors(), tuple(files.notes()))


def _require_known(dtype: str, form: str, max_shard_size: int, target: Path) -> None:
    """Refuse options with invalid values."""
    if dtype not in DTYPES:
        raise UsageError(f"--dtype {dtype}: choose one of {', '.join(DTYPES)}")
    if form not in FORMATS:
        raise UsageError(f"--format {form}: choose one of {', '.join(FORMATS)}")
    if max_shard_size < 1:
        raise UsageError(f"--max-shard-size {max_shard_size}: at least one byte is needed")
    if target.suffix in (".safetensors", ".bin", ".pt"):
        message = f"{target}: the weights go into a directory, with names that from_pretrained"
        raise UsageError(f"{message} knows; give a name without {target.suffix}")


def _tied(chosen: Weights, form: str) -> Iterator[str]:
    """Say which names are not stored because they are tied to a name that is."""
    if form == pretrained.TORCH:
        return
    tied = [f"{name} = {w.names[0]}" for w in chosen.weights for name in w.names[1:]]
    if tied:
        more = f" and {len(tied) - _MOST_NAMED:,} more" if len(tied) > _MOST_NAMED else ""
        yield f"Tied, and stored once under the second name: {', '.join(tied[:_MOST_NAMED])}{more}."
