"""Finds tensors that lie in one piece in one file, as they are; says of others how they are cut."""

import os
from typing import Final

import numpy as np

from streamshard.commands import command
from streamshard.engine.run.source_reader import Decoder
from streamshard.errors import UsageError
from streamshard.formats.zarr.rewritten_array import RewrittenPiece
from streamshard.layout.cutting import coalesce, whole_segment
from streamshard.model import ITEMSIZE, BlockDigests
from streamshard.operations.source.source import Source
from streamshard.operations.source.tensors_in_files import Seam

_FILES_SHOWN: Final = 3


def locate_whole(source: Source, number: int, name: str) -> tuple[int, int, int]:
    """Return the file that holds all of a tensor, where it begins there, and its size in bytes.

    Parameters
    ----------
    number
        Index of a tensor that has elements.
    name
        What to call it in messages.
    """
    tensor = source.checkpoint.tensors[number]
    itemsize = ITEMSIZE[tensor.dtype]
    found = source.cutting.locate(whole_segment(number, tensor.numel), target_itemsize=itemsize)
    copies = coalesce(found, target_itemsize=itemsize, itemsize=itemsize)
    files = list(dict.fromkeys(copies.file.tolist()))
    why = []
    decoders = [source.decoders.get(file) for file in files]
    pieces = len(copies) + any(isinstance(decoder, Seam) for decoder in decoders)
    if pieces > 1:
        why.append(f"is cut into {pieces:,} pieces")
    if any(isinstance(decoder, RewrittenPiece) for decoder in decoders):
        why.append("was rewritten by another tool")
    elif not all(map(_is_stored_plainly, decoders)):
        why.append("is compressed")
    if why:
        message = f"{name} {' and '.join(why)}, in {_listed(source, files)}, so it cannot be mapped"
        plain = ("--codec", "none", "--chunk-size", tensor.nbytes)
        way = command("convert", source.path, "NEW.zarr", "--tag", source.checkpoint.tag, *plain)
        raise UsageError(
            f"{message}. Read it with [...], .bits() or .torch(), or make a store that holds it in "
            f"one piece and open that: {way}"
        )
    return files[0], int(copies.source[0]), int(np.sum(copies.nbytes))


def _is_stored_plainly(decoder: Decoder | None) -> bool:
    return decoder is None or isinstance(decoder, BlockDigests | Seam)


def _listed(source: Source, files: list[int]) -> str:
    shown = [os.path.relpath(source.files[file].path, source.path) for file in files[:_FILES_SHOWN]]
    more = len(files) - len(shown)
    count = f"{len(files):,} files: " if len(files) > 1 else ""
    return count + ", ".join(shown) + (f", and {more:,} more" if more else "")
