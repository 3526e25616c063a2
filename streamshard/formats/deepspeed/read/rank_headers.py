"""Reads the optimizer files of thousands of ranks, in batches that workers can read elsewhere.

Rank files are nearly identical. A worker parses and checks the whole file, but returns only the
parts that differ from the first rank's, and the offsets of the storages: some hundred bytes. From
these the same object is put together again. Equal parts of all ranks are one object in memory, and
are examined once.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from streamshard.batches import map_batches
from streamshard.errors import SourceError, UnsupportedError, release_frames
from streamshard.formats.deepspeed import names
from streamshard.formats.deepspeed.read.rank_files import ReadFile, SourceFiles, read_dict
from streamshard.formats.pickle import inert_dump, inert_load
from streamshard.formats.pickle.inert import Node
from streamshard.formats.torch.parse_cache import CachedParse, ParseCache
from streamshard.formats.torch.torch_file import TorchFile
from streamshard.formats.torch.torch_tensor import Storage, storages_in
from streamshard.io.entries import open_readable

_OPENED: Final = (names.OPTIMIZER, names.BASE_OPTIMIZER)
"""Entries whose own entries are parts."""
_DEPTH: Final = 3
"""Most dicts around a part: the file's, the ZeRO optimizer's and the wrapped optimizer's."""
_LIMIT_BYTES: Final = 1 << 24
"""Parts that take more bytes are not compared; the file is read where it is needed."""
_UNREADABLE: Final = (
    SourceError, OSError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError,
)  # fmt: skip
"""Errors about a file's content or of its file system."""

_TOGETHER: Final = 16
"""Files whose storages of one element are read side by side."""

Place = tuple[Node, ...]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RankHeader:
    """A rank's optimizer file, as it differs from the first rank's."""

    own: bytes
    """Pickle, to be read inertly, of part number → part; empty if all parts are the same."""
    storages: NDArray[np.int64]
    """Byte offset of each storage, its CRC-32 or -1, and its bytes in `scalars` or 0; in the order
    of the file's pickle."""
    scalars: bytes
    """Content of the storages of one element, such as the optimizer's step, one after the other."""
    unknown: tuple[str, ...]
    """See `TorchFile`."""


@dataclass(frozen=True, slots=True)
class HeaderError:
    """The error that reading a file ended with."""

    error: Exception


class _Parts:
    """The parts of an optimizer file's object, which are compared one by one."""

    def __init__(self, found: TorchFile) -> None:
        self._numbers = {
            id(storage): number for number, storage in enumerate(found.storages.values())
        }
        self.nodes = dict(_parts_of(found.root))
        self.serialized: list[bytes] = []
        held_bytes = 0
        for node in self.nodes.values():
            self.serialized.append(self._serialize(node))
            held_bytes += len(self.serialized[-1])
            if held_bytes > _LIMIT_BYTES:
                raise UnsupportedError("holds parts that are too large to be compared")

    def _key_paths(self) -> list[list[tuple[type, Node]]]:
        """List the keys that lead to each part; 1 and True are equal, but not the same key."""
        return [[(type(key), key) for key in key_path] for key_path in self.nodes]

    def _serialize(self, node: Node) -> bytes:
        return inert_dump.dump(node, self._storage_id)

    def _storage_id(self, node: Node) -> Node | None:
        if not isinstance(node, Storage):
            return None
        return node.dtype, node.numel, self._numbers[id(node)]

    @cached_property
    def digest(self) -> bytes:
        """Return a digest of all parts, storages without their content."""
        every = [self._serialize(list(self.nodes)), *self.serialized]
        return sha256(b"".join(sha256(part).digest() for part in every)).digest()

    def differing_from(self, first: "_Parts") -> bytes | None:
        """Serialize the parts that differ from the first rank's; None if they are other parts."""
        if self._key_paths() != first._key_paths():
            return None
        both = zip(self.nodes.values(), self.serialized, first.serialized, strict=True)
        own = {number: node for number, (node, one, other) in enumerate(both) if one != other}
        serialized = self._serialize(own) if own else b""
        return serialized if len(serialized) <= _LIMIT_BYTES else None


def _parts_of(root: dict[Node, Node], around: Place = ()) -> Iterator[tuple[Place, Node]]:
    """Yield the parts of an object, each with the keys that lead to it."""
    for key, node in root.items():
        key_path = (*around, key)
        if key in _OPENED and type(node) is dict and node and len(key_path) < _DEPTH:
            yield from _parts_of(node, key_path)
        else:
            yield key_path, node


@dataclass(frozen=True, slots=True)
class _FirstFile(ReadFile):
    parts: _Parts | None = None
    """They are not sent to workers, which read the file again."""

    def __reduce__(self) -> tuple[type, tuple[Path, bytes]]:
        return _FirstFile, (self.path, self.digest)


def read_headers(first: _FirstFile, paths: Sequence[Path]) -> list[RankHeader | HeaderError | None]:
    """Read optimizer files; None for a file that differs from the first in more than its parts.

    The result for a file does not depend on the other files.
    """
    try:
        parts = first.parts or _Parts(read_dict(first.path))
    except _UNREADABLE:
        return [None] * len(paths)
    if parts.digest != first.digest:
        return [None] * len(paths)
    reader = _HeaderReader(parts)
    headers = list[RankHeader | HeaderError | None]()
    for start in range(0, len(paths), _TOGETHER):
        some = paths[start : start + _TOGETHER]
        headers += _with_scalars(some, [reader.read(path) for path in some])
    return headers


