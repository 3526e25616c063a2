"""Parse cache: detects torch files with the same object as an earlier file, without parsing them.

All ranks of stage 3 save the same module: only the bytes of its storages differ. A file's header is
all that reading examines, which is all but the storages' bytes. Two files match if their headers
are equal, byte for byte, where these are blanked:

- the root folder's name, which must be a folder's and the same in all records;
- checksums, which a match has of its own; the pickle's must be right, or left out;
- device numbers of storages, such as `cuda:3`, which must be digits. They are blanked only if the
  pickle makes the same object whatever they are, which `_device_digits` finds out.

Nothing else differs, so parsing a match would give the same object, with every storage at the same
offset, and only other checksums. A file that is no match is parsed, whether it is valid or not.
"""

import re
import zlib
from contextlib import suppress
from dataclasses import dataclass
from itertools import compress
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
from streamshard.model import RecordCrcs

_DEVICE: Final = re.compile(
    rb"X(.)\0\0\0([a-z]+:([0-9]+))(?:q.|r....)?(?:K.|M..|J....)t(?:q.|r....)?Q", re.DOTALL
)
"""The end of a storage's persistent id as torch writes it: the device, the count of elements."""
_MARK: Final = b"\x7f"
"""Stands for a letter of a device's name; it is no opcode of pickles."""
_LIMIT_BYTES: Final = 1 << 26
"""Most bytes of all headers in the cache; one more is in memory while a file is compared."""
_CRC32_BYTES: Final = 4

Offsets = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CachedParse:
    """The values in which a file differs from an earlier file with the same object."""

    root: Node
    """The earlier file's object. Its storages refer to that file; the offsets fit both files."""
    places: Offsets
    """Offsets of the records whose checksums may differ between the files; ascending."""
    crc32s: NDArray[np.uint32]
    """Checksums of these records in this file; 0 if the file does not record one."""
    earlier_crc32s: NDArray[np.uint32]
    """Checksums of these records in the earlier file; 0 likewise."""
    nbytes: Offsets
    """Sizes of these records in either file."""
    names: tuple[str, ...]
    """Their names, without the root folder."""

    @property
    def recorded(self) -> RecordCrcs:
        """The checksums that this file records."""
        is_known = self.crc32s != 0
        names = tuple(compress(self.names, is_known))
        starts, nbytes = self.places[is_known], self.nbytes[is_known]
        return RecordCrcs(starts, starts + nbytes, self.crc32s[is_known], names)

    def changed(self) -> frozenset[int]:
        """Return the offsets of records whose bytes may differ from the earlier file's."""
        unlike = (self.crc32s != self.earlier_crc32s) | (self.crc32s == 0)
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
        self._headers: dict[int, _Header] = {}
        """File size → header of the last parsed file of that size."""

    def remember(self, path: Path, archive: TorchFile) -> None:
        file_bytes = examine(path).nbytes
        ends = (one.entry + NAME_IN_ENTRY + len(one.name.encode()) for one in archive.records)
        if file_bytes < max(ends):  # cut off since it was parsed
            return
        header = _Header(archive, file_bytes, _device_digits(torch_file.pickled(path, archive)))
        read = header.read(path) if header.nbytes <= _LIMIT_BYTES else None
        if read is None:
            return
        header.data, header.crc32s = read
        self._headers.pop(file_bytes, None)
        self._headers[file_bytes] = header
        while sum(kept.nbytes for kept in self._headers.values()) > _LIMIT_BYTES:
            self._headers.pop(next(iter(self._headers)))

    def find(self, path: Path) -> CachedParse | None:
        header = self._headers.get(examine(path).nbytes)
        read = header.read(path) if header is not None else None
        if header is None or read is None or read[0] != header.data:
            return None
        return CachedParse(
            header.root, header.places, read[1], header.crc32s, header.sizes, header.record_names
        )


