"""SHA-256 of files that a worker reads from the first byte to the last, for something else."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING

from streamshard.model import (
    BlockDigests,
    Computed,
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
        """Return the hash of each file that is complete since the last call."""
        found, self._whole = self._whole, {}
        return found

    def watched(self) -> list[SourceFile]:
        """Return the files, whose decoders add the stored bytes once they are decoded."""
        return [self._watched(number, file) for number, file in enumerate(self._files)]

    def _watched(self, number: int, file: SourceFile) -> SourceFile:
        if file.decoder is None or isinstance(file.decoder, BlockDigests | Computed):
            return file
        shown = _Shown(file.decoder, file.nbytes, partial(self.add, number, 0))
        return replace(file, decoder=shown)


@dataclass(frozen=True, slots=True)
class _Shown:
    """A decoder that shows the stored bytes of its file, once they are decoded."""

    decoder: Encoded
    nbytes: int
    """Size of the file."""
    show: Callable[[memoryview], None]

    def decode(self, file: StoredBytes, stored: Memory, content: Memory) -> memoryview:
        """Return the content."""
        held = memoryview(b"")

        def keep(nbytes: int) -> memoryview:
            nonlocal held
            held = stored(nbytes)
            return held

        found = self.decoder.decode(file, keep, content)
        self.show(held[: self.nbytes])
        return found
