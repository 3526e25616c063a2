"""Makes the objects that `torch.load` would return for files that were never written."""

import io
import pickle
import weakref
from pathlib import Path
from typing import Any, Final

import torch

from streamshard.engine.run.region import RegionFiller
from streamshard.engine.run.source_reader import SourceReader
from streamshard.io.files import require_all_unchanged
from streamshard.io.memory_map import detach_map
from streamshard.io.object_path import is_object
from streamshard.model import ITEMSIZE
from streamshard.operations.native.files_on_demand import FileContent, FilesOnDemand, StorageContent
from streamshard.operations.source.source import Source

_LEAST_MAPPED: Final = 1 << 20
"""Smaller storages are read: a process may have some 65,000 maps, and models many small tensors."""
_WINDOW_BYTES: Final = 8 << 20
_SCRATCH_BYTES: Final = 1 << 20


class ServedFiles:
    """Loads the files of a target from the fragments of a source, for one rank.

    A storage that is one fragment of a file, as it is there, is a private map of that file, which
    ranks of one machine share in the page cache. Other storages are read.

    `maps`: whether anything is mapped.
    """

    def __init__(self, source: Source, files: FilesOnDemand, *, maps: bool) -> None:
        self._source = source
        self._files = files
        self._maps = maps
        self._reader = SourceReader(source.files)
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._prepared: dict[str, FileContent] = {}
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
        is_here = self._source.kind != "store" and not is_object(self._source.path)
        if path not in self._sidecars or not is_here:
            return None
        return self._source.path / self._sidecars[path]

    def prepare(self, path: str) -> None:
        """Find what fills a file, and open the source's files that hold it."""
        content = self._files.content(path)
        if self._source.kind != "store":  # a store has a file for each chunk, which it lists
            for file in sorted(content.source_files()):
                self._reader.require_unchanged(file)
        self._prepared[path] = content

    def load(self, path: str) -> Any:
        """Return the object in a file."""
        if path in self._sidecars:
            storage = self._files.sidecar(self._sidecars[path]).storages[0]
            data = memoryview(_bytes_of(self._read(storage))).tobytes()
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
        content = self._prepared.pop(path, None) or self._files.content(path)
        return self._load(content)

    def weights(self) -> Any:
        """Return the module's state dict with master weights; see `FilesOnDemand.weights`."""
        return self._load(self._files.weights())

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

    def close(self) -> None:
        """Close the source's files; what is mapped stays."""
        self._reader.close()

    def _load(self, content: FileContent) -> Any:
        self._used |= content.source_files()
        made = [self._storage(storage) for storage in content.storages]
        self.require_unchanged()
        return _Unpickler(content, made).load()

    def _storage(self, storage: StorageContent) -> torch.UntypedStorage:
        extent = storage.fragment() if self._maps and storage.nbytes >= _LEAST_MAPPED else None
        if extent is None or not self._is_plain(*extent, ITEMSIZE[storage.dtype]):
            return self._read(storage)
        view = self._reader.map(*extent, storage.nbytes, is_private=True, is_checked=True)
        mapped = torch.frombuffer(view, dtype=torch.uint8).untyped_storage()
        self.mapped[mapped.data_ptr()] = storage.nbytes
        self._held.append(weakref.ref(view.obj))
        return mapped

    def _is_plain(self, file: int, offset: int, itemsize: int) -> bool:
        return self._source.files[file].is_plain and offset % itemsize == 0

    def _read(self, storage: StorageContent) -> torch.UntypedStorage:
        made = torch.UntypedStorage(storage.nbytes)  # type: ignore[no-untyped-call]
        if not storage.nbytes:
            return made
        view = memoryview(_bytes_of(made))
        if storage.data is not None:
            view[:] = storage.data
            return made
        at = 0
        for region in storage.regions:
            filler = RegionFiller(region, self._reader, self._scratch)
            stop = at + region.nbytes
            for start in range(at, stop, _WINDOW_BYTES):
                filler.fill(view[start : min(start + _WINDOW_BYTES, stop)])
            at = stop
        self.read_bytes += storage.source_bytes()
        return made


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
