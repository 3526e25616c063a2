"""Writes native ZeRO checkpoints of any size in bounded memory.

torch itself lays each file out (`torch.save` under `skip_data`, which leaves holes where tensors
go); the elements are then written into the holes, and their CRCs where a zip file has them.
"""

import os
import struct
import time
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks._layout import TAG, Leaf, NativeLayout, Stored
from benchmarks._model import PADDING, PIECE_NUMEL, Model, Run, values
from benchmarks._stand_ins import deepspeed_stand_ins

_AGE_SECONDS: Final = 3600
SCRIPT: Final = ("zero_to_fp32.py", b"# DeepSpeed leaves a script next to its checkpoints.\n")
_CENTRAL: Final = struct.Struct("<IHHHHHHIIIHHHHHII")
_DESCRIPTOR: Final = 0x08074B50


def fabricate(
    run_dir: Path, model: Model, *, stage: int, world_size: int, sparse: bool = False
) -> int:
    """Write a run directory, dated an hour ago; returns its size in bytes.

    Stage 3 leaves garbage in its padding, as DeepSpeed does. Files that changed in the last minute
    would not be mapped.

    Parameters
    ----------
    sparse
        Leave holes where tensors go: headers are all that can be read of such a checkpoint.
    """
    (run_dir / TAG).mkdir(parents=True)
    like = _alike(world_size) if sparse and stage == 3 else {}
    ranks = [rank for rank in range(world_size) if rank not in like]
    for relative, tree in NativeLayout(model, stage, world_size).files(ranks):
        path = run_dir / relative
        if sparse:
            save_with_holes(path, tree)
        else:
            _fill_in(path, _lay_out(path, tree), garbage=stage == 3)
    for rank, first in like.items():
        for path in (run_dir / TAG).glob(f"*zero_pp_rank_{first}_*"):
            copy_renamed(path, (f"rank_{first}_", f"rank_{rank}_"))
    (run_dir / SCRIPT[0]).write_bytes(SCRIPT[1])
    (run_dir / "latest").write_text(TAG)
    files = [path for path in run_dir.rglob("*") if path.is_file()]
    modified = time.time() - _AGE_SECONDS
    for path in files:
        os.utime(path, (modified, modified))
    return sum(path.stat().st_size for path in files)


def pieces(runs: tuple[Run, ...]) -> Iterator[Run]:
    """Split runs into pieces that are small enough to be held."""
    for run in runs:
        for at in range(0, run.numel, PIECE_NUMEL):
            yield Run(run.state, run.name, run.start + at, min(PIECE_NUMEL, run.numel - at))


def _alike(world_size: int) -> dict[int, int]:
    """Return rank → the rank whose files of stage 3 differ from its own in their names alone.

    Rank 0 also lists tied parameters. A name of another length shifts what follows it.
    """
    found = {rank: 10 ** (len(str(rank)) - 1) for rank in range(1, world_size)}
    return {rank: first for rank, first in found.items() if rank != first}


def copy_renamed(path: Path, names: tuple[str, str]) -> None:
    """Copy a file under a name of the same length, which is in the file as well; keep its holes."""
    old, new = (name.encode() for name in names)
    nbytes, at = path.stat().st_size, 0
    with path.open("rb") as source, path.with_name(path.name.replace(*names)).open("wb") as copy:
        while at < nbytes:
            try:
                start = os.lseek(source.fileno(), at, os.SEEK_DATA)
            except OSError:  # nothing but a hole up to the end
                break
            at = os.lseek(source.fileno(), start, os.SEEK_HOLE)
            data = os.pread(source.fileno(), at - start, start)
            os.pwrite(copy.fileno(), data.replace(old, new), start)
        copy.truncate(nbytes)


def save_with_holes(path: Path, tree: dict[str, Any]) -> None:
    """Write a file with holes."""
    with torch.serialization.skip_data(), deepspeed_stand_ins():
        torch.save(_with_tensors(tree, {}), path)


