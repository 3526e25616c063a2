"""Finds the device names of the storages in a pickle, which reading ignores."""

import re
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from streamshard.errors import SourceError
from streamshard.formats.pickle import inert_load
from streamshard.formats.pickle.machine import PickleMachine
from streamshard.formats.torch.torch_tensor import Storage, storage_from_id, storages_in

_NAME: Final = re.compile(
    rb"X(.)\0\0\0([a-z]+:([0-9]+))(?:q.|r....)?(?:K.|M..|J....)t(?:q.|r....)?Q", re.DOTALL
)
"""The end of a storage's persistent id as torch writes it: the device, the count of elements."""


class DeviceNumbers:
    """The numbers in the device names of a pickle's storages, such as `cuda:3`."""

    def __init__(self, pickled: bytes) -> None:
        self._pickled = pickled
        found = [m for m in _NAME.finditer(pickled) if m.end(2) - m.start(2) == m.group(1)[0]]
        self._sizes = {match.start(2): match.group(1)[0] for match in found}
        """Offset of a device's name → its size in bytes."""
        digits = [at for match in found for at in range(match.start(3), match.end(3))]
        self.places: NDArray[np.int64] = np.array(digits, dtype=np.int64)
        """Offsets of the digits of the numbers."""

    @cached_property
    def mean_nothing(self) -> bool:
        """Whether the pickle makes the same object, whatever the numbers are.

        Bytes that look like a device name may be part of something else, or be used twice. So the
        pickle is read with a marker in place of each name. The object must not contain the marker.
        """
        machine = _Marking(self._pickled, self._sizes)
        try:
            root = inert_load.run(machine)
        except SourceError:
            return False
        if machine.unmarked:
            return False
        return all(storage is not machine.marker for storage in storages_in(root))


class _Marking(PickleMachine):
    """Reads a pickle with a marker in place of the texts at given offsets."""

    def __init__(self, data: bytes, sizes: dict[int, int]) -> None:
        super().__init__(data, 0, lambda identifier: storage_from_id(identifier)[0])
        self.marker = Storage("uint8", 0)
        self.unmarked = dict(sizes)
        """Offset of a text that was not read yet → its size in bytes."""

    def text(self, count: int) -> str:
        """Read a text; return the marker in place of a text at a given offset."""
        at = self.at
        found = super().text(count)
        if self.unmarked.get(at) != count:
            return found
        del self.unmarked[at]
        return self.marker  # type: ignore[return-value]
