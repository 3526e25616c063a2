"""Finds the files of a ZeRO checkpoint and opens them, refusing what is missing or does not fit."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamshard.errors import CorruptFileError, IncompleteError, UnsupportedError
from streamshard.formats import deepspeed_names as names
from streamshard.formats import torch_file
from streamshard.formats.inert import Node
from streamshard.formats.inert_dump import dump
from streamshard.formats.torch_tensor import Storage
from streamshard.model import SourceFile


@dataclass(frozen=True, slots=True)
class ShardSet:
    """The files of one tag directory that belong together."""

    tag_dir: Path
    model_files: tuple[Path, ...]
    """One in stages 1 and 2, one per rank in stage 3."""
    optimizer_files: tuple[Path, ...]
    """One per rank, in order of rank."""
    prefix: str
    others: tuple[Path, ...]
    """Files of the tag directory that are not DeepSpeed's."""


def find(tag_dir: Path) -> ShardSet:
    """Sort the files of a tag directory by what their names say.

    Raises
    ------
    IncompleteError
        A rank is missing between those that are there, or files of two runs lie together.
    UnsupportedError
        The files belong to a layout that is not supported.
    """
    model: dict[int | None, Path] = {}
    optimizer: dict[int, Path] = {}
    prefixes: dict[str, Path] = {}
    others: list[Path] = []
    for path in sorted(p for p in tag_dir.rglob("*") if p.is_file()):
        parsed = names.parse(path.name) if path.parent == tag_dir else None
        if parsed is None:
            others.append(path)
            continue
        if parsed.kind == "parallel" or parsed.mp_rank > 0:
            message = (
                f"{path}: a file of tensor, pipeline or expert parallel training, "
                "which is not supported yet"
            )
            raise UnsupportedError(message)
        if parsed.kind == "model":
            model[parsed.dp_rank] = path
        elif parsed.dp_rank is not None:
            if parsed.dp_rank in optimizer:
                message = f"{path} and {optimizer[parsed.dp_rank]} both claim to be of one rank"
                raise IncompleteError(f"{message}; move away the set that is older")
            optimizer[parsed.dp_rank] = path
            prefixes[parsed.prefix] = path
    if len(prefixes) > 1:
        both = " and ".join(str(path) for path in prefixes.values())
        raise IncompleteError(f"{both} are of different runs; move away the set that is older")
    if not optimizer:
        raise _no_optimizer_files(tag_dir, bool(model))
    _require_all_ranks(optimizer, next(iter(prefixes)))
    return ShardSet(
        tag_dir=tag_dir,
        model_files=_model_files(tag_dir, model, len(optimizer)),
        optimizer_files=tuple(optimizer[rank] for rank in sorted(optimizer)),
        prefix=next(iter(prefixes)),
        others=tuple(others),
    )


def _no_optimizer_files(tag_dir: Path, has_model: bool) -> IncompleteError:
    if has_model:
        return IncompleteError(
            f"{tag_dir}: no *_optim_states.pt file: not saved with ZeRO 1, 2 or 3, or not whole"
        )
    return IncompleteError(f"{tag_dir}: no DeepSpeed checkpoint files in it")


def _require_all_ranks(optimizer: Mapping[int, Path], prefix: str) -> None:
    for rank in range(max(optimizer) + 1):
        if rank not in optimizer:
            known = next(iter(optimizer.values()))
            missing = known.with_name(names.optimizer_file(rank, bf16=prefix == "bf16_"))
            message = (
                f"{missing}: rank {rank} of at least {max(optimizer) + 1} is missing; "
                "copy it from the node that saved it, or take an earlier tag"
            )
            raise IncompleteError(message)


def _model_files(
    tag_dir: Path, model: Mapping[int | None, Path], world_size: int
) -> tuple[Path, ...]:
    """Choose the shared model file, or check that there is one for every rank."""
    if None in model:
        if len(model) > 1:
            stale = next(path for rank, path in model.items() if rank is not None)
            message = f"{stale} is of stage 3, {model[None]} of stage 1 or 2: two runs in one place"
            raise IncompleteError(f"{message}; move away the set that is older")
        return (model[None],)
    wanted = [tag_dir / names.model_file(rank) for rank in range(world_size)]
    if not model:
        raise IncompleteError(f"{tag_dir / names.model_file(None)}: the model file is missing")
    for path in wanted:
        if path not in model.values():
            message = f"{path}: missing; {world_size} ranks saved optimizer files"
            raise IncompleteError(f"{message}; copy it from the node that saved it")
    for path in model.values():
        if path not in wanted:
            message = f"{path}: no optimizer file of this rank; left over from another world size?"
            raise IncompleteError(f"{message} Move it away, or restore the rank's optimizer file")
    return tuple(wanted)


class SourceFiles:
    """Opens source files and numbers them, so that every storage can say where it lies."""

    def __init__(self) -> None:
        self.files: list[SourceFile] = []

    def add(self, path: Path) -> int:
        """Number a file and remember what it looks like now."""
        stat = path.stat()
        self.files.append(SourceFile(path, stat.st_size, stat.st_mtime_ns))
        return len(self.files) - 1

    def read_dict(self, path: Path) -> dict[str, Any]:
        """Open a torch file that holds a dict."""
        root = torch_file.read(path, self.add(path)).root
        if not isinstance(root, dict):
            raise CorruptFileError(f"{path}: holds a {type(root).__name__} where a dict belongs")
        return root

    def path_of(self, storage: Storage) -> Path:
        """Tell which file a storage was read from."""
        return self.files[storage.file].path

    def read_bytes(self, storage: Storage, offset: int, nbytes: int) -> bytes:
        """Read a small tensor's bytes."""
        with self.path_of(storage).open("rb") as stream:
            stream.seek(offset)
            data = stream.read(nbytes)
        if len(data) != nbytes:
            message = f"{self.path_of(storage)}: ends before byte {offset + nbytes}"
            raise CorruptFileError(message)
        return data


def require(mapping: Mapping[str, Node], key: str, path: Path) -> Node:
    """Look up a key that a file of its kind always has."""
    if key not in mapping:
        message = f"{path}: no '{key}' in it, which every checkpoint of its kind has"
        raise CorruptFileError(message)
    return mapping[key]


def fingerprint(node: Node) -> bytes:
    """Return bytes that are equal for nodes of equal value, tensors by size and CRC-32."""

    def persistent_id(part: Node) -> Node | None:
        return (part.dtype, part.numel, part.crc32) if isinstance(part, Storage) else None

    return dump(node, persistent_id)
