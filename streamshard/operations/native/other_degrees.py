"""Takes a checkpoint to other tensor and pipeline parallel degrees."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Final

from streamshard.engine.run.phases import COMPARING
from streamshard.errors import (
    DisagreementError,
    SourceError,
    StreamshardError,
    UnsupportedError,
    UsageError,
)
from streamshard.formats.checkpoint import LIKE, Checkpoint, Reading
from streamshard.formats.deepspeed import ds_config, names
from streamshard.formats.deepspeed.expert_degree import is_own_degree
from streamshard.formats.deepspeed.model_parallel.affine_maps import has_maps
from streamshard.formats.deepspeed.model_parallel.categories import has_categories
from streamshard.formats.deepspeed.model_parallel.cut_rules import CutRules
from streamshard.formats.deepspeed.model_parallel.parallel_degrees import (
    AS_SAVED,
    Degrees,
    degrees_of,
    is_pipeline,
)
from streamshard.formats.deepspeed.model_parallel.parts import ModelParts
from streamshard.formats.deepspeed.model_parallel.pipeline_layers import (
    LayerCopy,
    as_one_module,
)
from streamshard.formats.deepspeed.model_parallel.recomputed_widths import (
    WidthRule,
    at_degree,
    grain_of,
)
from streamshard.formats.deepspeed.model_parallel.recut_checkpoint import (
    CopiesInParts,
    copies_in_parts,
    recut_checkpoint,
)
from streamshard.formats.deepspeed.model_parallel.stage_starts import (
    STAGES,
    count_stages,
    have_equal_stages,
    listed,
    with_stages,
)
from streamshard.formats.deepspeed.model_parallel.whole_model import whole_model
from streamshard.formats.pickle.inert import Node
from streamshard.formats.pickle.node_checks import of_file
from streamshard.formats.pretrained import CONFIG
from streamshard.formats.torch.tree_comparison import show_few
from streamshard.layout.memory_plan import MemoryPlan
from streamshard.model import ITEMSIZE, MASTER, LogicalTensor
from streamshard.operations.checks.problems import Findings
from streamshard.operations.compare.comparison import Comparing
from streamshard.operations.compare.pairing import Pair, SideElements, pair_of_copy
from streamshard.operations.native.averaged_parameters import (
    AVERAGE,
    require_averaged,
    with_means,
)
from streamshard.operations.native.model_config import kv_heads
from streamshard.operations.native.shard_values import require_different_shards
from streamshard.operations.source.blob_checksums import note_checksums
from streamshard.operations.source.layered import Layered, layered
from streamshard.operations.source.source import Source
from streamshard.operations.transfer.report import Progress

_SUPPLY = (
    'start that job, let it call engine.save_checkpoint("RUN") before its first step, and say here '
    "--like RUN as well"
)
_MOST_RANKS: Final = 1 << 12
"""More ranks than share a model in any job."""


@dataclass(frozen=True, slots=True)
class OtherDegrees:
    """A checkpoint that was cut anew for other degrees."""

    source: Source
    """With the parts of the model of the target, which lie in the files of the original."""
    original: Source
    degrees: Degrees
    """Of the target."""
    copies: CopiesInParts
    layers: Sequence[LayerCopy] = ()
    """What the files of a pipeline's layers must have in common with others."""
    stages: Sequence[int] | None = None
    """First layers of the target's stages, if they were given."""
    averaged: Sequence[str] = ()
    """Parameters that are to be averaged."""
    takes_means: bool = False
    """Whether the mean of their copies is taken; else these must be equal, as all others."""

    @property
    def options(self) -> dict[str, str]:
        """The options that ask for this."""
        stages = {} if self.stages is None else {STAGES: listed(self.stages)}
        return {**self.degrees.options, **stages, **({AVERAGE: ""} if self.takes_means else {})}

    def require_config(self, wanted: ds_config.Config | None) -> None:
        """Refuse a config of a job with another tensor parallel degree (AutoTP).

        Raises
        ------
        UsageError
            The message has both degrees.
        """
        if wanted is None or is_pipeline(self.source.checkpoint):
            return
        configured = ds_config.features(wanted).tensor_parallel
        if configured != self.degrees.tensor:
            message = f"--tensor-parallel {self.degrees.tensor}, but the given config says"
            raise UsageError(f"{message} autotp_size {configured}; make them agree")

    def require_equal_copies(self, memory: MemoryPlan, progress: Progress) -> None:
        """Compare what several parts of the original hold copies of, of which one is taken.

        Raises
        ------
        DisagreementError
            Copies differ; the message names the parameter and how many elements differ.
        SourceError
            A file cannot be read.
        """
        copies = self.copies
        first = replace(self.original, cutting=copies.cutting(0))
        for holder in range(1, max(copies.holders, default=1)):
            other = replace(self.original, cutting=copies.cutting(holder))
            comparing = Comparing(first, other, list(self._pairs(holder)))
            self._require_equal(comparing, partial(self._holders, holder), memory, progress)
        for path, held in groupby(self.layers, key=lambda layer: layer.path):
            comparing = Comparing(self.original, self.original, list(map(pair_of_copy, held)))
            self._require_equal(comparing, partial(_file_and_module, path), memory, progress)

    def _require_equal(
        self,
        comparing: Comparing,
        holders: Callable[[str], str],
        memory: MemoryPlan,
        progress: Progress,
    ) -> None:
        """Compare pairs; `holders` says whose copies those of a name are."""
        findings = Findings()
        progress.start(comparing.nbytes, COMPARING)
        found = comparing.run(memory, findings, lambda nbytes: progress.advance(nbytes // 2))
        if findings.problems:
            raise SourceError(findings.problems[0].message)
        if found:
            where = f"{found[0].message}, between {holders(found[0].name)}"
            message = f"{self.original.path}: {where}. Copies must be equal: they have drifted"
            message = f"{message} apart in training, and which is right is unknown"
            if found[0].name.partition(" of ")[2] in self.averaged:
                message = f"{message}. Its files list it as one to be averaged: with {AVERAGE},"
                message = f"{message} 'repartition', 'convert' and 'export' take the mean"
            raise DisagreementError(f"{message}. {AS_SAVED}")

    def _pairs(self, holder: int) -> Iterator[Pair]:
        """List the tensors that have as many copies."""
        for number, tensor in enumerate(self.copies.tensors):
            if self.copies.holders[number] > holder:
                side, size = SideElements(number, tensor.dtype), ITEMSIZE[tensor.dtype]
                name = _named(tensor)
                yield Pair(name, side, side, tensor.numel, tensor.dtype, size, tensor)

    def _holders(self, holder: int, name: str) -> str:
        """Name the parts of the model that hold the first copy of a tensor, and another one."""
        number = next(n for n, tensor in enumerate(self.copies.tensors) if _named(tensor) == name)
        return " and ".join(show_few(self.copies.parts(number, one)) for one in (0, holder))


def _named(tensor: LogicalTensor) -> str:
    return f"{tensor.state} of {tensor.name}"


def _file_and_module(path: Path, name: str) -> str:
    return f"{path.name} and the module that it is taken for a copy of"


def at_degrees(
    opened: Source,
    tensor_parallel: int | None,
    pipeline_parallel: int | None,
    rules: CutRules | None = None,
    *,
    average: bool = False,
    stages: Sequence[int] | None = None,
    expert_parallel: int | None = None,
    if_needed: bool = False,
) -> OtherDegrees | None:
    """Cut a checkpoint anew, if a job is to resume at other degrees than those that saved it.

    Parameters
    ----------
    rules
        How both jobs cut parameters; None for what their files tell.
    average
        Whether to take the mean of the copies of parameters that are to be averaged.
    stages
        First layer of each stage of that job; None for what a reference checkpoint tells.
    expert_parallel
        Count of ranks over which that job's experts are to be spread, if that is asked for too.
    if_needed
        Whether the stages may be those of the source.

    Raises
    ------
    UsageError
        There is no reference checkpoint, or it is of other degrees; or the stages are none, or
        those of the source.
    UnsupportedError, DisagreementError
        The checkpoint, or the reference, cannot be cut anew; the message says why.
    """
    if stages is not None:
        pipeline_parallel = count_stages(stages, pipeline_parallel)
    if tensor_parallel is None and pipeline_parallel is None:
        _require_unused(rules, average=average)
        return None
    _require_ranks(opened, tensor_parallel, pipeline_parallel)
    note_checksums(opened)
    with of_file(opened.path):
        own = degrees_of(opened.checkpoint)
        wanted = Degrees(tensor_parallel or own.tensor, pipeline_parallel or own.pipeline)
        keeps_shards = wanted.tensor == own.tensor
        if opened.like is None and keeps_shards and wanted.pipeline == 1 < own.pipeline:
            stages = stages or (0,)
        if keeps_shards:
            _require_unused(rules, average=average)
        if stages is not None:
            _require_use_of_stages(opened, stages, wanted, keeps_shards=keeps_shards)
        elif wanted == own and not _has_other_stages(opened):
            return None
        _require_changeable(opened, wanted, own, expert_parallel)
        laid, parts = _parts_of(opened, rules, keeps_shards=keeps_shards, average=average)
    if stages is None:
        made = _recut(laid, parts, _target_parts(laid.source, parts, wanted, rules))
        return replace(made, takes_means=average)
    like = _parts_of_stages(opened, parts, stages)
    if not have_equal_stages(like.checkpoint, opened.checkpoint):
        return replace(_recut(laid, parts, like), stages=stages)
    if if_needed:
        return None
    message = f"{opened.path}: {STAGES} {listed(stages)}: there its stages begin already"
    raise UsageError(f"{message}; leave it out")


def _parts_of(
    opened: Source, rules: CutRules | None, *, keeps_shards: bool, average: bool
) -> tuple[Layered, ModelParts]:
    """Return a source with all that is needed of its parts, and these."""
    laid = Layered(opened)
    if is_pipeline(opened.checkpoint) and not (keeps_shards and not opened.checkpoint.layers):
        laid = layered(opened)
    parts = ModelParts(laid.source.checkpoint, rules, keeps_shards=keeps_shards)
    if not average:
        return laid, parts
    # Files of layers hold the copies that the means are made of.
    averaged = set(parts.averaged())
    copies = [copy for copy in laid.copies if copy.name not in averaged]
    return Layered(with_means(laid.source, parts), copies), parts


def _require_ranks(opened: Source, *degrees: int | None) -> None:
    """Refuse impossible degrees, and sources that have none."""
    for flag, degree in zip(("tensor", "pipeline"), degrees, strict=True):
        if degree is not None and degree < 1:
            raise UsageError(f"--{flag}-parallel {degree}: at least one rank is needed")
    if opened.kind not in ("native", "store"):
        message = f"{opened.path}: only what an engine saved can be cut for other degrees, and this"
        raise UnsupportedError(f"{message} is neither its files nor a store of them")
    tensor, pipeline = (degree or 1 for degree in degrees)
    if tensor * pipeline > _MOST_RANKS:
        message = (
            f"{Degrees(tensor, pipeline)}: more than {_MOST_RANKS:,} ranks for each replica of"
        )
        raise UsageError(f"{message} the model; give the degrees of the job that will resume")


def _require_changeable(
    opened: Source, wanted: Degrees, own: Degrees, expert_parallel: int | None
) -> None:
    if wanted.pipeline > 1 and not is_pipeline(opened.checkpoint):
        message = f"--pipeline-parallel {wanted.pipeline}: but it is not of a pipeline"
        raise UsageError(f"{message} (PipelineModule); leave it out")
    if expert_parallel is not None and not is_own_degree(opened.checkpoint, expert_parallel):
        message = f"--expert-parallel {expert_parallel} with {wanted}: experts are spread anew"
        raise UnsupportedError(f"{message} only at the other degrees of the source, {own}")
    if opened.is_elastic:
        message = "saved with elastic_checkpoint, whose --like supplies hyper-parameters"
        raise UnsupportedError(f"{message}: its degrees cannot change")


def _has_other_stages(opened: Source) -> bool:
    """Tell whether a reference checkpoint is of a pipeline whose stages begin elsewhere."""
    own, like = opened.checkpoint, opened.like
    if like is None or not (is_pipeline(own) and is_pipeline(like)):
        return False
    return not have_equal_stages(own, like)


def _require_use_of_stages(
    opened: Source, stages: Sequence[int], wanted: Degrees, *, keeps_shards: bool
) -> None:
    """Refuse a list of stages where there are none, or where it does not tell all."""
    asked = f"{opened.path}: {STAGES} {listed(stages)}"
    if not is_pipeline(opened.checkpoint):
        raise UsageError(f"{asked}: but it is not of a pipeline (PipelineModule); leave it out")
    if opened.like is not None:
        raise UsageError(f"{asked}: {LIKE} tells that too; give one of them")
    if not keeps_shards:
        what = (
            "how tensor-parallel ranks cut tensors"
            if wanted.tensor > 1
            else "the names of layers' files"
        )
        message = f"{asked}: does not tell {what} in a job with {wanted}"
        raise UsageError(f"{message}. {_instead(stages)}")


def _parts_of_stages(opened: Source, parts: ModelParts, stages: Sequence[int]) -> ModelParts:
    try:
        with of_file(opened.path):
            return with_stages(parts, stages)
    except UnsupportedError as error:
        raise UnsupportedError(f"{error}. {_instead(stages)}") from error


def _instead(stages: Sequence[int]) -> str:
    return f"In place of {STAGES}, say --pipeline-parallel {len(stages)}, and {_SUPPLY}"


def _require_unused(rules: CutRules | None, *, average: bool) -> None:
    if rules is not None:
        message = "--cut-rules: no tensor is cut otherwise, or put together, in what is asked for"
        raise UsageError(f"{message}; leave it out")
    if average:
        require_averaged(())


def whole(
    opened: Source, rules: CutRules | None = None, *, average: bool = False
) -> OtherDegrees | None:
    """Put the tensors of a pipeline or of AutoTP together; None if the checkpoint is of neither.

    Parameters
    ----------
    rules
        How tensor parallelism cut parameters; None for what files tell.
    average
        Whether to take the mean of the copies of parameters that are to be averaged.

    Raises
    ------
    UnsupportedError, DisagreementError, IncompleteError, CorruptFileError
        Its parts cannot be put together; the message says why.
    """
    families = opened.checkpoint.families
    is_pipe = is_pipeline(opened.checkpoint)
    if len(families) == 1 or (is_pipe and degrees_of(opened.checkpoint).tensor == 1):
        _require_unused(rules, average=average)
    if not is_pipe and (len(families) == 1 or not (rules or _is_told(opened))):
        _require_unused(None, average=average)
        return None
    try:
        with of_file(opened.path):
            laid, parts = _parts_of(opened, rules, keeps_shards=False, average=average)
            return _whole_of_parts(laid, parts)
    except UnsupportedError as error:
        hint = "streamshard.open reads its parts one by one"
        if is_pipe and not opened.checkpoint.layout.stage:
            hint = "Its weights are in the layer_*-model_states.pt files, which torch.load reads"
        raise UnsupportedError(f"{error}. {hint}") from error


def _whole_of_parts(laid: Layered, parts: ModelParts) -> OtherDegrees:
    note_checksums(laid.source)
    require_different_shards(laid.source, parts)
    made = _recut(laid, parts, whole_model(parts))
    if not is_pipeline(laid.source.checkpoint):
        return made
    return replace(
        made, source=replace(made.source, checkpoint=as_one_module(made.source.checkpoint))
    )


def in_equal_parts(one: Source, other: Source) -> tuple[Source, Source, list[OtherDegrees]]:
    """Return two sources, both with whole tensors if their models are in unequal parts.

    Returns
    -------
    list
        What was put together, in which copies were taken for equal.

    Raises
    ------
    UnsupportedError, DisagreementError, IncompleteError
        The parts cannot be put together; the message says why.
    """
    if _have_equal_parts(one.checkpoint, other.checkpoint):
        return one, other, []
    found = [whole(side) for side in (one, other)]
    left, right = (
        side if joined is None else joined.source
        for joined, side in zip(found, (one, other), strict=True)
    )
    return left, right, [joined for joined in found if joined is not None]


def _have_equal_parts(one: Checkpoint, other: Checkpoint) -> bool:
    if len(one.families) != len(other.families):
        return False
    are_pipelines = [is_pipeline(side) for side in (one, other)]
    if bool(one.layers) != bool(other.layers):
        return False
    if one.is_dumps or other.is_dumps or not any(are_pipelines):
        return True
    held = [
        {(t.family, t.name) for t in side.tensors if t.state == MASTER} for side in (one, other)
    ]
    return all(are_pipelines) and held[0] == held[1]


def _target_parts(
    opened: Source, parts: ModelParts, wanted: Degrees, rules: CutRules | None
) -> ModelParts:
    """Find out how a job with the wanted degrees cuts the model."""
    if opened.like is None:
        if wanted.parts == 1 and not is_pipeline(opened.checkpoint):
            with of_file(opened.path):
                require_different_shards(opened, parts)
                return whole_model(parts)
        with of_file(opened.path):
            if wanted.pipeline == 1 and rules is None and has_maps(_told(opened)):
                grain = grain_of(opened.checkpoint.config)
                found = at_degree(parts, WidthRule(wanted.tensor, kv_heads(opened), grain))
                if found is not None:
                    return found
        message = f"{opened.path}: saved with {parts.degrees}, and nothing tells how a job with"
        message = f"{message} {wanted} cuts the model: {_SUPPLY}"
        if is_pipeline(opened.checkpoint) and wanted.tensor == parts.degrees.tensor:
            message = f"{message}; or list with {STAGES} the first layer of each stage"
        elif has_maps(_told(opened)) and kv_heads(opened) is None:
            message = (
                f"{message}. If AutoTP cut by heads, the model's {CONFIG} in {opened.path} may do"
            )
            message = f"{message}, with num_key_value_heads in it"
        raise UsageError(message)
    try:
        checkpoint = opened.like
        known = opened.reference
        if opened.checkpoint.layers and known is not None and is_pipeline(known.checkpoint):
            checkpoint = layered(known).source.checkpoint
        like = ModelParts(checkpoint, rules, keeps_shards=parts.keeps_shards)
    except StreamshardError as error:
        raise type(error)(f"{LIKE}: {error}") from error
    if like.degrees != wanted:
        message = f"{LIKE} was saved with {like.degrees}, and {wanted} are asked for"
        raise UsageError(f"{message}: {_SUPPLY}")
    return like


def _told(opened: Source) -> Node:
    """Return what the first model file tells of how parameters are cut."""
    return opened.checkpoint.families[0].model_state.get(names.UNIVERSAL_INFO)


def _is_told(opened: Source) -> bool:
    """Tell whether the model files tell how parameters are cut."""
    info = _told(opened)
    with of_file(opened.path):
        return has_maps(info) or has_categories(info)


def _recut(laid: Layered, parts: ModelParts, like: ModelParts) -> OtherDegrees:
    opened = laid.source
    reading = Reading(opened.checkpoint, opened.cutting, opened.files)
    with of_file(opened.path):
        made = recut_checkpoint(reading, parts, like)
        copies = copies_in_parts(reading, parts)
    source = replace(opened, checkpoint=made.checkpoint, cutting=made.cutting)
    averaged = parts.averaged()
    return OtherDegrees(source, opened, like.degrees, copies, laid.copies, averaged=averaged)
