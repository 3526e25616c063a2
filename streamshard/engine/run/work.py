"""The files to write, described independently of any format.

A span is the task of one worker: plain data without functions, so that it can be sent to any
process. What comes back, a span's result, is plain data too.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from streamshard.checksums import crc32, crc32c
from streamshard.engine.numeric.cast import Cast
from streamshard.model import Copies, Digest


class Encoder(Protocol):
    """Encodes content piece by piece. What becomes of the pieces follows a head, in their order."""

    def add(self, piece: memoryview) -> memoryview:
        """Return what becomes of the next piece."""

    @property
    def head(self) -> bytes:
        """The head: after the last piece; after the first, bytes of its size."""


class Codec(Protocol):
    """Compresses content. It is sent with its span, so it must be possible to pickle it."""

    @property
    def piece_bytes(self) -> int:
        """Size of the pieces that are encoded; the last may be up to twice as long."""

    def encode(self, content: memoryview) -> bytes:
        """Return the bytes to store."""

    def encoder(self, nbytes: int) -> Encoder:
        """Return what makes the same bytes of so much content in pieces."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """Bytes that are known beforehand."""

    data: bytes

    @property
    def nbytes(self) -> int:
        return len(self.data)


@dataclass(frozen=True, slots=True)
class Trailer:
    """Bytes after a region's content, with the checksum of the stored content among them."""

    parts: tuple[bytes, ...] = (b"", b"")
    """The checksum stands between each two of them."""
    is_crc32c: bool = False
    """Whether the checksum is a CRC-32C; else it is a CRC-32."""

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.parts)) + 4 * (len(self.parts) - 1)

    def checksum(self, view: memoryview, before: int) -> int:
        return crc32c(view, before) if self.is_crc32c else crc32(view, before)

    def serialize(self, checksum: int) -> bytes:
        return checksum.to_bytes(4, "little").join(self.parts)


@dataclass(frozen=True, slots=True)
class Region:
    """Bytes that come from sources; zeros where no copy writes."""

    content_bytes: int
    copies: Copies
    source_itemsize: int = 1
    target_itemsize: int = 1
    cast: Cast | None = None
    counts_overflow: bool = False
    """Whether to count finite elements that the cast makes infinite."""
    trailer: Trailer | None = None
    codec: Codec | None = None
    """How to encode the content, if it is not stored as it is; the region is alone in its file."""
    takes_crc32c: bool = False
    """Whether the result has a CRC-32C of the content, as well as the CRC-32."""
    block_bytes: int = 0
    """Length of the blocks of which the result has a CRC-32 each; 0 for none."""

    @property
    def nbytes(self) -> int:
        """Size in the file, the trailer included; an upper bound if the region is encoded."""
        return self.content_bytes + self.trailer_bytes

    @property
    def trailer_bytes(self) -> int:
        return self.trailer.nbytes if self.trailer is not None else 0


@dataclass(frozen=True, slots=True)
class Span:
    """Parts that follow each other in a file; the unit of work of one worker."""

    offset: int
    parts: Sequence[Fixed | Region]

    @property
    def nbytes(self) -> int:
        """Size in the file; an upper bound if a part is encoded."""
        return sum(part.nbytes for part in self.parts)

    @property
    def sizes(self) -> list[int]:
        return [part.content_bytes for part in self.parts if isinstance(part, Region)]


class LazySpans(Collection[Span]):
    """Spans that are made when they are needed and not kept, because their copies take memory."""

    def __init__(self, makers: Sequence[Callable[[], Span]], nbytes: int) -> None:
        self._makers = makers
        self.nbytes = nbytes
        """Size of all in the file; an upper bound if a part is encoded."""

    def __len__(self) -> int:
        return len(self._makers)

    def __iter__(self) -> Iterator[Span]:
        return (make() for make in self._makers)

    def __contains__(self, span: object) -> bool:
        return any(span == made for made in self)

    def __reduce__(self) -> tuple[type[list[Span]], tuple[list[Span]]]:
        """Send another process the spans, not what makes them."""
        return list, (list(self),)


@dataclass(frozen=True, slots=True)
class RegionResult:
    """What is known of a region's content after it is written."""

    offset: int
    """Where the content begins in the file."""
    content: Digest
    """Its CRC-32C is 0 if it was not asked for."""
    blocks: tuple[int, ...] = ()
    """CRC-32 of each block, if they were asked for."""
    overflowed: int = 0
    """Finite elements that the cast made infinite, if they were counted."""


@dataclass(frozen=True, slots=True)
class Written:
    nbytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class SpanResult:
    """What is known of a span after it is written."""

    offset: int
    written: Written
    """The bytes in the file."""
    regions: tuple[RegionResult, ...]
    """In the order of the span's parts."""


@dataclass(frozen=True, slots=True)
class FinishedFile:
    """A file that a run has finished, as its journal notes it."""

    path: str
    """Relative to the target directory."""
    version: str
    """The object's etag; empty for a local file."""
    written: Written
    """All bytes of the file."""
    results: Sequence[SpanResult]
    """The results of its spans; none where nobody takes them."""


@dataclass(frozen=True, slots=True)
class Ending:
    """Bytes that are written after all spans of a file, with checksums of its content in them."""

    offset: int
    data: bytes
    crc32s: Sequence[tuple[int, int, int]] = ()
    """(place, start, stop): at this place of `data` goes the CRC-32 of the file's bytes from start
    to stop, which are the content of whole regions."""


def ignore(result: SpanResult) -> None:
    """Take no note of a result."""


@dataclass(frozen=True, slots=True)
class TargetFile:
    """A file to write. Its spans are sent to workers; the rest stays where the run is led."""

    path: str
    """Relative to the target directory."""
    spans: Collection[Span]
    endings: Sequence[Ending] = ()
    mode: int | None = None
    """Permission bits, where they matter."""
    is_last: bool = False
    """Whether readers take what is there for whole as soon as this file is: in a bucket, which has
    no rename, it comes after all files before it."""
    take: Callable[[SpanResult], None] = ignore
    """Called with each span's result, in any order, but never twice at the same time."""

    def singly(self) -> "Iterator[TargetFile]":
        yield self

    def fits(self, done: FinishedFile) -> bool:
        """Tell whether results that a journal noted are those of the file's spans."""
        return self.take is ignore or {span.offset: span.sizes for span in self.spans} == {
            result.offset: [region.content.nbytes for region in result.regions]
            for result in done.results
        }

    def finish(self, done: FinishedFile) -> FinishedFile:
        for result in done.results:
            self.take(result)
        return done

    @property
    def span_bytes(self) -> int:
        """Size of all spans; an upper bound if a part is encoded."""
        spans = self.spans
        return spans.nbytes if isinstance(spans, LazySpans) else sum(span.nbytes for span in spans)

    @property
    def nbytes(self) -> int:
        """Size of the file; an upper bound if a part is encoded."""
        return self.span_bytes + sum(len(ending.data) for ending in self.endings)
