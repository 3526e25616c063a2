"""Files that hold the same object as one read before: known for it, and never taken for it."""

import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from streamshard.errors import SourceError
from streamshard.formats.pickle.inert import Node
from streamshard.formats.pickle.inert_dump import dump
from streamshard.formats.torch import parse_cache, torch_file
from streamshard.formats.torch.parse_cache import CachedParse, ParseCache
from streamshard.formats.torch.torch_tensor import Storage
from tests.formats.conftest import Device
from tests.samples import sampled


def serialized(root: Node, match: CachedParse | None) -> bytes:
    def persistent_id(node: Node) -> Node | None:
        if not isinstance(node, Storage):
            return None
        return node.dtype, node.numel, node.offset, match.crc32(node) if match else node.crc32

    return dump(root, persistent_id)


def require_rightly_known(known: ParseCache, path: Path) -> bool:
    """Tell whether a file is known as a match; then parsing it must find just what is known."""
    match = known.find(path)
    if match is not None:
        assert serialized(match.root, match) == serialized(torch_file.read(path, 0).root, None)
    return match is not None


def remembered(path: Path) -> ParseCache:
    known = ParseCache()
    known.remember(path, torch_file.read(path, 0))
    return known


def is_known(one: Path, other: Path) -> bool:
    """Tell whether the second is known for the object of the first."""
    return require_rightly_known(remembered(one), other)


def saved(directory: Path, *contents: object) -> list[Path]:
    paths = [directory / f"rank_{rank}.pt" for rank in range(len(contents))]
    for path, held in zip(paths, contents, strict=True):
        torch.save(held, path)
    return paths


def of_devices(directory: Path, device: Device, *names: str) -> list[Path]:
    paths = [directory / f"rank_{rank}.pt" for rank in range(len(names))]
    for rank, name in enumerate(names):
        device.name = name
        torch.save(content(rank), paths[rank])
    return paths


def content(seed: int) -> dict[str, Any]:
    """Make what a rank saves: placeholders, a buffer and a shard of its own, plain values."""
    return {
        "module": {"a": torch.empty(0), "b": torch.empty(0), "scale": torch.arange(3.0) + seed},
        "fragments": {"old": torch.full((5,), seed, dtype=torch.bfloat16)},
        "step": 7,
    }


def places(path: Path) -> dict[str, set[int]]:
    """Tell of each byte of a file what it is, with the standard library's reader of zips."""
    with zipfile.ZipFile(path) as archive:
        data, entry = path.read_bytes(), archive.start_dir
        found: dict[str, set[int]] = {"data": set(), "crc32": set()}
        covered = set(range(archive.start_dir, len(data)))
        for info in archive.infolist():
            lengths = struct.unpack_from("<HH", data, info.header_offset + 26)
            start = info.header_offset + 30 + sum(lengths)
            covered |= set(range(info.header_offset, start))
            if info.filename.endswith(("/data.pkl", "/byteorder")):
                covered |= set(range(start, start + info.file_size))
            elif info.file_size:
                found["crc32"] |= set(range(entry + 16, entry + 20))
            entry += 46 + sum(struct.unpack_from("<HHH", data, entry + 28))
        found["data"] = set(range(len(data))) - covered
    return found


@sampled(4)
def test_every_byte_flipped(tmp_path: Path, one_in: int) -> None:
    """Only bytes and checksums of storages can change without the file being parsed."""
    one, two = saved(tmp_path, content(1), content(2))
    known, whole = remembered(one), two.read_bytes()
    assert require_rightly_known(known, two)
    free = set.union(*places(two).values())
    other = tmp_path / "rank_3.pt"
    for at in range(0, len(whole), one_in):
        changed = bytearray(whole)
        changed[at] ^= 1 << at // one_in % 8
        other.write_bytes(changed)
        assert require_rightly_known(known, other) == (at in free), at


@pytest.mark.parametrize(
    ("root", "is_folder"),
    [(b"others", True), (b"oth/rs", False), ("öhres".encode(), True), (b"r\xff\xfek_0", False)],
)
def test_names_of_the_root_folder(tmp_path: Path, root: bytes, is_folder: bool) -> None:
    """Any folder will do, as it does in reading, but it has to be one."""
    (path,), other = saved(tmp_path, content(1)), tmp_path / "other.pt"
    other.write_bytes(path.read_bytes().replace(b"rank_0/", root + b"/"))
    assert is_known(path, other) == is_folder


@pytest.mark.usefixtures("_no_checksums")
def test_without_checksums(tmp_path: Path) -> None:
    """Where files tell no checksums, every storage may hold something else."""
    one, other = saved(tmp_path, content(1), content(2))
    assert is_known(one, other)
    match = remembered(one).find(other)
    assert match is not None
    storages = torch_file.read(other, 0).storages.values()
    assert {s.offset for s in storages if s.nbytes} <= match.changed()


def test_no_more_is_kept_than_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest goes first; what is too large by itself is not kept at all."""
    paths = saved(tmp_path, *([*content(1).values(), "x" * n * 64] for n in range(3)))
    size = paths[2].stat().st_size
    for limit, kept in ((3 * size, [0, 1, 2]), (2 * size, [1, 2]), (size // 8, [])):
        monkeypatch.setattr(parse_cache, "_LIMIT_BYTES", limit)
        known = ParseCache()
        for path in paths:
            known.remember(path, torch_file.read(path, 0))
        assert [n for n in range(3) if require_rightly_known(known, paths[n])] == kept


# Devices ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other", "is_twin"),
    [
        ("cuda:3", "cuda:7", True),
        ("cuda:10", "cuda:25", True),
        ("cuda:9", "cuda:10", False),  # another length, so that offsets differ
        ("cuda:3", "cuda:x", False),
        ("cuda:3", "musa:3", False),
        ("cpu", "xpu", False),
    ],
)
def test_devices(tmp_path: Path, device: Device, one: str, other: str, is_twin: bool) -> None:
    assert is_known(*of_devices(tmp_path, device, one, other)) == is_twin


def test_pickle_of_other_devices_needs_its_own_checksum(tmp_path: Path, device: Device) -> None:
    one, other = of_devices(tmp_path, device, "cuda:0", "cuda:1")
    known = remembered(one)
    assert require_rightly_known(known, other)
    whole = other.read_bytes()
    wrong = whole.replace(b"cuda:1", b"cuda:5", 1)
    assert wrong != whole
    other.write_bytes(wrong)
    assert not require_rightly_known(known, other)
    with pytest.raises(SourceError, match="checksum"):
        torch_file.read(other, 0)


@pytest.mark.parametrize("shared", [False, True], ids=["equal", "the same"])
def test_device_that_is_named_elsewhere_too(tmp_path: Path, device: Device, shared: bool) -> None:
    """A text that is part of the object tells ranks apart, though a storage names it too."""
    device.spelled_once = shared
    for rank in (0, 1):
        name = device.name = "".join(["cuda:", str(rank)])
        # The storage comes first: the text is then taken from the memo.
        torch.save([torch.ones(2), name], tmp_path / f"rank_{rank}.pt")
    assert not is_known(tmp_path / "rank_0.pt", tmp_path / "rank_1.pt")


def test_what_only_looks_like_a_device(tmp_path: Path, device: Device) -> None:
    """The end of a persistent id can be spelled inside of a text as well."""
    device.name = "cuda:0"
    looks = [[torch.ones(2), f"X\x06\0\0\0cuda:{rank}K\x00tQ"] for rank in (0, 1)]
    assert not is_known(*saved(tmp_path, *looks))
