"""Reads ranges of files, or regions, through one buffer to compute their checksums.

A file that is read from the first byte to the last gets its SHA-256 in passing.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from itertools import pairwise
from typing import TYPE_CHECKING

from streamshard.checksums import RunningChecksums
from streamshard.engine.jobs.executor import Host
from streamshard.engine.numeric.magnitudes import Magnitudes, Meter, block_bytes, joined
from streamshard.engine.run.region import RegionFiller
from streamshard.engine.run.source_reader import SourceReader
from streamshard.engine.run.work import Region
from streamshard.model import (
    BlockDigests,
    Computed,
    Digest,
    Encoded,
    Memory,
    SourceFile,
    StoredBytes,
)

if TYPE_CHECKING:
    from hashlib import _Hash


class FileHashes:
    """The hashes of files whose bytes come in order; others are left out."""

    def __init__(self, files: Sequence[SourceFile]) -> None:
        self._files = files
        self._whole: dict[int, str] = {}
        self._running: dict[int, tuple[int, _Hash]] = {}
        """File → bytes so far, and their hash."""

    def add(self, file: int, offset: int, data: memoryview) -> None:
        """Add bytes of a file; ignores bytes that do not follow the bytes so far."""
        at, digest = self._running.pop(file, (0, sha256())) if offset else (0, sha256())
        if at != offset:
            return
        end = offset + len(data)
        digest.update(data)
        if end == self._files[file].nbytes:
            self._whole[file] = digest.hexdigest()
        else:
            self._running[file] = end, digest

    def take(self) -> Mapping[int, str]:
        found, self._whole = self._whole, {}
        return found

    def watched(self) -> list[SourceFile]:
        """Return the files, whose decoders add the stored bytes."""
        return [
            file
            if file.decoder is None or isinstance(file.decoder, BlockDigests | Computed)
            else replace(file, decoder=_Shown(file.decoder, partial(self.add, number)))
            for number, file in enumerate(self._files)
        ]


@dataclass(frozen=True, slots=True)
class _Shown:
    """A decoder that shows the stored bytes of its file."""

    decoder: Encoded
    show: Callable[[int, memoryview], None]

    def decode(
        self, file: StoredBytes, stored: Memory, content: Memory, part: tuple[int, int] | None
    ) -> tuple[int, memoryview]:
        return self.decoder.decode(_ShownBytes(file, self.show), stored, content, part)


@dataclass(frozen=True, slots=True)
class _ShownBytes:
    """A file that shows the bytes that are read of it."""

    file: StoredBytes
    show: Callable[[int, memoryview], None]

    @property
    def takes_requests(self) -> bool:
        return self.file.takes_requests

    def will_need(self, offset: int, nbytes: int) -> None:
        self.file.will_need(offset, nbytes)

    def read_into(self, view: memoryview, offset: int) -> int:
        found = self.file.read_into(view, offset)
        self.show(offset, view[:found])
        return found


class Probe:
    """A worker's reader and its buffer.

    `hashes`: whether to compute the SHA-256 of files that are read from beginning to end.
    """

    def __init__(
        self, sources: Sequence[SourceFile], window_bytes: int, hashes: bool, host: Host
    ) -> None:
        self.hashes = FileHashes(sources) if hashes else None
        self._files = sources if self.hashes is None else self.hashes.watched()
        self._reader = SourceReader(self._files, workers=host.workers, stop=host.stop, maps=True)
        self._window = memoryview(bytearray(window_bytes))
        self._progress = host.progress
        self._meters: dict[str, Meter] = {}

    def settle(self) -> None:
        self._reader.settle()

    def close(self) -> None:
        self._reader.close()

    def crc32(self, file: int, start: int, stop: int) -> int:
        checksum = RunningChecksums()
        for view in self._windows(file, start, stop):
            checksum.update(view)
        return checksum.crc32

    def digests(self, file: int, cuts: Sequence[int]) -> list[Digest]:
        return [self.digest(file, start, stop) for start, stop in pairwise(cuts)]

    def digest(self, file: int, start: int, stop: int) -> Digest:
        digest = RunningChecksums(takes_crc32c=True)
        for view in self._windows(file, start, stop):
            digest.update(view)
        return digest.digest

    def magnitudes(self, region: Region, *, dtype: str) -> Magnitudes:
        meter = self._meters.setdefault(dtype, Meter(dtype))
        measured: list[Magnitudes] = []
        filler = RegionFiller(region, self._reader, memoryview(b""))
        unit = block_bytes(region.target_itemsize)
        step = len(self._window) // unit * unit
        for at in range(0, region.content_bytes, step):
            view, _ = filler.view(min(step, region.content_bytes - at), self._room)
            self._progress(len(view))
            measured.append(meter.measure(view))
        return joined(measured)

    def read(self, file: int, start: int, stop: int) -> bytes:
        return b"".join(bytes(view) for view in self._windows(file, start, stop))

    def _room(self, nbytes: int) -> memoryview:
        return self._window[:nbytes]

    def _windows(self, file: int, start: int, stop: int) -> Iterator[memoryview]:
        for at in range(start, stop, len(self._window)):
            nbytes = min(len(self._window), stop - at)
            window = self._reader.window(file, at, nbytes)
            view = self._room(nbytes) if window is None else window[0]
            if window is None:
                self._reader.read_into(file, at, view)
            if self.hashes is not None and self._files[file].is_plain:
                self.hashes.add(file, at, view)  # what is decoded is not what is stored
            self._progress(len(view))
            yield view
