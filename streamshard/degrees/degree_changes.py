"""Takes a checkpoint to other degrees; see `source/degree_change.py`.

What decides how a model's parts go together is read: checksums in a store, values of shards.
"""

import zlib
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Final

import numpy as np

from streamshard.degrees.equal_copies import EqualCopies
from streamshard.degrees.layered import WithLayerTensors, layered
from streamshard.degrees.recut_checkpoint import recut_checkpoint
from streamshard.errors import Option, StreamshardError, UnsupportedError, UsageError, lacking
from streamshard.formats.checkpoint import LIKE, Checkpoint, ModelPart
from streamshard.formats.deepspeed import ds_config, names
from streamshard.formats.deepspeed.model_parallel.cuts_in_files import cuts_in
from streamshard.formats.deepspeed.model_parallel.expert_degree import (
    expert_degree,
    is_own_degree,
    spread_note,
    with_expert_degree,
)
from streamshard.formats.deepspeed.model_parallel.parallel_degrees import (
    Degrees,
    degrees_of,
    is_pipeline,
)
from streamshard.formats.deepspeed.model_parallel.parts import ModelInParts, one_stage, whole_model
from streamshard.formats.deepspeed.model_parallel.pipeline_layers import as_one_module
from streamshard.formats.deepspeed.model_parallel.stated_cuts import CutRules, read_rules
from streamshard.formats.pickle.node_checks import of_file
from streamshard.formats.torch.torch_tensor import storages_in
from streamshard.model import ITEMSIZE, MASTER, MODULE, Note, Whole
from streamshard.sizes import counted
from streamshard.source.degree_change import DerivedSource, JobDegrees, OtherDegrees
from streamshard.source.source import Source
from streamshard.source.source_access import SourceAccess

_MOST_RANKS: Final = 1 << 12
"""More ranks than share a model in any job."""


_READ_BYTES: Final = 1 << 20


def _note_checksums(source: Source) -> None:
    """Note the CRC-32 of each tensor in the training state, as torch's files have it.

    Parts of a model are compared by it, so that no two tensors are in memory.
    """
    model_parts = source.checkpoint.model_parts
    roots = [root for one in model_parts for root in (one.model_state, one.optimizer_file)]
    with closing(SourceAccess(source)) as access:
        for storage in storages_in(roots):
            if storage.crc32 is None and isinstance(storage.content, Whole):
                storage.crc32 = _crc32(access, storage.content.tensor, storage.nbytes)


def _crc32(access: SourceAccess, blob: int, nbytes: int) -> int:
    piece = np.empty(min(nbytes, _READ_BYTES), dtype=np.uint8)
    crc32 = 0
    for start in range(0, nbytes, _READ_BYTES):
        part = piece[: min(nbytes - start, _READ_BYTES)]
        access.fill(part, blob, start, None)
        crc32 = zlib.crc32(part.data, crc32)
    return crc32


_PIECE_BYTES: Final = 1 << 16


def _require_different_shards(source: Source, parts: ModelInParts) -> None:
    """Refuse a tensor that is cut only because no list has it, if all ranks hold the same of it.

    It may be one that each rank holds whole: put together, it would be several times as long. Only
    the beginnings of other tensors are read.
    """
    index, model_parts = parts.checkpoint.tensor_index(), parts.checkpoint.model_parts
    with closing(SourceAccess(source)) as access:
        for name in parts.cut_by_default():
            tensor = parts.tensors[name]
            state = MODULE if tensor.group is None else MASTER
            first, *others = [index[model_parts[m].name, state, name] for m in tensor.shapes]
            if all(_are_equal(source, access, first, other) for other in others):
                advice = lacking("cut_rules")
                message = f"'{name}' is the same on all ranks, and no list says whether each has"
                raise UnsupportedError(f"{message} all of it or a part: {advice}")


