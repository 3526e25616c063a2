"""Our torch files against torch's own, byte by byte."""

import struct
import subprocess
import sys
import zipfile
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from streamshard.errors import CorruptFileError
from streamshard.formats.torch import torch_file
from streamshard.formats.torch.torch_file import Record, TorchLayout
from streamshard.formats.torch.torch_tensor import tensor_of
from streamshard.model import Literal
from tests.formats.graphs import Record as Kept

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
    "gradient": lambda: {"x": torch.ones(3, requires_grad=True), "size": torch.Size([2, 3])},
    "sizes": lambda: [torch.zeros(n, dtype=torch.uint8) for n in range(130)],
    "many": lambda: {f"name.{n}": torch.full((n,), n) for n in range(120)},
}  # fmt: skip


def put_together(layout: TorchLayout, source: bytes) -> bytes:
    """Make the whole file, with the storages' bytes taken from where they were read."""
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


def central_start(data: bytes) -> int:
    """Find the central directory."""
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
    again = torch_file.serialize(torch_file.read(path, 0).root)
    ours = put_together(torch_file.lay_out(again, "some_states"), theirs)
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


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("name", OBJECTS)
def test_ours_are_loaded_by_torch_and_tested_by_zip(tmp_path: Path, name: str, mmap: bool) -> None:
    path = saved(tmp_path, name)
    ours = tmp_path / "ours.pt"
    layout = torch_file.lay_out(torch_file.serialize(torch_file.read(path, 0).root), "ours")
    ours.write_bytes(put_together(layout, path.read_bytes()))
    with zipfile.ZipFile(ours) as archive:
        assert archive.testzip() is None
    for weights_only in {False, name in ("no tensors", "attributed")} - {True}:
        found = torch.load(ours, mmap=mmap, weights_only=weights_only)
        again = tmp_path / "again.pt"
        torch.save(found, again)
        same_records(again, path)
    if name not in ("no tensors", "attributed"):  # names a class, and a tensor's attributes
        torch.load(ours, mmap=mmap, weights_only=True)


def same_records(one: Path, other: Path) -> None:
    """Compare all records but those that tell of the file's name."""
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


def test_the_zip_command_line_finds_no_fault(tmp_path: Path) -> None:
    path = saved(tmp_path, "shared")
    layout = torch_file.lay_out(torch_file.serialize(torch_file.read(path, 0).root), "x")
    (tmp_path / "x.pt").write_bytes(put_together(layout, path.read_bytes()))
    command = [sys.executable, "-m", "zipfile", "-t", str(tmp_path / "x.pt")]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "Done testing" in done.stdout


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
    storages = torch_file.read(path, 0).storages.values()
    assert [storage.nbytes for storage in storages] == sizes
    for record, storage in zip([r for r in records if "/data/" in r.name], storages, strict=True):
        assert storage.offset == record.start + len(record.header())


def test_extents_are_where_torch_reads_them(tmp_path: Path) -> None:
    path = saved(tmp_path, "shared")
    root = torch_file.read(path, 5).root
    data = path.read_bytes()
    for name, wanted in torch.load(path).items():
        tensor = tensor_of(root[name])
        assert tensor is not None
        assert tensor.storage.file == 5
        assert (tensor.shape, tensor.dtype) == (tuple(wanted.shape), "bfloat16")
        piece = data[tensor.offset : tensor.offset + 2 * tensor.numel]
        assert torch.equal(
            torch.frombuffer(bytearray(piece), dtype=torch.bfloat16), wanted.reshape(-1)
        )
    assert root["a"].args[0] is root["b"].args[0]


def test_truncated_at_any_length(tmp_path: Path) -> None:
    data = saved(tmp_path, "shared").read_bytes()
    path = tmp_path / "cut.pt"
    edges = {at + step for at in _signatures(data) for step in (-1, 0, 1, 4, 30)}
    for length in sorted({*edges, *range(0, len(data), 41), len(data) - 1, len(data) - 22}):
        if not 0 <= length < len(data):
            continue
        path.write_bytes(data[:length])
        with pytest.raises(CorruptFileError, match=r"cut\.pt: not a whole torch file") as caught:
            torch_file.read(path, 0)
        assert f"{length} bytes" in str(caught.value)


def _signatures(data: bytes) -> list[int]:
    return [at for at in range(len(data)) if data[at : at + 2] == b"PK"]
