"""Reads the optimizer files of all ranks; what they have in common is one object in memory.

Rank files are nearly identical. Parts that are equal to the first rank's are the first rank's own,
which are examined once. A file that differs from such a file in checksums alone is not parsed.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
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

Place = tuple[Node, ...]


class _Parts:
    """The parts of an optimizer file's object, which are compared one by one."""

    def __init__(self, found: TorchFile) -> None:
        self.storages = [*found.storages.values()]
        self._numbers = {id(storage): number for number, storage in enumerate(self.storages)}
        places = dict(_parts_of(found.root))
        self.keys = [*places]
        self.nodes = [*places.values()]
        self.serialized: list[bytes] = []
        held_bytes = 0
        for node in self.nodes:
            self.serialized.append(inert_dump.dump(node, self._storage_id))
            held_bytes += len(self.serialized[-1])
            if held_bytes > _LIMIT_BYTES:
                raise UnsupportedError("holds parts that are too large to be compared")

    def _storage_id(self, node: Node) -> Node | None:
        if not isinstance(node, Storage):
            return None
        return node.dtype, node.numel, self._numbers[id(node)]

    def key_paths(self) -> list[list[tuple[type, Node]]]:
        """List the keys that lead to each part; 1 and True are equal, but not the same key."""
        return [[(type(key), key) for key in key_path] for key_path in self.keys]


def _parts_of(root: dict[Node, Node], around: Place = ()) -> Iterator[tuple[Place, Node]]:
    """Yield the parts of an object, each with the keys that lead to it."""
    for key, node in root.items():
        key_path = (*around, key)
        if key in _OPENED and type(node) is dict and node and len(key_path) < _DEPTH:
            yield from _parts_of(node, key_path)
        else:
            yield key_path, node


def _parts(found: TorchFile) -> _Parts | None:
    """Take a file's object apart; None if it is no dict, or too large to be compared."""
    try:
        return _Parts(found) if type(found.root) is dict else None
    except (KeyError, SourceError):  # storages outside of the pickle's, or parts without end
        return None


class _RankReader:
    """Reads the files of further ranks, which share what is equal to the first rank's."""

    def __init__(self, sources: SourceFiles, first: _Parts) -> None:
        self._sources = sources
        self._first = first
        self._with_storages = {
            number for number, node in enumerate(first.nodes) if any(storages_in(node))
        }
        self._cache = ParseCache()
        self._storages: dict[int, list[Storage]] = {}
        """Object of a file in the cache, by its id → the file's storages."""

    def read(self, path: Path, number: int) -> tuple[dict[str, Any], Iterable[Storage]]:
        """Return a file's object, and its storages."""
        cached = self._cache.find(path)
        if cached is not None:
            storages = [
                replace(storage, file=number, path=path, crc32=cached.crc32(storage), data=None)
                for storage in self._storages[id(cached.root)]
            ]
            return self._assembled(self._shared(storages)), storages
        found = self._sources.read(path, number)
        parts, first = _parts(found), self._first
        if parts is None or parts.key_paths() != first.key_paths():
            return found.root, found.storages.values()
        both = zip(parts.serialized, first.serialized, strict=True)
        equal = [one == other for one, other in both]
        if all(equal):
            self._cache.remember(path, found)
            self._storages[id(found.root)] = parts.storages
        nodes = [
            first.nodes[n] if equal[n] and n not in self._with_storages else node
            for n, node in enumerate(parts.nodes)
        ]
        return self._assembled(nodes), parts.storages

    def _shared(self, storages: Sequence[Storage]) -> list[Node]:
        """Return the first rank's parts, for a file that has these storages in their places."""
        return [
            inert_load.load(self._first.serialized[number], lambda known: storages[known[2]])
            if number in self._with_storages
            else node
            for number, node in enumerate(self._first.nodes)
        ]

    def _assembled(self, nodes: Iterable[Node]) -> dict[str, Any]:
        """Put the object of a file together from its parts."""
        root: dict[str, Any] = {}
        for key_path, node in zip(self._first.keys, nodes, strict=True):
            inside = root
            for key in key_path[:-1]:
                inside = inside.setdefault(key, {})
            inside[key_path[-1]] = node
        return root


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
    found = sources.read(paths[0], numbers[0])
    first = _parts(found) if len(paths) > 1 else None
    roots: list[dict[str, Any]] = [found.root]
    if first is None:
        both = zip(paths[1:], numbers[1:], strict=True)
        return [*roots, *(sources.read(path, number).root for path, number in both)]
    reader = _RankReader(sources, first)
    for start in range(1, len(paths), _TOGETHER):
        scalars = []
        for path, number in zip(paths[start:], numbers[start : start + _TOGETHER], strict=False):
            root, storages = reader.read(path, number)
            roots.append(root)
            scalars.append((path, [storage for storage in storages if storage.numel == 1]))
        _read_scalars(scalars)
    return roots
