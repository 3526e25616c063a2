"""Parse cache: detects torch files with the same object as an earlier file, without parsing them.

All ranks of stage 3 save the same module: only the bytes of its storages differ. The skeleton of a
file is everything that reading examines, which is all but the storages' bytes. Two files match
if their skeletons are equal, except for the few numbers that may differ. Parsing a match would give
the same object, with every storage at the same offset, and only other checksums. A file that is
no match must be parsed, whether it is valid or not.
"""

import re
import zlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from streamshard.errors import SourceError
from streamshard.formats.pickle import inert_dump, inert_load
from streamshard.formats.pickle.inert import Node
from streamshard.formats.torch import torch_file
from streamshard.formats.torch.torch_file import TorchFile
from streamshard.formats.torch.torch_tensor import Storage, storage_from_id
from streamshard.formats.torch.zip_directory import NAME_IN_ENTRY, NAME_IN_HEADER
from streamshard.formats.torch.zip_layout import CRC32_IN_ENTRY, PICKLE
from streamshard.io.entries import examine, open_readable

_NAME: Final = re.compile(
    rb"X(.)\0\0\0([a-z]+:([0-9]+))(?:q.|r....)?(?:K.|M..|J....)t(?:q.|r....)?Q", re.DOTALL
)
"""The end of a storage's persistent id as torch writes it: the device, the count of elements."""
_MARK: Final = b"\x7f"


class DeviceNumbers:
    """The numbers in the device names of a pickle's storages, such as `cuda:3`."""

    def __init__(self, pickled: bytes) -> None:
        self._pickled = pickled
        found = [m for m in _NAME.finditer(pickled) if m.end(2) - m.start(2) == m.group(1)[0]]
        self._sizes = {match.start(2): match.group(1)[0] for match in found}
        """Offset of a device's name → its size in bytes."""
        digits = [at for match in found for at in range(match.start(3), match.end(3))]
        self.places: NDArray[np.int64] = np.array(digits, dtype=np.int64)
        """Offsets of the digits of the numbers."""

    @cached_property
    def mean_nothing(self) -> bool:
        """Whether the pickle makes the same object, whatever the numbers are.

        Bytes that look like a device name may be part of something else, or be used twice. So the
        pickle is read with a marker in place of each name. The object must not contain the marker.
        """
        marked = bytearray(self._pickled)
        for at, size in self._sizes.items():
            marked[at : at + size] = _MARK * size
        try:
            root = inert_load.load(bytes(marked), lambda identifier: storage_from_id(identifier)[0])
            again = inert_dump.dump(root, lambda node: "" if isinstance(node, Storage) else None)
        except SourceError:
            return False
        return _MARK * min(self._sizes.values(), default=1) not in again


_LIMIT_BYTES: Final = 1 << 26
"""Most bytes of all skeletons in the cache; two more are in memory while a file is compared."""
_CRC32_BYTES: Final = 4

Offsets = NDArray[np.int64]
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class CachedParse:
    """The values in which a file differs from an earlier file with the same object."""

    root: Node
    """The earlier file's object. Its storages refer to that file; the offsets fit both files."""
    places: Offsets
    """Offsets of the records whose checksums may differ between the files; ascending."""
    crc32s: NDArray[np.uint32]
    """Checksums of these records in this file; 0 if the file does not record one."""
    others: NDArray[np.uint32]
    """Checksums of these records in the earlier file; 0 likewise."""

    def changed(self) -> frozenset[int]:
        """Return the offsets of records whose bytes may differ from the earlier file's."""
        unlike = (self.crc32s != self.others) | (self.crc32s == 0)
        return frozenset(self.places[unlike].tolist())

    def crc32(self, storage: Storage) -> int | None:
        """Return this file's recorded CRC-32 of one of the object's storages; None without one."""
        index = int(np.searchsorted(self.places, storage.offset))
        if index == len(self.places) or self.places[index] != storage.offset:
            return storage.crc32
        return int(self.crc32s[index]) or None


class ParseCache:
    """The cache of parsed files, which finds later files that match one of them."""

    def __init__(self) -> None:
        self._skeletons: dict[int, Skeleton] = {}
        """File size → skeleton of the last parsed file of that size."""

    def remember(self, path: Path, found: TorchFile) -> None:
        file_bytes = examine(path).nbytes
        ends = (one.entry + NAME_IN_ENTRY + len(one.name.encode()) for one in found.records)
        if file_bytes < max(ends):  # cut off since it was parsed
            return
        skeleton = Skeleton(path, found, file_bytes)
        if skeleton.nbytes > _LIMIT_BYTES or not skeleton.read():
            return
        self._skeletons.pop(skeleton.file_bytes, None)
        self._skeletons[skeleton.file_bytes] = skeleton
        kept_bytes = sum(kept.nbytes for kept in self._skeletons.values())
        while kept_bytes > _LIMIT_BYTES:
            oldest = self._skeletons.pop(next(iter(self._skeletons)))
            kept_bytes -= oldest.nbytes

    def find(self, path: Path) -> CachedParse | None:
        skeleton = self._skeletons.get(examine(path).nbytes)
        return skeleton.match(path) if skeleton is not None else None


