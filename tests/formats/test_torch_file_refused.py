"""Files that are not what torch.save wrote, or say one thing here and another there: refused."""

import io
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from streamshard.errors import CorruptFileError, SourceError, UnsupportedError
from streamshard.formats.torch import torch_file, zip_directory
from streamshard.formats.torch.zip_audit import audit
from streamshard.io.readable import ReadableFile
from tests.formats.large_records import LargeRecord

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
    at = data.index(name.encode(), data.index(b"PK\x01\x02"))
    return data.rindex(b"PK\x01\x02", 0, at)


def local(data: bytes | bytearray, name: str) -> int:
    return number(data, central(data, name) + 42, "<I")


def setting(where: Callable[[bytearray], int], form: str, value: int) -> Change:
    def change(data: bytearray) -> bytearray:
        struct.pack_into(form, data, where(data), value)
        return data

    return change


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


def in_end(offset: int, form: str, value: int) -> Change:
    return setting(lambda data: len(data) - offset, form, value)


def in_central(offset: int, form: str, value: int, name: str = "data/0") -> Change:
    return setting(lambda data: central(data, name) + offset, form, value)


def in_local(offset: int, form: str, value: int) -> Change:
    return setting(lambda data: local(data, "data/0") + offset, form, value)


LIES: dict[str, tuple[Change, str]] = {
    "bytes past its end": (lambda d: d + b"\0", "no end record"),
    "a comment": (comment, "no end record"),
    "a comment that is a zip": (hidden_in_a_comment, ""),
    "a comment of a length that is not there": (in_end(2, "<H", 5), "comment"),
    "another volume": (in_end(END - 4, "<H", 1), "volume"),
    "two counts": (in_end(END - 8, "<H", 3), "volume"),
    "ends that differ in count": (
        both(in_end(END - 8, "<H", 3), in_end(END - 10, "<H", 3)), "do not agree",
    ),
    "ends that differ in place": (in_end(END - 16, "<I", 77), "do not agree"),
    "a locator that leads elsewhere": (in_end(END + 12, "<Q", 0), "is not where"),
    "a Zip64 end that is larger": (in_end(TAIL - 4, "<Q", 45), "is not"),
    "a Zip64 end of two counts": (in_end(TAIL - 24, "<Q", 1), "another volume"),
    "a directory elsewhere": (
        both(in_end(TAIL - 48, "<Q", 0), in_end(END - 16, "<I", 0)), "is said to fill",
    ),
    "a directory past the end": (
        both(in_end(TAIL - 48, "<Q", 1 << 62), in_end(END - 16, "<I", LIMIT)), "is said to fill",
    ),
    "an entry too few": (without_entry, ""),
    "no entry where one is": (in_central(0, "<I", 0, "data/1"), "is not an entry"),
    "an encrypted record": (in_central(8, "<H", 0x0809), "is encrypted"),
    "a compressed record": (in_central(10, "<H", 8), "is compressed"),
    "a record that is compressed in its header alone": (
        in_local(8, "<H", 8), "another one in its local",
    ),
    "a patched record": (in_central(8, "<H", 0x0828), "not stored as torch"),
    "flags that differ": (in_local(6, "<H", 0), "another one in its local"),
    "two sizes": (in_central(20, "<I", 41), "not stored as torch"),
    "another size in the header": (in_local(22, "<I", 4), "local header says 4 where"),
    "another checksum in the header": (in_local(14, "<I", 4), "local header says 4 where"),
    "a size that Zip64 should hold": (in_central(24, "<I", LIMIT), "Zip64 field"),
    "a record's comment": (in_central(32, "<H", 1), "not stored as torch"),
    "a record of another volume": (in_central(34, "<H", 1), "not stored as torch"),
    "another name in the header": (
        renamed("file/data/0", b"file/data/9", everywhere=False), "another one in its local",
    ),
    "two records of one name": (
        renamed("file/data/0", b"file/data/1", everywhere=True), "two records are called",
    ),
    "two roots": (renamed("file/data/0", b"evil/data/0", everywhere=True), "not one that"),
    "a name that is not text": (
        renamed("file/data/0", b"file/data/\xff", everywhere=True), "is not text",
    ),
    "no header where one should be": (in_local(0, "<I", 0), "no local header"),
    "a header past the end": (in_central(42, "<I", 0xFFFFFF00), "no local header"),
    "records that overlap": (overlapping, "reaches to byte"),
    "records with one header": (with_one_header, ""),
    "a record past the directory": (
        both(
            in_central(20, "<I", 5000, "serialization_id"),
            in_central(24, "<I", 5000, "serialization_id"),
        ),
        "reaches to byte",
    ),
    "a zip behind a pickle": (behind_something, "legacy format"),
    "a zip behind zeros": (
        lambda d: bytes(4) + behind_something(d)[4:], "64 bytes before the first",
    ),
    "a damaged pickle": (setting(lambda d: d.index(b"\x80\x02"), "<H", 0), "checksum differs"),
}  # fmt: skip
UNSUPPORTED = {"an encrypted record", "a compressed record", "a zip behind a pickle"}


