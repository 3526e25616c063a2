"""Reads the model's own config, which HF Trainer and others save beside a checkpoint."""

from contextlib import closing
from typing import Final

import numpy as np

from streamshard.formats import strict_json
from streamshard.formats.pretrained import CONFIG
from streamshard.model import FILE
from streamshard.operations.source.source import Source
from streamshard.operations.source.source_access import SourceAccess

_MOST_BYTES: Final = 1 << 20
"""More than any config has."""


def kv_heads(source: Source) -> int | None:
    """Return the model's count of key and value heads, if its `config.json` has it by that name.

    AutoTP looks for others too, and for what the model's class calls them; only this name is read,
    which comes first (`AutoTPMeta.from_model_config` of `deepspeed/module_inject/tp_shard.py`,
    0.19.8).
    """
    for number, tensor in enumerate(source.checkpoint.tensors):
        if tensor.state == FILE and tensor.name == CONFIG and tensor.numel <= _MOST_BYTES:
            with closing(SourceAccess(source)) as access:
                content = np.empty(tensor.numel, dtype=np.uint8)
                access.fill(content, number, 0, None)
            return _kv_heads(content.tobytes())
    return None


def _kv_heads(content: bytes) -> int | None:
    try:
        config = strict_json.parse(content)
    except ValueError:
        return None
    inner = config.get("text_config") if isinstance(config, dict) else None
    held = inner if isinstance(inner, dict) else config
    found = held.get("num_key_value_heads") if isinstance(held, dict) else None
    return found if isinstance(found, int) and found > 0 else None
