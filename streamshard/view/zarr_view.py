"""A checkpoint as a store object of zarr-python."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import NoReturn

from zarr.abc.store import (
    ByteRequest,
    OffsetByteRequest,
    RangeByteRequest,
    Store,
    SuffixByteRequest,
)
from zarr.core.buffer import Buffer, BufferPrototype, default_buffer_prototype

from streamshard.source.source import Source
from streamshard.view.viewed_files import ViewedFiles, children


class ZarrView(Store):
    """A read-only store, whose keys hold what `convert` would write; see `OpenCheckpoint.zarr`."""

    supports_writes = False
    supports_deletes = False
    supports_listing = True

    def __init__(self, files: ViewedFiles) -> None:
        super().__init__(read_only=True)
        self._files = files

    @classmethod
    def of(cls, source: Source, chunk_bytes: int) -> "ZarrView":
        """View an opened checkpoint, in chunks of at most so many bytes."""
        return cls(ViewedFiles(source, chunk_bytes))

    def close(self) -> None:
        """Close all files; the next read opens them again."""
        super().close()
        self._files.close()

    def __str__(self) -> str:
        """Name the checkpoint, which is no path of a store."""
        return f"streamshard view of {self._files.source.path}"

    def __repr__(self) -> str:
        """Say the same."""
        return f"<ZarrView of {str(self._files.source.path)!r}>"

    def __eq__(self, other: object) -> bool:
        """Tell whether another object is a view of the same opened checkpoint."""
        return isinstance(other, ZarrView) and self._files is other._files

    __hash__ = None  # type: ignore[assignment]  # as of zarr-python's own stores

    def with_read_only(self, read_only: bool = False) -> "ZarrView":
        """Return a store of the same files; one that is written to is refused."""
        if not read_only:
            _refuse()
        return ZarrView(self._files)

    async def get(
        self,
        key: str,
        prototype: BufferPrototype | None = None,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        """Return what is under a key, or a range of it; None if nothing is."""
        data = await asyncio.to_thread(self._files.read, key)
        if data is None:
            return None
        part = memoryview(data)[_slice(byte_range, len(data))]
        return (prototype or default_buffer_prototype()).buffer.from_bytes(part)

    async def get_partial_values(
        self,
        prototype: BufferPrototype,
        key_ranges: Iterable[tuple[str, ByteRequest | None]],
    ) -> list[Buffer | None]:
        """Return a range of each of several keys."""
        return [await self.get(key, prototype, byte_range) for key, byte_range in key_ranges]

    async def exists(self, key: str) -> bool:
        """Tell whether there is a key."""
        return self._files.size_of(key) is not None

    async def getsize(self, key: str) -> int:
        """Return the size of what is under a key; reads nothing."""
        nbytes = self._files.size_of(key)
        if nbytes is None:
            raise FileNotFoundError(key)
        return nbytes

    async def list(self) -> AsyncIterator[str]:
        """List all keys."""
        for key in self._files.below(""):
            yield key

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """List the keys that begin with a prefix."""
        for key in self._files.below(prefix):
            yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """List what is directly below a group."""
        directory = f"{prefix.rstrip('/')}/" if prefix.rstrip("/") else ""
        for name in children(self._files.below(directory), directory):
            yield name

    async def set(self, key: str, value: Buffer) -> None:
        """Refuse."""
        _refuse()

    async def delete(self, key: str) -> None:
        """Refuse."""
        _refuse()


def _refuse() -> NoReturn:
    raise ValueError("a view of a checkpoint is read-only; 'streamshard convert' makes a store")


def _slice(wanted: ByteRequest | None, nbytes: int) -> slice:
    if isinstance(wanted, RangeByteRequest):
        return slice(wanted.start, wanted.end)
    if isinstance(wanted, OffsetByteRequest):
        return slice(wanted.offset, None)
    if isinstance(wanted, SuffixByteRequest):
        return slice(max(0, nbytes - wanted.suffix), None)
    return slice(None)
