"""`inspect`: describes a checkpoint from its headers, without reading tensor data."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from streamshard.errors import Option, SourceError, UsageError
from streamshard.formats.checkpoint import Checkpoint
from streamshard.formats.deepspeed import names
from streamshard.formats.deepspeed.model_parallel.parallel_degrees import known_degrees
from streamshard.formats.deepspeed.names import step_of
from streamshard.formats.deepspeed.read.rank_files import find
from streamshard.formats.pickle.inert import Call, Global, Node, show
from streamshard.io.entries import is_directory, is_file, listings_kept, paths_below, paths_in
from streamshard.io.files import source_errors
from streamshard.io.object_path import as_path
from streamshard.operations.inspect.checkpoint_list import summaries
from streamshard.operations.inspect.file_groups import group_files, list_files
from streamshard.operations.inspect.inspect_report import GroupSummary, Inspection
from streamshard.operations.inspect.ownership import (
    parameter_details,
    parameter_summaries,
    rank_detail,
)
from streamshard.options import takes
from streamshard.registry import GRAFT_DESCRIBED, NEEDS_ORDER, load
from streamshard.source.sidecars import has_shards
from streamshard.source.source import Source, open_source
from streamshard.source.tag_directory import find_tag
from streamshard.transfer.target import require_separate
from streamshard.verb_options import InspectOptions


@takes(InspectOptions)
@listings_kept()
def inspect(options: InspectOptions) -> Inspection:
    """Read a checkpoint's headers; no tensor data is read.

    A page of `html` is complete in itself. A page that is there already is replaced, any other file
    refused.

    Raises
    ------
    SourceError
        There is no checkpoint, or it cannot be used; the message names the file.
    UsageError
        A pattern matches nothing, there is no such rank, or that world size or stage is impossible;
        the message says what is possible.
    TargetError
        Another file than a page is there already, or the page cannot be written.
    """
    # Not at the top: verbs that move bytes import this module, and need no memory for pages.
    from streamshard.operations.inspect import page_file

    html = as_path(options.html) if options.html else None
    if html is not None:
        page_file.require_free(html)
    source, tag, params, rank = options.source, options.tag, options.params, options.rank
    world_size, zero_stage = options.world_size, options.zero_stage
    is_resized = world_size is not None or zero_stage is not None
    if is_resized and html is None:
        given = f"{Option('world_size')} and {Option('zero_stage')}"
        raise UsageError(f"{given} shape a page: say where with {Option('html', 'FILE')}")
    opened = open_source(source, options)
    stage = zero_stage or opened.checkpoint.layout.stage
    opened.require_use_of_like(needed=is_resized and load(NEEDS_ORDER)(opened.checkpoint, stage))
    is_brief = bool(params or rank is not None or html)
    is_run = opened.kind.is_tag and opened.path == as_path(source) and tag is None
    try:
        inspection = replace(
            summarize(opened),
            checkpoints=summaries(opened.path, opened) if is_run and not is_brief else (),
            details=parameter_details(opened, params),
            rank=None if rank is None else rank_detail(opened, rank),
        )
    except UsageError as error:
        raise UsageError(f"{opened.path}: {error}") from error
    if html is None:
        return inspection
    drawn = page_file.write_page(html, _page_of(opened, inspection, html, options))
    return replace(inspection, pictures=(drawn,))


def _page_of(source: Source, inspection: Inspection, html: Path, options: InspectOptions) -> bytes:
    from streamshard.operations.inspect.inspect_page import cut_of, cut_page

    require_separate(source.path, html, source.directories)
    cut = cut_of(source, world_size=options.world_size, zero_stage=options.zero_stage)
    return cut_page(inspection, source, cut)


def summarize(source: Source) -> Inspection:
    checkpoint, files = source.checkpoint, list_files(source)
    first = checkpoint.model_parts[0]
    model, optimizer = first.model_state, first.optimizer_file or first.model_state
    entries = [entry for model_part in checkpoint.model_parts for entry in model_part.module]
    kinds = [entry.kind for entry in entries]
    sizes: dict[str, int] = {}
    for tensor in checkpoint.tensors:
        sizes[tensor.state] = sizes.get(tensor.state, 0) + tensor.nbytes
    degrees = known_degrees(checkpoint)
    has_record = checkpoint.graft_record is not None
    grafted = load(GRAFT_DESCRIBED)(source) if has_record else ()
    with source_errors(source.path):
        problems = tuple(_problems(source)) if source.kind.is_tag else ()
    return Inspection(
        path=str(source.path),
        kind=source.kind.name,
        tag=checkpoint.tag,
        zero_stage=checkpoint.layout.stage,
        world_size=checkpoint.ranks,
        data_parallel=checkpoint.layout.world_size,
        model_parallel=len(checkpoint.model_parts),
        tensor_parallel=None if degrees is None else degrees.tensor,
        pipeline_parallel=None if degrees is None else degrees.pipeline,
        expert_parallel=checkpoint.expert_parallel,
        module_dtype=None if checkpoint.is_dumps else checkpoint.module_dtype,
        optimizer=_optimizer_type(checkpoint.config),
        deepspeed_version=_text(optimizer.get(names.DS_VERSION)),
        global_steps=_count(model.get("global_steps")),
        skipped_steps=_count(model.get("skipped_steps")),
        global_samples=_count(model.get("global_samples")),
        groups=_groups(checkpoint),
        parameters=tuple(parameter_summaries(source)),
        frozen=kinds.count("frozen"),
        weights=kinds.count("weight"),
        buffers=kinds.count("buffer"),
        tied={entry.name: entry.alias_of for entry in entries if entry.kind == "alias"},
        state_bytes=sizes,
        files=len(files),
        file_bytes=sum(file.nbytes for file in files),
        file_groups=group_files(files, source.kind),
        file_list=files,
        tensors=len(checkpoint.tensors),
        codec=source.kind.codec(source),
        problems=problems,
        notes=(*source.kind.remarks(source), *grafted, *checkpoint.remarks),
        weights_only=checkpoint.dropped,
        health=source.kind.health(source),
    )


def _groups(checkpoint: Checkpoint) -> tuple[GroupSummary, ...]:
    groups = []
    for model_part in checkpoint.model_parts:
        if not model_part.groups:
            continue
        numels = checkpoint.master_numels(model_part)
        hyper = model_part.wrapped_optimizer["param_groups"]
        groups += [
            GroupSummary(
                model_part=model_part.name,
                expert_rank=group.expert_rank if group.expert_parallel > 1 else None,
                parameters=len(group.params),
                numel=sum(numels[name] for name in group.params),
                master_dtype=group.master_dtype,
                states={k: _plain(state.plain()) for k, state in (group.states or {}).items()},
                hyper_parameters={
                    k: _plain(v) for k, v in hyper[group.number].items() if k != "params"
                },
            )
            for group in model_part.groups
        ]
    return tuple(groups)


def _plain(node: Node) -> Any:  # noqa: ANN401
    """Return a node as values that JSON can hold; calls, which are never made, appear by name only.

    This is only for nodes that the readers have checked, whose nesting is limited.
    """
    if node is None or isinstance(node, bool | int | float | str):
        return node
    if isinstance(node, dict):
        return {str(key): _plain(value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [_plain(value) for value in node]
    return show(node) if isinstance(node, Call | Global) else f"<{type(node).__name__}>"


def _text(node: Node) -> str | None:
    return node if isinstance(node, str) else None


def _count(node: Node) -> int | None:
    return node if isinstance(node, int) else None


def _optimizer_type(config: Node) -> str | None:
    section = config.get("optimizer") if isinstance(config, dict) else None
    return _text(section.get("type")) if isinstance(section, dict) else None


def _problems(source: Source) -> Iterator[str]:
    """Check the files around an opened checkpoint; only their names and `latest` are read."""
    run_dir, tag = source.path, source.checkpoint.tag
    latest = run_dir / names.LATEST
    if not is_file(latest):
        yield f"{latest}: not there, so load_checkpoint() finds no tag unless it is given one."
    else:
        try:
            find_tag(run_dir, None)
        except SourceError as error:
            yield f"{error}."
    yield from _newer_tags(run_dir, tag)
    for path in sorted(paths_below(run_dir / tag)):
        if path.parent != run_dir / tag and is_file(path) and names.parse(path.name):
            yield f"{path}: looks like a shard, lies in a directory of its own, and is not read."


def _newer_tags(run_dir: Path, tag: str) -> Iterator[str]:
    """Find later saves than this one: a save that was interrupted never became `latest`."""
    step, later = step_of(tag), list[Path]()
    for entry in sorted(paths_in((run_dir / tag).parent)):
        other = step_of(entry.name)
        if step is None or other is None or other <= step or not is_directory(entry):
            continue
        try:
            if has_shards(entry):
                find(entry)
                later.append(entry)
        except SourceError as error:
            yield f"A later save is not whole: {error}."
        except OSError as error:
            yield f"{entry}: perhaps a later step; cannot be read ({error.strerror})."
    if later:
        last = max(later, key=lambda entry: step_of(entry.name) or 0)
        more = f" (and {len(later) - 1:,} more)" if later[1:] else ""
        shows = Option("tag", last.relative_to(run_dir).as_posix())
        yield f"{last}{more}: a later step than the one shown here; {shows} shows it."
