"""torch's legacy container, older than the zip: consecutive pickles, then the storages' bytes.

`torch.serialization._legacy_save` (torch 2.13) writes a magic number, a version, properties of the
machine, the object, the keys of its storages; then, in the order of the keys, each storage's count
of elements and its bytes. DeepSpeed writes this format with ``"checkpoint_serialization": false``.
It has no checksums.
"""

from typing import Final

from streamshard.errors import CorruptFileError, UnsupportedError
from streamshard.formats.pickle import inert_load
from streamshard.formats.pickle.inert import Node, show
from streamshard.formats.pickle.machine import PersistentLoad, PickleMachine
from streamshard.formats.pickle.opcode_arguments import EndedTooEarlyError
from streamshard.formats.torch.torch_tensor import Storage, storage_from_id
from streamshard.io.readable import Readable
from streamshard.model import ITEMSIZE

MAGIC_NUMBER: Final = 0x1950A86A20F9469CFC6C
_VERSION: Final = 1001
_COUNT_BYTES: Final = 8
"""Size of the count in front of each storage."""


def is_legacy(start: bytes) -> bool:
    """Tell by its first bytes whether a file is a pickle of protocol 2 or later, not a zip."""
    return start[:1] == b"\x80"


def read(source: Readable) -> tuple[Node, dict[str, Storage]]:
    """Read the inert object and its storages by key, without any tensor data."""
    pickles = inert_load.Pickles(source)
    found = _Storages()

    def read(persistent_load: PersistentLoad = _no_storage) -> Node:
        return pickles.read(lambda data, at: PickleMachine(data, at, persistent_load))

    if read() != MAGIC_NUMBER:
        raise CorruptFileError("a pickle, but not one that torch.save wrote")
    version = read()
    if version != _VERSION:
        raise UnsupportedError(f"version {show(version)} of torch's legacy format")
    machine = read()
    if not isinstance(machine, dict) or machine.get("little_endian") is not True:
        raise UnsupportedError("written on a big-endian machine")
    root = read(found.persistent_load)
    found.place(read(), source, pickles.at)
    return root, found.by_key


class _Storages:
    """Collects the storages that an object refers to, and locates them in the file."""

    def __init__(self) -> None:
        self.by_key: dict[str, Storage] = {}

    def persistent_load(self, identifier: Node) -> Node:
        if not isinstance(identifier, tuple) or not identifier:
            raise CorruptFileError("a persistent id does not describe a storage")
        if identifier[0] == "module" and len(identifier) == 4:
            return identifier[1]  # a class, saved with its source text for comparison
        *known, view = identifier
        storage, key = storage_from_id(tuple(known))
        if view is not None:
            message = f"storage {key} is a view of another one, as torch has not saved it since 0.3"
            raise UnsupportedError(message)
        return self.by_key.setdefault(key, storage).require_like(storage, key)

    def place(self, keys: Node, source: Readable, start: int) -> None:
        """Set the offset of each storage. The storages follow each other after the last pickle."""
        if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
            raise CorruptFileError("the list of storages is not a list of keys")
        if sorted(keys) != sorted(self.by_key):
            message = f"{len(keys)} storages listed where the object refers to {len(self.by_key)}"
            raise CorruptFileError(f"{message}, or to others")
        size = source.nbytes
        for key in keys:
            storage = self.by_key[key]
            numel = int.from_bytes(source.read_at(start, _COUNT_BYTES), "little")
            storage.offset = start + _COUNT_BYTES
            start = storage.offset + storage.numel * ITEMSIZE[storage.dtype]
            if start > size:
                raise EndedTooEarlyError(f"storage {key} ends at byte {start}")
            if numel != storage.numel:
                message = f"storage {key} holds {numel} elements where {storage.numel} belong"
                raise CorruptFileError(message)
        if start != size:
            raise CorruptFileError(f"{size - start} bytes behind the last storage")


def _no_storage(_identifier: Node) -> Node:
    raise CorruptFileError("a persistent id where no object is")
