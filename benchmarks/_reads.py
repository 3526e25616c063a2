"""Counts the bytes that this process reads from files, by directory and by proof."""

import io
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO
from unittest import mock

from streamshard.operations.compact.archive.archive import Archiver
from streamshard.operations.compact.archive.proof import Checks, Means

OTHER = "opening and checksums"
"""All reads outside of a named proof."""


class Reads:
    """The bytes read so far: from which of some directories, and for which proof."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.nbytes: Counter[tuple[Path, str]] = Counter()
        self.proof = OTHER
        self._roots = roots

    def add(self, descriptor: int, nbytes: int) -> None:
        """Count a read."""
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        for root in self._roots:
            if path.is_relative_to(root):
                self.nbytes[root, self.proof] += nbytes

    def of(self, root: Path) -> int:
        """Return all bytes that were read from a directory."""
        return sum(count for (place, _), count in self.nbytes.items() if place == root)


@contextmanager
def counted(*roots: Path) -> Iterator[Reads]:
    """Count the reads of `compact` at the calls of Python by which its modules read."""
    reads, preadv = Reads(roots), os.preadv

    def count(descriptor: int, buffers: Sequence[Any], *others: int) -> int:
        nbytes = preadv(descriptor, buffers, *others)
        reads.add(descriptor, nbytes)
        return nbytes

    class Stream(io.FileIO):
        def readinto(self, buffer: Any, /) -> int:
            nbytes = super().readinto(buffer) or 0
            reads.add(self.fileno(), nbytes)
            return nbytes

        def readall(self) -> bytes:
            data = super().readall()
            reads.add(self.fileno(), len(data))
            return data

    def stream_of(descriptor: int, mode: str) -> BinaryIO:
        return io.BufferedReader(Stream(descriptor, mode))

    def named(proof: str, do: Callable[..., Any]) -> Callable[..., Any]:
        def work(*given: Any, **options: Any) -> Any:
            before = reads.proof
            reads.proof = proof or (str(given[1]) if before == OTHER else before)
            try:
                return do(*given, **options)
            finally:
                reads.proof = before

        return work

    hash_all = named("SHA-256 to record", Means.hash_all)

    def hashed(means: Means, paths: list[Path]) -> Any:
        return (hash_all if reads.proof == OTHER else real)(means, paths)

    real = Means.hash_all
    with (
        mock.patch.object(os, "preadv", count),
        mock.patch.object(os, "fdopen", stream_of),
        mock.patch.object(Checks, "hold", named("", Checks.hold)),
        mock.patch.object(Archiver, "_derived", named("weights are casts", Archiver._derived)),
        mock.patch.object(Archiver, "_write", named("writing the archive", Archiver._write)),
        mock.patch.object(Means, "hash_all", hashed),
    ):
        yield reads
