"""What is counted in tensors is what NumPy counts in all of their elements at once."""

import math

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from streamshard.engine.numeric.magnitudes import Meter, block_bytes, health_of, joined
from streamshard.health import MEASURED
from streamshard.layout.memory_plan import MIN_WINDOW_BYTES
from streamshard.model import ITEMSIZE

DTYPES = {
    "float64": np.float64,
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}
FLOAT8 = {"float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2}
SPECIAL = (0.0, -0.0, math.nan, -math.nan, math.inf, -math.inf)


def view_of(values: NDArray[np.generic]) -> memoryview:
    return memoryview(values.tobytes())


@pytest.mark.parametrize(("specials", "scale"), [(0, 3e4), (1, -1.0), (400, 1e-6), (70_000, 1.0)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_counts_and_sizes_are_those_of_all_elements(
    dtype: str, specials: int, scale: float
) -> None:
    """Over two blocks and a part of one; with nothing but special values as well."""
    random = np.random.default_rng(specials)
    values = np.abs(random.standard_normal(70_000)) * scale
    places = random.choice(len(values), specials, replace=False)
    values[places] = random.choice(SPECIAL, specials)
    with np.errstate(over="ignore", invalid="ignore"):
        given = values.astype(DTYPES[dtype])
    exact = given.astype(np.float64)
    finite = exact[np.isfinite(exact)]
    found = health_of(Meter(dtype).measure(view_of(given)))
    counts = (np.isnan(exact).sum(), np.isinf(exact).sum(), (exact == 0).sum())
    assert (found.nans, found.infinities, found.zeros) == counts
    assert found.numel == len(values)
    assert found.largest == np.abs(finite).max(initial=0)
    assert found.rms == pytest.approx(np.sqrt(np.mean(finite**2)) if len(finite) else 0, rel=1e-5)
    assert found.is_good == (not counts[0] and not counts[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_pattern_of_bits_that_is_no_number_is_found(dtype: str) -> None:
    """All of the 16-bit dtypes; of the others those with each bit of the fraction set alone."""
    kind = np.dtype(DTYPES[dtype])
    bits = 8 * kind.itemsize
    if bits == 16:
        patterns = np.arange(1 << 16, dtype=np.uint16)
    else:
        infinity = int(np.array(np.inf, kind).view(f"u{kind.itemsize}"))
        fraction = 23 if bits == 32 else 52
        numbers = [infinity, infinity - 1, *(infinity | 1 << bit for bit in range(fraction))]
        signed = [*numbers, *(number | 1 << (bits - 1) for number in numbers)]
        patterns = np.array(signed, dtype=f"u{kind.itemsize}")
    with np.errstate(invalid="ignore"):
        exact = patterns.view(kind).astype(np.float64)
    for step in (1, len(patterns)):  # alone, so that nothing hides behind a larger one
        for at in range(0, len(patterns), step * (1 if bits > 16 or step > 1 else 23)):
            part = slice(at, at + step)
            found = Meter(dtype).measure(view_of(patterns[part]))
            assert found.nans == np.isnan(exact[part]).sum()
            assert found.infinities == np.isinf(exact[part]).sum()


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e20, 3e38])
def test_squares_neither_vanish_nor_overflow(scale: float) -> None:
    """As of second moments, which are squares of gradients already."""
    values = np.full(1000, scale, dtype=np.float32)
    found = health_of(Meter("float32").measure(view_of(values)))
    assert found.rms == pytest.approx(float(values[0]), rel=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_does_not_matter_how_many_blocks_are_measured_at_once(dtype: str) -> None:
    values = np.random.default_rng(5).standard_normal(100_000).astype(DTYPES[dtype])
    view, meter = view_of(values), Meter(dtype)
    step = block_bytes(values.itemsize)
    parts = [meter.measure(view[at : at + step]) for at in range(0, len(view), step)]
    assert joined(parts) == meter.measure(view)


def test_the_smallest_window_holds_a_block_of_every_dtype() -> None:
    assert all(0 < block_bytes(ITEMSIZE[dtype]) <= MIN_WINDOW_BYTES for dtype in MEASURED)
    assert all(block_bytes(ITEMSIZE[dtype]) % ITEMSIZE[dtype] == 0 for dtype in MEASURED)


@pytest.mark.parametrize("dtype", FLOAT8)
def test_each_value_of_float8_is_known(dtype: str) -> None:
    for bits in range(256):
        given = np.array([bits], np.uint8).view(FLOAT8[dtype])
        value = float(given.astype(np.float64)[0])
        found = Meter(dtype).measure(view_of(given))
        counts = math.isnan(value), math.isinf(value), value == 0
        assert (found.numel, found.nans, found.infinities, found.zeros) == (1, *counts)
        assert found.largest == (abs(value) if math.isfinite(value) else 0)
        assert found.squares == found.largest**2


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_a_complex_number_is_as_large_as_its_magnitude(dtype: str) -> None:
    wrong = [
        complex(0, math.nan),
        complex(math.nan, 1),
        complex(-math.inf, 0),
        complex(1, math.inf),
    ]
    given = np.array([3 - 4j, 0, -0.0j, *wrong] * 30_000, dtype)
    found = health_of(Meter(dtype).measure(view_of(given)))
    assert (found.nans, found.infinities, found.zeros) == (60_000, 60_000, 60_000)
    assert found.largest == 5
    assert found.rms == pytest.approx(math.sqrt(25 / 3))
