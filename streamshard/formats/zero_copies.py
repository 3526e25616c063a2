"""Tells of what the files of a family hold more than once and not alike, of which one is kept."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from streamshard.formats import deepspeed_names as names
from streamshard.formats import torch_file
from streamshard.formats.checkpoint import ModuleEntry
from streamshard.formats.inert import Node
from streamshard.formats.node_checks import of_file
from streamshard.formats.node_walk import spell_few, spell_key
from streamshard.formats.torch_tensor import Tensor, shape_of, tensor_of
from streamshard.formats.zero_files import UNREAD, fingerprint, fingerprints
from streamshard.formats.zero_rank_files import RankFile

RANKS_DIFFER: Final = "The ranks' files differ in"
COPIES_DIFFER: Final = "Kept in two places, and not alike:"
UNLIKE: Final = (RANKS_DIFFER, COPIES_DIFFER, UNREAD)
"""Begin the notes about what is not kept of every file."""


def ranks_differ(keys: set[Node]) -> str:
    """Tell what ranks hold besides their shards and do not agree about."""
    spelled = spell_few(sorted(keys, key=spell_key))
    return f"{RANKS_DIFFER} {spelled}; rank 0's are taken for all."


def unlike_optimizers(
    optimizers: Sequence[Mapping[str, Node]], paths: Sequence[Path]
) -> Iterator[str]:
    """Note what optimizer files hold beside the optimizer's state and do not agree about."""
    first, *rest = [
        fingerprints({key: node for key, node in root.items() if key != names.OPTIMIZER}, path)
        for root, path in zip(optimizers, paths, strict=True)
    ]
    differing = {key for own in rest for key in {**first, **own} if first.get(key) != own.get(key)}
    if differing:
        yield ranks_differ(differing)


def unlike_copies(
    optimizer: Mapping[str, Node],
    models: Sequence[RankFile],
    entries: Sequence[ModuleEntry],
    stage: int,
) -> Iterator[str]:
    """Note what model files hold of which another place has something else, or nothing.

    To be asked before what depends on the cutting is taken out of them.
    """
    found = [*_config(optimizer, models[0].root)]
    for file in models:
        if file.twin is None:
            found += _tied(file.root, entries)
            found += _module(file, entries, stage)
            found += _frozen(file, entries, stage)
            if _frozen_shapes(file) != _frozen_shapes(models[0]):
                found.append(names.FROZEN_SHAPES)
    if found:
        yield f"{COPIES_DIFFER} {spell_few(list(dict.fromkeys(found)))}; one of them is kept."


def _config(optimizer: Mapping[str, Node], model: Mapping[str, Node]) -> Iterator[str]:
    holders = [root[names.DS_CONFIG] for root in (optimizer, model) if names.DS_CONFIG in root]
    if len({fingerprint(node) for node in holders}) > 1:
        yield names.DS_CONFIG


def _tied(model: Mapping[str, Node], entries: Sequence[ModuleEntry]) -> Iterator[str]:
    alias_of = {entry.name: entry.alias_of for entry in entries}
    for name, of in (model.get(names.SHARED_PARAMS) or {}).items():
        if alias_of.get(name) != of:
            yield f"{names.SHARED_PARAMS}.{name}"


def _module(file: RankFile, entries: Sequence[ModuleEntry], stage: int) -> Iterator[str]:
    module = file.root.get(names.MODULE_STATE) or {}
    with of_file(file.path):
        for entry in entries:
            weight = tensor_of(module.get(entry.name))
            if stage == 3:
                # Of what is cut the fragments are kept, and all else is to be an empty placeholder.
                is_cut = entry.kind in ("param", "frozen", "alias")
                is_other = is_cut and weight is not None and weight.numel > 0
            else:
                is_other = bool(entry.alias_of) and not _alike(
                    weight, tensor_of(module.get(entry.alias_of))
                )
            if is_other:
                yield f"{names.MODULE_STATE}.{entry.name}"


def _frozen(file: RankFile, entries: Sequence[ModuleEntry], stage: int) -> Iterator[str]:
    module = file.root.get(names.MODULE_STATE) or {}
    known = {entry.name for entry in entries if entry.kind in ("frozen", "alias")}
    for key in (names.FROZEN_SHAPES, names.FROZEN_FRAGMENTS):
        yield from (f"{key}.{name}" for name in (file.root.get(key) or {}) if name not in known)
    if stage == 3:
        return  # which keeps the fragments alone
    with of_file(file.path):
        for name, node in (file.root.get(names.FROZEN_FRAGMENTS) or {}).items():
            pair = tensor_of(node), tensor_of(module.get(name))
            if name in known and not _alike(*pair):
                yield f"{names.FROZEN_FRAGMENTS}.{name}"


def _frozen_shapes(file: RankFile) -> dict[str, tuple[int, ...]]:
    with of_file(file.path):
        held = file.root.get(names.FROZEN_SHAPES) or {}
        return {name: shape_of(node) for name, node in held.items()}


def _alike(one: Tensor | None, other: Tensor | None) -> bool:
    """Tell whether two places hold the same tensor, by the CRC-32 of what it lies in."""
    if one is None or other is None:
        return False
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    if one.place == other.place:
        return True
    storages = one.storage, other.storage
    return (
        one.start == other.start
        and storages[0].numel == storages[1].numel
        and torch_file.checksum(storages[0]) == torch_file.checksum(storages[1])
    )
