"""Decides the settings that shape the files of a target, and says where they come from."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from streamshard.errors import Option, UnsupportedError, UsageError, lacking
from streamshard.formats.checkpoint import Checkpoint
from streamshard.formats.deepspeed import ds_config, names, resume_settings
from streamshard.formats.deepspeed.ds_versions import OLDEST_TARGET, Version, dotted, target_version
from streamshard.model import MODULE, ZeroLayout
from streamshard.sizes import some_of

MOST_RANKS: Final = 1 << 17
"""More GPUs than any job has. A plan for so many takes minutes; a larger number is a mistake."""
_MOST_NAMED: Final = 4
_NOT_CUT: Final = (
    "Saved without ZeRO (stage 0), which cuts nothing: DeepSpeed loads the source itself on any "
    "count of ranks. Of what it saved, dp_world_size alone is another in OUT."
)
_NAMELESS: Final = (
    "saved without ZeRO (stage 0), whose optimizer numbers the parameters and does not name them, "
    "so its states cannot be cut for another stage: resume at stage 0, or begin at another stage "
    "from the weights that 'streamshard export' writes"
)


def _stage_0_note() -> str:
    return (
        "The config says ZeRO stage 0. DeepSpeed before 0.17.6 resumes from these files with that "
        "config, because it partitioned the states of bf16 training as at stage 1. Later versions "
        f"do not: for them give {Option('zero_stage')} 1, 2 or 3, and set the same stage in the "
        "job's config."
    )


@dataclass(frozen=True, slots=True)
class TargetSettings:
    """The settings that shape the files of a target; the notes say where they come from."""

    layout: ZeroLayout
    config: Mapping[str, Any]
    """DeepSpeed config that the files will hold."""
    module_dtype: str
    is_bf16: bool
    notes: tuple[str, ...]


def target_settings(
    checkpoint: Checkpoint,
    dp_world_size: int,
    zero_stage: int | None,
    wanted: ds_config.Config | None,
    ds_version: Version | None = None,
) -> TargetSettings:
    """Decide the target's settings: from the options, else the given config, else the kept one.

    `ds_version`: DeepSpeed's version in the job that resumes; by default the one that saved.
    """
    kept = checkpoint.config
    stage, dtype = zero_stage or checkpoint.layout.stage, checkpoint.module_dtype
    saved_stage = _saved_stage(checkpoint)
    version = target_version(ds_version, checkpoint.ds_version)
    as_saved = wanted is None and zero_stage in (None, saved_stage)
    config, is_bf16 = dict(kept), checkpoint.is_bf16
    if not checkpoint.layout.stage:
        return _uncut_settings(checkpoint, dp_world_size, zero_stage, wanted, version)
    if checkpoint.replicas > 1:
        config = ds_config.with_data_parallel_size(config, dp_world_size)
    if wanted is not None:
        config = ds_config.resolved(wanted, kept)
        cast_to, in_config = ds_config.module_dtype(config), ds_config.zero_stage(config)
        # A BF16_Optimizer's job may have no stage.
        as_saved = cast_to == "bfloat16" and not (in_config or zero_stage or saved_stage)
        stage = stage if as_saved else _agreed_stage(in_config, zero_stage)
        _require_known_order(checkpoint, config, stage, version)
        is_bf16 = cast_to == "bfloat16"
        # Without a section for bf16 or fp16 an engine casts nothing, and the model has its dtype.
        casts = cast_to != "float32" or not kept or ds_config.module_dtype(kept) != "float32"
        dtype = cast_to if casts else dtype
        _require_same_scaling(checkpoint, dtype)
    if config and not as_saved:
        config = ds_config.with_stage(config, stage)
    if checkpoint.is_dumps and (stage == 3) != (checkpoint.layout.stage == 3):
        message = f"raw dumps of ZeRO stage {checkpoint.layout.stage} lack what stage {stage} needs"
        raise UsageError(f"{message}; reshard a whole checkpoint instead")
    _require_carried_parts(checkpoint, stage, dtype)
    # Without a stage, only older versions have a BF16_Optimizer; then the config says nothing.
    keeps_kind = as_saved and (version == checkpoint.ds_version or not saved_stage)
    kind = checkpoint.layout.bf16_optimizer if keeps_kind else None
    layout = ds_config.zero_layout(
        config, stage=stage, world_size=dp_world_size, bf16_optimizer=kind, version=version
    )
    if wanted is None and not kept:
        layout = replace(
            checkpoint.layout, stage=stage, world_size=dp_world_size, bf16_optimizer=bool(kind)
        )
    _require_one_unit(checkpoint, config, layout)
    _require_resumable(checkpoint, config, layout, version, is_given=wanted is not None)
    note = _settings_note(checkpoint, layout, dtype, wanted)
    if as_saved and saved_stage == 0 and not _is_pipeline(checkpoint):
        note = f"{note} {_stage_0_note()}"
    saved_by = checkpoint.ds_version
    if ds_version is None and saved_by is not None and saved_by < OLDEST_TARGET:
        note = f"{note} DeepSpeed {dotted(saved_by)} saved it; what is written is for"
        note = f"{note} {dotted(OLDEST_TARGET)} and later versions."
    notes = (note, *left_out(checkpoint, stage), *resume_settings.notes(config, layout, dtype))
    return TargetSettings(layout, config, dtype, is_bf16, notes)


def left_out(checkpoint: Checkpoint, stage: int) -> Iterator[str]:
    """Name weights that stages 1 and 2 save and stage 3 does not, or only if they are frozen."""
    if stage < 3:
        return
    if checkpoint.layout.stage == 1:
        entries = (e for part in checkpoint.model_parts for e in part.module)
        frozen = {e.name for e in entries if e.kind == "frozen" and 0 not in e.shape}
        if taken := sorted(frozen):
            yield (
                "In no param group, so taken for frozen, which stage 1 does not record: "
                f"{some_of(taken, _MOST_NAMED)}. Stage 3 loads them only into a job that freezes "
                "them before deepspeed.initialize(); another keeps the values that it begins with."
            )
    index = checkpoint.tensor_index()
    for model_part in checkpoint.model_parts:
        for entry in model_part.module:
            if entry.kind == "excluded" and (model_part.name, MODULE, entry.name) in index:
                yield (
                    f"'{entry.name}' is tied to '{entry.alias_of}', a frozen weight that "
                    "exclude_frozen_parameters left out: stage 3 saves neither, so the job takes "
                    "both from the model it begins with, as it does with all frozen weights."
                )


def _uncut_settings(
    checkpoint: Checkpoint,
    dp_world_size: int,
    zero_stage: int | None,
    wanted: ds_config.Config | None,
    version: Version | None,
) -> TargetSettings:
    """Decide the target's settings for a checkpoint that was saved without ZeRO, and stays so."""
    kept, dtype = checkpoint.config, checkpoint.module_dtype
    config = dict(kept) if wanted is None else ds_config.resolved(wanted, kept)
    if zero_stage or (wanted is not None and ds_config.zero_stage(config)):
        raise UnsupportedError(_NAMELESS)
    if checkpoint.replicas > 1:
        config = ds_config.with_data_parallel_size(config, dp_world_size)
    if ds_config.module_dtype(config) != dtype:
        message = f"the checkpoint was trained in {dtype} without ZeRO, {ds_config.GIVEN} trains in"
        message = f"{message} {ds_config.module_dtype(config)}: its optimizer's state is of another"
        raise UsageError(f"{message} kind; keep the dtype")
    layout = ds_config.zero_layout(config, stage=0, world_size=dp_world_size)
    _require_resumable(checkpoint, config, layout, version, is_given=wanted is not None)
    notes = (_NOT_CUT, *resume_settings.notes(config, layout, dtype))
    return TargetSettings(layout, config, dtype, checkpoint.is_bf16, notes)