def _are_equal(source: Source, access: SourceAccess, left: int, right: int) -> bool:
    tensor = source.checkpoint.tensors[left]
    size = ITEMSIZE[tensor.dtype]
    pieces = np.empty((2, min(tensor.numel, _PIECE_BYTES // size)), dtype=f"u{size}")
    for start in range(0, tensor.numel, max(1, pieces.shape[1])):
        rows = pieces[:, : tensor.numel - start]
        for row, number in zip(rows, (left, right), strict=True):
            access.fill(row, number, start, None)
        if not np.array_equal(rows[0], rows[1]):
            return False
    return True


def _parts_of(
    opened: Source, rules: CutRules | None, *, keeps_shards: bool
) -> tuple[WithLayerTensors, ModelInParts]:
    """Return a source with all that is needed of its parts, and these."""
    laid = WithLayerTensors(opened)
    if is_pipeline(opened.checkpoint) and not (keeps_shards and not opened.checkpoint.layers):
        laid = layered(opened)
    return laid, ModelInParts(laid.source.checkpoint, rules, keeps_shards=keeps_shards)


def _recut(laid: WithLayerTensors, parts: ModelInParts, like: ModelInParts) -> DerivedSource:
    """Cut a source into the parts of another job."""
    opened = laid.source
    with of_file(opened.path):
        source = recut_checkpoint(opened, parts, like)
        copies = EqualCopies.of(laid, parts)
    return DerivedSource(
        source=replace(source, facts=replace(source.facts, cut_rules=None)),  # of the original
        original=opened,
        parts=like.degrees.parts,
        averaged=copies.averaged,
        check=copies.require_equal,
    )


def _tells_cut(opened: Source) -> bool:
    """Tell whether the model files tell how parameters are cut."""
    info = opened.checkpoint.model_parts[0].model_state.get(names.UNIVERSAL_INFO)
    with of_file(opened.path):
        return cuts_in(info) is not None


def _require_unused(rules: CutRules | None) -> None:
    if rules is not None:
        rules_given = Option("facts", what="source.cut_rules")
        message = f"{rules_given}: no tensor is cut otherwise, or put together, by this command"
        raise UsageError(f"{message}; leave them out")


def _parts_of_job(
    source: Source, parts: ModelInParts, degrees: Degrees, rules: CutRules | None
) -> ModelInParts:
    """Return how a job with other degrees cuts the model, by the first that tells it.

    `parts`: those of the source.
    `rules`: how both jobs cut parameters; None for what their files tell.
    """
    if source.reference is not None:
        like = _parts_of_reference(source, source.reference, rules, keeps_shards=parts.keeps_shards)
        if like.degrees != degrees:
            message = f"{LIKE} was saved with {like.degrees}, and {degrees} are asked for"
            raise UsageError(f"{message}: {_supply()}")
        return like
    if degrees.parts == 1 and not is_pipeline(source.checkpoint):
        with of_file(source.path):
            _require_different_shards(source, parts)
            return whole_model(parts)
    if degrees != Degrees(parts.degrees.tensor, 1):
        message = f"{source.path}: saved with {parts.degrees}, and nothing tells how"
        raise UsageError(f"{message} a job with {degrees} cuts the model: {_supply()}")
    try:
        with of_file(source.path):
            return one_stage(parts)
    except UnsupportedError as error:
        message = f"{error}. A save of that job tells it: {_supply()}"
        raise UnsupportedError(message) from error


def _parts_of_reference(
    source: Source, like: Source, rules: CutRules | None, *, keeps_shards: bool
) -> ModelInParts:
    try:
        if source.checkpoint.layers and is_pipeline(like.checkpoint):
            like = layered(like).source
        return ModelInParts(like.checkpoint, rules, keeps_shards=keeps_shards)
    except StreamshardError as error:
        raise type(error)(f"{LIKE}: {error}") from error


def _supply() -> str:
    return (
        'start that job, let it call engine.save_checkpoint("RUN") before its first step, and say '
        f"here {Option('like', 'RUN')} as well"
    )


def _at_degrees(opened: Source, wanted: JobDegrees) -> DerivedSource | None:
    """Re-cut a checkpoint, if a job is to resume at other degrees than those that saved it."""
    rules = read_rules(opened.facts.cut_rules)
    if wanted.tensor_parallel is None and wanted.pipeline_parallel is None:
        _require_unused(rules)
        return None
    _require_ranks(opened, wanted.tensor_parallel, wanted.pipeline_parallel)
    _note_checksums(opened)
    with of_file(opened.path):
        degrees = degrees_of(opened.checkpoint)
        target = Degrees(
            wanted.tensor_parallel or degrees.tensor, wanted.pipeline_parallel or degrees.pipeline
        )
        keeps_shards = target.tensor == degrees.tensor
        if keeps_shards:
            _require_unused(rules)
        if target == degrees and not _has_other_stages(opened):
            return None
        _require_changeable(opened, target, degrees, wanted.expert_parallel)
        laid, parts = _parts_of(opened, rules, keeps_shards=keeps_shards)
    like = _parts_of_job(laid.source, parts, target, rules)
    made = _recut(laid, parts, like)
    _require_config(made.source, like.degrees, wanted.config)
    cut_rules = {} if rules is None else {"cut_rules": rules.text}
    return replace(made, options={**like.degrees.options, **cut_rules})


def _require_config(made: Source, degrees: Degrees, config: ds_config.Config | None) -> None:
    """Refuse a config of a job with another tensor parallel degree (AutoTP)."""
    if config is None or is_pipeline(made.checkpoint):
        return
    configured = ds_config.features(config).tensor_parallel
    if configured != degrees.tensor:
        asked = Option("tensor_parallel", degrees.tensor)
        message = f"{asked}, but {ds_config.GIVEN} says"
        raise UsageError(f"{message} autotp_size {configured}; make them agree")


def _require_ranks(opened: Source, *degrees: int | None) -> None:
    """Refuse impossible degrees, and sources that have none."""
    for name, degree in zip(("tensor_parallel", "pipeline_parallel"), degrees, strict=True):
        if degree is not None and degree < 1:
            raise UsageError(f"{Option(name, degree)}: at least one rank is needed")
    if not opened.kind.changes_degrees:
        message = f"{opened.path}: only what an engine saved can be cut for other degrees, and this"
        raise UnsupportedError(f"{message} is neither its files nor a store of them")
    tensor, pipeline = (degree or 1 for degree in degrees)
    if tensor * pipeline > _MOST_RANKS:
        message = (
            f"{Degrees(tensor, pipeline)}: more than {_MOST_RANKS:,} ranks for each replica of"
        )
        raise UsageError(f"{message} the model; give the degrees of the job that will resume")


def _require_changeable(
    opened: Source, wanted: Degrees, degrees: Degrees, expert_parallel: int | None
) -> None:
    if wanted.pipeline > 1 and not is_pipeline(opened.checkpoint):
        option = Option("pipeline_parallel", wanted.pipeline)
        message = f"{option}: but it is not of a pipeline"
        raise UsageError(f"{message} (PipelineModule); leave it out")
    if expert_parallel is not None and not is_own_degree(opened.checkpoint, expert_parallel):
        option = Option("expert_parallel", expert_parallel)
        message = f"{option} with {wanted}: experts are spread again"
        raise UnsupportedError(f"{message} only at the other degrees of the source, {degrees}")


def _has_other_stages(opened: Source) -> bool:
    """Tell whether a reference checkpoint is of a pipeline whose stages begin elsewhere."""
    own, like = opened.checkpoint, opened.like
    if like is None or not (is_pipeline(own) and is_pipeline(like)):
        return False
    return [*map(_params, own.model_parts)] != [*map(_params, like.model_parts)]


def _params(model_part: ModelPart) -> list[tuple[str, ...]]:
    return [group.params for group in model_part.groups]


def whole(opened: Source, rules: CutRules | None) -> DerivedSource | None:
    """Put the tensors of a pipeline or of AutoTP together; None if the checkpoint is of neither.

    `rules`: how tensor parallelism cut parameters; None for what files tell.
    """
    model_parts = opened.checkpoint.model_parts
    is_pipe = is_pipeline(opened.checkpoint)
    if len(model_parts) == 1 or (is_pipe and degrees_of(opened.checkpoint).tensor == 1):
        _require_unused(rules)
    if not is_pipe and (len(model_parts) == 1 or not (rules or _tells_cut(opened))):
        return None
    try:
        with of_file(opened.path):
            laid, parts = _parts_of(opened, rules, keeps_shards=False)
            return _whole_of_parts(laid, parts)
    except UnsupportedError as error:
        hint = "streamshard.open reads its parts one by one"
        if is_pipe and not opened.checkpoint.layout.stage:
            hint = "Its weights are in the layer_*-model_states.pt files, which torch.load reads"
        raise UnsupportedError(f"{error}. {hint}") from error


def _whole_of_parts(laid: WithLayerTensors, parts: ModelInParts) -> DerivedSource:
    _note_checksums(laid.source)
    _require_different_shards(laid.source, parts)
    derived = _recut(laid, parts, whole_model(parts))
    if not is_pipeline(laid.source.checkpoint):
        return derived
    return replace(
        derived, source=replace(derived.source, checkpoint=as_one_module(derived.source.checkpoint))
    )


def _have_equal_parts(one: Checkpoint, other: Checkpoint) -> bool:
    if len(one.model_parts) != len(other.model_parts):
        return False
    are_pipelines = [is_pipeline(side) for side in (one, other)]
    if bool(one.layers) != bool(other.layers):
        return False
    if one.is_dumps or other.is_dumps or not any(are_pipelines):
        return True
    masters = [
        {(t.model_part, t.name) for t in side.tensors if t.state == MASTER} for side in (one, other)
    ]
    return all(are_pipelines) and masters[0] == masters[1]


def _spread_experts(opened: Source, degree: int | None, world_size: int) -> DerivedSource | None:
    """Spread the experts of a checkpoint again; None if they are to stay as they are.

    `degree`: count of ranks that will share the experts; by default as many as in the source, which
    is 1 without experts.
    `world_size`: count of all ranks of the job that resumes.
    """
    if degree is None:
        return None
    with of_file(opened.path):
        if is_own_degree(opened.checkpoint, degree):
            return None
        parts = len(opened.checkpoint.model_parts)
        if degree > 0 and world_size % (degree * parts):
            asked, spread = Option("world_size", world_size), Option("expert_parallel")
            message = f"{asked}: the experts are to be spread over {counted(degree, 'rank')}"
            beside = f" of each of {parts} tensor parallel parts" if parts > 1 else ""
            few = ", ".join(str(degree * parts * k) for k in (1, 2, 3))
            message = f"{message} ({spread}){beside}: give a multiple of"
            raise UsageError(f"{message} {degree * parts} ({few}, …)")
        checkpoint = with_expert_degree(opened.checkpoint, degree, opened.like)
    note = spread_note(expert_degree(opened.checkpoint), degree, opened.like)
    checkpoint = replace(checkpoint, notes=(*checkpoint.notes, Note(note)))
    return DerivedSource(
        source=replace(opened, checkpoint=checkpoint),
        original=opened,
        options={"expert_parallel": str(checkpoint.expert_parallel)},
    )


def with_part_files(opened: Source) -> DerivedSource:
    """Add the tensors in the files of a pipeline's layers, or of experts, if there are any."""
    with of_file(opened.path):
        laid = layered(opened)
    checkpoint = laid.source.checkpoint
    # Copies lie after the tensors, and are none of the checkpoint's.
    alone = laid.source.take(range(len(checkpoint.tensors)), checkpoint)
    # Only shapes tell what several layers of a pipeline share: values prove it.
    check = EqualCopies.in_files(laid).require_equal if is_pipeline(checkpoint) else None
    return DerivedSource(source=alone, original=opened, check=check)


class _ModelParallelism(OtherDegrees):
    def change(self, source: Source, wanted: JobDegrees) -> DerivedSource | None:
        made = _at_degrees(source, wanted)
        return made or _spread_experts(source, wanted.expert_parallel, wanted.world_size)

    def join(self, source: Source) -> DerivedSource | None:
        return whole(source, read_rules(source.facts.cut_rules))

    def join_unequal(
        self, one: Source, other: Source
    ) -> tuple[Source, Source, Sequence[DerivedSource]]:
        if _have_equal_parts(one.checkpoint, other.checkpoint):
            return one, other, []
        derived = [self.join(side) for side in (one, other)]
        left, right = (
            side if joined is None else joined.source
            for joined, side in zip(derived, (one, other), strict=True)
        )
        return left, right, [joined for joined in derived if joined is not None]

    def tells_cut(self, source: Source) -> bool:
        return _tells_cut(source)


OTHER_DEGREES: Final = _ModelParallelism()
