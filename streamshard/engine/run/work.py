"""What there is to write, in terms that know no format."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from streamshard.engine.numeric.cast import Cast
from streamshard.engine.numeric.checksums import Checksum, Crc32
from streamshard.model import Copies


@dataclass(frozen=True, slots=True)
class Encoding:
    """How what is stored comes from all of the content at once."""

    encode: Callable[[memoryview], bytes]
    recall: Callable[[bytes], None]
    """Takes in what an earlier run stored, the trailer included, in place of the content."""
    checksum: Checksum
    """Sees what `encode` returned before the trailer is spelled."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """Bytes that are at hand."""

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
    """Spells what follows the content, once the checksum has seen all of it."""
    trailer_bytes: int = 0
    source_itemsize: int = 1
    target_itemsize: int = 1
    cast: Cast | None = None
    keeps: Callable[[memoryview], bool] | None = None
    """Tells of whole elements that an earlier run wrote whether all is known of them that is to be;
    if not, they are made anew."""
    encoding: Encoding | None = None
    """Where not the content is stored; such a region is alone in its file."""

    @property
    def nbytes(self) -> int:
        """Size in the file, the trailer included; an upper bound where it is encoded."""
        return self.content_bytes + self.trailer_bytes


@dataclass(frozen=True, slots=True)
class Span:
    """Parts that follow each other in a file; the unit of work of one worker."""

    offset: int
    parts: Sequence[Fixed | Region]

    @property
    def nbytes(self) -> int:
        """Size in the file; an upper bound where it is encoded."""
        return sum(part.nbytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class TargetFile:
    """A file to write."""

    path: str
    """Relative to the target directory."""
    spans: Sequence[Span]
    endings: Callable[[], Sequence[tuple[int, bytes]]] = tuple
    """Spells what is to be written once all spans are, each with its byte offset."""
    mode: int | None = None
    """Permission bits, where they matter."""