def _require_resumable(
    checkpoint: Checkpoint,
    config: ds_config.Config,
    layout: ZeroLayout,
    version: Version | None,
    *,
    is_given: bool,
) -> None:
    """Refuse a config with which DeepSpeed would not load the target's files."""
    entries = [entry for model_part in checkpoint.model_parts for entry in model_part.module]
    job = resume_settings.Resuming(
        config=config,
        kept=checkpoint.config,
        layout=layout,
        version=version,
        saved_by=checkpoint.ds_version,
        has_empty=any(0 in entry.shape for entry in entries),
        auto_experts=checkpoint.expert_parallel if checkpoint.has_auto_experts else None,
        has_frozen=any(entry.kind == "frozen" for entry in entries),
    )
    objection = resume_settings.objection(job) or _other_sequences(
        checkpoint, config, layout, version
    )
    if objection is None:
        return
    if is_given:
        raise UsageError(f"{ds_config.GIVEN} {objection}")
    message = f"the config kept in the checkpoint {objection}"
    message = f"{message}. Do so in the job's config, and give the file with"
    raise UsageError(f"{message} {Option('ds_config_file')}")


def _other_sequences(
    checkpoint: Checkpoint, config: ds_config.Config, layout: ZeroLayout, version: Version | None
) -> str | None:
    """Return an objection if the config changes how many ranks hold copies of each partition."""
    world_size, saved = layout.world_size, checkpoint.replicas
    requested = ds_config.sequence_mesh(config, version)
    if requested and layout.stage == 3 and checkpoint.layout.stage < 3:
        # The parameters are cut among all ranks, the optimizer's files are named by data-parallel
        # rank (`Init` of `deepspeed/runtime/zero/partition_parameters.py`, 0.19.8).
        return (
            "sets data_parallel_size and sequence_parallel_size at ZeRO stage 3, where DeepSpeed "
            "cuts the state among all ranks and saves the parts of only as many as "
            "data_parallel_size: no such job can load this, or save. Stay at stage 1 or 2"
        )
    if requested == ((world_size, saved) if saved > 1 else None):
        return None
    if saved > 1:
        return (
            "does not cut sequences as the checkpoint's job did, which cannot be changed: set "
            f"data_parallel_size {world_size} and sequence_parallel_size {saved}"
        )
    return (
        "cuts sequences by data_parallel_size and sequence_parallel_size, which the checkpoint's "
        "job did not, and which cannot be changed: leave data_parallel_size out"
    )


