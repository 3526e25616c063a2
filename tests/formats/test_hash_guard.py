"""Keys chosen to collide in a dict are noticed; keys that nobody chose are not."""

import random
from collections.abc import Callable, Hashable, Iterable

import numpy as np
import pytest

from streamshard.errors import UnsupportedError
from streamshard.formats.pickle.hash_guard import HashGuard, HashProbes

COUNT = 60_000
MODULUS = (1 << 61) - 1
"""Python's hash of an integer is its remainder by this."""


HARMLESS: dict[str, Callable[[], Iterable[Hashable]]] = {
    "counted": lambda: range(COUNT),
    "counted down": lambda: range(0, -COUNT, -1),
    "shuffled": lambda: random.Random(5).sample(range(COUNT), COUNT),
    "tokens": lambda: random.Random(5).sample(range(4 * COUNT), COUNT),
    "random": lambda: random.Random(5).sample(range(1 << 60), COUNT),
    "every thousandth": lambda: range(0, 1000 * COUNT, 1000),
    "floats": lambda: [n / 7 for n in range(COUNT)],
    "pairs": lambda: [(n // 300, n % 300) for n in range(COUNT)],
    "text": lambda: [str(n) for n in range(COUNT)],
    "mixed": lambda: [kind(n) for n in range(COUNT // 3) for kind in (int, str, (0.5).__add__)],
}
"""Keys as training state may have them."""


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_keys_pass(name: str) -> None:
    HashProbes(HARMLESS[name]())


@pytest.mark.parametrize("power", range(1, 62, 4))
def test_multiples_of_a_power_of_two_pass(power: int) -> None:
    HashProbes(n << power for n in range(COUNT))


def test_keys_of_one_hash_are_noticed_soon() -> None:
    probes = HashProbes([])
    with pytest.raises(UnsupportedError, match=r"keys collide"):
        probes.add(n * MODULUS for n in range(COUNT))
    assert len(probes._hashes) < 3000


def chosen_for_their_paths() -> list[int]:
    """Keys of distinct hashes of which half fill a path through the table that the others take.

    Once a hash is used up, CPython goes from place p to 5p + 1: the first keys lie on one such
    path, the others come to it early and have to follow it to its end.
    """
    bits = 16
    size, filled = 1 << bits, 25_000
    path = np.zeros(size, dtype=np.int64)
    for step in range(1, size):
        path[step] = (5 * path[step - 1] + 1) & (size - 1)
    position = np.empty(size, dtype=np.int64)
    position[path] = np.arange(size)
    found: set[int] = set()
    generator = np.random.default_rng(1)
    while len(found) < 15_000:
        key = generator.integers(size, 1 << 32, 500_000)
        place, perturb = key & (size - 1), key.copy()
        kept = position[place] < filled
        while perturb.any():
            perturb >>= 5
            place = (place * 5 + perturb + 1) & (size - 1)
            kept &= position[place] < filled
        found |= {*key[kept & (position[place] < filled // 2)].tolist()}
    return [*path[:filled].tolist(), *found]


def test_keys_with_one_path_are_noticed() -> None:
    keys = chosen_for_their_paths()
    assert len({hash(key) for key in keys}) == len(keys)
    probes = HashProbes([])
    with pytest.raises(UnsupportedError, match=r"keys collide"):
        probes.add(keys)
    assert 25_000 < len(probes._hashes) < 26_000  # soon after the first that have to follow


def test_a_dict_is_followed_from_its_first_key() -> None:
    guard, target = HashGuard(0), dict.fromkeys(n * MODULUS for n in range(900))
    guard.check(target, [900 * MODULUS])

    def set_more() -> None:
        for n in range(901, 5000):
            guard.check(target, [n * MODULUS])
            target[n * MODULUS] = None

    with pytest.raises(UnsupportedError, match=r"keys collide"):
        set_more()
    assert 900 < len(target) < 3000


def test_tuples_are_weighed_with_what_is_in_them() -> None:
    guard = HashGuard(0)
    flat = tuple(range(1000))
    guard.check({}, [flat])
    nested = (flat, 1)
    guard.weigh(nested)
    with pytest.raises(UnsupportedError, match=r"a key of 1,002 parts"):
        guard.check({}, [nested])
