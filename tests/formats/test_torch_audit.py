"""The containers of torch files: whole ones pass whoever wrote them, no damaged bit does."""

import io
import zipfile
import zlib
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from streamshard.formats.torch import torch_file
from streamshard.formats.torch.zip_audit import TorchAudit, audit, is_legacy, is_torch_file
from tests.formats.test_torch_file import put_together

GIB = 1 << 30


def saved(directory: Path) -> Path:
    """Save a small file with torch: an empty storage is in it, and one that is shared."""
    path = directory / "whole.pt"
    shared = torch.arange(12, dtype=torch.bfloat16)
    torch.save({"a": shared[:5], "b": shared[5:], "c": torch.empty(0), "d": {"e": [1, None]}}, path)
    return path


def wrong_crcs(path: Path, found: TorchAudit) -> list[str]:
    """List the records whose bytes do not have the CRC that the directory has of them."""
    data = path.read_bytes()
    return [r.name for r in found.records if zlib.crc32(data[r.start :][: r.nbytes]) != r.crc32]


class Pipe(io.RawIOBase):
    """A stream that cannot go back, for which zipfile writes sizes behind the data."""

    def __init__(self, path: Path) -> None:
        self._stream = path.open("wb")

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]
        return self._stream.write(data)

    def close(self) -> None:
        self._stream.close()


def test_what_torch_and_what_we_write_is_whole(tmp_path: Path) -> None:
    path = saved(tmp_path)
    layout = torch_file.lay_out(torch_file.serialize(torch_file.read(path, 0).root), "ours")
    (tmp_path / "ours.pt").write_bytes(put_together(layout, path.read_bytes()))
    for place, root in ((path, "whole"), (tmp_path / "ours.pt", "ours")):
        found = audit(place)
        assert (found.problems, found.root) == ((), root)
        assert wrong_crcs(place, found) == []
        with zipfile.ZipFile(place) as archive:
            infos = {i.filename.partition("/")[2]: (i.file_size, i.CRC) for i in archive.infolist()}
        assert {r.name: (r.nbytes, r.crc32) for r in found.records} == infos
        assert is_torch_file(place)


@pytest.mark.parametrize("how", ["plain", "pipe", "zip64"])
def test_what_zipfile_writes_is_whole(tmp_path: Path, how: str) -> None:
    source = zipfile.ZipFile(saved(tmp_path))
    path = tmp_path / "copy.pt"
    target = Pipe(path) if how == "pipe" else path
    with source, zipfile.ZipFile(target, "w") as copy:
        for info in source.infolist():
            with copy.open(info.filename, "w", force_zip64=how == "zip64") as record:
                record.write(source.read(info))
    if isinstance(target, Pipe):
        target.close()
    assert len(torch.load(path)["a"]) == 5
    assert audit(path).problems == ()
    assert is_torch_file(path)


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param([0xFFFFFFFE, 5, 0], id="just below 4 GiB"),
        pytest.param([0xFFFFFFFF, 5, 64], id="the first that needs Zip64"),
        pytest.param([4 * GIB, 1, 4 * GIB + 7], id="above"),
        pytest.param([3 * GIB, GIB - 700, 3, 3, 3, 3, 3], id="offsets that cross 4 GiB"),
    ],
)
def test_large_files_of_torch_are_whole(tmp_path: Path, sizes: list[int]) -> None:
    path = tmp_path / "large.pt"
    with FakeTensorMode():
        tensors = [torch.empty(size, dtype=torch.uint8) for size in sizes]
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(tensors, path)
    found = audit(path)
    assert found.problems == ()
    assert [r.nbytes for r in found.records if r.name.startswith("data/")] == sizes


@pytest.mark.parametrize("how", ["one bit", "zero", "ones"])
def test_every_damaged_byte_is_noticed(tmp_path: Path, how: str) -> None:
    path = saved(tmp_path)
    data = path.read_bytes()
    silent = []
    with path.open("r+b", buffering=0) as stream:
        for place, byte in enumerate(data):
            value = {"one bit": byte ^ 1 << place % 8, "zero": 0, "ones": 255}[how]
            stream.seek(place)
            stream.write(bytes([value]))
            found = audit(path)
            if value != byte and not found.problems and not wrong_crcs(path, found):
                silent.append(place)
            assert is_torch_file(path)
            stream.seek(place)
            stream.write(bytes([byte]))
    assert silent == []


def test_every_length_but_the_whole_is_noticed(tmp_path: Path) -> None:
    path = saved(tmp_path)
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        assert audit(path).problems
    path.write_bytes(data + b"\0")
    assert audit(path).problems
    path.write_bytes(b"\0" + data)
    assert audit(path).problems


def test_every_byte_taken_out_or_put_in_is_noticed(tmp_path: Path) -> None:
    path = saved(tmp_path)
    data = path.read_bytes()
    for place in range(len(data)):
        for damaged in (data[:place] + data[place + 1 :], data[:place] + b"Z" + data[place:]):
            path.write_bytes(damaged)
            found = audit(path)
            assert damaged == data or found.problems or wrong_crcs(path, found), place


def test_damage_of_one_part_hides_no_other(tmp_path: Path) -> None:
    path = saved(tmp_path)
    data, before = bytearray(path.read_bytes()), audit(path).records
    with zipfile.ZipFile(path) as archive:
        headers = [info.header_offset for info in archive.infolist()]
    for header in headers[:2]:
        data[header] ^= 1
    data[-18] ^= 1  # the number of a volume in the end record
    path.write_bytes(data)
    found = audit(path)
    assert found.records == before[2:]
    assert len(found.problems) == 3
    assert "another volume" in found.problems[0]
    assert all("no local header" in problem for problem in found.problems[1:])


def test_two_records_of_one_name(tmp_path: Path) -> None:
    path = tmp_path / "twice.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", b"1")
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("x/data.pkl", b"2")
    assert audit(path).problems == ("2 records are called x/data.pkl",)


def test_a_compressed_record_is_none_of_torch_s(tmp_path: Path) -> None:
    path = tmp_path / "packed.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", bytes(1000))
    (problem,) = audit(path).problems
    assert "compressed" in problem


def test_other_files_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "other"
    for data in (b"", b"PK\x03\x04", b"text", b"\x80\x02}q\0.", bytes(100_000)):
        path.write_bytes(data)
        assert not is_torch_file(path)
        assert is_legacy(path) == data.startswith(b"\x80")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("numbers.npy", b"1")
    assert not is_torch_file(path)
    # TorchScript's, which have compressed records, are another matter.
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", b"1")
        archive.writestr("x/constants.pkl", b"1", zipfile.ZIP_DEFLATED)
    assert not is_torch_file(path)
    torch.save([torch.ones(3)], path, _use_new_zipfile_serialization=False)
    assert is_legacy(path)
    assert not is_torch_file(path)
