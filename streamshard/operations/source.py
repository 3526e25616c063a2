"""Opens whatever SRC names: finds the checkpoint, reads its headers, and cuts it as ZeRO did."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from streamshard.engine.files import Decoder
from streamshard.errors import (
    CorruptFileError,
    DisagreementError,
    IncompleteError,
    SourceError,
    SourceNotFoundError,
    UnsupportedError,
    UsageError,
)
from streamshard.formats import deepspeed_names as names
from streamshard.formats import (
    ds_config,
    dump_names,
    dump_reader,
    frameworks,
    zarr_reader,
    zero_reader,
)
from streamshard.formats.checkpoint import Checkpoint, ParamGroup
from streamshard.model import ITEMSIZE, MASTER, RecordedCut, Slot, SourceFile, SourceMap, ZeroLayout
from streamshard.plan.cutting import Cutting, CuttingBuilder
from streamshard.plan.zero import (
    FlatGroup,
    alignment_unit,
    flat_group,
    round_robin_order,
    shard_numel,
)

_LAYOUT_KEYS: Final = "round_robin_gradients, parameter_alignment"


@dataclass(frozen=True, slots=True)
class Source:
    """An opened checkpoint: its content, and where every element of it lies."""

    path: Path
    """The run directory, the store, or the directory of the dumps."""
    kind: str
    """`native`, `store` or `dumps`."""
    checkpoint: Checkpoint
    cutting: Cutting
    files: tuple[SourceFile, ...]
    decoders: Mapping[int, Decoder]
    """How to read files whose stored bytes are not the tensor's."""
    codec_bytes: int = 0
    """Memory that decoding one file takes."""


def open_source(
    path: str | os.PathLike[str],
    tag: str | None = None,
    *,
    ds_config_file: str | os.PathLike[str] | None = None,
    like: str | os.PathLike[str] | None = None,
) -> Source:
    """Open a run directory, a tag directory, a store, or raw dumps.

    Parameters
    ----------
    ds_config_file
        DeepSpeed config of the job that saved, for raw dumps, which hold none.
    like
        Another checkpoint of the same model, for raw dumps of stage 3, which hold no shapes.

    Raises
    ------
    SourceError
        There is no checkpoint there, or it cannot be used; the message names the file.
    """
    root = Path(path)
    for flag, given in (("--like", like), ("--source-ds-config", ds_config_file)):
        if given is not None and not dump_names.is_template(str(path)):
            raise UsageError(f"{path}: is no set of raw dumps, so there is no use for {flag}")
    try:
        if dump_names.is_template(str(path)):
            config = ds_config.read_file(Path(ds_config_file)) if ds_config_file else None
            return _open_dumps(str(path), config, like)
        if (root / "zarr.json").is_file():
            return _open_store(root, tag)
        return _open_native(*_find_tag(root, tag))
    except OSError as error:
        place = error.filename or root
        raise SourceError(f"{place}: cannot be read ({error.strerror})") from error


def _find_tag(root: Path, tag: str | None) -> tuple[Path, Path]:
    """Return the run directory and the tag directory in it."""
    if not root.exists():
        raise SourceNotFoundError(f"{root}: no such file or directory")
    if not root.is_dir():
        message = f"{root}: a file; give the run directory, the tag directory or a .zarr store"
        raise SourceNotFoundError(message)
    if tag is None and _has_shards(root):
        return root.absolute().parent, root.absolute()
    if tag is None:
        tag = _latest(root)
    _require_plain(tag, root / names.LATEST)
    if not (root / tag).is_dir():
        message = f"{root / tag}: no such tag directory{_hint_of_tags(root)}"
        raise SourceNotFoundError(message)
    return root, root / tag


def _latest(root: Path) -> str:
    latest = root / names.LATEST
    if not latest.is_file():
        message = f"{root}: no 'latest' file and no shards in it{_hint_of_tags(root)}"
        raise SourceNotFoundError(message)
    tag = latest.read_text(errors="replace").strip()
    if not tag:
        message = f"{latest}: empty, as a save that was killed leaves it{_hint_of_tags(root)}"
        raise IncompleteError(message)
    if not (root / tag).is_dir():
        message = f"{latest}: names '{tag}', which is not there{_hint_of_tags(root)}"
        raise IncompleteError(message)
    return tag


def _require_plain(tag: str, where: Path) -> None:
    if Path(tag).name != tag or tag in (".", ".."):
        raise SourceError(f"{where}: tag {tag!r} leads out of the run directory")


def _has_shards(path: Path) -> bool:
    return any(names.parse(entry.name) for entry in path.iterdir())


