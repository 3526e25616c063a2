"""Makes the objects that `torch.load` would return for files that were never written."""

import io
import pickle
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from streamshard.engine.run.mapping_reader import MappingReader
from streamshard.engine.run.region import RegionFiller
from streamshard.engine.run.source_check import Ranges, ReadLog, SourceCheck
from streamshard.engine.run.work import Region
from streamshard.errors import IntegrityError
from streamshard.io.detached_map import detach_map
from streamshard.io.files import require_all_unchanged
from streamshard.io.object_path import is_object
from streamshard.live.node_share import NodeShare
from streamshard.model import ITEMSIZE
from streamshard.native.files_on_demand import FileContent, FilesOnDemand, StorageContent
from streamshard.source.source import Source

_WEIGHTS: Final = "weights of part "
_LEAST_MAPPED: Final = 1 << 20
"""Smaller storages are read: a process may have some 65,000 maps, and models many small tensors."""
_WINDOW_BYTES: Final = 8 << 20
_SCRATCH_BYTES: Final = 1 << 20


def weights_of(mp_rank: int) -> str:
    """Return the path of what is no file: a part's state dict; see `FilesOnDemand.weights`."""
    return f"{_WEIGHTS}{mp_rank}"


class ServedFiles:
    """Loads the files of a target from the fragments of a source, for one rank.

    A storage that is one fragment of a file, as it is there, is a private map of that file, which
    ranks of one machine share in the page cache. Other storages are read, or mapped where the ranks
    of the machine have read them together.

    `maps`: whether anything is mapped.
    """

    def __init__(self, source: Source, files: FilesOnDemand, *, maps: bool) -> None:
        self._source = source
        self._files = files
        self._maps = maps
        self.log = ReadLog(source.files)
        """Notes the checksums of what this rank reads."""
        self._reader = MappingReader(source.files, reads_once=True, log=self.log)
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._prepared: dict[str, FileContent] = {}
        self._shares: dict[str, NodeShare] = {}
        self._sidecars = files.sidecars()
        self.read_bytes = 0
        self.mapped: dict[int, int] = {}
        """Address → size in bytes of each storage that is mapped."""
        self._held: list[weakref.ref[Any]] = []
        """The memory of each map."""
        self._used: set[int] = set()
        """Files that something was loaded from."""

    @property
    def paths(self) -> list[str]:
        """Paths of all files, relative to the run directory."""
        return [*self._files.paths, *self._sidecars]

    def is_sidecar(self, path: str) -> bool:
        """Tell whether a file is copied as it is: of these a rank loads none, or many."""
        return path in self._sidecars

    def real_path(self, path: str) -> Path | None:
        """Return the source's own file for a path, if it is the file of that path as it is."""
        is_here = not self._source.kind.is_store and not is_object(self._source.path)
        if path not in self._sidecars or not is_here:
            return None
        return self._source.path / self._sidecars[path]

    def prepare(self, path: str) -> None:
        """Find what fills a file, and open the source's files that hold it."""
        content = self._content(path)
        if not self._source.kind.is_store:  # a store has a file for each chunk, which it lists
            for file in sorted(content.source_files()):
                self._reader.require_unchanged(file)
        self._prepared[path] = content

    def share(self, path: str, ranks: int) -> NodeShare:
        """Return how ranks of one machine share what is read of a file that is prepared."""
        numbered = enumerate(self._prepared[path].storages)
        filled = ((n, each) for n, each in numbered if each.nbytes and each.regions)
        read = {n: each for n, each in filled if self._extent(each) is None}
        self._shares[path] = NodeShare(path, read, ranks)
        return self._shares[path]

    def load(self, path: str) -> Any:
        """Return the object in a file."""
        if path in self._sidecars:
            storage = self._files.sidecar(self._sidecars[path]).storages[0]
            data = memoryview(_bytes_of(self._read(storage))).tobytes()
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
        content = self._prepared.pop(path, None) or self._content(path)
        shared = self._shares[path].maps() if path in self._shares else {}
        return self._load(content, shared)

    def require_unchanged(self) -> None:
        """Refuse what was loaded if its files have changed since they were opened."""
        require_all_unchanged([self._source.files[file] for file in sorted(self._used)])

    def settle(self) -> None:
        """Move what is still there of all maps into memory of this process; ends the load.

        A map shows the file: whoever cuts the file off, or writes to it, would reach into the job.
        """
        self.require_unchanged()
        blocks = [block for reference in self._held if (block := reference()) is not None]
        for block in blocks:
            detach_map(block)
        if blocks:  # what they showed until now could change until now
            self.require_unchanged()

    def require_intact(self, read: Iterable[Ranges]) -> None:
        """Compare what all ranks have read with the checksums that the files record."""
        check = SourceCheck(self._source.files)

        def read_rest(ranges: Ranges) -> None:
            self._reader.read_all(ranges, memoryview(bytearray(_WINDOW_BYTES)))
            check.add(self.log.take())

        try:
            for ranges in read:
                check.add(ranges)
            check.settle(read_rest)
        except IntegrityError as error:
            message = "The engine holds what was read of it: build the engine again"
            raise IntegrityError(f"{error}. {message}") from error

    def close(self) -> None:
        """Close the source's files, and shared memory; what is mapped stays."""
        self._reader.close()
        for share in self._shares.values():
            share.close()

    def _content(self, path: str) -> FileContent:
        if path.startswith(_WEIGHTS):
            return self._files.weights(int(path.removeprefix(_WEIGHTS)))
        return self._files.content(path)

    def _load(self, content: FileContent, shared: Mapping[int, memoryview]) -> Any:
        """Return the object in a file; `shared`: storages that are filled, by their numbers."""
        self._used |= content.source_files()
        numbered = enumerate(content.storages)
        made = [self._storage(storage, shared.get(number)) for number, storage in numbered]
        self.require_unchanged()
        return _Unpickler(content, made).load()

    def _storage(self, storage: StorageContent, view: memoryview | None) -> torch.UntypedStorage:
        """Make a storage; `view`: what is in it, if it is in memory of all ranks."""
        extent = self._extent(storage) if view is None else None
        if extent is not None:
            view = self._reader.map(*extent, storage.nbytes, is_private=True, is_checked=True)
        elif view is None or not self._is_mapped(storage):
            return self._read(storage, view)
        mapped = torch.frombuffer(view, dtype=torch.uint8).untyped_storage()
        self.mapped[mapped.data_ptr()] = storage.nbytes
        self._held.append(weakref.ref(view.obj))
        return mapped

    def _is_mapped(self, storage: StorageContent) -> bool:
        return self._maps and storage.nbytes >= _LEAST_MAPPED

    def _extent(self, storage: StorageContent) -> tuple[int, int] | None:
        """Return (file, byte offset) of a storage that can be mapped there."""
        found = storage.fragment() if self._is_mapped(storage) else None
        if found is None or not self._source.files[found[0]].is_plain:
            return None
        return None if found[1] % ITEMSIZE[storage.dtype] else found

    def _read(
        self, storage: StorageContent, shared: memoryview | None = None
    ) -> torch.UntypedStorage:
        memory = torch.UntypedStorage(storage.nbytes)  # type: ignore[no-untyped-call]
        if not storage.nbytes:
            return memory
        view = memoryview(_bytes_of(memory))
        known = storage.data if shared is None else shared
        if known is not None:
            view[:] = known
            return memory
        at = 0
        for region in storage.regions:
            self.fill(region, view[at : at + region.nbytes])
            at += region.nbytes
        return memory

    def fill(self, region: Region, view: memoryview) -> None:
        """Fill a view with a region: in windows, except chunks that are decoded at once."""
        filler = RegionFiller(region, self._reader, self._scratch)
        if self._source.codec_bytes:
            filler.fill(view)
        else:
            for start in range(0, region.nbytes, _WINDOW_BYTES):
                filler.fill(view[start : start + _WINDOW_BYTES])
        self.read_bytes += int(region.copies.nbytes.sum())


class _Unpickler(pickle.Unpickler):
    """Unpickles an object as `torch.load` does, with storages that are made already."""

    def __init__(self, content: FileContent, made: list[torch.UntypedStorage]) -> None:
        super().__init__(io.BytesIO(content.pickled))
        self._dtypes = [storage.dtype for storage in content.storages]
        self._made = made

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name.endswith("Storage"):
            return name  # torch warns of these classes; the id below only mentions them
        return super().find_class(module, name)

    def persistent_load(self, identifier: Any) -> Any:
        number = int(identifier[2])
        dtype = self._dtypes[number]
        return torch.storage.TypedStorage(  # type: ignore[no-untyped-call]
            wrap_storage=self._made[number], dtype=getattr(torch, dtype), _internal=True
        )


def _bytes_of(storage: torch.UntypedStorage) -> Any:
    return torch.tensor([], dtype=torch.uint8).set_(storage).numpy()
