"""Zips that say one thing here and another there, or what torch never says: each is refused."""

import io
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from streamshard.errors import CorruptFileError, StreamshardError, UnsupportedError
from streamshard.formats.torch import torch_file, zip_directory
from streamshard.io.readable import ReadableFile

END = 22
END_64 = 56
LOCATOR_64 = 20
LIMIT = 0xFFFFFFFF
TAIL = END_64 + LOCATOR_64 + END

Change = Callable[[bytearray], bytes | bytearray]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("zip") / "file.pt"
    torch.save({"x": torch.arange(10.0), "y": torch.arange(3), "z": torch.empty(0)}, path)
    return path.read_bytes()


def number(data: bytes | bytearray, at: int, form: str) -> int:
    found: int = struct.unpack_from(form, data, at)[0]
    return found


def central(data: bytes | bytearray, name: str) -> int:
    """Find a record's entry in the central directory."""
    at = data.index(name.encode(), data.index(b"PK\x01\x02"))
    return data.rindex(b"PK\x01\x02", 0, at)


def local(data: bytes | bytearray, name: str) -> int:
    """Find a record's local header."""
    return number(data, central(data, name) + 42, "<I")


def setting(where: Callable[[bytearray], int], form: str, value: int) -> Change:
    """Overwrite a number."""

    def change(data: bytearray) -> bytearray:
        struct.pack_into(form, data, where(data), value)
        return data

    return change


def at_end(offset: int) -> Callable[[bytearray], int]:
    return lambda data: len(data) - offset


def in_central(name: str, offset: int) -> Callable[[bytearray], int]:
    return lambda data: central(data, name) + offset


def in_local(name: str, offset: int) -> Callable[[bytearray], int]:
    return lambda data: local(data, name) + offset


def both(first: Change, second: Change) -> Change:
    return lambda data: bytes(second(bytearray(first(data))))


def renamed(name: str, to: bytes, *, everywhere: bool) -> Change:
    """Call a record by another name of its length."""

    def change(data: bytearray) -> bytearray:
        for at in [central(data, name) + 46, *([local(data, name) + 30] if everywhere else [])]:
            data[at : at + len(to)] = to
        return data

    return change


def without_entry(data: bytearray) -> bytes:
    """Take one entry out of the directory, and nothing else."""
    at = central(data, "data/1")
    end = data.index(b"PK\x01\x02", at + 4)
    return bytes(data[:at] + data[end:])


def comment(data: bytearray) -> bytes:
    struct.pack_into("<H", data, len(data) - 2, 5)
    return bytes(data + b"hello")


def hidden_in_a_comment(data: bytearray) -> bytes:
    """Put the end of another zip into the comment, where a reader from the back finds it first."""
    other = io.BytesIO()
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("file/data.pkl", b"other")
    struct.pack_into("<H", data, len(data) - 2, len(other.getvalue()))
    return bytes(data + other.getvalue())


def behind_something(data: bytearray) -> bytes:
    """Move the zip behind other bytes, with all its offsets."""
    extra, start = 64, number(data, len(data) - TAIL + 48, "<Q")
    at = start
    while data[at : at + 4] == b"PK\x01\x02":
        struct.pack_into("<I", data, at + 42, number(data, at + 42, "<I") + extra)
        at += 46 + sum(struct.unpack_from("<HHH", data, at + 28))
    struct.pack_into("<Q", data, len(data) - TAIL + 48, start + extra)
    struct.pack_into("<Q", data, len(data) - LOCATOR_64 - END + 8, at + extra)
    struct.pack_into("<I", data, len(data) - END + 16, start + extra)
    return b"\x80\x02N." + bytes(extra - 4) + bytes(data)


def overlapping(data: bytearray) -> bytearray:
    """Let one record's data be another one's header and data."""
    reach = local(data, "data/1") - local(data, "data/0")
    for place in (central(data, "data/0") + 20, central(data, "data/0") + 24):
        struct.pack_into("<I", data, place, reach)
    return data


def with_one_header(data: bytearray) -> bytearray:
    """Let two records have one local header."""
    struct.pack_into("<I", data, central(data, "data/1") + 42, local(data, "data/0"))
    return data