@pytest.fixture
def path(whole: bytes, tmp_path: Path) -> Path:
    place = tmp_path / "file.pt"
    place.write_bytes(whole)
    return place


@pytest.mark.parametrize("name", LIES)
def test_a_zip_that_lies_is_refused(name: str, path: Path) -> None:
    change, says = LIES[name]
    path.write_bytes(change(bytearray(path.read_bytes())))
    kind = UnsupportedError if name in UNSUPPORTED else CorruptFileError
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
            with archive.open(LargeRecord(name), "w", force_zip64=True) as record:
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


@pytest.mark.parametrize(
    ("records", "says"),
    [
        ({"a/data.pkl": 1 << 36}, "68,719,476,736 bytes, for at most 1,073,741,824"),
        ({"a/data.pkl": 5, "a/byteorder": 1 << 36}, "byteorder' of 68,719,476,736 bytes"),
    ],
)
def test_a_record_of_absurd_size_is_not_read(
    tmp_path: Path, records: dict[str, int], says: str
) -> None:
    with pytest.raises(UnsupportedError, match=says):
        torch_file.read(sparse(tmp_path / "huge.pt", records), 0)


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


@pytest.mark.usefixtures("_no_checksums")
def test_files_saved_without_checksums_are_read(path: Path, tmp_path: Path) -> None:
    torch.save(torch.arange(10.0), tmp_path / "none.pt")
    (found,) = torch_file.read(tmp_path / "none.pt", 0).storages.values()
    known = next(iter(torch_file.read(path, 0).storages.values()))
    assert found.crc32 is None
    assert torch_file.checksum(found) == known.crc32 == torch_file.checksum(known)


# Records ------------------------------------------------------------------------------------------


def rewritten(path: Path, changed: dict[str, bytes | None]) -> Path:
    """Write a torch file's records again with some of them changed or left out."""
    made = path.with_name("made.pt")
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(made, "w") as target:
        for name in source.namelist():
            key = name.partition("/")[2]
            data = changed.get(key, source.read(name))
            if data is not None:
                target.writestr(name, data)
    return made


@pytest.mark.parametrize("content", [b"", b"P", b"PK", b"hello", b"PK\x05\x06" + bytes(18)])
def test_what_is_no_torch_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "no.pt"
    path.write_bytes(content)
    with pytest.raises(CorruptFileError, match=r"no\.pt: "):
        torch_file.read(path, 0)


def test_another_zip_file(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "other.pt", "w") as archive:
        archive.writestr("readme", "hello")
    with pytest.raises(CorruptFileError, match=r"other\.pt: a zip file, but not one"):
        torch_file.read(tmp_path / "other.pt", 0)


@pytest.mark.parametrize(
    ("changed", "kind", "match"),
    [
        pytest.param({"data/0": b"123"}, CorruptFileError, "40 bytes has 3 bytes", id="short"),
        pytest.param({"data/1": None}, CorruptFileError, "24 bytes has no record", id="gone"),
        pytest.param({"byteorder": b"big"}, UnsupportedError, "big-endian", id="big-endian"),
        pytest.param(
            {"data.pkl": b"\x80\x02]"}, CorruptFileError, "not a whole torch file", id="pickle"
        ),
        pytest.param({"data.pkl": b"\x80\x02NQ."}, CorruptFileError, "persistent id", id="id"),
        pytest.param(
            {"data.pkl": b"\x80\x02(U\x07storagecm\nC\nU\x010U\x03cpuK\x01tQ."},
            UnsupportedError,
            "storage of type m.C",
            id="unknown storage",
        ),
    ],
)
def test_wrong_records_are_named(
    path: Path, changed: dict[str, bytes | None], kind: type[SourceError], match: str
) -> None:
    made = rewritten(path, changed)
    with pytest.raises(kind, match=match) as caught:
        torch_file.read(made, 0)
    assert str(made) in str(caught.value)


def test_the_format_before_the_zip_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "old.pt"
    torch.save({"x": torch.ones(3)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(
        UnsupportedError, match=r"old\.pt: .*legacy format .* save it once with torch"
    ):
        torch_file.read(path, 0)
    (problem,) = audit(path).problems
    assert "legacy format" in problem
