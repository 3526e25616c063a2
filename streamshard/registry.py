"""Names the rooms around the core by text, so that the core imports none of them.

This is the only module that imports by text.
"""

from importlib import import_module
from typing import Any, Final

BUCKETS: Final = "streamshard.io.objects.buckets:BUCKETS"
"""Object stores, as a `Place`."""
UPLOADED_TARGET: Final = "streamshard.operations.transfer.uploaded_target:UploadedTarget"
"""A target that comes into being by uploads; see `operations/transfer/staged_target.py`."""
REQUIRE_FREE_OBJECTS: Final = "streamshard.operations.transfer.upload_state:require_free_objects"
"""Refuses a target in a bucket that exists; see `operations/transfer/target.py`."""


def load(name: str) -> Any:  # noqa: ANN401
    """Return what a name above stands for."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)
