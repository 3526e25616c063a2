"""Stores in one file: read as a directory is, whoever packed it, and opened by other libraries."""

import os
import struct
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
import torch
import zarr
from zarr.storage import ZipStore

import streamshard
from streamshard.errors import (
    CorruptFileError,
    IncompleteError,
    IntegrityError,
    SourceError,
    StreamshardError,
    UnsupportedError,
)
from streamshard.formats.torch.zip_layout import directory_of
from streamshard.formats.zarr import packed_directory
from streamshard.formats.zarr.packed_directory import PackedEntry
from streamshard.formats.zarr.packed_place import packed
from streamshard.io.entries import examine, open_readable
from tests.fabricated import client_state, write
from tests.formats.conftest import files_of
from tests.job import LEAN
from tests.samples import sampled

CHUNK = "state/exp_avg/embed.weight/c/1/0"


def pack(store: Path, to: Path, *, lists_directories: bool = False, **options: Any) -> Path:  # noqa: ANN401
    """Pack a store by another tool."""
    with zipfile.ZipFile(to, "w", **options) as made:
        for path in sorted(store.rglob("*")):
            if path.is_file() or lists_directories:
                made.write(path, path.relative_to(store))
    return to


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store as streamshard packs it; the directory next to it."""
    place = tmp_path_factory.mktemp("ours")
    write(replace(LEAN, client_state=client_state()), place / "run")
    for name in ("x.zarr", "x.zarr.zip"):
        streamshard.convert(place / "run", place / name, chunk_size=100)
    return place / "x.zarr.zip"


# Others open it -----------------------------------------------------------------------------------


def test_it_has_the_files_of_a_directory_to_the_byte(ours: Path) -> None:
    with zipfile.ZipFile(ours) as found:
        assert found.testzip() is None
        files = {name: found.read(name) for name in found.namelist()}
        places = {info.filename: info for info in found.infolist()}
    assert files == files_of(ours.with_suffix(""))
    data = ours.read_bytes()
    for name, info in places.items():
        start = data.index(files[name], info.header_offset + 30 + len(name))
        assert start % 64 == 0, name
        assert info.compress_type == zipfile.ZIP_STORED
    assert [*files][-1] == "zarr.json"


def test_zarr_and_tensorstore_open_it(ours: Path) -> None:
    store = ours.with_suffix("")
    base = {"driver": "file", "path": str(ours)}
    paths = [
        path.parent.relative_to(store).as_posix()
        for path in store.rglob("zarr.json")
        if b'"array"' in path.read_bytes()
    ]
    with ZipStore(ours, mode="r") as packed_store:
        for path in paths:
            wanted = np.asarray(zarr.open_array(store / path, mode="r")[...])
            kvstore = {"driver": "zip", "base": base, "path": f"{path}/"}
            spec = {"driver": "zarr3", "kvstore": kvstore}
            found = np.asarray(zarr.open_array(packed_store, path=path, mode="r")[...])
            other = tensorstore.open(spec).result().read().result()
            assert found.tobytes() == wanted.tobytes() == other.tobytes()
    assert len(paths) > 10


# Read ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lists_directories", [False, True])
def test_every_verb_reads_what_any_tool_packed(
    store: Path, tmp_path: Path, lists_directories: bool
) -> None:
    made = pack(store, tmp_path / "a.zarr.zip", lists_directories=lists_directories)
    for source, out in ((store, tmp_path / "wanted"), (made, tmp_path / "made")):
        streamshard.repartition(source, out / "run", world_size=3)
        streamshard.export(source, out / "model")
    assert files_of(tmp_path / "made") == files_of(tmp_path / "wanted")
    assert streamshard.diff(made, store).is_equal
    checked, wanted = streamshard.verify(made), streamshard.verify(store)
    assert checked.is_good
    assert (checked.files, checked.tensors) == (wanted.files, wanted.tensors)
    assert streamshard.inspect(made).tag == streamshard.inspect(store).tag


def test_tensors_of_it_are_mapped(ours: Path) -> None:
    with streamshard.open(ours) as opened, streamshard.open(ours.with_suffix("")) as other:
        found, wanted = opened["old"].module, other["old"].module
        assert np.array_equal(found.memmap(bits=True), wanted.memmap(bits=True))
        assert torch.equal(found.memmap_torch(), wanted.memmap_torch())


def test_a_file_that_changes_meanwhile_is_refused(store: Path, tmp_path: Path) -> None:
    one = pack(store, tmp_path / "x.zarr.zip")
    with streamshard.open(one) as opened:
        data = one.read_bytes()
        one.write_bytes(data[:-30])
        os.utime(one, ns=(1, 1))
        with pytest.raises(SourceError, match="changed while"):
            opened["embed.weight"].fp32.numpy()


def test_large_files_have_large_numbers(tmp_path: Path) -> None:
    """A sparse file of 9 GiB, in which one entry is large and others lie behind it."""
    place, start, central = tmp_path / "x.zarr.zip", 0, list[bytes]()
    wanted = {"a/c/0": (4 << 30) + 5, "b/c/0": (4 << 30) - 1, "c/c/0": 9 << 20}
    with place.open("wb") as file:
        for path, nbytes in wanted.items():
            entry = PackedEntry(path, start, nbytes)
            file.seek(start)
            file.write(entry.header())
            file.seek(entry.end - len(entry.descriptor(7)))
            file.write(entry.descriptor(7))
            central.append(entry.central(7))
            start = entry.end
        file.seek(start)
        file.write(directory_of(central, start))
    with zipfile.ZipFile(place) as found:
        assert {info.filename: info.file_size for info in found.infolist()} == wanted
        for name in wanted:
            with found.open(name) as stream:
                assert stream.read(10) == bytes(10)
    for name, nbytes in wanted.items():
        with open_readable(packed(place) / name) as file:
            assert file.nbytes == nbytes
            assert file.read_at(0, 10) == bytes(10)


# Damaged or made to mislead -----------------------------------------------------------------------


@sampled(60)
def test_any_byte_that_is_changed_is_found(ours: Path, tmp_path: Path, one_in: int) -> None:
    """All but two versions in the Zip64 end record, which no reader looks at."""
    whole, one = ours.read_bytes(), tmp_path / "x.zarr.zip"
    unread = range(len(whole) - 98 + 12, len(whole) - 98 + 16)
    places = {*range(0, len(whole), 30 * one_in), *range(len(whole) - 300, len(whole), one_in)}
    for at in sorted(places.difference(unread)):
        one.write_bytes(whole[:at] + bytes([whole[at] ^ 0x11]) + whole[at + 1 :])
        try:
            is_good = streamshard.verify(one).is_good
        except StreamshardError:
            is_good = False
        assert not is_good, at


def rewritten(path: Path, change: Callable[[zipfile.ZipInfo], None]) -> None:
    """Write a zip anew with other entries."""
    with zipfile.ZipFile(path) as found:
        both = [(info, found.read(info)) for info in found.infolist()]
    with zipfile.ZipFile(path, "w") as made:
        for info, data in both:
            change(info)
            made.writestr(info, data)


def compress(info: zipfile.ZipInfo) -> None:
    info.compress_type = zipfile.ZIP_DEFLATED


def rename(name: str) -> Callable[[zipfile.ZipInfo], None]:
    def change(info: zipfile.ZipInfo) -> None:
        if info.filename == CHUNK:
            info.filename = name

    return change


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (compress, UnsupportedError, "compressed"),
        (rename("/etc/passwd"), CorruptFileError, "no path in a store"),
        (rename("../../outside"), CorruptFileError, "no path in a store"),
        (rename("a/./b"), CorruptFileError, "no path in a store"),
        (rename("zarr.json"), CorruptFileError, "two entries are called 'zarr.json'"),
        (rename("state/exp_avg"), CorruptFileError, "'state/exp_avg' is a file and a directory"),
        (rename("elsewhere"), IncompleteError, CHUNK),
    ],
)
def test_what_misleads_is_refused(
    store: Path,
    tmp_path: Path,
    change: Callable[[zipfile.ZipInfo], None],
    kind: type[SourceError],
    message: str,
) -> None:
    one = pack(store, tmp_path / "x.zarr.zip")
    rewritten(one, change)
    with pytest.raises(kind, match=message):
        streamshard.open(one)
    assert not streamshard.verify(one).is_good


def fields(data: bytes, name: str) -> Iterator[int]:
    """Yield where the two halves of an entry begin."""
    at = data.index(name.encode())
    yield at - 30
    yield data.rindex(name.encode()) - 46


def test_halves_that_disagree_are_refused(ours: Path, tmp_path: Path) -> None:
    data, one = bytearray(ours.read_bytes()), tmp_path / "x.zarr.zip"
    local, central = fields(bytes(data), CHUNK)
    assert data[local : local + 4] == b"PK\3\4"
    assert data[central : central + 4] == b"PK\1\2"
    size, start = struct.unpack_from("<I", data, central + 24)[0], central + 42
    for place, form, value, message in (
        (local + 18, "<I", size + 1, "local header says"),
        (local + 6, "<H", 0x0809, "another one in its local header"),
        (central + 8, "<H", 0x0809, "encrypted"),
        (local + 30, "<B", ord("x"), "another one in its local header"),
        (start, "<I", struct.unpack_from("<I", data, start)[0] - 64, "reaches into what follows"),
        (start, "<I", 0xFFFFFF00, "reach past the entries' end"),
    ):
        changed = bytearray(data)
        struct.pack_into(form, changed, place, value)
        one.write_bytes(changed)
        with pytest.raises(SourceError, match=message), streamshard.open(one) as opened:
            opened["embed.weight"].exp_avg.numpy()
        assert not streamshard.verify(one).is_good


@pytest.mark.parametrize("names", [(), ("a/",)])
def test_one_without_files_is_no_store(names: tuple[str, ...], tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.zarr.zip", "w") as made:
        for name in names:
            made.writestr(name, b"")
    (problem,) = streamshard.verify(tmp_path / "x.zarr.zip").problems
    assert "the store is not whole" in problem.message
    with pytest.raises(SourceError):
        streamshard.open(tmp_path / "x.zarr.zip")


@pytest.mark.parametrize("names", ["a a-b a/c", "a a- a-b a.c/d a/c", "a/b a/b/c/d a/bc"])
def test_a_file_is_no_directory_too(names: str, tmp_path: Path) -> None:
    place = tmp_path / "x.zarr.zip"
    with zipfile.ZipFile(place, "w") as made:
        for name in names.split():
            made.writestr(name, b"")
    with pytest.raises(CorruptFileError, match="is a file and a directory"):
        packed_directory.PackedDirectory(place, examine(place))
    with zipfile.ZipFile(place, "w") as made:
        for name in names.split()[1:]:
            made.writestr(name, b"")
    assert packed_directory.PackedDirectory(place, examine(place)).count == len(names.split()) - 1


def test_damage_in_a_chunk_is_named(ours: Path, tmp_path: Path) -> None:
    data, one = bytearray(ours.read_bytes()), tmp_path / "x.zarr.zip"
    local, _ = fields(bytes(data), CHUNK)
    data[local + 30 + len(CHUNK) + 64] ^= 1
    one.write_bytes(data)
    with pytest.raises(IntegrityError, match=f"x.zarr.zip/{CHUNK}"):
        streamshard.repartition(one, tmp_path / "out", world_size=3)
    assert any(CHUNK in problem.file for problem in streamshard.verify(one).problems)


def test_memory_for_a_directory_is_bounded(tmp_path: Path) -> None:
    """A directory of 5,000 entries takes the bytes of the zip's directory, and little besides."""
    place, parts, central, start = tmp_path / "x.zarr.zip", [], [], 0
    count = 5_000
    for number in range(count):
        entry = PackedEntry(f"state/exp_avg/layers.{number}.mlp.experts.weight/c/0/0", start, 4)
        parts.append(entry.header() + b"1234" + entry.descriptor(1))
        central.append(entry.central(1))
        start = entry.end
    directory = directory_of(central, start)
    place.write_bytes(b"".join([*parts, directory]))
    import tracemalloc

    tracemalloc.start()
    found = packed_directory.PackedDirectory(place, examine(place))
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.count == count
    assert kept < len(directory) + 100 * count
    assert peak < len(directory) + 800 * count
