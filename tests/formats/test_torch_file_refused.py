"""Files that are not, or no longer, what torch.save wrote."""

import io
import zipfile
from pathlib import Path

import pytest
import torch

from streamshard.errors import CorruptFileError, StreamshardError, UnsupportedError
from streamshard.formats.torch import torch_file


def rewritten(path: Path, changed: dict[str, bytes | None], compression: int = 0) -> Path:
    """Write a torch file's records again with some of them changed or left out."""
    made = path.with_name("made.pt")
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(made, "w", compression) as target:
        for name in source.namelist():
            key = name.partition("/")[2]
            data = changed.get(key, source.read(name))
            if data is not None:
                target.writestr(name, data)
    return made


@pytest.fixture
def path(tmp_path: Path) -> Path:
    place = tmp_path / "file.pt"
    torch.save({"x": torch.arange(10.0), "y": torch.arange(3)}, place)
    return place


def test_rewritten_unchanged_it_is_read(path: Path) -> None:
    storages = torch_file.read(rewritten(path, {}), 0).storages
    assert [storage.nbytes for storage in storages.values()] == [40, 24]


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
    path: Path, changed: dict[str, bytes | None], kind: type[StreamshardError], match: str
) -> None:
    made = rewritten(path, changed)
    with pytest.raises(kind, match=match) as caught:
        torch_file.read(made, 0)
    assert str(made) in str(caught.value)


def test_compressed_records_are_refused(path: Path) -> None:
    made = rewritten(path, {}, compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(UnsupportedError, match="is compressed"):
        torch_file.read(made, 0)


def test_any_damaged_byte_of_the_frame_reads_or_is_refused(path: Path) -> None:
    data = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        pickled = archive.infolist()[0]
        first = pickled.header_offset + 400
    frame = [*range(first), *range(data.rindex(b"PK\x03\x04"), len(data))]
    for at in frame:
        damaged = bytearray(data)
        damaged[at] ^= (1, 0x80, 0x10)[at % 3]
        path.write_bytes(damaged)
        try:
            torch_file.read(path, 0)
        except StreamshardError as error:
            assert path.name in str(error)  # noqa: PT017 - some damage does no harm


def test_sizes_that_lie_allocate_nothing(path: Path) -> None:
    stream = io.BytesIO()
    pickled = b"\x80\x02X\xff\xff\xff\x7fabc."
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("x/data.pkl", pickled)
    path.write_bytes(stream.getvalue())
    with pytest.raises(CorruptFileError, match="pickle asks for 2147483647 bytes where 4 are left"):
        torch_file.read(path, 0)