def _hint_of_tags(root: Path) -> str:
    directories = [p for p in root.iterdir() if p.is_dir()]
    tags = sorted(p.name for p in directories if _has_shards(p))
    nested = sorted(p.name for p in directories if (p / names.LATEST).is_file())
    if nested and not tags:
        return f". Give one of the checkpoints in it: {', '.join(nested[:8])}"
    if not tags:
        return ". Give the directory that holds 'latest', or a tag directory"
    return f". Choose one with --tag: {', '.join(tags[:8])}"


def _run_files(run_dir: Path, tag: str) -> list[tuple[Path, str]]:
    """List the files beside the tags: recovery scripts, tokenizer, configs."""
    skipped = {names.LATEST, names.LATEST_UNIVERSAL}
    found = [
        (entry, entry.name)
        for entry in sorted(run_dir.iterdir(), key=lambda entry: entry.name)
        if entry.is_file() and not entry.is_symlink() and entry.name not in skipped
    ]
    framework = frameworks.framework_of(tag, [name for _, name in found])
    if framework is None:
        return found
    # A framework's directory holds one checkpoint, so what lies deeper belongs to it as well.
    for directory in sorted(d for d in run_dir.iterdir() if d.is_dir() and not d.is_symlink()):
        if _has_shards(directory):
            if framework == frameworks.ACCELERATE and directory.name != tag:
                message = f"{directory}: a second model of one Accelerate checkpoint, which is not"
                raise UnsupportedError(f"{message} supported; save each model by itself")
            continue
        inside = sorted(p for p in directory.rglob("*") if p.is_file() and not p.is_symlink())
        found += [(path, path.relative_to(run_dir).as_posix()) for path in inside]
    return found


def _open_dumps(
    path: str, config: ds_config.Config | None, like: str | os.PathLike[str] | None
) -> Source:
    template = dump_names.parse(path)
    shapes = None
    if like is not None:
        known = open_source(like).checkpoint
        by_name = {t.name: t.shape for t in known.tensors if t.state == MASTER}
        shapes = [{name: by_name[name] for name in group.params} for group in known.groups]
    checkpoint, source_map = dump_reader.read(template.find(), template.name, config, shapes)
    # The slices that name the parameters are recorded in the group's own order already.
    cutting = _cut(checkpoint, source_map)
    return Source(template.directory, "dumps", checkpoint, cutting, source_map.files, {})


def _open_native(run_dir: Path, tag_dir: Path) -> Source:
    checkpoint, source_map = zero_reader.read(tag_dir, _run_files(run_dir, tag_dir.name))
    if checkpoint.layout.round_robin:
        groups = tuple(
            _undo_round_robin(group, checkpoint.layout.world_size) for group in checkpoint.groups
        )
        checkpoint = replace(checkpoint, groups=groups)
    cutting = _cut(checkpoint, source_map)
    return Source(run_dir, "native", checkpoint, cutting, source_map.files, {})


def _open_store(root: Path, tag: str | None) -> Source:
    store = zarr_reader.read(root)
    if tag is not None and tag != store.checkpoint.tag:
        message = f"{root}: holds tag '{store.checkpoint.tag}', not '{tag}'"
        raise UsageError(message)
    cutting = _cut(store.checkpoint, store.source_map)
    return Source(
        root, "store", store.checkpoint, cutting, store.source_map.files, store.decoders,
        store.codec_bytes,
    )  # fmt: skip


def _undo_round_robin(group: ParamGroup, world_size: int) -> ParamGroup:
    order = round_robin_order(len(group.params), world_size)
    params = [""] * len(order)
    for stored, index in zip(group.params, order, strict=True):
        params[index] = stored
    return replace(group, params=tuple(params))


def flat_groups(checkpoint: Checkpoint, layout: ZeroLayout, dtype: str) -> list[FlatGroup]:
    """Lay out every param group for stages 1 and 2; `dtype` is that of the module's weights."""
    numels = {t.name: t.numel for t in checkpoint.tensors if t.state == MASTER}
    unit = alignment_unit(ITEMSIZE[dtype]) if layout.parameter_alignment else 1
    return [
        flat_group(
            [numels[name] for name in group.params],
            world_size=layout.world_size,
            round_robin=layout.round_robin,
            alignment=unit,
        )
        for group in checkpoint.groups
    ]


