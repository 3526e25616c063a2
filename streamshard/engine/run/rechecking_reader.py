"""Reads source files for as long as a program asks, and notices at each read that one changed."""

from streamshard.engine.run.source_reader import SourceReader
from streamshard.io.readable import OpenedFile


class RecheckingReader(SourceReader):
    """Refuses a file that changed until now when `settle` is called, however it was read."""

    def _opened(self, file: int) -> OpenedFile:
        opened = super()._opened(file)
        self._looked_at.add(file)
        return opened
