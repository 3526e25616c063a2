"""Reads every file of an archive once, from the disk, for all that is proved of its bytes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from streamshard.engine.run import resident_memory
from streamshard.engine.run.source_reader import Encoded
from streamshard.io.page_cache import drop_cached
from streamshard.io.readable import OpenedFile
from streamshard.layout.memory_plan import MemoryPlan
from streamshard.layout.sample import EVERYTHING
from streamshard.model import BlockDigests, Memory, SourceFile
from streamshard.operations.checks.problems import Findings
from streamshard.operations.checks.scan import scan
from streamshard.operations.checks.structure import Request, look_at
from streamshard.operations.transfer.report import Progress

if TYPE_CHECKING:
    from hashlib import _Hash


@dataclass(slots=True)
class ArchiveReading:
    """One reading of an archive: its checksums, the digests of its tensors, and its SHA-256s."""

    store: Path
    memory: Callable[[int, Sequence[SourceFile]], MemoryPlan]
    """Fits the reading into the memory limit, with the bytes that decoding takes."""
    progress: Progress
    findings: Findings = field(default_factory=Findings)

    def run(self) -> dict[Path, str]:
        """Read the archive, bypassing the page cache; the findings say what is wrong with it.

        Returns the SHA-256 of each file that was read from its first byte to its last. Files that
        are damaged may be missing, and so may large files that several workers read.

        Raises
        ------
        SourceError
            There is nothing like a store.
        """
        resident_memory.restart_peak()
        drop_cached(self.store)
        looked = look_at(Request(self.store), self.findings, EVERYTHING)
        hashes = _Hashes(looked.files)
        decoders = {
            number: _Shown(decoder, looked.files[number].nbytes, partial(hashes.add, number, 0))
            for number, decoder in looked.decoders.items()
            if not isinstance(decoder, BlockDigests)
        }

        def see(file: int, offset: int, data: memoryview) -> None:
            if file not in decoders:  # what is decoded is not what is stored
                hashes.add(file, offset, data)

        self.progress.start(looked.nbytes)
        try:
            plan = self.memory(looked.codec_bytes, looked.files)
            scan(looked.units(), looked.files, decoders, plan, self.progress.advance, see)
        finally:
            self.progress.stop()
        return hashes.whole


class _Hashes:
    """The SHA-256 of files whose bytes are read in order, by one thread after the other."""

    def __init__(self, files: Sequence[SourceFile]) -> None:
        self.whole: dict[Path, str] = {}
        self._files = files
        self._running: dict[int, tuple[int, _Hash]] = {}
        """File → bytes so far, and their hash."""

    def add(self, file: int, offset: int, data: memoryview) -> None:
        """Add bytes of a file; ignores bytes that do not follow the bytes so far."""
        at, digest = self._running.pop(file, (0, sha256())) if offset else (0, sha256())
        if at != offset:
            return
        source, end = self._files[file], offset + len(data)
        digest.update(data)
        if end == source.nbytes:
            self.whole[source.path] = digest.hexdigest()
        else:
            self._running[file] = end, digest


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
