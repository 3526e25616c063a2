"""Items of a distributed checkpoint: how tensors are cut into them, and the bytes of each."""

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from streamshard.formats.dcp.dcp_names import ARCHIVE
from streamshard.formats.pickle.inert import Node
from streamshard.formats.torch import zip_layout
from streamshard.formats.torch.torch_tensor import Storage, make_tensor, storages_in
from streamshard.formats.torch.zip_layout import Record, TorchLayout
from streamshard.model import Literal

_ITEM_BYTES: Final = 64 << 20
"""Most bytes of an item's tensor, unless one row is larger: torch loads whole items."""
_CRC32: Final = slice(4, 8)
"""Place of the checksum in a record's descriptor."""


@dataclass(frozen=True, slots=True)
class ItemFrame:
    """The bytes of an item before and after the elements of its tensor."""

    head: bytes
    tail: tuple[bytes, ...]
    """The CRC-32 of the elements stands between each two of them."""
    content_bytes: int
    """Size of the elements; 0 if all of the item is in `head` and `tail`."""

    @property
    def nbytes(self) -> int:
        """Size of the whole item."""
        rest = sum(map(len, self.tail)) + 4 * (len(self.tail) - 1)
        return len(self.head) + self.content_bytes + rest

    def around(self, content: bytes) -> bytes:
        """Return a whole item."""
        return self.head + content + zlib.crc32(content).to_bytes(4, "little").join(self.tail)


def chunk_rows(shape: tuple[int, ...], itemsize: int) -> int:
    """Return how many rows of a tensor go into each item: whole ones, and at least one.

    >>> chunk_rows((1000, 1 << 20), 4), chunk_rows((3, 1 << 30), 4), chunk_rows((5, 0), 4)
    (16, 1, 5)
    """
    row_bytes = math.prod(shape[1:]) * itemsize
    return min(shape[0], max(1, _ITEM_BYTES // row_bytes)) if row_bytes else shape[0]


def chunks(shape: tuple[int, ...], itemsize: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Cut a tensor into items: yield the first row and the shape of each.

    >>> list(chunks((40, 1 << 20), 4)), list(chunks((), 4)), list(chunks((0, 3), 4))
    ([(0, (16, 1048576)), (16, (16, 1048576)), (32, (8, 1048576))], [(0, ())], [(0, (0, 3))])
    """
    rows = chunk_rows(shape, itemsize) if shape else 0
    if not rows:
        yield 0, shape
        return
    for first in range(0, shape[0], rows):
        yield first, (min(rows, shape[0] - first), *shape[1:])


@lru_cache(maxsize=256)
def tensor_frame(dtype: str, shape: tuple[int, ...]) -> ItemFrame:
    """Serialize what is around the elements of a tensor in its item."""
    storage = Storage(dtype, math.prod(shape))
    layout = zip_layout.lay_out(zip_layout.serialize(make_tensor(storage, shape)), ARCHIVE)
    records = layout.records
    number = next(n for n, record in enumerate(records) if record.content is storage)
    record, known = records[number], _checksums(layout)
    before = b"".join(map(_literal, records[:number])) + record.header()
    after = b"".join(map(_literal, records[number + 1 :]))
    ending, place = layout.ending(known), list(layout.crc32_places())[number]
    descriptor = record.descriptor(0)
    if not descriptor:  # without elements, nothing has a checksum
        return ItemFrame(before, (after + ending,), 0)
    middle = descriptor[_CRC32.stop :] + after + ending[:place]
    tail = (descriptor[: _CRC32.start], middle, ending[place + 4 :])
    return ItemFrame(before, tail, storage.nbytes)


def value_item(value: Node) -> bytes:
    """Serialize the item of a value that holds no tensor."""
    if next(storages_in(value), None) is not None:
        raise TypeError("a value with a tensor in it")
    layout = zip_layout.lay_out(zip_layout.serialize(value), ARCHIVE)
    return b"".join(map(_literal, layout.records)) + layout.ending(_checksums(layout))


def _literal(record: Record) -> bytes:
    """Serialize a record whose data is known."""
    data = record.content.data if isinstance(record.content, Literal) else b""
    return record.header() + data + record.descriptor(zlib.crc32(data))


def _checksums(layout: TorchLayout) -> list[int]:
    """Return the checksums of the records; 0 for those whose data is not known."""
    contents = (record.content for record in layout.records)
    return [zlib.crc32(one.data) if isinstance(one, Literal) else 0 for one in contents]
