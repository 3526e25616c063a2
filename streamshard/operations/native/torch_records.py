"""Describes the records of a torch file to be written as parts of spans, and the file's ending."""

from typing import Final

from streamshard.engine.numeric.checksums import crc32
from streamshard.engine.run.work import Ending, Fixed, Trailer
from streamshard.formats.torch.torch_file import Record, TorchLayout
from streamshard.formats.torch.torch_tensor import Content, Storage
from streamshard.model import Literal

_CRC32: Final = slice(4, 8)
"""Place of the CRC-32 in a record's descriptor."""


def content_of(record: Record) -> Content | None:
    """Return what fills a record."""
    storage = record.content
    return storage.content if isinstance(storage, Storage) else storage


def literal_record(record: Record, content: Literal) -> Fixed:
    """Return all of a record whose data is known."""
    return Fixed(record.header() + content.data + record.descriptor(crc32(content.data)))


def trailer_of(record: Record) -> Trailer | None:
    """Describe the descriptor behind a record's data; empty records have none."""
    data = record.descriptor(0)
    return Trailer((data[: _CRC32.start], data[_CRC32.stop :])) if data else None


def late_descriptor(record: Record) -> Ending:
    """Describe the descriptor of a record whose data is in several spans."""
    stop = record.data_start + record.nbytes
    return Ending(stop, record.descriptor(0), [(_CRC32.start, record.data_start, stop)])


def zip_ending(layout: TorchLayout) -> Ending:
    """Describe the central directory of a file, which holds the checksums of all records."""
    known, crc32s = [], []
    for record, place in zip(layout.records, layout.crc32_places(), strict=True):
        content = content_of(record)
        known.append(crc32(content.data) if isinstance(content, Literal) else 0)
        if not isinstance(content, Literal):
            crc32s.append((place, record.data_start, record.data_start + record.nbytes))
    return Ending(layout.records[-1].end, layout.ending(known), crc32s)
