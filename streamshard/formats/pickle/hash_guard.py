"""Refuses pickles that would keep Python hashing forever, before a dict is built from them."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Final

from streamshard.errors import UnsupportedError

_LIMIT_DEPTH: Final = 200
"""Most levels of nested tuples: Python hashes them by recursion, without checking the depth."""
_LIMIT_SHARED: Final = 1_000_000
"""A tuple and its nested tuples may have this many more parts than the pickle has bytes."""
_LIMIT_KEY_PARTS: Final = 1000
_FREE_KEYS: Final = 1000
"""Keys of a dict that may collide without limit."""
_LIMIT_STEPS: Final = 100
"""Most steps per key on average. Ordinary keys take one or two, multiples of 2^42 forty."""
_PERTURB_SHIFT: Final = 5
_HASH_MASK: Final = (1 << 64) - 1


class HashGuard:
    """Checks the tuples and the large dicts of one pickle."""

    def __init__(self, pickle_bytes: int) -> None:
        self._limit_parts = pickle_bytes + _LIMIT_SHARED
        self._nested: dict[int, tuple[object, int, int]] = {}
        """Id of a tuple that contains tuples → the tuple, its depth, its count of parts."""
        self._probes: dict[int, tuple[object, HashProbes]] = {}
        """Id of a large dict with keys other than text → the dict, and its keys' collisions."""

    def weigh(self, made: tuple[Any, ...]) -> None:
        """Check and record a tuple that contains tuples."""
        depth, parts = 0, len(made)
        for part in made:
            if type(part) is tuple:
                _, deeper, more = self._nested.get(id(part), (part, 1, len(part)))
                parts += more
                if deeper > depth:
                    depth = deeper
        if depth >= _LIMIT_DEPTH:
            raise UnsupportedError(f"pickle has more than {_LIMIT_DEPTH} tuples in each other")
        if parts > self._limit_parts:
            raise UnsupportedError(f"pickle has a tuple of {parts:,} parts, most of them again")
        self._nested[id(made)] = made, depth + 1, parts

    def check(self, target: Mapping[Any, Any], keys: Sequence[Any]) -> None:
        """Check keys before they are set in a dict."""
        if not self._probes and {*map(type, keys)} == {str}:
            return
        for key in keys:
            if type(key) is tuple:
                _, _, parts = self._nested.get(id(key), (key, 1, len(key)))
                if parts > _LIMIT_KEY_PARTS:
                    raise UnsupportedError(f"pickle has a key of {parts:,} parts")
        if len(target) + len(keys) > _FREE_KEYS:
            if id(target) not in self._probes:
                self._probes[id(target)] = target, HashProbes(target)
            self._probes[id(target)][1].add(keys)


class HashProbes:
    """Simulates how CPython's dict (3.7 to 3.14) finds slots for keys, and counts the steps.

    Python hashes text with a secret of the process, but everyone can compute the hashes of numbers
    and of tuples of numbers: a dict of well-chosen keys takes time quadratic in their count.
    """

    def __init__(self, keys: Iterable[Hashable]) -> None:
        self._hashes: list[int] = []
        self._slots = bytearray(8)
        self._steps = 0
        self.add(keys)

    def add(self, keys: Iterable[Hashable]) -> None:
        """Add the keys that are set next."""
        for key in keys:
            if len(self._hashes) >= 2 * len(self._slots) // 3:
                self._grow()
            self._hashes.append(hash(key))
            self._place(self._hashes[-1])
            if self._steps > _LIMIT_STEPS * (len(self._hashes) + _FREE_KEYS):
                message = f"pickle has a dict whose {len(self._hashes):,} keys collide"
                raise UnsupportedError(f"{message}: they were chosen to take forever")

    def _grow(self) -> None:
        self._slots = bytearray(1 << (3 * len(self._hashes) - 1).bit_length())
        for value in self._hashes:
            self._place(value)

    def _place(self, value: int) -> None:
        slots, mask = self._slots, len(self._slots) - 1
        place, perturb, steps = value & mask, value & _HASH_MASK, 0
        while slots[place]:
            perturb >>= _PERTURB_SHIFT
            place = (place * 5 + perturb + 1) & mask
            steps += 1
        slots[place] = 1
        self._steps += steps
