"""Damaged and hostile distributed checkpoints: an error that names the file, and nothing run."""

import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
)

import streamshard
from streamshard.cli.main import main
from streamshard.errors import CorruptFileError, IncompleteError, SourceError, UnsupportedError
from streamshard.formats.checkpoint import ScalarState
from streamshard.formats.dcp.optimizer_state import number_in
from streamshard.formats.pickle import inert_load
from tests.fabricated_dcp import adamw, save_index

SHAPES = {"up.weight": (8, 5), "up.bias": (7,)}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory to save in."""
    return tmp_path / "dcp"


def write(place: Path) -> Metadata:
    return adamw(SHAPES).write(place)


def first(metadata: Metadata, key: str) -> MetadataIndex:
    found: MetadataIndex = next(i for i in metadata.storage_data if i.fqn == key)
    return found


def refused(place: Path, kind: type[SourceError], message: str) -> None:
    """Require the error of `inspect`, exit code 3, and a problem that `verify` lists."""
    with pytest.raises(kind, match=message):
        streamshard.inspect(place)
    assert main(["inspect", str(place)]) == 3
    assert main(["verify", str(place)]) == 6
    assert streamshard.verify(place).problems


def test_a_missing_file_is_named(place: Path) -> None:
    write(place)
    (place / "__1_0.distcp").unlink()
    refused(place, IncompleteError, r"__1_0\.distcp: missing")


def test_a_missing_index_is_named(place: Path) -> None:
    write(place)
    (place / ".metadata").unlink()
    refused(place, IncompleteError, r"\.metadata: missing; torch writes it last")


@pytest.mark.parametrize("keep", [0, 1, 1000, -1])
def test_a_truncated_file_is_named(keep: int, place: Path) -> None:
    write(place)
    path = place / "__0_0.distcp"
    data = path.read_bytes()
    path.write_bytes(data[:keep])
    refused(place, CorruptFileError, r"__0_0\.distcp: [\d,]+ bytes, \.metadata lists an item to")


@pytest.mark.parametrize("keep", [0, 1, 50, 1000, -1])
def test_a_truncated_index_is_refused(keep: int, place: Path) -> None:
    write(place)
    path = place / ".metadata"
    path.write_bytes(path.read_bytes()[:keep])
    refused(place, CorruptFileError, r"\.metadata")


def change(place: Path, edit: Callable[[Metadata], object]) -> None:
    metadata = write(place)
    edit(metadata)
    save_index(metadata, place)


def set_item(metadata: Metadata, key: str, **values: Any) -> None:  # noqa: ANN401
    index = first(metadata, key)
    old = metadata.storage_data[index]
    known = {"relative_path": old.relative_path, "offset": old.offset, "length": old.length}
    metadata.storage_data[index] = _StorageInfo(**{**known, **values})


ITEMS: list[tuple[dict[str, Any], type[SourceError], str]] = [
    ({"offset": -1}, CorruptFileError, "is said to be"),
    ({"offset": 1 << 70}, CorruptFileError, "is said to be"),
    ({"offset": 1 << 61}, CorruptFileError, "lists an item to byte"),
    ({"length": 1 << 61}, CorruptFileError, "lists an item to byte"),
    ({"length": 0}, CorruptFileError, "no end record of a zip"),
    ({"length": 100}, CorruptFileError, r"item of 'model\.up\.weight'"),
    ({"length": 2500}, CorruptFileError, "which overlap"),
    ({"offset": 1}, CorruptFileError, "overlap"),
    ({"length": "9"}, CorruptFileError, "is said to be"),
    ({"length": True}, CorruptFileError, "is said to be"),
    ({"relative_path": "../secret"}, CorruptFileError, "is said to lie in"),
    ({"relative_path": "/etc/passwd"}, CorruptFileError, "is said to lie in"),
    ({"relative_path": "a\nb"}, CorruptFileError, "is said to lie in"),
    ({"relative_path": ".."}, CorruptFileError, "is said to lie in"),
    ({"relative_path": "x.distcp"}, IncompleteError, r"x\.distcp: missing"),
    ({"transform_descriptors": ["zstd"]}, UnsupportedError, "transformed while it was saved"),
]


@pytest.mark.parametrize(("values", "kind", "message"), ITEMS)
def test_wrong_places_are_refused(
    values: dict[str, Any], kind: type[SourceError], message: str, place: Path
) -> None:
    change(place, lambda metadata: set_item(metadata, "model.up.weight", **values))
    refused(place, kind, message)


def set_chunks(metadata: Metadata, *boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    held = metadata.state_dict_metadata["model.up.weight"]
    held.chunks = [  # type: ignore[union-attr]
        ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes
    ]


TOP, BOTTOM = ((0, 0), (4, 5)), ((4, 0), (4, 5))
BOXES = [
    ((TOP,), "belongs to nothing that is listed"),
    ((TOP, ((4, 0), (3, 5))), "is float32 of .* listed is float32 of"),
    ((TOP, ((3, 0), (4, 5))), "but not where it lies"),
    ((TOP, BOTTOM, ((0, 0), (4, 5))), "but not where it lies"),
    ((TOP, ((4,), (4,))), "has a box at"),
    ((TOP, ((4, 0), (4, 1 << 50))), "not a shape|is float32 of"),
]


@pytest.mark.parametrize(("boxes", "message"), BOXES)
def test_wrong_boxes_are_refused(
    boxes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...], message: str, place: Path
) -> None:
    change(place, lambda metadata: set_chunks(metadata, *boxes))
    refused(place, CorruptFileError, message)


def test_boxes_of_a_larger_tensor_leave_a_gap(place: Path) -> None:
    def grow(metadata: Metadata) -> None:
        for key in ("model", "optimizer.state"):
            for name in ("up.weight", "up.weight.exp_avg", "up.weight.exp_avg_sq"):
                held = metadata.state_dict_metadata.get(f"{key}.{name}")
                if held is not None:
                    held.size = torch.Size((9, 5))  # type: ignore[union-attr]

    change(place, grow)
    refused(place, CorruptFileError, r"no box holds its element \[8, 0\]")


def test_a_swapped_item_is_refused(place: Path) -> None:
    metadata = write(place)
    stored = metadata.storage_data
    one, other = first(metadata, "model.up.weight"), first(metadata, "model.up.bias")
    stored[one], stored[other] = stored[other], stored[one]
    save_index(metadata, place)
    refused(place, CorruptFileError, r"is float32 of \[.*\], listed is float32 of")


def test_a_flipped_bit_is_found(place: Path) -> None:
    write(place)
    path = place / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    with streamshard.open(place) as found:
        offset = found._source.cutting.offset[0]
    data[offset] ^= 1
    path.write_bytes(data)
    (problem,) = streamshard.verify(place).problems
    assert problem.kind == "damaged"
    assert problem.file == str(path)


class Bomb:
    """Runs when it is unpickled."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return exec, ("raise SystemExit('it ran')",)


