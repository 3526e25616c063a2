"""`repartition`: writes native files for another world size, from shards or from a store."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from streamshard import registry
from streamshard.errors import Option, UnsupportedError, UsageError
from streamshard.formats.deepspeed import ds_config, names
from streamshard.io.object_path import as_path
from streamshard.layout.batch import BatchPlan
from streamshard.model import Template
from streamshard.native.resharding import Resharding, resharding_of
from streamshard.native.target_files import NativeWriter
from streamshard.options import Path_, RepartitionOptions, takes
from streamshard.sizes import counted
from streamshard.source.degree_change import JobDegrees, change_of
from streamshard.source.source import Source, supply
from streamshard.transfer.plan import TransferPlan, plan_transfer
from streamshard.transfer.report import Report, Watched
from streamshard.transfer.run_identity import digest_of_settings
from streamshard.transfer.target_writer import Output


class _Repartition(RepartitionOptions, Watched):
    """What `repartition` takes."""


@takes(RepartitionOptions)
def plan_repartition(options: RepartitionOptions) -> TransferPlan:
    """Read the source's headers and plan a repartition; writes nothing.

    A key that `ds_config_file` leaves out has DeepSpeed's default; an "auto" in it has the last
    run's value. Only a store knows the default of `world_size`; other sources need it.
    """
    return _plan(options)


@takes(_Repartition)
def repartition(options: _Repartition) -> Report:
    """Write a checkpoint's files for another world size; see `plan_repartition`."""
    return _plan(options).run(options.progress)


def _plan(options: RepartitionOptions) -> TransferPlan:
    target = str(options.target)
    template = _template(target) if names.is_template(target) else None
    if options.format == "fsdp-ranks":
        return plan_transfer(options, partial(registry.load(registry.RANK_FILES), options))
    wanted: ds_config.Config | None = None
    if options.ds_config_file:
        # Not at the top: most jobs keep the config that is in the checkpoint.
        from streamshard.formats.deepspeed.given_config import read_file

        wanted = read_file(as_path(options.ds_config_file))
    return plan_transfer(options, partial(prepare, template, options, wanted), template=template)


def _template(target: str) -> Template:
    from streamshard.formats.deepspeed.dumps.dump_names import parse  # not at the top: for dumps

    return parse(target)


def prepare(
    template: Template | None,
    options: RepartitionOptions,
    wanted: ds_config.Config | None,
    opened: Source,
) -> Output:
    """Decide what the files for the new world size are."""
    opened = _with_training_state(opened, options, wanted)
    opened.require_states()
    _require_same_kind(opened, template, options.target)
    if options.fresh_states:
        opened = registry.load(registry.FRESH_STATES)(opened)
    world_size = _own_world_size(opened) if options.world_size is None else options.world_size
    derived = change_of(
        opened,
        JobDegrees(
            tensor_parallel=options.tensor_parallel,
            pipeline_parallel=options.pipeline_parallel,
            expert_parallel=options.expert_parallel,
            world_size=world_size,
            config=wanted,
        ),
    )
    resharding = resharding_of(
        opened,
        world_size,
        zero_stage=options.zero_stage,
        wanted=wanted,
        ds_version=opened.facts.ds_version,
        derived=derived,
    )
    resharding.source.require_use_of_like(needed=resharding.uses_like, if_needed=options.if_needed)
    if not resharding.is_cut_alike:
        resharding.source.require_cut_states()
    fresh = {"fresh_states": "yes"} if options.fresh_states else {}
    is_reusable = options.if_needed and not fresh and _is_resumed_from(resharding)
    output = output_of(resharding, {"verb": "repartition", **fresh}, options.target, template)
    return replace(output, is_reusable=is_reusable)


def output_of(
    resharding: Resharding,
    decisive: Mapping[str, str],
    target: Path_,
    template: Template | None = None,
    job: BatchPlan | None = None,
) -> Output:
    """Return the files of a target. `decisive`: options that decide what is in them."""
    opened, settings, derived = resharding.source, resharding.settings, resharding.derived
    checkpoint, layout = opened.checkpoint, settings.layout
    shaping = layout, settings.config, settings.module_dtype, settings.is_bf16
    resizes = resharding.explain(job)
    return Output(
        source=opened,
        writer=NativeWriter.of(opened, settings, template, resharding.resized),
        options={
            "tag": checkpoint.tag,
            "world_size": str(resharding.world_size),
            "zero_stage": str(layout.stage),
            "ds_config_file": digest_of_settings(shaping),
            **({"OUT": template.name} if template else {}),
            **decisive,
            **({} if derived is None else derived.options),
        },
        named=str(target),
        source_world_size=checkpoint.ranks,
        world_size=resharding.world_size,
        zero_stage=layout.stage,
        notes=(*settings.notes, *checkpoint.remarks, *resizes.notes),
        latest=checkpoint.tag if template is None else None,
        template=template,
        changes=resizes.changes,
        check=None if derived is None else derived.check,
        reopened=-(-layout.world_size // checkpoint.layout.world_size),
    )


def _with_training_state(
    opened: Source, options: RepartitionOptions, wanted: ds_config.Config | None
) -> Source:
    """Add what a DeepSpeed job needs to a source, from the job's config if that suffices."""
    if wanted is None or not (opened.checkpoint.foreign and opened.kind.completes):
        opened.require_training_state()
        return opened
    if options.world_size is None:
        message = f"{opened.path}: give {Option('world_size')}, the count of ranks that will resume"
        raise UsageError(message)
    stage, ranks = options.zero_stage, options.world_size
    try:
        completed = opened.kind.complete(opened, wanted, stage, ranks)
    except UnsupportedError as error:
        message = f"{opened.path}: {opened.checkpoint.foreign}; {error}"
        raise UnsupportedError(f"{message}: {supply()}") from error
    return replace(opened, checkpoint=completed)


def _own_world_size(source: Source) -> int:
    """Return the default world size of the target, for a source that is not cut among ranks.

    It is the world size of the ranks that saved the content of a store, or the reference of a
    distributed checkpoint.
    """
    if source.kind.is_of_ranks:
        ranks = counted(source.checkpoint.ranks, "rank")
        message = f"{source.path}: has files for {ranks} already; say with"
        raise UsageError(f"{message} {Option('world_size')} for how many they are to be written")
    return source.checkpoint.ranks


def _require_same_kind(source: Source, template: Template | None, target: Path_) -> None:
    """Refuse to make a checkpoint from dumps, which lack the model, or dumps from a checkpoint."""
    if source.checkpoint.is_dumps and template is None:
        message = f"{target}: the source is raw dumps, without the model's files; give a template"
        raise UsageError(f"{message} for the target too, such as 'out/{source.checkpoint.tag}'")
    if template is not None and not source.checkpoint.is_dumps:
        message = f"{target}: a template, but the source is not raw dumps; give a directory"
        raise UsageError(message)


def _is_resumed_from(resharding: Resharding) -> bool:
    """Tell whether `load_checkpoint` without a tag can take the source's own files."""
    source = resharding.source
    if source.kind.is_tag and names.latest_of(source.path) != source.checkpoint.tag:
        return False
    return resharding.has_these_files()
