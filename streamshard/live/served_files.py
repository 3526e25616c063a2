"""Makes the objects that `torch.load` would return for files that were never written."""

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from streamshard.engine.run.region import RegionFiller
from streamshard.engine.run.source_reader import SourceReader
from streamshard.model import ITEMSIZE, BlockDigests
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

    Parameters
    ----------
    maps
        Whether anything is mapped.
    """

    def __init__(self, source: Source, files: FilesOnDemand, *, maps: bool) -> None:
        self._source = source
        self._files = files
        self._maps = maps
        self._reader = SourceReader(source.files, source.decoders)
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._prepared: dict[str, FileContent] = {}
        self._sidecars = files.sidecars()
        self.read_bytes = 0
        self.mapped: dict[int, int] = {}
        """Address → size in bytes of each storage that is mapped."""

    @property
    def paths(self) -> list[str]:
        """Paths of all files, relative to the run directory."""
        return [*self._files.paths, *self._sidecars]

    def real_path(self, path: str) -> Path | None:
        """Return the source's own file for a path, if it is the file of that path as it is."""
        if path not in self._sidecars or self._source.kind == "store":
            return None
        return self._source.path / self._sidecars[path]

    def prepare(self, path: str) -> None:
        """Find what fills a file, and open the source's files that hold it.

        Raises
        ------
        SourceError
            One of them cannot be read, or has changed.
        """
        content = self._files.content(path)
        if self._source.kind != "store":  # a store has a file for each chunk, which it lists
            for file in sorted(content.source_files()):
                self._reader.require_unchanged(file)
        self._prepared[path] = content

    def load(self, path: str) -> Any:
        """Return the object in a file.

        Raises
        ------
        StreamshardError
            The source cannot be read, or is damaged.
        KeyError
            There is no such file.
        """
        if path in self._sidecars:
            storage = self._files.sidecar(self._sidecars[path]).storages[0]
            content = memoryview(_bytes_of(self._read(storage))).tobytes()
            return torch.load(io.BytesIO(content), map_location="cpu", weights_only=False)
        if path in self._prepared:
            return self._load(self._prepared.pop(path))
        return self._load(self._files.content(path))

    def weights(self) -> Any:
        """Return the module's state dict with master weights; see `FilesOnDemand.weights`."""
        return self._load(self._files.weights())

    def close(self) -> None:
        """Close the source's files; what is mapped stays."""
        self._reader.close()

    def _load(self, content: FileContent) -> Any:
        made = [self._storage(storage) for storage in content.storages]
        return _Unpickler(content, made).load()

    def _storage(self, storage: StorageContent) -> torch.UntypedStorage:
        place = storage.fragment() if self._maps and storage.nbytes >= _LEAST_MAPPED else None
        if place is None or not self._is_plain(*place, ITEMSIZE[storage.dtype]):
            return self._read(storage)
        view = self._reader.map(*place, storage.nbytes, is_private=True, is_checked=True)
        mapped = torch.frombuffer(view, dtype=torch.uint8).untyped_storage()
        self.mapped[mapped.data_ptr()] = storage.nbytes
        return mapped

    def _is_plain(self, file: int, offset: int, itemsize: int) -> bool:
        decoder = self._source.decoders.get(file)
        return (decoder is None or isinstance(decoder, BlockDigests)) and offset % itemsize == 0

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


def settle(root: Any, mapped: Mapping[int, int], moved: dict[int, torch.UntypedStorage]) -> None:
    """Move every tensor in a tree of containers from mapped memory into memory of its own.

    A map shows the file: who cuts the file off, or writes to it, would reach into the job.

    Parameters
    ----------
    moved
        Address → storage that took the place of a mapped one: tensors that shared it still do.
    """
    if isinstance(root, torch.Tensor):
        _settle_tensor(root, mapped, moved)
    elif isinstance(root, Mapping):
        for value in root.values():
            settle(value, mapped, moved)
    elif isinstance(root, list | tuple | set):
        for value in root:
            settle(value, mapped, moved)


def _settle_tensor(
    tensor: torch.Tensor, mapped: Mapping[int, int], moved: dict[int, torch.UntypedStorage]
) -> None:
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return
    storage = tensor.untyped_storage()
    address = storage.data_ptr()
    if address not in mapped:
        return
    if address not in moved:
        moved[address] = storage.clone()  # type: ignore[no-untyped-call]
    own = torch.empty(0, dtype=tensor.dtype)
    own.set_(moved[address], tensor.storage_offset(), tensor.size(), tensor.stride())
    tensor.data = own
