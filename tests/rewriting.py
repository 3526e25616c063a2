"""Rewrites stores with zarr-python, as a user does who wants other chunks or another codec."""

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zarr
from zarr.codecs import BytesCodec, GzipCodec, TransposeCodec

Options = dict[str, Any]
Choice = Callable[[tuple[int, ...]], Options]
"""Shape of an array → how `zarr.create_array` is to write it."""


def halves(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Cut every dimension in two."""
    return tuple(max(1, -(-length // 2)) for length in shape)


def columns(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Cut all dimensions but the first, so that no chunk is one range of elements."""
    return tuple(max(1, length if axis == 0 else 1) for axis, length in enumerate(shape))


def _transposed(shape: tuple[int, ...]) -> Options:
    order = tuple(reversed(range(len(shape))))
    return {"filters": [TransposeCodec(order=order)] if len(shape) > 1 else [], "chunks": shape}


def _shards(shape: tuple[int, ...]) -> Options:
    if not shape:
        return {}
    inner = halves(shape)
    shards = tuple(-(-length // n) * n for length, n in zip(shape, inner, strict=True))
    return {"chunks": inner, "shards": shards}


REWRITES: dict[str, Choice] = {
    "as zarr-python likes": lambda shape: {},
    "gzip": lambda shape: {"compressors": GzipCodec(level=1), "chunks": halves(shape) or "auto"},
    "columns": lambda shape: {"compressors": None, "chunks": columns(shape) or "auto"},
    "larger than the array": lambda shape: {"chunks": tuple(n + 3 for n in shape) or "auto"},
    "small": lambda shape: {
        "chunks": tuple(max(1, n // 8) for n in shape) or "auto",
        "compressors": None,
    },
    "zarr shards": _shards,
    "big endian": lambda shape: {"serializer": BytesCodec(endian="big"), "compressors": None},
    "transposed": _transposed,
    "other keys": lambda shape: {"chunk_key_encoding": {"name": "v2", "separator": "."}},
}


def rewrite_array(store: Path, path: str, **options: Any) -> None:  # noqa: ANN401
    """Rewrite one array in its place."""
    array = zarr.open_array(store / path, mode="r")
    # The shape of a chunk has no zeros.
    content, attributes = array[...], dict(array.attrs)
    shutil.rmtree(store / path)
    made = {"attributes": attributes, "dtype": array.dtype, "fill_value": array.fill_value}
    fresh = zarr.create_array(store / path, shape=array.shape, **{**made, **options})
    fresh[...] = content


def copy_store(store: Path, target: Path, choose: Choice, *, consolidates: bool = False) -> Path:
    """Copy a store with zarr-python, the training state and the manifest included."""
    source = zarr.open_group(store, mode="r")
    copied = zarr.open_group(target, mode="w", attributes=dict(source.attrs))
    for path, member in sorted(source.members(max_depth=None)):
        if isinstance(member, zarr.Group):
            copied.require_group(path)
            continue
        options = choose(member.shape) if member.size else {}
        array = copied.create_array(
            path, shape=member.shape, dtype=member.dtype, attributes=dict(member.attrs), **options
        )
        array[...] = member[...]
    if consolidates:
        with warnings.catch_warnings(action="ignore"):
            zarr.consolidate_metadata(target)
    return target
