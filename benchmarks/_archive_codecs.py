"""How small do other codecs make states in archives, each save alone and after an earlier one?"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any, Final

import numpy as np
import zarr
from numcodecs import blosc
from numcodecs.blosc import Blosc
from numpy.typing import NDArray

HEAD: Final = ("stored as", *(STATES := ("fp32", "exp_avg", "exp_avg_sq")), "of the source",
               "encode x early", "decode x early")  # fmt: skip
Bits = NDArray[np.uint32]
"""Bit patterns of 32-bit floats."""
_Save = dict[str, list[Bits]]
"""State → the bits of all its tensors."""
_LEFT: Final = np.uint32(1)
_SIGN: Final = np.uint32(31)


@dataclass(frozen=True, slots=True)
class Way:
    """A way to store a chunk: bits to bits, then a codec. `base` is what an earlier save holds."""

    name: str
    codec: Blosc
    there: Callable[[Bits, Bits], Bits] = lambda bits, base: bits
    back: Callable[[Bits, Bits], Bits] = lambda bits, base: bits
    ratios: dict[str, list[float]] = field(default_factory=dict)
    shares: list[float] = field(default_factory=list)
    """Bytes of a save's states, of those of its whole checkpoint."""
    seconds: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """Processor time to encode and to decode."""


def _blosc(level: int, shuffle: int, block_bytes: int = 0) -> Blosc:
    return Blosc(cname="zstd", clevel=level, shuffle=shuffle, blocksize=block_bytes)


def _rotated(bits: Bits, _: Bits) -> Bits:
    return (bits << _LEFT) | (bits >> _SIGN)


def _rotated_back(bits: Bits, _: Bits) -> Bits:
    return (bits >> _LEFT) | (bits << _SIGN)


def _difference(bits: Bits, base: Bits) -> Bits:
    """Subtract bit patterns as integers; small differences of either sign become small numbers."""
    change = bits - base
    return (change << _LEFT) ^ (change.view(np.int32) >> 31).view(np.uint32)


def _sum(change: Bits, base: Bits) -> Bits:
    return base + ((change >> _LEFT) ^ (np.uint32(0) - (change & _LEFT)))


def _ways() -> list[Way]:
    now = _blosc(1, Blosc.SHUFFLE, 512 << 10)
    return [
        Way("bits apart, zstd 5 (early stores)", _blosc(5, Blosc.BITSHUFFLE)),
        Way("bytes apart, zstd 1, blocks of 512 KiB (now)", now),
        Way("bytes apart, zstd 5", _blosc(5, Blosc.SHUFFLE)),
        Way("bits apart, zstd 1, blocks of 512 KiB", _blosc(1, Blosc.BITSHUFFLE, 512 << 10)),
        Way("exponents in one byte, the sign last; now", now, _rotated, _rotated_back),
        Way("XOR with the first save; now", now, np.bitwise_xor, np.bitwise_xor),
        Way("difference to the first save; now", now, _difference, _sum),
    ]


def compare(archives: Sequence[tuple[Path, int]]) -> list[list[str]]:
    """Store the states of archives in other ways; returns the rows of a table.

    Parameters
    ----------
    archives
        The archive of each save, by step, and the bytes of the save. What is stored as a change is
        that to the first of them, which counts with all its bytes.
    """
    blosc.set_nthreads(1)
    ways, first = _ways(), _states(archives[0][0])
    for number, (archive, source_bytes) in enumerate(archives):
        save = _states(archive)
        for way in ways:
            # As the difference to zeros, every change is the save itself.
            base = first if number else {s: [bits * 0 for bits in first[s]] for s in first}
            _measure(way, save, base, source_bytes)
    early = ways[0].seconds
    return [
        [
            way.name,
            *(f"{mean(way.ratios[state]):.3f}" for state in STATES),
            f"{mean(way.shares):.3f}",
            *(f"{other / own:.2f}" for own, other in zip(way.seconds, early, strict=True)),
        ]
        for way in ways
    ]


def _states(archive: Path) -> _Save:
    group: Any = zarr.open_group(str(archive), mode="r")
    return {
        state: [
            np.ascontiguousarray(array[...]).view(np.uint32).reshape(-1)
            for _, array in sorted(group[f"state/{state}"].arrays())
        ]
        for state in STATES
    }


def _measure(way: Way, save: _Save, base: _Save, source_bytes: int) -> None:
    total = 0
    for state, tensors in save.items():
        stored = 0
        for bits, other in zip(tensors, base[state], strict=True):
            began = time.process_time()
            encoded = way.codec.encode(way.there(bits, other))
            between = time.process_time()
            decoded = way.back(np.frombuffer(way.codec.decode(encoded), np.uint32), other)
            way.seconds[1] += time.process_time() - between
            way.seconds[0] += between - began
            if not np.array_equal(decoded, bits):
                raise RuntimeError(f"{way.name}: other bits come back")
            stored += len(encoded)
        way.ratios.setdefault(state, []).append(stored / sum(bits.nbytes for bits in tensors))
        total += stored
    way.shares.append(total / source_bytes)
