"""The paths of logical tensors in a store, which also name them in messages and reports."""

import re
from functools import lru_cache
from hashlib import sha256
from typing import Final
from urllib.parse import quote

from streamshard.model import BLOB, FILE, MODULE, LogicalTensor

ROOT_DOCUMENT: Final = "zarr.json"
"""The root group's document. A node of this name would replace its parent's document."""

_LIMIT_NAME: Final = 255
"""Most bytes of a directory's name on nearly every file system."""
_SHORTENED: Final = "%~"
"""Stands for the rest of a name that is too long; the SHA-256 of the whole name follows."""
_CUT_ESCAPE: Final = re.compile("%[0-9A-F]?$")
_SAFE: Final = " !#$&'()+,;=@[]{}~^"
"""Characters that are kept, in addition to those that no URL escapes."""
_PLAIN: Final = re.compile(
    rf"(?!__|zarr\.json$|\.+$)[\w.\-{re.escape(_SAFE)}]{{1,{_LIMIT_NAME}}}", re.ASCII
)
"""Names that stay as they are, as nearly all do."""


def array_path(tensor: LogicalTensor) -> str:
    path = f"{_directory(tensor.state)}/{_escape(tensor.name)}"
    return f"{tensor.model_part}/{path}" if tensor.model_part else path


def is_shortened(path: str) -> bool:
    """Tell whether a name was too long for its path, which then does not say it."""
    return _SHORTENED in path


@lru_cache  # thousands of tensors have one of a few states
def _directory(state: str) -> str:
    return state if state in (MODULE, BLOB, FILE) else f"state/{_escape(state)}"


def _escape(name: str) -> str:
    """Turn any text into a node name that is not reserved, not empty and not too long."""
    if _PLAIN.fullmatch(name):
        return name
    escaped = quote(name, safe=_SAFE)
    if not escaped.strip(".") or escaped.startswith("__") or escaped == ROOT_DOCUMENT:
        escaped = "".join(f"%{byte:02X}" for byte in name[:1].encode()) + escaped[1:]
    if len(escaped) > _LIMIT_NAME:
        digest = sha256(name.encode()).hexdigest()
        # Do not cut within an escape. No escape begins with the mark that follows.
        start = _CUT_ESCAPE.sub("", escaped[: _LIMIT_NAME - len(_SHORTENED) - len(digest)])
        escaped = f"{start}{_SHORTENED}{digest}"
    return escaped or "%"
