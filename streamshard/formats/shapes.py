"""Shapes that a file claims: refused before any product of their numbers is computed.

A file can list a million dimensions, or a size of a million digits. Multiplying those takes longer
than all honest work on a file of that length.
"""

import math
from typing import Final

from streamshard.errors import CorruptFileError
from streamshard.formats.pickle.inert import Node, show

LIMIT_DIMENSIONS: Final = 64
"""Most dimensions that torch can iterate over."""
LIMIT_NUMEL: Final = 1 << 44
"""More elements than any real tensor has. The sum of many such numbers still fits an int64."""


def is_size(node: Node) -> bool:
    """Tell whether a value can be the length of a tensor along a dimension."""
    return type(node) is int and 0 <= node <= LIMIT_NUMEL


def sizes_of(node: Node) -> tuple[int, ...]:
    """Read a list of lengths, one for each dimension; their product may be any."""
    if isinstance(node, list | tuple) and len(node) <= LIMIT_DIMENSIONS and all(map(is_size, node)):
        return tuple(node)
    raise CorruptFileError(f"{show(node)} is not a shape")


def require_shape(node: Node) -> tuple[int, ...]:
    """Read the shape of a tensor."""
    shape = sizes_of(node)
    if math.prod(shape) > LIMIT_NUMEL:
        raise CorruptFileError(f"{show(node)} is not a shape: no tensor has as many elements")
    return shape