def _saved_stage(checkpoint: Checkpoint) -> int:
    """Return the stage in the config of the job that saved.

    BF16_Optimizer cuts as stage 1 does, but its job may have been configured without a stage.
    """
    if checkpoint.layout.bf16_optimizer and checkpoint.config:
        return ds_config.zero_stage(checkpoint.config) or 0
    return checkpoint.layout.stage


def _is_pipeline(checkpoint: Checkpoint) -> bool:
    """Tell whether the weights of each module layer are in a separate file."""
    modules = [
        model_part.model_state.get(names.MODULE_STATE) for model_part in checkpoint.model_parts
    ]
    return not checkpoint.is_dumps and None in modules


def _require_carried_parts(checkpoint: Checkpoint, stage: int, dtype: str) -> None:
    """Refuse a stage or dtype that the files of pipeline layers and experts cannot follow.

    These files are copied as they are; DeepSpeed trains pipelines at stage 1 alone, and experts not
    at stage 3.
    """
    pipeline = _is_pipeline(checkpoint)
    experts = any(
        model_part.model_state.get(names.EXPERT_COUNTS) for model_part in checkpoint.model_parts
    )
    if not pipeline and not experts and checkpoint.expert_parallel == 1:
        return
    kind = "pipeline" if pipeline else "expert"
    if stage == 2 and checkpoint.layout.stage == 2 and (frozen := _frozen_expert(checkpoint)):
        message = f"'{frozen}' is a frozen weight of an expert: DeepSpeed saves those of the first"
        message = f"{message} rank at stage 2, and loads them into the experts of every rank. Stage"
        raise UnsupportedError(f"{message} 1 loads each its own: give {Option('zero_stage', 1)}")
    if checkpoint.has_auto_experts:
        saved = checkpoint.layout.stage
        if (stage == 3) != (saved == 3):
            message = "AutoEP's experts have files of their own, but none at stage 3: from stage"
            raise UsageError(f"{message} {saved} to {stage} is not supported; keep the stage")
    elif stage == 3 or (stage == 2 and pipeline):
        message = f"stage {stage} does not train with {kind} parallelism, as this checkpoint was"
        raise UsageError(message)
    if dtype != checkpoint.module_dtype:
        message = f"the checkpoint was trained in {checkpoint.module_dtype} with {kind} parallelism"
        raise UsageError(f"{message}, whose weights cannot be taken to {dtype}; keep the dtype")


def require_allowed(checkpoint: Checkpoint, world_size: int) -> int:
    """Return the data-parallel size for a count of all ranks."""
    parts, experts = len(checkpoint.model_parts), checkpoint.expert_parallel
    replicas = checkpoint.replicas
    unit, option = parts * experts * replicas, Option("world_size", world_size)
    if world_size > MOST_RANKS:
        message = f"{option}: above {MOST_RANKS:,}, the most ranks that files"
        raise UsageError(f"{message} are written for; give the count of GPUs that will resume")
    if world_size < 1 or world_size % unit:
        reasons = [f"is in {parts} tensor or pipeline parallel parts"] if parts > 1 else []
        reasons += [f"has its experts spread over {experts} ranks"] if experts > 1 else []
        reasons += [f"is trained on sequences cut among {replicas} ranks"] if replicas > 1 else []
        message = f"{option}: the model {' and '.join(reasons)}"
        if unit == 1:
            raise UsageError(f"{option}: at least one rank is needed")
        few = ", ".join(str(unit * k) for k in (1, 2, 3))
        message = f"{message}: give a multiple of {unit} ({few}, …)"
        if parts > 1:
            message = f"{message}, or let 'streamshard repartition' change the number of parts with"
            degrees = f"{Option('tensor_parallel')} or {Option('pipeline_parallel')}"
            raise UsageError(f"{message} {degrees}")
        raise UsageError(message)
    return world_size // (parts * replicas)


