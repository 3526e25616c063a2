"""Writes spans in another process, which knows nothing but what is sent to it."""

import pickle
import sys
from collections.abc import Sequence
from pathlib import Path

from streamshard.engine.run.source_reader import SourceReader
from streamshard.engine.run.window import Window
from streamshard.engine.run.work import Span
from streamshard.io.changes import open_sink
from streamshard.model import SourceFile

Task = tuple[str, int, Span, int]
"""Path and size of the file so far, the span, and the size of the window."""


def perform(sources: bytes, task: bytes) -> bytes:
    """Write a span of a file; returns the result as a pickle."""
    files: Sequence[SourceFile] = pickle.loads(sources)
    path, size, span, window_bytes = pickle.loads(task)
    reader = SourceReader(files)
    buffer, scratch = (memoryview(bytearray(window_bytes)) for _ in range(2))
    file = open_sink(Path(path), is_new=False, nbytes=0)
    try:
        result = Window(buffer, scratch, reader).write(span, file, is_new=size == 0)
    finally:
        file.close()
        reader.close()
    if "torch" in sys.modules:
        raise AssertionError(f"{Path(path).name} took torch to write")
    return pickle.dumps(result)
