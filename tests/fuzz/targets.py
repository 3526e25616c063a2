"""What is fuzzed: a reader is given bytes, and may return or raise one of its own errors.

Anything else is a finding: another exception, a side effect, an extent that leaves the file, or
something read that is not the same when it is written and read again.
"""

import codecs
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from streamshard.errors import StreamshardError
from streamshard.formats import pickle_files
from streamshard.formats.pickle import inert_dump, inert_load
from streamshard.formats.torch import torch_file
from streamshard.formats.torch.torch_tensor import Storage, tensor_of
from streamshard.formats.torch.tree_comparison import compare_nodes
from streamshard.formats.zarr import store_manifest, store_state
from streamshard.io.readable import ReadableFile

FORBIDDEN: Final = ("exec", "import", "compile", "os.", "subprocess.", "socket.", "shutil.")
"""Audit events that no input may cause; with `open`, but for the one file that is read."""


class SideEffectError(BaseException):
    """A reader did more than to read; not an `Exception`, so that nothing catches it."""


def unpickler(data: bytes, _: Path) -> None:
    """Read a pickle; what was read is written and read again, and must be the same."""
    node = inert_load.load(data, lambda identifier: identifier)
    again = inert_load.load(inert_dump.dump(node, lambda part: None), lambda identifier: identifier)
    # What was just not nested too deeply to be written may be so some frames further down.
    told = [str(found) for found in compare_nodes(node, again, "")]
    assert [found for found in told if "too deeply" not in found] == []


def torch_files(data: bytes, path: Path) -> None:
    """Read a torch file; its storages and tensors lie inside it.

    The list of the names that it asks for is made of any file, even one that cannot be read.
    """
    with path.open("rb") as stream:
        try:
            pickle_files.look_into(ReadableFile(stream.fileno()), path.name)
        except StreamshardError as error:
            raise AssertionError("an error where a finding belongs") from error
    found = torch_file.read(path, 0)
    for storage in found.storages.values():
        assert 0 <= storage.offset <= storage.offset + storage.nbytes <= len(data)
        torch_file.checksum(storage)
    if isinstance(found.root, dict):
        for node in found.root.values():
            tensor = tensor_of(node)
            if tensor is not None and tensor.numel:
                reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride, strict=True))
                assert 0 <= tensor.start <= tensor.start + reach < tensor.storage.numel
    inert_dump.dump(found.root, lambda part: "storage" if isinstance(part, Storage) else None)


def manifests(data: bytes, _: Path) -> None:
    """Read a store's manifest, or its training state: either may be what the bytes are."""
    try:
        manifest = store_manifest.read(data)
    except StreamshardError:
        checkpoint, chunk_shapes = store_state.load(data)
        again, same_shapes = store_state.load(store_state.dump(checkpoint, chunk_shapes))
        assert again.tensors == checkpoint.tensors
        assert list(same_shapes) == list(chunk_shapes)
    else:
        serialized = store_manifest.serialize(
            manifest.records, manifest.codec, manifest.digests or {}
        )
        assert store_manifest.read(serialized).records.keys() == manifest.records.keys()


TARGETS: Final[Mapping[str, Callable[[bytes, Path], None]]] = {
    "manifests": manifests,
    "torch-files": torch_files,
    "unpickler": unpickler,
}


class Harness:
    """Tries inputs, and watches what the process does meanwhile."""

    def __init__(self, name: str, directory: Path) -> None:
        self._target = TARGETS[name]
        self._path = directory / "input.pt"
        """The one file that may be opened."""
        self._is_watching = False
        codecs.lookup("raw_unicode_escape")  # imported on first use
        # Such a hook can never be taken away again.
        sys.addaudithook(self._watch)

    def _watch(self, event: str, args: tuple[object, ...]) -> None:
        if not self._is_watching:
            return
        # What has a number was opened before, and looked at then.
        elsewhere = event == "open" and str(args[0]) != str(self._path) and type(args[0]) is not int
        if elsewhere or event.startswith(FORBIDDEN):
            self._is_watching = False
            raise SideEffectError(f"{event} {args}")

    def try_one(self, data: bytes) -> bool:
        """Give bytes to the reader; tell whether it took them.

        Raises
        ------
        BaseException
            Whatever is a finding.
        """
        self._path.write_bytes(data)
        self._is_watching = True
        try:
            self._target(data, self._path)
        except StreamshardError:
            return False
        finally:
            self._is_watching = False
        return True
