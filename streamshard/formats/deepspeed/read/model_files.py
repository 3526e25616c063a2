"""Opens and compares the model files of a model part: one per rank in stage 3, else one."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamshard.batches import map_batches
from streamshard.errors import SourceError
from streamshard.formats.deepspeed.read.agreement import Facts, differing
from streamshard.formats.deepspeed.read.fingerprints import fingerprints
from streamshard.formats.deepspeed.read.rank_files import ReadFile, SourceFiles, read_dict
from streamshard.formats.pickle.inert import Node
from streamshard.formats.torch import torch_file, zip_directory
from streamshard.formats.torch.parse_cache import CachedParse, ParseCache
from streamshard.formats.torch.torch_file import TorchFile
from streamshard.formats.torch.torch_tensor import Storage, storages_in
from streamshard.io.entries import examine, open_readable
from streamshard.io.retry import FROM_OUTSIDE, ignored

Entries = Mapping[Node, Node]


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A model file and the object in it, which may be shared with an earlier file."""

    path: Path
    number: int
    """Number by which the storages of this file refer to it."""
    root: dict[str, Any]
    cached: CachedParse | None = None
    """Set if `root` is an earlier file's object. Its storages have that file's path and CRC-32."""

    def checksum(self, storage: Storage) -> int:
        """Return the CRC-32 of a storage's content in this file."""
        if self.cached is None:
            return torch_file.checksum(storage)
        crc32 = self.cached.crc32(storage)
        own = replace(storage, file=self.number, path=self.path, crc32=crc32)
        return torch_file.checksum(own)


def match_models(
    parsed: Mapping[int, ReadFile], paths: Sequence[Path]
) -> list[NDArray[np.uint32] | None]:
    """Return the checksums of each file that holds the object of the parsed one of its size.

    They are `CachedParse.crc32s`; None for a file that must be parsed itself.
    """
    found: list[NDArray[np.uint32] | None] = []
    for path in paths:
        cached = None
        # What is wrong with the file is said when it is parsed.
        with ignored(FROM_OUTSIDE), suppress(SourceError, ValueError):
            like = parsed.get(examine(path).nbytes)
            cache = _cache_of(like) if like is not None else None
            cached = cache.find(path) if cache is not None else None
        found.append(None if cached is None else cached.crc32s)
    return found


@lru_cache(maxsize=2)
def _cache_of(like: ReadFile) -> ParseCache | None:
    """Read what files are compared with, once for many batches; None if it is another file here."""
    with open_readable(like.path) as file:
        records = tuple(zip_directory.read(file).values())
    cache = ParseCache()
    cache.remember(like.path, TorchFile(None, {}, records=records))
    skeleton = cache.skeleton(examine(like.path).nbytes)
    return cache if skeleton is not None and skeleton.digest() == like.digest else None


def read_models(sources: SourceFiles, paths: Sequence[Path]) -> list[ModelFile]:
    """Open a model part's model files. Files with the same object are parsed only once."""
    numbers = [sources.add(path) for path in paths]
    if len(paths) == 1:  # there is nothing to compare it with
        return [ModelFile(paths[0], numbers[0], sources.read(paths[0], numbers[0]).root)]
    sizes = [sources.files[number].nbytes for number in numbers]
    cache = ParseCache()
    first = {size: index for index, size in reversed([*enumerate(sizes)])}
    opened = {index: _open(paths[index], numbers[index], cache) for index in first.values()}
    skeletons = {size: cache.skeleton(size) for size in first}
    others = [index for index in range(len(paths)) if index not in opened]
    like = {
        size: ReadFile(paths[first[size]], skeleton.digest())
        for size, skeleton in skeletons.items()
        if skeleton is not None and others
    }
    found = map_batches(partial(match_models, like), [paths[index] for index in others])
    _cache_of.cache_clear()  # a worker keeps it for its next batch; here there is none
    matches = dict(zip(others, found, strict=True))
    files: list[ModelFile] = []
    for index, (path, number) in enumerate(zip(paths, numbers, strict=True)):
        crc32s, skeleton = matches.get(index), skeletons[sizes[index]]
        if crc32s is not None and skeleton is not None:
            own: _Opened = skeleton.cached(crc32s)
        else:
            own = opened[index] if index in opened else _open(path, number, cache)
        if isinstance(own, Exception):
            raise own
        if isinstance(own, CachedParse):
            files.append(ModelFile(path, number, own.root, own))
            continue
        sources.note(path, own.unknown)
        files.append(ModelFile(path, number, own.root))
    return files


_Opened = TorchFile | CachedParse | Exception


def _open(path: Path, number: int, cache: ParseCache) -> _Opened:
    """Find a file in the cache, or parse and remember it; return the error if it is unreadable."""
    try:
        cached = cache.find(path)
        if cached is not None:
            return cached
        found = read_dict(path, number)
        cache.remember(path, found)
    except (SourceError, OSError) as error:
        return error
    return found


@dataclass(frozen=True, slots=True)
class _Compared:
    entries: Entries
    wrong: Sequence[Node]
    """Keys of entries that differ."""
    places: Mapping[Node, frozenset[int]]
    """Entry → the offsets of its storages."""


def differences(
    files: Sequence[ModelFile], entries: Callable[[ModelFile], Entries]
) -> Iterator[tuple[ModelFile, list[Node]]]:
    """Yield each file that differs from the first in some entries, with the keys of these entries.

    If files share one object, only the entries with other checksums are compared again.

    `entries`: selects the entries of a file to compare; called once for each object.
    """
    first: Facts | None = None
    compared: dict[int, _Compared] = {}
    for file in files:
        if file.cached is None:
            picked = entries(file)
            own = fingerprints(picked, file.path, file.checksum)
            first = own if first is None else first
            wrong = differing(first, own)
            places = {k: frozenset(s.offset for s in storages_in(n)) for k, n in picked.items()}
            compared[id(file.root)] = _Compared(picked, wrong, places)
        else:
            wrong = _of_cached(file, file.cached, compared[id(file.root)], first or {})
        if wrong:
            yield file, wrong


def _of_cached(file: ModelFile, cached: CachedParse, like: _Compared, first: Facts) -> list[Node]:
    """List the keys of entries in which a file with a shared object differs from the first."""
    changed = cached.changed()
    again = {
        key: like.entries[key] for key, at in like.places.items() if not changed.isdisjoint(at)
    }
    own = fingerprints(again, file.path, file.checksum)
    same = [key for key in like.wrong if key not in own]
    return [*same, *(key for key in own if first.get(key) != own[key])]
