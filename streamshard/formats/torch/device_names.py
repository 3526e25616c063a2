"""Finds in a pickle where it says on which device a storage lay, which reading leaves aside."""

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
"""The end of a storage's persistent id as torch spells it: the device, the count of elements."""


class DeviceNumbers:
    """The numbers in the names of devices, such as `cuda:3`, that a pickle gives for storages."""

    def __init__(self, pickled: bytes) -> None:
        self._pickled = pickled
        found = [m for m in _NAME.finditer(pickled) if m.end(2) - m.start(2) == m.group(1)[0]]
        self._sizes = {match.start(2): match.group(1)[0] for match in found}
        """Offset of a device's name → its size in bytes."""
        digits = [at for match in found for at in range(match.start(3), match.end(3))]
        self.places: NDArray[np.int64] = np.array(digits, dtype=np.int64)
        """Offsets of their digits."""

    @cached_property
    def mean_nothing(self) -> bool:
        """Whether the same object comes of the pickle, whatever the numbers are.

        What looks like a device's name may be part of something else, or be used twice. So the
        pickle is read with a marker in place of each, which must not be found in the object.
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
        """Offset of a text that was not met yet → its size in bytes."""

    def text(self, count: int) -> str:
        """Read a text, or take the marker for it."""
        at = self.at
        found = super().text(count)
        if self.unmarked.get(at) != count:
            return found
        del self.unmarked[at]
        return self.marker  # type: ignore[return-value]