def _frozen_expert(checkpoint: Checkpoint) -> str | None:
    """Return a weight of an expert that the model files list as frozen, if there is one."""
    listed = (part.model_state.get(names.FROZEN_SHAPES) or {} for part in checkpoint.model_parts)
    return next((str(name) for part in listed for name in part if names.expert_of(name)), None)


def _agreed_stage(in_config: int | None, requested: int | None) -> int:
    """Return the stage of the given config, and require that it agrees with what is asked for."""
    if in_config is not None and requested is not None and in_config != requested:
        asked = Option("zero_stage", requested)
        message = f"{asked}, but {ds_config.GIVEN} says stage {in_config}"
        raise UsageError(f"{message}; make them agree")
    stage = requested or in_config
    if stage not in (1, 2, 3):
        message = f"{ds_config.GIVEN} asks for ZeRO stage {stage or 0}, which partitions nothing"
        raise UsageError(f"{message}; give the whole config of the job that will resume")
    return stage


def _require_known_order(
    checkpoint: Checkpoint, config: ds_config.Config, stage: int, version: Version | None
) -> None:
    """Refuse to guess the layout of dumps if the given config leaves it open."""
    unknown = checkpoint.is_dumps and not checkpoint.config
    layout = ds_config.zero_layout(config, stage=stage, world_size=1, version=version)
    if unknown and (layout.round_robin or layout.parameter_alignment):
        message = (
            f"{ds_config.GIVEN} has round_robin_gradients or parameter_alignment on, and the dumps "
            f"do not tell whether they were saved so: {lacking('ds_config')}, the "
            "config of the job that saved them"
        )
        raise UsageError(message)


def _require_same_scaling(checkpoint: Checkpoint, target: str) -> None:
    source = checkpoint.module_dtype
    if checkpoint.is_dumps and not checkpoint.config:
        # Only the loss scale in dumps shows fp16.
        state = checkpoint.model_parts[0].optimizer_file[names.OPTIMIZER]
        dynamic = state.get("dynamic_loss_scale") is True
        source = "float16" if dynamic else target
    if source != target and "float16" in (source, target):
        message = (
            f"the checkpoint was trained in {source}, {ds_config.GIVEN} trains in {target}: "
            "the loss scale that fp16 training needs cannot be made up"
        )
        raise UsageError(message)


def _require_one_unit(checkpoint: Checkpoint, config: ds_config.Config, layout: ZeroLayout) -> None:
    """Refuse to align parameters of several dtypes for a job that casts them and did not before."""
    entries = (entry for model_part in checkpoint.model_parts for entry in model_part.module)
    dtypes = sorted({entry.dtype for entry in entries if entry.kind == "param"})
    cast_to, before = map(ds_config.module_dtype, (config, checkpoint.config))
    if layout.parameter_alignment and len(dtypes) > 1 and cast_to != before:
        message = f"the weights are saved in {' and '.join(dtypes)}, {ds_config.GIVEN} casts all to"
        message = f"{message} {cast_to} and has parameter_alignment on, whose unit is by dtype: set"
        raise UnsupportedError(f"{message} parameter_alignment to false, or bf16 and fp16 as saved")


def _settings_note(
    checkpoint: Checkpoint, layout: ZeroLayout, dtype: str, wanted: ds_config.Config | None
) -> str:
    where = "the config kept in the checkpoint, then DeepSpeed's defaults"
    if wanted is not None:
        where = f"{ds_config.GIVEN}, then DeepSpeed's defaults"
    elif not checkpoint.config:
        where = "DeepSpeed's defaults, as the checkpoint keeps no config"
    shape = f"sub_group_size {layout.sub_group_size:,}"
    if layout.stage < 3:
        shape = (
            f"round_robin_gradients {_switch(layout.round_robin)}, "
            f"parameter_alignment {_switch(layout.parameter_alignment)}"
        )
        if checkpoint.has_muon:
            shape += f", offload_optimizer {_switch(layout.offload)}"
    return f"ZeRO stage {layout.stage}, {dtype}, {shape}: from {where}."


def _switch(on: bool) -> str:
    return "on" if on else "off"
