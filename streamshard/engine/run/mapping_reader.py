"""Readers of source files for programs that keep them open, or map them, for any time."""

from streamshard.engine.run.source_reader import SourceReader
from streamshard.errors import SourceError
from streamshard.io.files import require_same
from streamshard.io.memory_map import map_range
from streamshard.io.readable import OpenedFile
from streamshard.io.retry import try_again
from streamshard.model import BlockDigests


class MappingReader(SourceReader):
    def map(
        self, file: int, offset: int, nbytes: int, *, is_private: bool, is_checked: bool
    ) -> memoryview:
        """Map a range of a file that holds its content as it is; see `map_range`.

        `is_checked`: whether the range is read first and compared with what was recorded of it, if
        anything was. No change after that is noticed.
        """
        digests = self._files[file].decoder
        if is_checked and isinstance(digests, BlockDigests):
            buffer = memoryview(bytearray(min(nbytes, digests.block_bytes)))
            for start in range(offset, offset + nbytes, digests.block_bytes):
                self.read_into(file, start, buffer[: offset + nbytes - start])
        try:
            return try_again(lambda: self._map(file, offset, nbytes, is_private), self._stop)
        except OSError as error:
            message = f"cannot be mapped ({error.strerror})"
            raise SourceError(message, path=self._files[file].path) from error

    def _map(self, file: int, offset: int, nbytes: int, is_private: bool) -> memoryview:
        try:
            opened = self._opened(file)
            # It may have been open for long, and a map that leaves the file ends the process.
            require_same(self._files[file], opened.status())
            start = opened.origin + offset
            view = map_range(opened.descriptor, start, nbytes, is_private=is_private)
        except OSError:
            self._forget(file)
            raise
        if self._log is not None:
            self._log.add(file, offset, view)
        return view


class RecheckingReader(SourceReader):
    """Refuses a file that changed until now when `settle` is called, however it was read."""

    def _opened(self, file: int) -> OpenedFile:
        opened = super()._opened(file)
        self._looked_at.add(file)
        return opened
