"""Memory that is used again."""


class ReusableBuffer:
    """A buffer as large as the most that was asked for, in place of a new one each time.

    The system has to clear new memory, which can take longer than reading into it.
    """

    def __init__(self) -> None:
        self._buffer = memoryview(b"")

    def __call__(self, nbytes: int) -> memoryview:
        """Return so many bytes, whatever is in them; what was returned before is lost."""
        if len(self._buffer) < nbytes:
            self._buffer = memoryview(b"")  # let go of it before asking for more
            self._buffer = memoryview(bytearray(nbytes))
        return self._buffer[:nbytes]
