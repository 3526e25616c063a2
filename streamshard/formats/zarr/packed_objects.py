"""Stores in one object each, as a place; see `packed_place`."""

from typing import Final

from streamshard.formats.zarr.packed_place import PackedStores
from streamshard.io.objects.buckets import BUCKETS
from streamshard.io.place import Place

PACKED_OBJECTS: Final[Place] = PackedStores(BUCKETS)
