"""Reads small files of a store and checks paths in it. Neither is trusted."""

from pathlib import Path
from typing import Final

from streamshard.errors import CorruptFileError, IncompleteError, SourceError
from streamshard.formats.zarr.chunks import require_checksum
from streamshard.io.entries import examine, read_all, resolve
from streamshard.io.files import stays_inside

LIMIT_BYTES: Final = 1 << 30
"""Most bytes of a document, manifest or training state. A sparse file can claim any size."""


def require_inside(path: Path, root: Path) -> None:
    """Refuse a path in which a symbolic link leads out of the store."""
    if not stays_inside(path, root):
        message = f"a symbolic link leads out of the store here, to {resolve(path)}"
        raise SourceError(f"{message}; copy the store with 'cp -rL'", path=path)


def read_small(path: Path) -> bytes:
    """Read a small file: a document, the manifest or the training state."""
    try:
        stat = examine(path)
    except (FileNotFoundError, NotADirectoryError):
        raise IncompleteError("missing; the store is not whole", path=path) from None
    if not stat.is_file:
        raise CorruptFileError("not a regular file", path=path)
    if stat.nbytes > LIMIT_BYTES:
        raise CorruptFileError(f"{stat.nbytes:,} bytes, where {LIMIT_BYTES:,} is most", path=path)
    return read_all(path)


def read_checked(path: Path) -> bytes:
    """Read a small array's only chunk. The checksum at its end is checked and left out."""
    return bytes(require_checksum(read_small(path), path))
