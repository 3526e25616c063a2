"""Reads an array through zarr-python; imported only for arrays that another tool rewrote."""

import json
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any, NoReturn

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.abc.store import (
    ByteRequest,
    OffsetByteRequest,
    RangeByteRequest,
    Store,
    SuffixByteRequest,
)
from zarr.core.buffer import Buffer, BufferPrototype

from streamshard.errors import CorruptFileError
from streamshard.formats.zarr.bounded_codecs import bounded
from streamshard.formats.zarr.documents import ROOT_DOCUMENT
from streamshard.io.entries import open_readable
from streamshard.io.files import require_same
from streamshard.model import SourceFile


class OpenArray:
    """An array that zarr-python decodes.

    Parameters
    ----------
    document
        The content of its zarr.json.
    files
        The files in its directory, by path relative to it.
    """

    def __init__(self, document: bytes, files: Mapping[str, SourceFile]) -> None:
        parsed = json.loads(document)
        parsed["codecs"] = bounded(parsed["codecs"])
        self._files = _ArrayFiles(json.dumps(parsed).encode(), files)
        self._array = zarr.open_array(self._files, mode="r", zarr_format=3)

    def read(self, where: tuple[slice, ...]) -> NDArray[Any]:
        """Decode a part of the array."""
        return np.asarray(self._array[where])

    @property
    def missing(self) -> frozenset[str]:
        """Chunks that were to be read but are missing or empty: they read as the fill value."""
        return frozenset(self._files.missing)


class _ArrayFiles(Store):
    """The files of one array, as zarr-python reads them: read-only, and noticed if missing."""

    supports_writes = supports_deletes = supports_listing = False

    def __init__(self, document: bytes, files: Mapping[str, SourceFile]) -> None:
        super().__init__(read_only=True)
        self.missing: set[str] = set()
        self._document = document
        self._files = files

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = Store.__hash__

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        if key == ROOT_DOCUMENT:
            return prototype.buffer.from_bytes(self._document)
        file = self._files.get(key)
        # An empty file is not a chunk either: in place of a zarr shard it would read as fill value.
        if file is None or not file.nbytes:
            self.missing.add(key)
            return None
        return prototype.buffer.from_bytes(_read(file, *_bounds(byte_range, file.nbytes)))

    async def exists(self, key: str) -> bool:
        return key == ROOT_DOCUMENT or key in self._files

    async def get_partial_values(
        self,
        prototype: BufferPrototype,
        key_ranges: Iterable[tuple[str, ByteRequest | None]],
    ) -> list[Buffer | None]:
        return [await self.get(key, prototype, wanted) for key, wanted in key_ranges]

    async def set(self, key: str, value: Buffer) -> NoReturn:
        raise NotImplementedError(key)

    async def delete(self, key: str) -> NoReturn:
        raise NotImplementedError(key)

    def list(self) -> AsyncIterator[str]:
        raise NotImplementedError

    def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        raise NotImplementedError(prefix)

    def list_dir(self, prefix: str) -> AsyncIterator[str]:
        raise NotImplementedError(prefix)


def _bounds(wanted: ByteRequest | None, nbytes: int) -> tuple[int, int]:
    match wanted:
        case RangeByteRequest():
            return min(wanted.start, nbytes), min(wanted.end, nbytes)
        case OffsetByteRequest():
            return min(wanted.offset, nbytes), nbytes
        case SuffixByteRequest():
            return max(0, nbytes - wanted.suffix), nbytes
    return 0, nbytes


def _read(file: SourceFile, start: int, stop: int) -> bytearray:
    data = bytearray(max(0, stop - start))
    with open_readable(file.path) as opened:
        require_same(file, opened.status())
        if opened.read_into(memoryview(data), start) != len(data):
            raise CorruptFileError(f"{file.path}: ends before byte {stop}")
    return data
