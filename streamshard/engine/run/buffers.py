"""Memory that is reused."""


class ReusableBuffer:
    """A buffer that grows to the largest requested size, in place of a new buffer each time.

    The system has to clear new memory, which can take longer than reading data into it.
    """

    def __init__(self) -> None:
        self._buffer = memoryview(b"")

    def __call__(self, nbytes: int) -> memoryview:
        """Return `nbytes` of memory with any content; memory returned before becomes invalid."""
        if len(self._buffer) < nbytes:
            self._buffer = memoryview(b"")  # free the old buffer before allocating a larger one
            self._buffer = memoryview(bytearray(nbytes))
        return self._buffer[:nbytes]
