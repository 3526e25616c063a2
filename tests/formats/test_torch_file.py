"""Our torch files against torch's own, byte by byte; an audit that notices every damaged bit."""

import io
import struct
import zipfile
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from streamshard.errors import CorruptFileError
from streamshard.formats.torch import torch_file, zip_layout
from streamshard.formats.torch.zip_audit import TorchAudit, audit, is_torch_file
from streamshard.formats.torch.zip_layout import Record, TorchLayout
from streamshard.model import Literal
from tests.formats.graphs import Record as Kept
from tests.formats.large_records import LargeRecord
from tests.samples import sampled

GIB = 1 << 30
END_BYTES = 56 + 20 + 22
"""Zip64 end record, its locator, the end record."""


def shared() -> object:
    flat = torch.arange(100, dtype=torch.bfloat16)
    return {"a": flat[10:30].view(4, 5), "b": flat[50:], "same": flat}


def attributed() -> object:
    tensor = torch.arange(5.0)
    tensor.ds_id = "3_7"  # type: ignore[attr-defined]
    return [tensor, torch.nn.Parameter(torch.ones(2, 2))]


OBJECTS: dict[str, Any] = {
    "nothing": lambda: None,
    "no tensors": lambda: {"step": 7, "betas": (0.9, 0.95), "object": Kept([1, 2])},
    "one": lambda: torch.arange(7),
    "dtypes": lambda: [
        torch.ones(n, dtype=getattr(torch, dtype))
        for n, dtype in enumerate(
            ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8",
             "uint8", "bool", "complex64", "complex128"]
        )
    ],
    "new dtypes": lambda: [
        torch.zeros(n + 1, dtype=getattr(torch, dtype))
        for n, dtype in enumerate(["float8_e4m3fn", "float8_e5m2", "uint16", "uint32", "uint64"])
    ],
    "empty": lambda: OrderedDict(a=torch.empty(0), b=torch.empty(0, 3), c=torch.tensor(3.5)),
    "shared": shared,
    "attributed": attributed,
    "module": lambda: torch.nn.Linear(3, 2),
    "gradient": lambda: {"x": torch.ones(3, requires_grad=True), "size": torch.Size([2, 3])},
    "sizes": lambda: [torch.zeros(n, dtype=torch.uint8) for n in range(130)],
    "many": lambda: {f"name.{n}": torch.full((n,), n) for n in range(120)},
}  # fmt: skip


def put_together(layout: TorchLayout, source: bytes) -> bytes:
    """Make the whole file; storages' bytes are taken from where they were read."""
    made, crcs = b"", []
    for record in layout.records:
        assert record.start == len(made)
        content = record.content
        data = (
            content.data
            if isinstance(content, Literal)
            else source[content.offset : content.offset + content.nbytes]
        )
        crcs.append(zlib.crc32(data))
        made += record.header() + data + record.descriptor(crcs[-1])
        assert record.end == len(made)
    made += layout.ending(crcs)
    assert len(made) == layout.nbytes
    return made


def remade(path: Path, target: Path) -> Path:
    """Read a file, and write what was read as a file of ours."""
    layout = zip_layout.lay_out(zip_layout.serialize(torch_file.read(path, 0).root), target.stem)
    target.parent.mkdir(exist_ok=True)
    target.write_bytes(put_together(layout, path.read_bytes()))
    return target


def central_start(data: bytes) -> int:
    return int(struct.unpack("<Q", data[-END_BYTES + 48 : -END_BYTES + 56])[0])


def saved(tmp_path: Path, name: str) -> Path:
    path = tmp_path / "some_states.pt"
    torch.save(OBJECTS[name](), path)
    return path


