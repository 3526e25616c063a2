"""Casts, bit by bit, against torch's `tensor.to(dtype)`."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from streamshard.engine.numeric.cast import cast_between, comparing_cast, find_nans, wider
from streamshard.errors import UnsupportedError

Bits = NDArray[Any]
TORCH = {"bfloat16": torch.bfloat16, "float16": torch.float16}
PAIRS = [
    (source, target)
    for source in ("float64", "float32", "float16", "bfloat16")
    for target in ("float32", "float16", "bfloat16")
    if source != target
]


def cast_bits(bits: Bits, source: str, target: str) -> Bits:
    """Cast elements of any dtype with the engine; bits in, bits out."""
    cast = cast_between(source, target)
    assert cast is not None
    word = np.dtype(f"<u{getattr(torch, target).itemsize}")
    into = bytearray(word.itemsize * len(bits))
    cast(memoryview(bits.tobytes()), memoryview(into))
    return np.frombuffer(into, word)


def same_as_torch(bits: Bits, source: str, target: str) -> None:
    """Compare with torch bit by bit; of a NaN only that it stays one.

    torch does not agree with itself about a NaN's bits: its scalar code, its vector code and its
    kernels for GPUs each make another one.
    """
    tensor = torch.frombuffer(bytearray(bits.tobytes()), dtype=getattr(torch, source))
    result = tensor.to(getattr(torch, target))
    found = cast_bits(bits, source, target)
    wanted = result.view(torch.uint8).numpy().view(found.dtype)
    nan = find_nans(memoryview(bits.tobytes()), source)
    np.testing.assert_array_equal(found[~nan], wanted[~nan])
    np.testing.assert_array_equal(find_nans(memoryview(found.tobytes()), target), nan)
    np.testing.assert_array_equal(torch.isnan(tensor).numpy(), nan)
    np.testing.assert_array_equal(torch.isnan(result).numpy(), nan)


def check(bits: Bits, target: str) -> None:
    same_as_torch(bits.astype("<u4"), "float32", target)


def test_every_bfloat16_and_its_neighbours() -> None:
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    for lower in (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        check(upper | np.uint32(lower), "bfloat16")


def test_every_float16_the_ties_between_them_and_their_neighbours() -> None:
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    with np.errstate(invalid="ignore"):
        exact = halves.astype(np.float32).view(np.uint32)
    tie = exact + np.uint32(1 << 12)  # for subnormal halves the ties lie elsewhere, below
    for bits in (exact, tie):
        for step in (-1, 0, 1):
            check((bits.astype(np.int64) + step).astype(np.uint32), "float16")
    below = np.ldexp(np.arange(2050, dtype=np.float32) + np.float32(0.5), -24).view(np.uint32)
    for step in (-1, 0, 1):
        check((below.astype(np.int64) + step).astype(np.uint32), "float16")
        check((below.astype(np.int64) + step).astype(np.uint32) | np.uint32(1 << 31), "float16")


def test_what_need_not_and_what_cannot_be_cast() -> None:
    assert cast_between("int64", "int64") is None
    with pytest.raises(UnsupportedError, match="int64 to bfloat16"):
        cast_between("int64", "bfloat16")
    with pytest.raises(UnsupportedError, match="float8_e4m3fn to float32"):
        cast_between("float8_e4m3fn", "float32")
    assert not find_nans(memoryview(b"\xff" * 8), "uint8").any()
    assert cast_bits(np.array([], "<u4"), "float32", "bfloat16").size == 0


@pytest.mark.parametrize(("source", "target"), [p for p in PAIRS if p[0] in TORCH])
def test_every_16_bit_number_by_every_road(source: str, target: str) -> None:
    same_as_torch(np.arange(1 << 16, dtype="<u2"), source, target)


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_any_bits_by_every_road(source: str, target: str) -> None:
    width = getattr(torch, source).itemsize
    random = np.random.default_rng(7).integers(0, 256, 3 * width * (1 << 16) + width, np.uint8)
    same_as_torch(random.view(f"<u{width}"), source, target)


def test_float64_is_rounded_twice_as_torch_does() -> None:
    # Between two halves, and a little above: float32 has no room for the little.
    bits = np.array([1 + 2**-11 + 2**-40, 2.0**-25 * (1 + 2**-50), 65520 - 2**-30], "<f8")
    for target in ("float32", "float16", "bfloat16"):
        same_as_torch(bits.view("<u8"), "float64", target)
    assert cast_bits(bits.view("<u8"), "float64", "float16")[0] == np.float16(1).view("<u2")


@pytest.mark.parametrize(
    ("source", "target", "largest", "beyond"),
    [
        ("float32", "float16", 65519.996, 65520.0),
        ("bfloat16", "float16", 65280.0, 65536.0),
        ("float64", "float32", 3.4028235e38, 3.403e38),
        ("float32", "bfloat16", 3.39e38, 3.4e38),
    ],
)
def test_only_finite_elements_that_become_infinite_count(
    source: str, target: str, largest: float, beyond: float
) -> None:
    cast = cast_between(source, target)
    assert cast is not None
    finite = [largest, -largest, 0.0, float("inf"), float("-inf"), float("nan")]
    for numbers, expected in ((finite, 0), ([*finite, beyond, -beyond, beyond], 3)):
        tensor = torch.tensor(numbers, dtype=getattr(torch, source))
        into = bytearray(len(numbers) * getattr(torch, target).itemsize)
        data = memoryview(tensor.view(torch.uint8).numpy().tobytes())
        counted = cast.count_overflow(data, memoryview(into))
        by_torch = tensor.to(getattr(torch, target)).isinf() & ~tensor.isinf()
        assert int(by_torch.sum()) == expected == counted


@pytest.mark.parametrize("target", ["float32", "float64"])
@pytest.mark.parametrize("source", ["bfloat16", "float16"])
def test_widening_changes_no_value(source: str, target: str) -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    cast = comparing_cast(source, target)
    assert cast is not None
    found = np.empty(len(every), dtype=target)
    cast(memoryview(every.tobytes()), memoryview(found.view(np.uint8)))  # type: ignore[arg-type]
    wanted = torch.from_numpy(every.view(np.int16)).view(TORCH[source])
    np.testing.assert_array_equal(found, wanted.to(getattr(torch, target)).numpy())
    assert np.signbit(found[0x8000])


def test_the_wider_dtype_holds_both() -> None:
    assert wider("float32", "float32") == wider("bfloat16", "float32") == "float32"
    assert wider("float64", "bfloat16") == "float64"
    assert wider("float16", "bfloat16") == "float32"
    assert wider("int64", "int64") == "int64"
    assert wider("int64", "int32") is wider("bool", "float32") is None