def test_nothing_of_the_index_is_run(place: Path) -> None:
    def plant(metadata: Metadata) -> None:
        metadata.planner_data = Bomb()

    change(place, plant)
    assert streamshard.inspect(place).kind == "dcp"  # it is ignored
    (place / ".metadata").write_bytes(pickle.dumps(Bomb()))
    refused(place, CorruptFileError, "where torch writes Metadata")


HUGE = struct.pack("<Q", 1 << 60)
PICKLES = [
    b"",
    b"\x80\x04.",
    b"\x80\x04}.",
    b"\x80\x04\x8e" + HUGE + b"x.",
    b"\x80\x04\x8d" + HUGE + b"x.",
    b"\x80\x04r\xff\xff\xff\xff.",
    b"\x80\x04\x82\x01.",
    b"(" * 100_000,
    b"\x80\x04]" + b"2\x85" * 50_000 + b".",
    b"\x80\x04cposix\nsystem\nX\x02\x00\x00\x00lsR.",
    b"\x80\x02(X\x07\x00\x00\x00storageQ.",
]


@pytest.mark.parametrize("data", PICKLES, ids=range(len(PICKLES)))
def test_hostile_indices_are_refused(data: bytes, place: Path) -> None:
    write(place)
    (place / ".metadata").write_bytes(data)
    refused(place, SourceError, r"\.metadata")


def test_an_index_of_too_many_boxes_says_how_many_are_read(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(place)
    monkeypatch.setattr(inert_load, "LIMIT_OPCODES", 1000)
    refused(place, UnsupportedError, r"\.metadata: lists more than about 470,000 boxes of tensors")


def test_links_out_of_the_directory_are_refused(place: Path, tmp_path: Path) -> None:
    write(place)
    path = place / "__0_0.distcp"
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    refused(place, SourceError, "a symbolic link that leads out")


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_changed_bytes_are_refused_or_harmless(name: str, place: Path) -> None:
    write(place)
    path, random = place / name, Random(7)
    whole = path.read_bytes()
    refusals: list[str] = []
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(random.choice((1, 1, 8))):
            data[random.randrange(len(data))] = random.randrange(256)
        path.write_bytes(data)
        try:
            with streamshard.open(place) as found:
                for parameter in found.values():
                    for tensor in parameter.tensors.values():
                        tensor[...]
        except SourceError as error:
            refusals.append(str(error))
    assert refusals
    assert all(str(place) in message for message in refusals)


def test_a_number_in_a_dtype_that_optimizers_do_not_use_is_named() -> None:
    assert number_in("lr", ScalarState("float64", (), np.float64(0.1).tobytes())) == 0.1
    with pytest.raises(UnsupportedError, match="lr is bfloat16"):
        number_in("lr", ScalarState("bfloat16", (), b"\0\0"))