# Of dtypes that came after the typed storages, the bytes are torch's but not the name of the class
# of their storage; torch loads both alike, as the test after this one shows.
@pytest.mark.parametrize("name", [name for name in OBJECTS if name != "new dtypes"])
def test_small_files_are_torchs_byte_by_byte(tmp_path: Path, name: str) -> None:
    path = saved(tmp_path, name)
    theirs = path.read_bytes()
    ours = remade(path, tmp_path / "ours" / path.name).read_bytes()
    # torch ends with a record of a hash of its records, which ours leaves out.
    with zipfile.ZipFile(path) as archive:
        last = archive.infolist()[-1]
    assert last.filename.endswith(".data/serialization_id")
    assert ours[: central_start(ours)] == theirs[: last.header_offset]
    directory = ours[central_start(ours) : -END_BYTES]
    assert theirs[central_start(theirs) :].startswith(directory)
    # The end records: all constants are torch's; counts, sizes and offsets are checked by reading.
    assert ours[-END_BYTES:][:24] == theirs[-END_BYTES:][:24]
    count = len(zipfile.ZipFile(path).infolist()) - 1
    assert struct.unpack("<QQQ", ours[-END_BYTES:][24:48]) == (count, count, len(directory))


@pytest.mark.parametrize("name", OBJECTS)
def test_ours_are_loaded_by_torch_and_tested_by_zip(tmp_path: Path, name: str) -> None:
    path = saved(tmp_path, name)
    ours = remade(path, tmp_path / "ours.pt")
    with zipfile.ZipFile(ours) as archive:
        assert archive.testzip() is None
    again = tmp_path / "again.pt"
    torch.save(torch.load(ours, mmap=True, weights_only=False), again)
    same_records(again, path)
    if name not in ("no tensors", "attributed", "module"):  # which name classes or attributes
        torch.load(ours, weights_only=True)


def same_records(one: Path, other: Path) -> None:
    contents = []
    for path in (one, other):
        with zipfile.ZipFile(path) as archive:
            contents.append(
                {
                    name.partition("/")[2]: archive.read(name)
                    for name in archive.namelist()
                    if not name.endswith("serialization_id")
                }
            )
    assert contents[0] == contents[1]


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param([0xFFFFFFFE, 5, 0], id="just below 4 GiB"),
        pytest.param([0xFFFFFFFF, 5, 64], id="the first that needs Zip64"),
        pytest.param([4 * GIB, 1, 4 * GIB + 7], id="above"),
        pytest.param([3 * GIB, GIB - 700, 3, 3, 3, 3, 3], id="offsets that cross 4 GiB"),
        pytest.param([9 * GIB] * 3, id="large"),
    ],
)
def test_large_files_are_laid_out_as_torch_does(tmp_path: Path, sizes: list[int]) -> None:
    path = tmp_path / "large.pt"
    with FakeTensorMode():
        tensors = [torch.empty(size, dtype=torch.uint8) for size in sizes]
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(tensors, path)
    # Nothing is taken from torch but the names, the sizes and the small records.
    records: list[Record] = []
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist()[:-1]:
            data = b"" if "/data/" in info.filename else archive.read(info)
            start = records[-1].end if records else 0
            records.append(Record(info.filename, start, info.file_size, Literal(data)))
    with path.open("rb") as stream:

        def read(start: int, count: int) -> bytes:
            stream.seek(start)
            return stream.read(count)

        # torch leaves the checksum of what it skipped at 0.
        crcs = [
            zlib.crc32(record.content.data)
            for record in records
            if isinstance(record.content, Literal)
        ]
        for record, crc in zip(records, crcs, strict=True):
            header, descriptor = record.header(), record.descriptor(crc)
            # torch spells the local header's compressed size before it knows it, as 0.
            at = 30 + len(record.name) + 4 + 8
            unknown = slice(at, at + 8) if record.nbytes >= 0xFFFFFFFF else slice(0, 0)
            theirs, wanted = (bytearray(part) for part in (read(record.start, len(header)), header))
            assert struct.unpack("<Q", wanted[unknown] or bytes(8))[0] in (record.nbytes, 0)
            theirs[unknown] = wanted[unknown] = b""
            assert theirs == wanted
            assert read(record.start + len(header) + record.nbytes, len(descriptor)) == descriptor
        tail = read(records[-1].end, 1 << 20)
    directory = TorchLayout(tuple(records)).ending(crcs)[:-END_BYTES]
    assert tail[tail.index(b"PK\x01\x02") :].startswith(directory)
    found = audit(path)
    assert found.problems == ()
    assert [r.nbytes for r in found.records if r.name.startswith("data/")] == sizes
    storages = torch_file.read(path, 0).storages.values()
    assert [storage.nbytes for storage in storages] == sizes
    for record, storage in zip([r for r in records if "/data/" in r.name], storages, strict=True):
        assert storage.offset == record.start + len(record.header())


