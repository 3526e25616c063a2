"""Names the rooms around the core by text, so that the core imports none of them."""

from collections.abc import Iterator
from importlib import import_module
from typing import Any, Final

_READERS: Final = (
    "streamshard.operations.source.distributed_source",
    "streamshard.operations.source.weights_source",
)
"""Readers of what is neither DeepSpeed's nor a store, in the order in which they are asked."""


def readers() -> Iterator[Any]:
    """Yield the readers; see `operations.checks.structure.Reader`."""
    for name in _READERS:
        yield import_module(name).READER