def _lay_out(path: Path, tree: dict[str, Any]) -> list[tuple[Stored, int]]:
    """Write a file with holes; returns what belongs into each, and its offset."""
    save_with_holes(path, tree)
    with deepspeed_stand_ins():
        loaded = torch.load(path, map_location="meta", weights_only=False)
    places = {
        id(leaf.stored): (leaf.stored, _offset(tensor)) for leaf, tensor in leaves(tree, loaded)
    }
    return list(places.values())


def _fill_in(path: Path, places: list[tuple[Stored, int]], *, garbage: bool) -> None:
    crc32s = {}
    with path.open("r+b") as stream:
        for stored, offset in places:
            if stored.numel:
                crc32s[offset] = _fill(stream.fileno(), stored, offset, garbage=garbage)
        _write_crc32s(path, stream.fileno(), crc32s)


def _with_tensors(node: Any, made: dict[int, tuple[Stored, torch.Tensor]]) -> Any:  # noqa: ANN401
    """Replace each description by a tensor whose memory is never touched, so never there."""
    if isinstance(node, Leaf):
        # The description is held too: an id is only good while its object lives.
        _, flat = made.setdefault(
            id(node.stored), (node.stored, torch.empty(node.stored.numel, dtype=node.stored.dtype))
        )
        stride = torch.empty(node.shape, device="meta").stride()
        tensor = flat.as_strided(node.shape, stride, node.start).requires_grad_(node.requires_grad)
        if node.ds_id is not None:
            tensor = tensor.detach().requires_grad_(node.requires_grad)
            tensor.ds_id = node.ds_id  # type: ignore[attr-defined]
        return tensor
    if isinstance(node, dict):
        return type(node)((key, _with_tensors(value, made)) for key, value in node.items())
    if isinstance(node, list):
        return [_with_tensors(value, made) for value in node]
    return node


def leaves(tree: Any, loaded: Any) -> Iterator[tuple[Leaf, torch.Tensor]]:  # noqa: ANN401
    """Pair each described tensor with the one that stands in its place in a loaded file."""
    if isinstance(tree, Leaf):
        yield tree, loaded
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from leaves(value, loaded[key])
    elif isinstance(tree, list):
        for inner, other in zip(tree, loaded, strict=True):
            yield from leaves(inner, other)


def _offset(tensor: torch.Tensor) -> int:
    """Tell where in the file a tensor's storage begins; torch says so of tensors on "meta"."""
    return int(tensor.untyped_storage()._checkpoint_offset or 0)


def _fill(descriptor: int, stored: Stored, offset: int, *, garbage: bool) -> int:
    crc32 = 0
    for run in pieces(stored.runs):
        piece = values(run, stored.dtype)
        if garbage and run.state == PADDING:
            piece = torch.full_like(piece, float("nan"))
        data = piece.view(torch.uint8).numpy().data
        crc32 = zlib.crc32(data, crc32)
        os.pwrite(descriptor, data, offset)
        offset += len(data)
    return crc32


def _write_crc32s(path: Path, descriptor: int, crc32s: dict[int, int]) -> None:
    """Put the CRCs of filled records where a zip file has them: after the data, and at its end."""
    with zipfile.ZipFile(path) as archive:
        entry = archive.start_dir
        for info in archive.infolist():
            header = os.pread(descriptor, 30, info.header_offset)
            name_bytes, extra_bytes = struct.unpack_from("<HH", header, 26)
            data = info.header_offset + 30 + name_bytes + extra_bytes
            if data in crc32s:
                serialized = struct.pack("<I", crc32s[data])
                os.pwrite(descriptor, serialized, entry + 16)
                os.pwrite(
                    descriptor, struct.pack("<I", _DESCRIPTOR) + serialized, data + info.file_size
                )
            fields = _CENTRAL.unpack(os.pread(descriptor, _CENTRAL.size, entry))
            entry += _CENTRAL.size + sum(fields[10:13])
