"""SHA-256 of files that a worker reads from the first byte to the last, for something else."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING

from streamshard.engine.run.source_reader import Decoder, Encoded
from streamshard.io.readable import OpenedFile
from streamshard.model import BlockDigests, Memory, SourceFile

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
        """Return the hash of each file that is complete since the last call."""
        found, self._whole = self._whole, {}
        return found

    def watching(self, decoders: Mapping[int, Decoder]) -> dict[int, Decoder]:
        """Return decoders that add the stored bytes of their files, once they are decoded."""
        return {
            number: decoder
            if isinstance(decoder, BlockDigests)
            else _Shown(decoder, self._files[number].nbytes, partial(self.add, number, 0))
            for number, decoder in decoders.items()
        }


@dataclass(frozen=True, slots=True)
class _Shown:
    """A decoder that shows the stored bytes of its file, once they are decoded."""

    decoder: Encoded
    nbytes: int
    """Size of the file."""
    show: Callable[[memoryview], None]

    def decode(self, file: OpenedFile, stored: Memory, content: Memory) -> memoryview:
        """Return the content."""
        held = memoryview(b"")

        def keep(nbytes: int) -> memoryview:
            nonlocal held
            held = stored(nbytes)
            return held

        found = self.decoder.decode(file, keep, content)
        self.show(held[: self.nbytes])
        return found
