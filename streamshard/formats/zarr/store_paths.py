"""Small files of a store, and paths in it: both are as whoever made it left them."""

from pathlib import Path
from stat import S_ISREG
from typing import Final

from streamshard.errors import CorruptFileError, IncompleteError, SourceError
from streamshard.formats.links import is_inside, place_of
from streamshard.formats.zarr.chunks import require_checksum
from streamshard.posix import read_all

LIMIT_BYTES: Final = 1 << 30
"""Size of the largest document, manifest or training state: a hole in a file costs nothing."""


def require_inside(path: Path, root: Path) -> None:
    """Refuse a path that symbolic links lead out of the store, wherever in it they are.

    Raises
    ------
    SourceError
        They do; the message says where to.
    """
    if not is_inside(path, root):
        message = f"{path}: a symbolic link leads out of the store here, to {place_of(path)}"
        raise SourceError(f"{message}; copy the store with 'cp -rL'")


def read_small(path: Path) -> bytes:
    """Read a file that is no chunk.

    Raises
    ------
    IncompleteError
        It is not there.
    CorruptFileError
        It is no regular file, or larger than any such file is.
    OSError
        It cannot be read.
    """
    try:
        stat = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise IncompleteError(f"{path}: missing; the store is not whole") from None
    if not S_ISREG(stat.st_mode):
        raise CorruptFileError(f"{path}: no regular file")
    if stat.st_size > LIMIT_BYTES:
        raise CorruptFileError(f"{path}: {stat.st_size:,} bytes, where {LIMIT_BYTES:,} is most")
    return read_all(path)


def read_checked(path: Path) -> bytes:
    """Read a small array's only chunk; the checksum at its end is compared and left out.

    Raises
    ------
    IntegrityError
        The checksum is another.
    SourceError, OSError
        See `read_small`.
    """
    return bytes(require_checksum(read_small(path), path))
