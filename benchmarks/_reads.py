"""Counts the bytes that this process reads from files, by directory and by proof."""

import io
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final, ParamSpec, TypeVar
from unittest import mock

from streamshard.engine.run.source_reader import Checked, SourceReader
from streamshard.operations.compact import archive, omissions
from streamshard.operations.compact.receipts import CheckLog
from streamshard.operations.compact.run_context import RunContext

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

OTHER: Final = "outside of a proof"
_STEPS: Final = (
    (omissions, "exact_casts", "weights are casts"),
    (archive, "_write_store", "writing the archive"),
    (RunContext, "hash_all", "SHA-256 to record"),
)
"""Steps that read and are no proofs in a receipt."""
P = ParamSpec("P")
R = TypeVar("R")


class Reads:
    """The bytes read so far: from which of some directories, and for which proof."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.nbytes: Counter[tuple[Path, str]] = Counter()
        self.proof = OTHER
        self._roots = roots
        self._lock = threading.Lock()

    def add(self, descriptor: int, nbytes: int) -> None:
        """Count a read."""
        self.add_of(Path(f"/proc/self/fd/{descriptor}").readlink(), nbytes)

    def add_of(self, path: Path, nbytes: int) -> None:
        """Count bytes of a file that are looked at."""
        for root in self._roots:
            if path.is_relative_to(root):
                with self._lock:
                    self.nbytes[root, self.proof] += nbytes

    @contextmanager
    def named(self, proof: str) -> Iterator[None]:
        """Count reads for a proof, unless they are for another one already."""
        before = self.proof
        self.proof = proof if before == OTHER else before
        try:
            yield
        finally:
            self.proof = before

    def naming(self, proof: str, do: Callable[P, R]) -> Callable[P, R]:
        """Return a function whose reads are for a proof."""

        def work(*given: P.args, **options: P.kwargs) -> R:
            with self.named(proof):
                return do(*given, **options)

        return work


class _Stream(io.FileIO):
    """A file that counts what is read from it."""

    def __init__(self, descriptor: int, mode: str, reads: Reads) -> None:
        super().__init__(descriptor, mode)
        self._reads = reads

    def readinto(self, buffer: "WriteableBuffer", /) -> int:
        nbytes = super().readinto(buffer) or 0
        self._reads.add(self.fileno(), nbytes)
        return nbytes

    def readall(self) -> bytes:
        data = super().readall()
        self._reads.add(self.fileno(), len(data))
        return data


@contextmanager
def counted(*roots: Path) -> Iterator[Reads]:
    """Count the reads of `compact` at the calls of Python by which its modules read or map."""
    reads, preadv, run = Reads(roots), os.preadv, CheckLog.run
    window = SourceReader.window

    def count(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        nbytes = preadv(descriptor, buffers, offset)
        reads.add(descriptor, nbytes)
        return nbytes

    def look(reader: SourceReader, file: int, offset: int, nbytes: int) -> Checked | None:
        mapped = window(reader, file, offset, nbytes)
        if mapped is not None:
            reads.add_of(reader._files[file].path, nbytes)
        return mapped

    def stream_of(descriptor: int, mode: str) -> BinaryIO:
        return io.BufferedReader(_Stream(descriptor, mode, reads))

    def run_named(log: CheckLog, name: str, check: Callable[[], str]) -> None:
        with reads.named(name):
            run(log, name, check)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(os, "preadv", count))
        stack.enter_context(mock.patch.object(SourceReader, "window", look))
        stack.enter_context(mock.patch.object(os, "fdopen", stream_of))
        stack.enter_context(mock.patch.object(CheckLog, "run", run_named))
        for holder, name, proof in _STEPS:
            do = reads.naming(proof, getattr(holder, name))
            stack.enter_context(mock.patch.object(holder, name, do))
        yield reads
