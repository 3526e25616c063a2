"""What verbs ask of the room of other degrees, which they do not import: `registry` names it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from streamshard import registry
from streamshard.engine.run.phases import Progress
from streamshard.formats.deepspeed import ds_config
from streamshard.layout.memory_plan import MemoryPlan
from streamshard.source.source import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDegrees:
    """The degrees of a job that will resume."""

    tensor_parallel: int | None = None
    """None for that of the source, as for the other degrees."""
    pipeline_parallel: int | None = None
    expert_parallel: int | None = None
    world_size: int = 0
    """Count of all ranks of the job; 0 if only a store is made for it."""
    config: ds_config.Config | None = None
    """DeepSpeed config of the job; None for what the checkpoint keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DerivedSource:
    """A source that was made of another one: re-cut for other degrees, or grafted."""

    source: Source
    """With the parts of the model of the target."""
    original: Source
    parts: int | None = None
    """Count of the model-parallel parts of the target; None if they stay as they are."""
    options: Mapping[str, str] = field(default_factory=dict)
    """The options that ask for this."""
    averaged: Sequence[str] = ()
    """Parameters whose copies may differ, as the files list them as ones to be averaged."""
    check: Callable[[MemoryPlan, Progress], Sequence[str]] | None = None
    """What is to be read before the run, such as copies of which one was taken; returns notes."""


class OtherDegrees(ABC):
    """Takes checkpoints to other tensor, pipeline and expert parallel degrees."""

    @abstractmethod
    def change(self, source: Source, wanted: JobDegrees) -> DerivedSource | None:
        """Re-cut a checkpoint for a job; None if the job cuts the model as the source does."""

    @abstractmethod
    def join(self, source: Source) -> DerivedSource | None:
        """Put tensors together that AutoTP or a pipeline cut; None if the model is whole."""

    @abstractmethod
    def join_unequal(
        self, one: Source, other: Source
    ) -> tuple[Source, Source, Sequence[DerivedSource]]:
        """Return two sources, both with whole tensors if their models are in unequal parts.

        What was put together comes with them: copies in it were taken for equal.
        """

    @abstractmethod
    def tells_cut(self, source: Source) -> bool:
        """Tell whether the model files tell how parameters are cut."""


def change_of(source: Source, wanted: JobDegrees) -> DerivedSource | None:
    """Re-cut a checkpoint for a job; None if the job cuts the model as the source does."""
    asked = wanted.tensor_parallel, wanted.pipeline_parallel, wanted.expert_parallel
    if asked == (None, None, None) and source.facts.cut_rules is None:
        return None
    return other_degrees().change(source, wanted)


def other_degrees() -> OtherDegrees:
    """Return what takes checkpoints to other degrees."""
    found: OtherDegrees = registry.load(registry.OTHER_DEGREES)
    return found