@sampled(5)
def test_truncated_at_any_length(tmp_path: Path, one_in: int) -> None:
    data = saved(tmp_path, "shared").read_bytes()
    path = tmp_path / "cut.pt"
    for length in (*range(2, len(data), one_in), len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(CorruptFileError, match=r"cut\.pt: not a whole torch file") as caught:
            torch_file.read(path, 0)
        assert f"{length} bytes" in str(caught.value)


# Audit -------------------------------------------------------------------------------------------


def small(directory: Path) -> Path:
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
    path = small(tmp_path)
    for place, root in ((path, "whole"), (remade(path, tmp_path / "ours.pt"), "ours")):
        found = audit(place)
        assert (found.problems, found.root) == ((), root)
        assert wrong_crcs(place, found) == []
        with zipfile.ZipFile(place) as archive:
            infos = {i.filename.partition("/")[2]: (i.file_size, i.CRC) for i in archive.infolist()}
        assert {r.name: (r.nbytes, r.crc32) for r in found.records} == infos
        assert is_torch_file(place)


@pytest.mark.parametrize("how", ["plain", "pipe", "zip64"])
def test_what_zipfile_writes_is_whole(tmp_path: Path, how: str) -> None:
    source = zipfile.ZipFile(small(tmp_path))
    path = tmp_path / "copy.pt"
    target = Pipe(path) if how == "pipe" else path
    with source, zipfile.ZipFile(target, "w") as copy:
        for info in source.infolist():
            is_large = how == "zip64"
            name = LargeRecord(info.filename) if is_large else info.filename
            with copy.open(name, "w", force_zip64=is_large) as record:
                record.write(source.read(info))
    if isinstance(target, Pipe):
        target.close()
    assert len(torch.load(path)["a"]) == 5
    assert audit(path).problems == ()
    assert is_torch_file(path)


def test_every_damaged_byte_is_noticed(tmp_path: Path) -> None:
    path = small(tmp_path)
    data = path.read_bytes()
    silent = []
    with path.open("r+b", buffering=0) as stream:
        for place, byte in enumerate(data):
            value = byte ^ 1 << place % 8 if place % 3 else 255
            stream.seek(place)
            stream.write(bytes([value]))
            found = audit(path)
            if value != byte and not found.problems and not wrong_crcs(path, found):
                silent.append(place)
            assert is_torch_file(path)
            stream.seek(place)
            stream.write(bytes([byte]))
    assert silent == []


def test_damage_of_one_part_hides_no_other(tmp_path: Path) -> None:
    path = small(tmp_path)
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


def test_other_files_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "other"
    for data in (b"", b"PK\x03\x04", b"text", b"\x80\x02}q\0.", bytes(100_000)):
        path.write_bytes(data)
        assert not is_torch_file(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("numbers.npy", b"1")
    assert not is_torch_file(path)
    # TorchScript's, which have compressed records, are another matter.
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", b"1")
        archive.writestr("x/constants.pkl", b"1", zipfile.ZIP_DEFLATED)
    assert not is_torch_file(path)
    torch.save([torch.ones(3)], path, _use_new_zipfile_serialization=False)
    assert not is_torch_file(path)