LIES: dict[str, tuple[Change, type[StreamshardError], str]] = {
    "bytes behind its end": (lambda d: d + b"\0", CorruptFileError, "no end record"),
    "a comment": (comment, CorruptFileError, "no end record"),
    "a comment that is a zip": (hidden_in_a_comment, CorruptFileError, ""),
    "a comment of a length that is not there": (
        setting(at_end(2), "<H", 5), CorruptFileError, "comment",
    ),
    "another volume": (setting(at_end(END - 4), "<H", 1), CorruptFileError, "volume"),
    "two counts": (setting(at_end(END - 8), "<H", 3), CorruptFileError, "volume"),
    "ends that differ in count": (
        both(setting(at_end(END - 8), "<H", 3), setting(at_end(END - 10), "<H", 3)),
        CorruptFileError, "do not agree",
    ),
    "ends that differ in place": (
        setting(at_end(END - 16), "<I", 77), CorruptFileError, "do not agree",
    ),
    "a locator that leads elsewhere": (
        setting(at_end(END + 12), "<Q", 0), CorruptFileError, "is not where",
    ),
    "a Zip64 end that is larger": (setting(at_end(TAIL - 4), "<Q", 45), CorruptFileError, "is not"),
    "a Zip64 end of two counts": (
        setting(at_end(TAIL - 24), "<Q", 1), CorruptFileError, "another volume",
    ),
    "a directory elsewhere": (
        both(setting(at_end(TAIL - 48), "<Q", 0), setting(at_end(END - 16), "<I", 0)),
        CorruptFileError, "is said to fill",
    ),
    "a directory past the end": (
        both(setting(at_end(TAIL - 48), "<Q", 1 << 62), setting(at_end(END - 16), "<I", LIMIT)),
        CorruptFileError, "is said to fill",
    ),
    "an entry too few": (without_entry, CorruptFileError, ""),
    "no entry where one is": (
        setting(in_central("data/1", 0), "<I", 0), CorruptFileError, "is not an entry",
    ),
    "an encrypted record": (
        setting(in_central("data/0", 8), "<H", 0x0809), UnsupportedError, "is encrypted",
    ),
    "a compressed record": (
        setting(in_central("data/0", 10), "<H", 8), UnsupportedError, "is compressed",
    ),
    "a record that is compressed in its header alone": (
        setting(in_local("data/0", 8), "<H", 8), CorruptFileError, "another one in its local",
    ),
    "a patched record": (
        setting(in_central("data/0", 8), "<H", 0x0828), CorruptFileError, "not stored as torch",
    ),
    "flags that differ": (
        setting(in_local("data/0", 6), "<H", 0), CorruptFileError, "another one in its local",
    ),
    "two sizes": (
        setting(in_central("data/0", 20), "<I", 41), CorruptFileError, "not stored as torch",
    ),
    "another size in the header": (
        setting(in_local("data/0", 22), "<I", 4), CorruptFileError, "local header says 4 where",
    ),
    "another checksum in the header": (
        setting(in_local("data/0", 14), "<I", 4), CorruptFileError, "local header says 4 where",
    ),
    "a size that Zip64 should hold": (
        setting(in_central("data/0", 24), "<I", 0xFFFFFFFF), CorruptFileError, "Zip64 field",
    ),
    "a record's comment": (
        setting(in_central("data/0", 32), "<H", 1), CorruptFileError, "not stored as torch",
    ),
    "a record of another volume": (
        setting(in_central("data/0", 34), "<H", 1), CorruptFileError, "not stored as torch",
    ),
    "another name in the header": (
        renamed("file/data/0", b"file/data/9", everywhere=False),
        CorruptFileError, "another one in its local",
    ),
    "two records of one name": (
        renamed("file/data/0", b"file/data/1", everywhere=True),
        CorruptFileError, "two records are called",
    ),
    "two roots": (
        renamed("file/data/0", b"evil/data/0", everywhere=True), CorruptFileError, "not one that",
    ),
    "a name that is not text": (
        renamed("file/data/0", b"file/data/\xff", everywhere=True), CorruptFileError, "is not text",
    ),
    "no header where one should be": (
        setting(in_local("data/0", 0), "<I", 0), CorruptFileError, "no local header",
    ),
    "a header past the end": (
        setting(in_central("data/0", 42), "<I", 0xFFFFFF00), CorruptFileError, "no local header",
    ),
    "records that overlap": (overlapping, CorruptFileError, "reaches to byte"),
    "records with one header": (with_one_header, CorruptFileError, ""),
    "a record past the directory": (
        both(
            setting(in_central("serialization_id", 20), "<I", 5000),
            setting(in_central("serialization_id", 24), "<I", 5000),
        ),
        CorruptFileError, "reaches to byte",
    ),
    "a zip behind a pickle": (behind_something, CorruptFileError, ""),
    "a zip behind zeros": (
        lambda d: bytes(4) + behind_something(d)[4:], CorruptFileError, "64 bytes before the first",
    ),
    "a damaged pickle": (
        setting(lambda d: d.index(b"\x80\x02"), "<H", 0), CorruptFileError, "checksum differs",
    ),
}  # fmt: skip


