"""The layout of a torch file: a header, data and a descriptor for each record, then a directory."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Final

from streamshard.checksums import crc32
from streamshard.engine.run.work import Ending, Fixed, Trailer
from streamshard.formats.torch.torch_tensor import Storage
from streamshard.formats.torch.zip_layout import Serialized, lay_out
from streamshard.layout.cutting import Share
from streamshard.model import Literal, Whole
from streamshard.transfer.file_layout import Elements, FileLayout

_CRC32: Final = slice(4, 8)
"""Place of the CRC-32 in a record's descriptor."""


def torch_layout(
    path: str,
    serialized: Serialized,
    rank: int | None = None,
    names: Mapping[int, str] | None = None,
) -> FileLayout:
    """Describe the file that torch.save would write.

    `rank`: whose share fills the storages that do not say it.
    `names`: names of whole tensors; see `Elements`.
    """
    laid, pieces = lay_out(serialized, PurePosixPath(path).stem), list[Fixed | Elements]()
    crc32s, places = list[int](), list[tuple[int, int, int]]()
    for record, place in zip(laid.records, laid.crc32_places(), strict=True):
        match record.content:
            case Literal(data) | Storage(content=Literal(data)):
                crc32s.append(crc32(data))
                pieces.append(Fixed(record.header() + data + record.descriptor(crc32s[-1])))
            case storage:
                crc32s.append(0)
                places.append((place, record.data_start, record.data_start + record.nbytes))
                found, descriptor = elements_of(storage, rank, names or {}), record.descriptor(0)
                parts = descriptor[: _CRC32.start], descriptor[_CRC32.stop :]
                trailer = Trailer(parts) if descriptor else None  # empty records have none
                pieces += [Fixed(record.header()), replace(found, trailer=trailer)]
    return FileLayout(path, pieces, [Ending(laid.records[-1].end, laid.ending(crc32s), places)])


def elements_of(storage: Storage, rank: int | None, names: Mapping[int, str]) -> Elements:
    content, dtype = storage.content, storage.dtype
    if isinstance(content, Whole):
        return Elements(content, storage.nbytes, dtype, name=names.get(content.tensor, ""))
    if isinstance(content, Share):
        content = replace(content, rank=rank) if content.rank is None else content
        return Elements(content, storage.nbytes, dtype)
    raise TypeError("a storage that the source does not fill")
