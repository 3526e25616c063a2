"""`convert`: writes a checkpoint as chunked Zarr arrays, which do not depend on the ranks."""

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Final

from streamshard.engine.run.memory_limits import Limits
from streamshard.engine.run.resident_memory import resident_bytes
from streamshard.errors import Option, SourceError, UsageError
from streamshard.health import TensorHealth
from streamshard.io.object_path import PACKED_SUFFIX, as_path, is_object, is_packed_name
from streamshard.layout.memory_plan import MIB
from streamshard.model import ITEMSIZE
from streamshard.operations.convert.store_targets import (
    KeptArrays,
    LinkedTargets,
    StoreTargets,
    chunk_of,
)
from streamshard.options import takes
from streamshard.source.degree_change import JobDegrees, change_of, other_degrees
from streamshard.source.source import Source
from streamshard.transfer.plan import TransferPlan, plan_transfer
from streamshard.transfer.report import Report, Watched
from streamshard.transfer.target_writer import Output
from streamshard.verb_options import ConvertOptions

_ENCODING_BYTES: Final = 8 * MIB
"""A piece of content, what becomes of it, and Blosc's own memory."""


class _Convert(ConvertOptions, Watched):
    """What `convert` takes."""


@takes(ConvertOptions)
def plan_convert(options: ConvertOptions) -> TransferPlan:
    """Read the source's headers and plan a conversion; writes nothing."""
    return _plan(options)


@takes(_Convert)
def convert(options: _Convert) -> Report:
    """Write a checkpoint's store; see `plan_convert`."""
    return _plan(options).run(options.progress)


def _plan(options: ConvertOptions) -> TransferPlan:
    target = as_path(options.target)
    if target.suffix == ".zip" and not is_packed_name(target):
        message = f"a store in one file ends in {PACKED_SUFFIX}, and any other name is a directory"
        raise UsageError(f"{target}: {message}; write {target.with_suffix(PACKED_SUFFIX)}")
    return plan_transfer(options, partial(prepare, options))


def prepare(options: ConvertOptions, opened: Source) -> Output:
    """Decide what the store holds: the source's parts of the model, or those of other degrees."""
    change = change_of(
        opened,
        JobDegrees(
            tensor_parallel=options.tensor_parallel,
            pipeline_parallel=options.pipeline_parallel,
        ),
    )
    opened.require_use_of_like(needed=change is not None, if_needed=options.if_needed)
    if change is None:
        output = store_output(opened, verb="convert", options=options)
        return replace(output, notes=(*output.notes, *_kept_apart(opened)))
    opened.require_cut_states()
    output = store_output(change.source, verb="convert", options=options)
    return replace(
        output,
        options={**output.options, **change.options},
        source_world_size=opened.checkpoint.ranks,
        check=change.check,
    )


def _kept_apart(opened: Source) -> Iterator[str]:
    """Say that a store keeps parts of tensors, where it might hold whole ones."""
    parts = len(opened.checkpoint.model_parts)
    if parts == 1:
        return
    # Not at the top: only models in parts have degrees.
    from streamshard.formats.deepspeed.model_parallel.parallel_degrees import is_pipeline

    with suppress(SourceError):  # parts are stored whatever files tell of their cut
        if not is_pipeline(opened.checkpoint) and other_degrees().tells_cut(opened):
            yield (
                f"The store keeps what each of {parts} tensor-parallel ranks has. With "
                f"{Option('tensor_parallel', 1)} it holds whole tensors, for any Zarr library."
            )


def store_output(
    opened: Source,
    *,
    verb: str,
    options: ConvertOptions,
    health: Mapping[str, TensorHealth] | None = None,
    kept: KeptArrays | None = None,
) -> Output:
    """Describe the store of an opened source; `verb` is the verb that writes it.

    `health`: record the health of its tensors; what was measured earlier, and all are read if some
    is missing.
    `kept`: arrays of all tensors that are to stay as they are in the opened store; their files are
    linked, except in one file.
    """
    opened.require_training_state()
    checkpoint, codec = opened.checkpoint, options.codec
    tensors = checkpoint.tensors
    if kept is None:
        shapes = [chunk_of(tensor, options.chunk_size) for tensor in tensors]
    else:
        shapes = [array.chunk for array in kept.arrays]
    both = zip(shapes, tensors, strict=True)
    largest = max((math.prod(shape) * ITEMSIZE[t.dtype] for shape, t in both), default=0)
    limits = Limits(resident_bytes(), options.memory_limit, options.workers)
    measure = None
    if health is not None:
        from streamshard.compare.tensor_content import measured  # not at the top: rare

        measure = partial(measured, opened, limits, health)
    target = as_path(options.target)
    packs, planned = is_packed_name(target), (opened, shapes, codec, measure)
    writer = StoreTargets(*planned)
    if packs:
        from streamshard.operations.convert.packed_targets import PackedTargets  # not at the top

        writer = PackedTargets(target.name, *planned)
    elif kept is not None:
        writer = LinkedTargets(target, kept, *planned)
    is_raw = writer.encode is None
    return Output(
        source=opened,
        writer=writer,
        options={
            "verb": verb,
            "tag": checkpoint.tag,
            "codec": codec,
            "chunk_size": str(options.chunk_size),
            **({} if health is None else {"health": "measured"}),
        },
        source_world_size=checkpoint.ranks,
        world_size=checkpoint.ranks if checkpoint.uncut else None,
        notes=checkpoint.remarks,
        # Pieces are compressed one by one. Where files only grow, a chunk waits in memory.
        codec_bytes=0 if is_raw else _ENCODING_BYTES + (is_object(target) and not packs) * largest,
        packs=packs,
        encode=writer.encode,
    )
