"""Shows a tensor of bytes as a file of its own, wherever a source keeps it."""

from collections.abc import Sequence

import numpy as np

from streamshard.source.source import Source
from streamshard.source.source_access import SourceAccess


class TensorBytes:
    """The bytes of a tensor, read as those of a file are."""

    takes_requests = False

    def __init__(self, source: Source, access: SourceAccess, tensor: int) -> None:
        self._access, self._tensor = access, tensor
        self.nbytes = source.checkpoint.tensors[tensor].nbytes
        """Size in bytes."""

    def prepare(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Do nothing: what is read may be a part of a larger piece."""

    def read_at(self, offset: int, count: int) -> bytes:
        """Read bytes from an offset; fewer than `count` only at the end of the file."""
        data = np.empty(max(0, min(count, self.nbytes - offset)), dtype=np.uint8)
        self._access.fill(data, self._tensor, offset, None)
        return data.tobytes()
