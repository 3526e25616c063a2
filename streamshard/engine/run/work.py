"""The files to write, described independently of any format."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from streamshard.engine.numeric.cast import Cast
from streamshard.engine.numeric.checksums import Checksum, Crc32
from streamshard.model import Copies


@dataclass(frozen=True, slots=True)
class Encoding:
    """How the stored bytes are made from the whole content."""

    encode: Callable[[memoryview], bytes]
    recall: Callable[[bytes], None]
    """Accepts the bytes that an earlier run stored, trailer included, in place of the content."""
    checksum: Checksum
    """Receives the result of `encode` before the trailer is serialized."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """Bytes that are known beforehand."""

    data: bytes

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return len(self.data)


@dataclass(frozen=True, slots=True)
class Region:
    """Bytes that come from sources; zeros where no copy writes."""

    content_bytes: int
    copies: Copies
    checksum: Checksum = field(default_factory=Crc32)
    trailer: Callable[[], bytes] = bytes
    """Serializes the bytes after the content, once the checksum has seen all content."""
    trailer_bytes: int = 0
    source_itemsize: int = 1
    target_itemsize: int = 1
    cast: Cast | None = None
    keeps: Callable[[memoryview], bool] | None = None
    """Tells whether elements that an earlier run wrote can be kept; if a count about them cannot be
    recovered, they are written again."""
    encoding: Encoding | None = None
    """How to encode the content, if it is not stored as it is; the region is alone in its file."""

    @property
    def nbytes(self) -> int:
        """Size in the file, the trailer included; an upper bound if the region is encoded."""
        return self.content_bytes + self.trailer_bytes


@dataclass(frozen=True, slots=True)
class Span:
    """Parts that follow each other in a file; the unit of work of one worker."""

    offset: int
    parts: Sequence[Fixed | Region]

    @property
    def nbytes(self) -> int:
        """Size in the file; an upper bound if a part is encoded."""
        return sum(part.nbytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class TargetFile:
    """A file to write."""

    path: str
    """Relative to the target directory."""
    spans: Sequence[Span]
    endings: Callable[[], Sequence[tuple[int, bytes]]] = tuple
    """Returns the bytes to write after all spans, each with its byte offset."""
    mode: int | None = None
    """Permission bits, where they matter."""