class _HeaderReader:
    """Reads the files of a batch."""

    def __init__(self, first: _Parts) -> None:
        self._first = first
        self._cache = ParseCache()
        self._headers: dict[int, RankHeader] = {}
        """Object of a file in the cache, by its id → header of the file."""

    def read(self, path: Path) -> RankHeader | HeaderError | None:
        try:
            cached = self._cache.find(path)
            if cached is not None:
                return self._of_cached(cached)
            found = read_dict(path)
        except _UNREADABLE as error:
            release_frames(error)
            return HeaderError(error)
        try:
            own = _Parts(found).differing_from(self._first) if type(found.root) is dict else None
        except (KeyError, SourceError):  # storages outside of the pickle's, or parts without end
            return None
        if own is None:
            return None
        storages = np.array(
            [_storage_row(storage) for storage in found.storages.values()], dtype=np.int64
        )
        header = RankHeader(own, storages.reshape(-1, 3), b"", found.unknown)
        if not own:
            # Files like this one differ in checksums and scalars alone, if at all.
            self._cache.remember(path, found)
            self._headers[id(found.root)] = header
        return header

    def _of_cached(self, cached: CachedParse) -> RankHeader:
        header = self._headers[id(cached.root)]
        storages = header.storages.copy()
        rows = {int(offset): row for row, offset in enumerate(storages[:, 0])}
        for offset, crc32 in zip(cached.places.tolist(), cached.crc32s.tolist(), strict=True):
            if offset in rows:
                storages[rows[offset], 1] = crc32 or -1
        return replace(header, storages=storages)


def _storage_row(storage: Storage) -> tuple[int, int, int]:
    crc32 = -1 if storage.crc32 is None else storage.crc32
    return storage.offset, crc32, storage.nbytes if storage.numel == 1 else 0


def _with_scalars(
    paths: Sequence[Path], headers: Sequence[RankHeader | HeaderError | None]
) -> list[RankHeader | HeaderError | None]:
    """Read the storages of one element in some files, side by side where that takes requests."""
    with ExitStack() as stack:
        opened = [
            _tried(partial(_request_scalars, path, header, stack))
            if isinstance(header, RankHeader) and header.storages[:, 2].any()
            else header
            for path, header in zip(paths, headers, strict=True)
        ]
        return [_tried(one) if callable(one) else one for one in opened]


def _tried(work: Callable[[], T]) -> T | HeaderError:
    try:
        return work()
    except _UNREADABLE as error:
        release_frames(error)
        return HeaderError(error)


def _request_scalars(path: Path, header: RankHeader, stack: ExitStack) -> Callable[[], RankHeader]:
    """Open a file and request its storages of one element; returns what reads them."""
    wanted = [(int(at), int(count)) for at, _, count in header.storages if count]
    file = stack.enter_context(open_readable(path))
    for at, count in wanted:
        file.will_need(at, count)

    def read() -> RankHeader:
        scalars = bytearray(sum(count for _, count in wanted))
        done = 0
        for at, count in wanted:
            done += file.read_into(memoryview(scalars)[done : done + count], at)
        # If the file has become shorter, an error is raised where a scalar is needed.
        return replace(header, scalars=bytes(scalars) if done == len(scalars) else b"")

    return read


class _HeaderRestorer:
    """Puts the objects of files together from their headers."""

    def __init__(self, first: _Parts) -> None:
        self._keys = list(first.nodes)
        self._nodes = list(first.nodes.values())
        self._with_storages = {
            number: serialized
            for number, (node, serialized) in enumerate(
                zip(self._nodes, first.serialized, strict=True)
            )
            if any(storages_in(node))
        }

    def restore(self, header: RankHeader, path: Path, file: int) -> dict[str, Any]:
        """Return a file's object; parts without storages may be those of other files."""
        storages: dict[int, Storage] = {}

        def persistent_load(identifier: Node) -> Storage:
            dtype, numel, number = identifier
            if number not in storages:
                offset, crc32, count = header.storages[number].tolist()
                start = int(header.storages[:number, 2].sum())
                storages[number] = Storage(
                    dtype, numel, None, file, offset, path,
                    crc32=None if crc32 < 0 else crc32,
                    data=header.scalars[start : start + count] if count else None,
                )  # fmt: skip
            return storages[number]

        own = inert_load.load(header.own, persistent_load) if header.own else {}
        root: dict[str, Any] = {}
        for number, key_path in enumerate(self._keys):
            if number in own:
                node = own[number]
            elif number in self._with_storages:
                node = inert_load.load(self._with_storages[number], persistent_load)
            else:
                node = self._nodes[number]
            inside = root
            for key in key_path[:-1]:
                inside = inside.setdefault(key, {})
            inside[key_path[-1]] = node
        return root


def read_optimizers(sources: SourceFiles, paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Open the optimizer files of all ranks; what they have in common is one object."""
    numbers = [sources.add(path) for path in paths]
    found = sources.read(paths[0], numbers[0])
    headers: list[RankHeader | HeaderError | None] = [None] * (len(paths) - 1)
    restorer = None
    if len(paths) > 1 and type(found.root) is dict:
        try:
            parts = _Parts(found)
        except (KeyError, SourceError):
            pass  # each file is read here
        else:
            restorer = _HeaderRestorer(parts)
            first = _FirstFile(paths[0], parts.digest, parts)
            headers = map_batches(partial(read_headers, first), paths[1:])
    roots: list[dict[str, Any]] = [found.root]
    for path, number, header in zip(paths[1:], numbers[1:], headers, strict=True):
        if isinstance(header, HeaderError):
            raise header.error
        if header is None or restorer is None:
            roots.append(sources.read(path, number).root)
            continue
        sources.note(path, header.unknown)
        roots.append(restorer.restore(header, path, number))
    return roots