class _Header:
    """What reading examines in a file, with blanks where a match may differ."""

    data: bytearray
    crc32s: NDArray[np.uint32]
    """Checksums of the records at `places`, which are blanked."""

    def __init__(self, archive: TorchFile, file_bytes: int, digits: Offsets) -> None:
        self.root = archive.root
        records = archive.records
        names = [record.name.partition("/")[2] for record in records]
        is_read = [name in torch_file.LOOKED_INTO for name in names]
        entries = np.array([record.entry for record in records], dtype=np.int64)
        starts = np.array([*(record.header for record in records), entries.min()], dtype=np.int64)
        ends = (one.start + one.nbytes * read for one, read in zip(records, is_read, strict=True))
        stops = np.array([*ends, file_bytes], dtype=np.int64)
        apart = starts[1:] != stops[:-1]
        self._regions = [
            *zip(
                starts[np.r_[True, apart]].tolist(), stops[np.r_[apart, True]].tolist(), strict=True
            )
        ]
        places = np.cumsum(stops - starts) - (stops - starts)
        """Where each record's header begins in what is read, and the directory."""
        self.nbytes = int((stops - starts).sum())
        entries += places[-1] - starts[-1]
        has_header = [record.header < record.start for record in records]
        headers = places[:-1][has_header]
        self._names = np.r_[headers + NAME_IN_HEADER, entries + NAME_IN_ENTRY]
        """Places of the root folder's name, with which the name of every record begins."""
        self._name_bytes = len(records[0].name.partition("/")[0].encode())
        pickled = names.index(PICKLE)
        filled = [n for n, record in enumerate(records) if record.nbytes and not is_read[n]]
        self.places = np.array([records[number].start for number in filled], dtype=np.int64)
        """Offsets of the records whose checksums may differ."""
        self.sizes = np.array([records[number].nbytes for number in filled], dtype=np.int64)
        self.record_names = tuple(names[number] for number in filled)
        self._crc32s = entries[[*filled, pickled]] + CRC32_IN_ENTRY
        """Places of these checksums, and of the pickle's."""
        start = int(places[pickled]) + records[pickled].start - records[pickled].header
        self._pickle = slice(start, start + records[pickled].nbytes)
        self._digits = start + digits

    def read(self, path: Path) -> tuple[bytearray, NDArray[np.uint32]] | None:
        """Read the header of a file of this size, and its checksums; None if it cannot match."""
        data, at = bytearray(self.nbytes), 0
        with open_readable(path) as file:
            file.prepare(self._regions)
            for start, stop in self._regions:
                at += file.read_into(memoryview(data)[at : at + stop - start], start)
        letters = np.frombuffer(data, np.uint8)
        names = sliding_window_view(letters, self._name_bytes, writeable=True)
        crc32s = sliding_window_view(letters, _CRC32_BYTES, writeable=True)
        name, digits = names[self._names[0]].copy(), letters[self._digits]
        listed = np.frombuffer(crc32s[self._crc32s].tobytes(), dtype="<u4")
        is_sound = (
            at == len(data)
            and _is_folder(name.tobytes())
            and (names[self._names] == name).all()
            and ((digits >= ord("0")) & (digits <= ord("9"))).all()
            # As in reading, 0 means that torch was told to leave checksums out.
            and listed[-1] in (0, zlib.crc32(memoryview(data)[self._pickle]))
        )
        if not is_sound:
            return None
        names[self._names], crc32s[self._crc32s], letters[self._digits] = 0, 0, 0
        return data, listed[:-1]


def _device_digits(pickled: bytes) -> Offsets:
    """Return the offsets of the digits of device numbers in a file's pickle.

    Bytes that look like a device may be part of something else, or be used twice. So the pickle is
    read with a marker in place of each name. There are no such digits if the object contains it.
    """
    names = [m for m in _DEVICE.finditer(pickled) if m.end(2) - m.start(2) == m.group(1)[0]]
    digits: list[int] = []
    if not names:
        return np.array(digits, dtype=np.int64)
    marked = bytearray(pickled)
    for match in names:
        marked[match.start(2) : match.end(2)] = _MARK * match.group(1)[0]
    with suppress(SourceError):
        root = inert_load.load(bytes(marked), lambda identifier: storage_from_id(identifier)[0])
        again = inert_dump.dump(root, lambda node: "" if isinstance(node, Storage) else None)
        if _MARK * min(match.group(1)[0] for match in names) not in again:
            digits = [at for match in names for at in range(*match.span(3))]
    return np.array(digits, dtype=np.int64)


def _is_folder(name: bytes) -> bool:
    """Tell whether some bytes can be the name of an archive's root folder."""
    try:
        name.decode()
    except UnicodeDecodeError:
        return False
    return b"/" not in name
