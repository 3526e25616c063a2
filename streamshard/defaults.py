"""Allowed values and defaults of the verbs' options.

They are here, not in the verbs' modules, so that the command line shows its help without loading
the verbs.
"""

from collections.abc import Mapping
from datetime import timedelta
from typing import Final

CODECS: Final = ("none", "lz4", "zstd")
"""Codecs for the chunks of a store."""
DTYPES: Final[Mapping[str, str]] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Dtypes that weights may be cast to, with torch's names for them."""
FORMATS: Final = ("safetensors", "torch", "universal", "dcp")
"""Formats of exports."""
TITAN: Final = "titan"
ACCELERATE: Final = "accelerate"
LAYOUTS: Final = ("torch", TITAN, ACCELERATE)
"""Loaders of a distributed checkpoint, which ask for different keys and directories."""
ORDERS: Final = ("relative", "max", "mean", "cosine", "changed")
"""Figures by which `diff` may sort tensors, the most changed first."""
PROGRESS_MODES: Final = ("auto", "bar", "lines", "json", "none")
"""Ways to show progress."""

DEFAULT_CHUNK_BYTES: Final = 64 << 20
"""Maximum bytes per chunk, before compression."""
DEFAULT_SHARD_BYTES: Final = 5 * 10**9
"""Maximum bytes per file of exported weights."""
DEFAULT_GRACE: Final = timedelta(days=7)
"""How long tags stay in the trash."""
DEFAULT_MIN_AGE: Final = timedelta(hours=2)
"""How long a tag must be unchanged before it is archived."""
