"""What the options of the verbs may be, and what they are where nobody gives them.

Here and not beside the verbs, so that the command line shows its help without loading them.
"""

from collections.abc import Mapping
from datetime import timedelta
from typing import Final

CODECS: Final = ("none", "lz4", "zstd")
"""How the chunks of a store may be compressed."""
DTYPES: Final[Mapping[str, str]] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""What weights may be cast to, and torch's names for it."""
FORMATS: Final = ("safetensors", "torch", "universal")
"""What weights may be exported as."""
ORDERS: Final = ("relative", "max", "mean", "cosine", "changed")
"""By what `diff` may sort tensors, the most changed first."""
PROGRESS_MODES: Final = ("auto", "bar", "lines", "json", "none")
"""How progress may be shown."""

DEFAULT_CHUNK_BYTES: Final = 64 << 20
"""Bytes of a chunk at most, before compression."""
DEFAULT_SHARD_BYTES: Final = 5 * 10**9
"""Bytes of a file of weights at most."""
DEFAULT_GRACE: Final = timedelta(days=7)
"""How long tags stay in the trash."""
DEFAULT_MIN_AGE: Final = timedelta(hours=2)
"""How long nothing may have changed in a tag that is archived."""