def _cut(checkpoint: Checkpoint, source_map: SourceMap) -> Cutting:
    """Combine where a source keeps things with the arithmetic of how it was cut."""
    tensors = checkpoint.tensors
    builder = CuttingBuilder([ITEMSIZE[tensor.dtype] for tensor in tensors])
    index = checkpoint.tensor_index()
    if source_map.partitions:
        _place_partitions(checkpoint, source_map, builder, index)
    if source_map.sub_groups:
        _place_sub_groups(checkpoint, source_map, builder, index)
    for tensor, (file, offset) in source_map.whole.items():
        numel = tensors[tensor].numel
        slot = Slot(np.array([file]), np.array([offset]), np.array([numel]))
        builder.place(tensor, builder.slot(slot), piece_numel=numel)
    for tensor, slot in source_map.shards.items():
        share = shard_numel(tensors[tensor].numel, checkpoint.layout.world_size)
        name = tensors[tensor].name
        _require_lengths(slot, [share] * len(slot.numels), source_map, f"the shard of {name}")
        builder.place(tensor, builder.slot(slot), piece_numel=share)
    for tensor, (chunk_numel, slot) in source_map.chunks.items():
        builder.place(tensor, builder.slot(slot), piece_numel=chunk_numel)
    for tensor in builder.missing():
        if tensors[tensor].numel:
            raise CorruptFileError(f"{tensors[tensor].state} of {tensors[tensor].name} is nowhere")
    return builder.build()


def _place_partitions(
    checkpoint: Checkpoint,
    source_map: SourceMap,
    builder: CuttingBuilder,
    index: Mapping[tuple[str, str], int],
) -> None:
    groups = flat_groups(checkpoint, checkpoint.layout, checkpoint.module_dtype)
    for (group, state), slot in source_map.partitions.items():
        flat, held = groups[group], checkpoint.groups[group]
        stripped = state == MASTER and not checkpoint.layout.bf16_optimizer
        lengths = [
            flat.partition_numel - (flat.padding(rank) if stripped else 0)
            for rank in range(flat.world_size)
        ]
        _require_lengths(slot, lengths, source_map, f"{state} of param group {group}")
        first = builder.slot(slot)
        for name, start in zip(held.params, flat.starts.tolist(), strict=True):
            tensor = index[state, name]
            builder.place(tensor, first, piece_numel=flat.partition_numel, origin=start)
    for rank, recorded in enumerate(source_map.recorded):
        _require_recorded(recorded, rank, groups, checkpoint.groups)


def _require_recorded(
    recorded: RecordedCut, rank: int, groups: Sequence[FlatGroup], held: Sequence[ParamGroup]
) -> None:
    """Refuse a source whose files describe another cut than the one computed from its config.

    The lengths alone would not tell: stored in another order, parameters take as much room.
    """
    cuts = [group.cut(rank) for group in groups]
    slices = tuple(
        tuple((group.params[index], start, numel) for index, start, numel in cut.recorded)
        for group, cut in zip(held, cuts, strict=True)
    )
    computed = {
        "group_paddings": (recorded.paddings, tuple(cut.padding for cut in cuts)),
        "param_alignment_paddings": (recorded.alignments, tuple(g.alignments for g in groups)),
        "param_slice_mappings": (recorded.slices, slices),
    }
    for key, (found, expected) in computed.items():
        if found is not None and found != expected:
            message = f"{recorded.path}: its {key} are not those of the layout that its ds_config"
            raise DisagreementError(
                f"{message} describes ({_LAYOUT_KEYS}). Was the config changed after the save?"
            )


def _place_sub_groups(
    checkpoint: Checkpoint,
    source_map: SourceMap,
    builder: CuttingBuilder,
    index: Mapping[tuple[str, str], int],
) -> None:
    tensors, world_size = checkpoint.tensors, checkpoint.layout.world_size
    for (unit, state), slot in source_map.sub_groups.items():
        params = source_map.sub_group_params[unit]
        shares = [shard_numel(tensors[index[state, n]].numel, world_size) for n in params]
        lengths = [sum(shares)] * world_size
        _require_lengths(slot, lengths, source_map, f"{state} of sub-group {unit}")
        first, held = builder.slot(slot), 0
        for name, share in zip(params, shares, strict=True):
            tensor = index[state, name]
            lead = held * ITEMSIZE[tensors[tensor].dtype]
            builder.place(tensor, first, piece_numel=share, lead=lead)
            held += share


def _require_lengths(slot: Slot, lengths: Sequence[int], source_map: SourceMap, what: str) -> None:
    """Refuse a source whose tensors are not as long as the arithmetic says."""
    for rank, (found, expected) in enumerate(zip(slot.numels.tolist(), lengths, strict=True)):
        if found != expected:
            path = source_map.files[int(slot.files[rank])].path
            message = f"{path}: {what} has {found} elements on rank {rank}, {expected} belong there"
            raise CorruptFileError(
                f"{message}. Is the ds_config in the checkpoint ({_LAYOUT_KEYS}) that of the run "
                "that saved it?"
            )