def test_unchanged_it_is_read(whole: bytes, tmp_path: Path) -> None:
    (tmp_path / "file.pt").write_bytes(whole)
    assert len(torch_file.read(tmp_path / "file.pt", 0).storages) == 3


@pytest.mark.parametrize("name", LIES)
def test_refused(name: str, whole: bytes, tmp_path: Path) -> None:
    change, kind, says = LIES[name]
    path = tmp_path / "file.pt"
    path.write_bytes(change(bytearray(whole)))
    with pytest.raises(kind, match=rf"file\.pt: .*{says}"):
        torch_file.read(path, 0)


def listed(data: bytes, path: Path) -> dict[str, zip_directory.ZipRecord]:
    path.write_bytes(data)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return zip_directory.read(ReadableFile(descriptor))
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("large", [False, True])
def test_what_other_writers_make_is_read_if_it_is_as_plain(tmp_path: Path, large: bool) -> None:
    made = io.BytesIO()
    contents = {"a/data.pkl": b"one", "a/data/0": b"", "a/é": b"three" * 100}
    with zipfile.ZipFile(made, "w") as archive:
        for name, data in contents.items():
            with archive.open(name, "w", force_zip64=large) as stream:
                stream.write(data)
    found = listed(made.getvalue(), tmp_path / "made.zip")
    assert {n: made.getvalue()[r.start :][: r.nbytes] for n, r in found.items()} == contents
    with zipfile.ZipFile(made) as archive:
        crcs = {info.filename: info.CRC for info in archive.infolist()}
    assert {name: record.crc32 for name, record in found.items()} == crcs


def test_a_zip_of_nothing(tmp_path: Path) -> None:
    assert listed(b"PK\x05\x06" + bytes(18), tmp_path / "made.zip") == {}


def sparse(path: Path, records: dict[str, int]) -> Path:
    """Write a zip of records of zeros that take no room on disk."""
    with path.open("wb") as stream, zipfile.ZipFile(stream, "w") as archive:
        for name, nbytes in records.items():
            with archive.open(name, "w", force_zip64=True) as record:
                record.write(b"\0")
            info = archive.infolist()[-1]
            stream.seek(nbytes - 1, 1)
            info.file_size = info.compress_size = nbytes
            archive.start_dir = stream.tell()
            # The header was written with the size of the one byte.
            end = stream.tell()
            stream.seek(info.header_offset + 30 + len(name) + 4)
            stream.write(struct.pack("<QQ", nbytes, nbytes))
            stream.seek(end)
    return path


def test_a_pickle_of_absurd_size_is_not_read(tmp_path: Path) -> None:
    path = sparse(tmp_path / "huge.pt", {"a/data.pkl": 1 << 36})
    with pytest.raises(UnsupportedError, match=r"68,719,476,736 bytes, for at most 1,073,741,824"):
        torch_file.read(path, 0)


def test_a_small_record_of_absurd_size_is_not_read(tmp_path: Path) -> None:
    path = sparse(tmp_path / "huge.pt", {"a/data.pkl": 5, "a/byteorder": 1 << 36})
    with pytest.raises(UnsupportedError, match=r"byteorder' of 68,719,476,736 bytes"):
        torch_file.read(path, 0)


def test_a_directory_of_absurd_size_is_not_read(tmp_path: Path) -> None:
    path, nbytes = tmp_path / "huge.pt", 1 << 30
    with path.open("wb") as stream:
        stream.write(b"PK\x03\x04")
        stream.truncate(4 + nbytes)
        stream.seek(0, 2)
        stream.write(struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, 9, 9, nbytes, 4, 0))
    with pytest.raises(CorruptFileError, match=r"a zip directory of 1,073,741,824 bytes"):
        torch_file.read(path, 0)


def test_a_program_is_no_checkpoint(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "program.pt", "w") as archive:
        for name in ("data.pkl", "constants.pkl"):
            archive.writestr(f"a/{name}", b"\x80\x02N.")
    with pytest.raises(UnsupportedError, match=r"TorchScript"):
        torch_file.read(tmp_path / "program.pt", 0)


def test_files_saved_without_checksums_are_read(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"x": torch.arange(300.0)}, path)
    finally:
        torch.serialization.set_crc32_options(True)
    (storage,) = torch_file.read(path, 0).storages.values()
    assert storage.crc32 is None
    with_checksums = tmp_path / "other.pt"
    torch.save({"x": torch.arange(300.0)}, with_checksums)
    (other,) = torch_file.read(with_checksums, 0).storages.values()
    assert torch_file.checksum(storage) == other.crc32 == torch_file.checksum(other)