class Skeleton:
    """The bytes of a parsed file that reading examines, and the places where a match may differ."""

    def __init__(self, path: Path, found: TorchFile, file_bytes: int) -> None:
        self._path = path
        self._root = found.root
        self.file_bytes = file_bytes
        paths = [record.name.partition("/")[2] for record in found.records]
        looked_into = [path in torch_file.LOOKED_INTO for path in paths]
        self._regions = _joined(
            [
                *(
                    (record.header, record.start + (record.nbytes if whole else 0))
                    for record, whole in zip(found.records, looked_into, strict=True)
                    if record.header < record.start or whole
                ),
                (min(record.entry for record in found.records), self.file_bytes),
            ]
        )
        self.nbytes = sum(stop - start for start, stop in self._regions)
        entries = np.array([record.entry for record in found.records], dtype=np.int64)
        read = [record.header for record in found.records if record.header < record.start]
        headers = np.array(read, dtype=np.int64)
        self._names = self._place(
            np.concatenate([headers + NAME_IN_HEADER, entries + NAME_IN_ENTRY])
        )
        """Offsets of the root folder's name, with which the name of every record begins."""
        self._name_bytes = len(found.records[0].name.partition("/")[0].encode())
        pickled = paths.index(PICKLE)
        start = int(self._place(np.array([found.records[pickled].start]))[0])
        self._pickle = slice(start, start + found.records[pickled].nbytes)
        filled = np.array([record.nbytes > 0 for record in found.records])
        own = np.flatnonzero(filled & ~np.array(looked_into))
        self._places = np.array([found.records[index].start for index in own], dtype=np.int64)
        self._crc32s = self._place(entries[[*own, pickled]] + CRC32_IN_ENTRY)
        """Offsets of the checksums in which a match may differ. The pickle's checksum is last."""
        self._data = bytearray()
        self._name = b""
        """The root folder's name."""
        self._crc32_bytes: Bytes = np.zeros(0, dtype=np.uint8)
        """The checksums, one per row."""
        self._devices: DeviceNumbers | None = None

    def read(self) -> bool:
        """Read the skeleton; False if the file has become shorter."""
        self._data = self._read(self._path)
        if len(self._data) < self.nbytes:
            return False
        self._name = _rows(self._data, self._name_bytes)[self._names[0]].tobytes()
        self._crc32_bytes = _rows(self._data, _CRC32_BYTES)[self._crc32s]
        return True

    def _read(self, path: Path) -> bytearray:
        """Read the bytes of the regions; fewer bytes if the file ends before."""
        data, at = bytearray(self.nbytes), 0
        with open_readable(path) as file:
            file.prepare(self._regions)
            for start, stop in self._regions:
                piece = memoryview(data)[at : at + stop - start]
                at += file.read_into(piece, start)
        return data if at == len(data) else data[:at]

    def _place(self, offsets: Offsets) -> Offsets:
        """Turn offsets in the file into offsets in the skeleton."""
        starts, stops = np.array(self._regions, dtype=np.int64).T
        before = np.cumsum(stops - starts) - (stops - starts)
        region = np.searchsorted(starts, offsets, side="right") - 1
        placed: Offsets = before[region] + offsets - starts[region]
        return placed

    def match(self, path: Path) -> CachedParse | None:
        """Compare a file of the same size; None if it does not match, or is damaged."""
        own = self._read(path)
        if len(own) != self.nbytes:
            return None
        # A match has its own folder's name, the same in all records, and its own checksums. With
        # the skeleton's in their places, all bytes are the skeleton's.
        names, crc32s = _rows(own, self._name_bytes), _rows(own, _CRC32_BYTES)
        name = names[self._names[0]].tobytes()
        if not _is_folder(name) or (names[self._names] != np.frombuffer(name, np.uint8)).any():
            return None
        names[self._names] = np.frombuffer(self._name, np.uint8)
        listed = _numbers(crc32s[self._crc32s])
        crc32s[self._crc32s] = self._crc32_bytes
        if own != self._data and not self._differs_in_devices(own):
            return None
        # As in reading, 0 means that torch was told to leave checksums out.
        if listed[-1] not in (0, zlib.crc32(memoryview(own)[self._pickle])):
            return None
        known = _numbers(self._crc32_bytes)[:-1]
        return CachedParse(self._root, self._places, listed[:-1], known)

    def _differs_in_devices(self, data: bytearray) -> bool:
        """Tell whether the files differ only in the device numbers of storages."""
        if self._devices is None:
            self._devices = DeviceNumbers(bytes(self._data[self._pickle]))
        own = np.frombuffer(data, np.uint8)
        unlike = own != np.frombuffer(self._data, np.uint8)
        places = self._devices.places + self._pickle.start
        digits = own[places][unlike[places]]
        return bool(
            np.count_nonzero(unlike) == len(digits)
            and ((digits >= ord("0")) & (digits <= ord("9"))).all()
            and self._devices.mean_nothing
        )


def _rows(data: bytearray, count: int) -> Bytes:
    """Return the next bytes from each byte on, as a view of the data: row i begins at byte i."""
    return sliding_window_view(np.frombuffer(data, np.uint8), count, writeable=True)


def _numbers(serialized: Bytes) -> NDArray[np.uint32]:
    """Read 32-bit numbers from rows of bytes, one number per row."""
    return np.frombuffer(serialized.tobytes(), dtype="<u4")


def _joined(regions: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join ascending regions that touch each other."""
    joined = regions[:1]
    for start, stop in regions[1:]:
        if start == joined[-1][1]:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined


def _is_folder(name: bytes) -> bool:
    """Tell whether some bytes can be the name of an archive's root folder."""
    try:
        name.decode()
    except UnicodeDecodeError:
        return False
    return b"/" not in name
