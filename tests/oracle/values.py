"""Name every difference between two values, down to the bits of tensors and floats."""

import struct
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def value_differences(a: object, b: object, path: str) -> Iterator[str]:
    """Every difference between two unpickled values, each with the path that leads to it."""
    if type(a) is not type(b):
        yield f"{path}: {_brief(a)} is a {_kind(a)}, {_brief(b)} is a {_kind(b)}"
    elif isinstance(a, torch.Tensor):
        yield from _tensor_differences(a, b, path)  # type: ignore[arg-type]
    elif isinstance(a, Mapping):
        yield from _mapping_differences(a, b, path)  # type: ignore[arg-type]
    elif isinstance(a, list | tuple):
        yield from _sequence_differences(a, b, path)  # type: ignore[arg-type]
    elif isinstance(a, float):
        if struct.pack("<d", a) != struct.pack("<d", b):
            yield f"{path}: {a!r} != {b!r}"
    elif isinstance(a, np.ndarray | np.generic):
        yield from _array_differences(np.asarray(a), np.asarray(b), path)
    elif hasattr(a, "__dict__") and not isinstance(a, Enum | type):
        # By attributes, with the rules above: an own __eq__ may not know about bits.
        yield from _mapping_differences(vars(a), vars(b), f"{path}.__dict__")
    elif a != b:
        yield f"{path}: {_brief(a)} != {_brief(b)}"


def _mapping_differences(
    a: Mapping[Any, object], b: Mapping[Any, object], path: str
) -> Iterator[str]:
    for key in a.keys() - b.keys():
        yield f"{path}[{key!r}]: missing on the right"
    for key in b.keys() - a.keys():
        yield f"{path}[{key!r}]: missing on the left"
    if isinstance(a, OrderedDict) and a.keys() == b.keys() and list(a) != list(b):
        yield f"{path}: keys in another order: {list(a)} != {list(b)}"
    for key in a:
        if key in b:
            yield from value_differences(a[key], b[key], f"{path}[{key!r}]")


def _sequence_differences(
    a: list[object] | tuple[object, ...], b: list[object] | tuple[object, ...], path: str
) -> Iterator[str]:
    if len(a) != len(b):
        yield f"{path}: {len(a)} items != {len(b)} items"
    for index, (left, right) in enumerate(zip(a, b, strict=False)):
        yield from value_differences(left, right, f"{path}[{index}]")


def _tensor_differences(a: torch.Tensor, b: torch.Tensor, path: str) -> Iterator[str]:
    for attribute in ("dtype", "shape", "requires_grad"):
        left, right = getattr(a, attribute), getattr(b, attribute)
        if left != right:
            yield f"{path}: {attribute} {left} != {right}"
    if a.dtype != b.dtype or a.shape != b.shape:
        return
    unequal = (_bits(a) != _bits(b)).nonzero().flatten()
    if len(unequal):
        at = int(unequal[0])
        left, right = a.detach().flatten()[at].item(), b.detach().flatten()[at].item()
        yield (
            f"{path}: {len(unequal)} of {a.numel()} elements differ, "
            f"first at {at}: {left!r} != {right!r}"
        )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as integers: NaN payloads count, and so does the sign of zero."""
    flat = tensor.detach().flatten().contiguous()
    return flat.view(_INTEGER[flat.element_size()]) if flat.numel() else flat


def _array_differences(
    a: np.ndarray[Any, Any], b: np.ndarray[Any, Any], path: str
) -> Iterator[str]:
    if a.dtype != b.dtype or a.shape != b.shape:
        yield f"{path}: {a.dtype}{a.shape} != {b.dtype}{b.shape}"
    elif a.tobytes() != b.tobytes():
        yield f"{path}: {a!r} != {b!r}"


def _kind(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
