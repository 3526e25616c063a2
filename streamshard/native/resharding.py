"""Decides how a checkpoint is cut for another world size: the settings, and all that follows."""

from dataclasses import dataclass, replace

from streamshard.formats import frameworks
from streamshard.formats.deepspeed import ds_config
from streamshard.formats.deepspeed.ds_versions import Version, target_version
from streamshard.layout.batch import BatchPlan
from streamshard.model import ZeroLayout
from streamshard.native import resizing
from streamshard.native.target_settings import TargetSettings, require_allowed, target_settings
from streamshard.registry import IN_ORDER, NEEDS_ORDER, load
from streamshard.source.degree_change import DerivedSource
from streamshard.source.source import Source


@dataclass(frozen=True, slots=True)
class Resharding:
    """A checkpoint, and how it is cut for a world size."""

    source: Source
    """With the parameters in the target's order."""
    world_size: int
    """Count of all ranks of the job that resumes."""
    settings: TargetSettings
    resized: frameworks.Resized
    """What happens to the files of frameworks."""
    uses_like: bool
    """Whether the parameters' order, or their cut, is the reference checkpoint's."""
    derived: DerivedSource | None = None
    """How the source was made of another one; None if it was not."""

    def explain(self, job: BatchPlan | None = None) -> resizing.Resizing:
        """Explain the effects on everything that depends on the count of ranks.

        `job`: the batch of the job that resumes, if it runs already.
        """
        return resizing.explain(
            self.source if self.derived is None else self.derived.original,
            self.world_size,
            self.resized,
            dp_world_size=self.settings.layout.world_size,
            config=self.settings.config,
            parts=None if self.derived is None else self.derived.parts,
            job=job,
        )

    def has_these_files(self) -> bool:
        """Tell whether a job with these settings can resume from the source's own files.

        It can if its own files would be laid out alike.
        """
        source = self.source
        is_alike = self.is_cut_alike and source.checkpoint.ranks == self.world_size
        return is_alike and source.kind.is_of_ranks

    @property
    def is_cut_alike(self) -> bool:
        """Whether each rank gets what a rank of the source had."""
        source, settings = self.source, self.settings
        checkpoint = source.checkpoint
        if self.derived is not None:
            return False
        dtypes = checkpoint.module_dtype, checkpoint.is_bf16
        if (settings.module_dtype, settings.is_bf16) != dtypes:
            return False
        return _shaping(source, settings.layout) == _shaping(source, checkpoint.layout)


def resharding_of(
    opened: Source,
    world_size: int,
    *,
    zero_stage: int | None = None,
    wanted: ds_config.Config | None = None,
    ds_version: Version | None = None,
    derived: DerivedSource | None = None,
) -> Resharding:
    """Decide how a checkpoint is cut for a world size.

    `world_size`: count of all ranks of the job that resumes.
    `zero_stage` and `wanted`: ZeRO stage and DeepSpeed config of that job; by default those kept in
    the checkpoint.
    `ds_version`: DeepSpeed's version in that job; by default the one that saved.
    `derived`: how a source was made of it for that job, if one was.
    """
    opened = opened if derived is None else derived.source
    dp_world_size = require_allowed(opened.checkpoint, world_size)
    settings = target_settings(opened.checkpoint, dp_world_size, zero_stage, wanted, ds_version)
    stage = settings.layout.stage
    uses_like, checkpoint = derived is not None, opened.checkpoint
    if checkpoint.has_muon:
        uses_like = uses_like or load(NEEDS_ORDER)(checkpoint, stage)
        checkpoint = load(IN_ORDER)(checkpoint, stage, opened.like)
    checkpoint = checkpoint.of_version(target_version(ds_version, checkpoint.ds_version))
    resized = frameworks.resize(
        checkpoint.tag,
        [file.path for file in checkpoint.files],
        source_world_size=checkpoint.ranks,
        world_size=world_size,
    )
    source = replace(opened, checkpoint=checkpoint)
    return Resharding(source, world_size, settings, resized, uses_like, derived)


def _shaping(source: Source, layout: ZeroLayout) -> ZeroLayout:
    """Return a layout without the settings that do not shape files at its stage."""
    has_experts = source.checkpoint.expert_parallel > 1
    return replace(
        layout,
        sub_group_size=layout.sub_group_size if layout.stage == 3 else 0,
        round_robin=layout.round_robin and layout.stage < 3,
        parameter_alignment=layout.parameter_alignment and layout.stage < 3,
        offload=layout.offload and source.checkpoint.has_muon,
        data_before_experts=layout.data_before_experts and has_experts,
    )
