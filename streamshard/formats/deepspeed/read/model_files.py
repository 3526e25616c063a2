"""Opens and compares the model files of a model part: one per rank in stage 3, else one."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from streamshard.formats.deepspeed.read.agreement import Facts, differing
from streamshard.formats.deepspeed.read.fingerprints import fingerprints
from streamshard.formats.deepspeed.read.rank_files import SourceFiles
from streamshard.formats.pickle.inert import Node
from streamshard.formats.torch import torch_file
from streamshard.formats.torch.parse_cache import CachedParse, ParseCache
from streamshard.formats.torch.torch_tensor import Storage, storages_in

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


def read_models(sources: SourceFiles, paths: Sequence[Path]) -> list[ModelFile]:
    """Open a model part's model files. Files with the same object are parsed only once."""
    numbers = [sources.add(path) for path in paths]
    if len(paths) == 1:  # there is nothing to compare it with
        return [ModelFile(paths[0], numbers[0], sources.read(paths[0], numbers[0]).root)]
    cache = ParseCache()
    files: list[ModelFile] = []
    for path, number in zip(paths, numbers, strict=True):
        cached = cache.find(path)
        if cached is not None:
            sources.record(number, cached.recorded, is_whole=bool(cached.crc32s.all()))
            files.append(ModelFile(path, number, cached.root, cached))
            continue
        found = sources.read(path, number)
        cache.remember(path, found)
        files.append(ModelFile(path, number, found.root))
    return files


def differences(
    files: Sequence[ModelFile], entries: Callable[[ModelFile], Entries]
) -> Iterator[tuple[ModelFile, list[Node]]]:
    """Yield each file that differs from the first in some entries, with the keys of these entries.

    If files share one object, only the entries with other checksums are compared again.

    `entries`: selects the entries of a file to compare; called once for each object.
    """
    first: Facts | None = None
    compared: dict[int, tuple[Entries, Facts, dict[Node, frozenset[int]]]] = {}
    """Object of a file, by its id → its entries, their fingerprints, and where their storages are.
    """
    for file in files:
        if file.cached is None:
            picked = entries(file)
            facts = fingerprints(picked, file.checksum)
            places = {k: frozenset(s.offset for s in storages_in(n)) for k, n in picked.items()}
            compared[id(file.root)] = picked, facts, places
        else:
            picked, known, places = compared[id(file.root)]
            changed = file.cached.changed()
            again = {key: picked[key] for key, at in places.items() if not changed.isdisjoint(at)}
            facts = {**known, **fingerprints(again, file.checksum)}
        first = facts if first is None else first
        wrong = differing(first, facts)
        if wrong:
            yield file, wrong
