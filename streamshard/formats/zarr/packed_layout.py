"""The entries of a store in one file, laid out before a byte of them is written.

A header has the size of its entry, but not the CRC-32, which is known once the content is written:
it follows the content in a descriptor. TensorStore looks for the descriptor by the header's size.
"""

import struct
from dataclasses import dataclass
from typing import Final

from streamshard.formats.torch.zip_layout import ALIGNMENT, CENTRAL, LIMIT_32, LOCAL

_FLAGS: Final = 0x0808
"""UTF-8 name; the CRC-32 follows."""
_VERSION, _VERSION_64 = 20, 45
_DATE: Final = 0x0021
"""The first of January 1980: the earliest, as the bytes do not depend on the time."""
OURS: Final = (_VERSION_64, 0, 0)
"""What only the zip's directory has of each entry: the version that made it, attributes."""


@dataclass(frozen=True, slots=True)
class PackedEntry:
    """A file of a store as an entry of the zip: its header, its content, its descriptor."""

    path: str
    start: int
    """Byte offset of the header."""
    nbytes: int

    @property
    def is_large(self) -> bool:
        """Whether its size needs Zip64."""
        return self.nbytes >= LIMIT_32

    @property
    def _bare(self) -> int:
        """Byte offset where the content would begin without padding."""
        return self.start + LOCAL.size + len(self.path.encode()) + (20 if self.is_large else 0)

    @property
    def _gap(self) -> int:
        """Length of the padding, an extra field that is not empty: TensorStore refuses such."""
        gap = -self._bare % ALIGNMENT
        return gap if gap == 0 or gap > 4 else gap + ALIGNMENT

    def _common(self) -> tuple[int, ...]:
        needs = self.is_large or self.start >= LIMIT_32
        return (_VERSION_64 if needs else _VERSION, _FLAGS, 0, 0, _DATE)

    def header(self) -> bytes:
        name, gap = self.path.encode(), self._gap
        extra = struct.pack("<HHQQ", 1, 16, self.nbytes, self.nbytes) if self.is_large else b""
        if gap:
            extra += struct.pack("<2sH", b"FB", gap - 4) + bytes(gap - 4)
        size = min(self.nbytes, LIMIT_32)
        numbers = (0x04034B50, *self._common(), 0, size, size, len(name), len(extra))
        return LOCAL.pack(*numbers) + name + extra

    def descriptor(self, crc32: int) -> bytes:
        form = "<IIQQ" if self.is_large else "<IIII"
        return struct.pack(form, 0x08074B50, crc32, self.nbytes, self.nbytes)

    def central(self, crc32: int) -> bytes:
        name, numbers = self.path.encode(), [self.nbytes] * 2 if self.is_large else []
        numbers += [self.start] if self.start >= LIMIT_32 else []
        form = f"<HH{len(numbers)}Q"
        extra = struct.pack(form, 1, 8 * len(numbers), *numbers) if numbers else b""
        size, start = min(self.nbytes, LIMIT_32), min(self.start, LIMIT_32)
        made_by, *attributes = OURS
        fields = (crc32, size, size, len(name), len(extra), 0, 0, *attributes, start)
        return CENTRAL.pack(0x02014B50, made_by, *self._common(), *fields) + name + extra

    @property
    def content(self) -> int:
        """Byte offset of the content, which is aligned."""
        return self._bare + self._gap

    @property
    def end(self) -> int:
        """Byte offset just behind the descriptor."""
        return self.content + self.nbytes + (24 if self.is_large else 16)
