"""Reads the optimizer files of all ranks; what they have in common is one object in memory.

Rank files are nearly identical. Parts that are equal to the first rank's are the first rank's own,
which are examined once. A file that differs from such a file in checksums alone is not parsed.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from streamshard.errors import SourceError, UnsupportedError
from streamshard.formats.deepspeed import names
from streamshard.formats.deepspeed.read.rank_files import SourceFiles
from streamshard.formats.pickle import inert_dump, inert_load
from streamshard.formats.pickle.inert import Node
from streamshard.formats.torch.parse_cache import ParseCache
from streamshard.formats.torch.torch_file import TorchFile
from streamshard.formats.torch.torch_tensor import Storage, storages_in
from streamshard.io.entries import open_readable

_OPENED: Final = (names.OPTIMIZER, names.BASE_OPTIMIZER)
"""Entries whose own entries are parts."""
_DEPTH: Final = 3
"""Most dicts around a part: the file's, the ZeRO optimizer's and the wrapped optimizer's."""
_LIMIT_BYTES: Final = 1 << 24
"""Parts that take more bytes are not compared."""
_TOGETHER: Final = 16
"""Files whose storages of one element are read side by side."""


def _mapped(root: Mapping[Node, Node], change: Callable[[Node], Node], depth: int = 1) -> Node:
    """Make an object of the same keys, and of what `change` returns for each part."""
    return {
        key: _mapped(node, change, depth + 1)
        if depth < _DEPTH and key in _OPENED and type(node) is dict
        else change(node)
        for key, node in root.items()
    }


def _serialized(found: TorchFile) -> dict[int, bytes]:
    """Serialize the parts of a file's object, storages as their numbers; by the ids of the parts.

    None of them if it is no dict, or too large to be compared.
    """
    numbers = {id(storage): number for number, storage in enumerate(found.storages.values())}
    serialized: dict[int, bytes] = {}
    left = _LIMIT_BYTES

    def persistent_id(node: Node) -> Node | None:
        return (node.dtype, node.numel, numbers[id(node)]) if isinstance(node, Storage) else None

    def serialize(part: Node) -> None:
        nonlocal left
        serialized[id(part)] = inert_dump.dump(part, persistent_id)
        left -= len(serialized[id(part)])
        if left < 0:
            raise UnsupportedError("holds parts that are too large to be compared")

    with suppress(SourceError):  # or nested too deeply
        if type(found.root) is dict:
            _mapped(found.root, serialize)
            return serialized
    return {}


class _RankReader:
    """Reads the files of all ranks, which share what is equal to the first rank's."""

    def __init__(self, sources: SourceFiles) -> None:
        self._sources = sources
        self._cache = ParseCache()
        self._first: dict[bytes, Node] = {}
        """Part of the first rank's object, serialized → the part; None if storages are in it."""
        self._parsed: dict[int, tuple[dict[int, bytes], list[Storage]]] = {}
        """Object of a file in the cache, by its id → its parts, serialized, and its storages."""

    def read(self, path: Path, number: int) -> tuple[dict[str, Any], list[Storage]]:
        """Return a file's object, and its storages."""
        cached = self._cache.find(path)
        if cached is not None:
            self._sources.record(number, cached.recorded, is_whole=bool(cached.crc32s.all()))
            serialized, parsed = self._parsed[id(cached.root)]
            storages = [
                replace(storage, file=number, path=path, crc32=cached.crc32(storage), data=None)
                for storage in parsed
            ]

            def copied(part: Node) -> Node:
                return inert_load.load(serialized[id(part)], lambda known: storages[known[2]])

            return self._shared(cached.root, serialized, copied), storages
        found = self._sources.read(path, number)
        serialized, storages = _serialized(found), [*found.storages.values()]
        if not serialized:
            return found.root, storages
        if not self._first:

            def remember(part: Node) -> None:
                self._first[serialized[id(part)]] = None if any(storages_in(part)) else part

            _mapped(found.root, remember)
        if self._first.keys() >= {*serialized.values()}:
            self._cache.remember(path, found)
            self._parsed[id(found.root)] = serialized, storages
        return self._shared(found.root, serialized, lambda part: part), storages

    def _shared(
        self, root: Node, serialized: Mapping[int, bytes], own: Callable[[Node], Node]
    ) -> Node:
        """Make an object of the first rank's parts where they are equal, and of its `own`."""

        def part_of(part: Node) -> Node:
            known = self._first.get(serialized[id(part)])
            return own(part) if known is None else known

        return _mapped(root, part_of)


def _read_scalars(storages: Iterable[tuple[Path, list[Storage]]]) -> None:
    """Read storages of one element, such as the optimizer's step, of some files side by side."""
    with ExitStack() as stack:
        opened = [
            (stack.enter_context(open_readable(path)), wanted)
            for path, wanted in storages
            if wanted
        ]
        for file, wanted in opened:
            for storage in wanted:
                file.will_need(storage.offset, storage.nbytes)
        for file, wanted in opened:
            for storage in wanted:
                # If the file has become shorter, an error is raised where the scalar is needed.
                storage.data = file.read_at(storage.offset, storage.nbytes)


def read_optimizers(sources: SourceFiles, paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Open the optimizer files of all ranks; what they have in common is one object."""
    numbers = [sources.add(path) for path in paths]
    if len(paths) == 1:  # there is nothing to compare it with
        return [sources.read(paths[0], numbers[0]).root]
    reader = _RankReader(sources)
    roots: list[dict[str, Any]] = []
    for start in range(0, len(paths), _TOGETHER):
        scalars = []
        for path, number in zip(paths[start:], numbers[start : start + _TOGETHER], strict=False):
            root, storages = reader.read(path, number)
            roots.append(root)
            scalars.append((path, [storage for storage in storages if storage.numel == 1]))
        _read_scalars(scalars)
    return roots
