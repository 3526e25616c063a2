"""Stores with something missing or wrong: an error of the right kind, never other bytes."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import streamshard
from streamshard.errors import (
    CorruptFileError,
    IncompleteError,
    IntegrityError,
    SourceError,
    SourceNotFoundError,
    StreamshardError,
    UnsupportedError,
)

CHUNK = "state/exp_avg/embed.weight/c/1/0"
Damage = Callable[[Path], None]


def files_of(store: Path, out: Path) -> dict[str, bytes]:
    """Rebuild the checkpoint and return its files."""
    if out.exists():
        shutil.rmtree(out)
    streamshard.repartition(store, out, world_size=3, overwrite=True)
    return {p.relative_to(out).as_posix(): p.read_bytes() for p in out.rglob("*") if p.is_file()}


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def extend(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def flip_first(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)


def flip_last(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 0x80
    path.write_bytes(data)


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [cut, extend, flip_first, empty], ids=lambda f: f.__name__)
def test_a_damaged_chunk_is_named(store: Path, tmp_path: Path, damage: Damage) -> None:
    damage(store / CHUNK)
    with pytest.raises(IntegrityError, match=CHUNK):
        files_of(store, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_missing_chunk_is_not_taken_for_zeros(store: Path, tmp_path: Path) -> None:
    (store / CHUNK).unlink()
    with pytest.raises(SourceError, match=CHUNK):
        files_of(store, tmp_path / "out")


@pytest.mark.parametrize("which", ["meta/manifest/c/0", "meta/state/c/0"])
@pytest.mark.parametrize(
    "damage", [cut, extend, flip_first, flip_last, empty], ids=lambda f: f.__name__
)
def test_damaged_metadata_is_named(store: Path, tmp_path: Path, which: str, damage: Damage) -> None:
    damage(store / which)
    with pytest.raises(IntegrityError, match=which):
        files_of(store, tmp_path / "out")


@pytest.mark.parametrize("which", ["meta/manifest/c/0", "meta/state/c/0"])
def test_missing_metadata_is_named(store: Path, tmp_path: Path, which: str) -> None:
    (store / which).unlink()
    with pytest.raises(IncompleteError, match=which):
        files_of(store, tmp_path / "out")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        pytest.param("{}", SourceNotFoundError, id="no attributes"),
        pytest.param("[1]", SourceNotFoundError, id="no object"),
        pytest.param("{", SourceNotFoundError, id="no JSON"),
        pytest.param(
            '{"attributes": {"streamshard": {"format_version": 999}}}',
            UnsupportedError,
            id="newer",
        ),
    ],
)
def test_a_root_document_that_is_not_ours(
    store: Path, tmp_path: Path, text: str, kind: type[StreamshardError]
) -> None:
    (store / "zarr.json").write_text(text)
    with pytest.raises(kind, match=r"x\.zarr"):
        files_of(store, tmp_path / "out")


def test_a_chunk_swapped_with_another_of_its_size_is_noticed(store: Path, tmp_path: Path) -> None:
    one, other = store / CHUNK, store / CHUNK.replace("c/1/0", "c/0/0")
    data = one.read_bytes(), other.read_bytes()
    one.write_bytes(data[1])
    other.write_bytes(data[0])
    with pytest.raises(IntegrityError):
        files_of(store, tmp_path / "out")


def test_no_flipped_byte_of_any_file_changes_the_result(store: Path, tmp_path: Path) -> None:
    before = files_of(store, tmp_path / "out")
    places = sorted(p for p in store.rglob("*") if p.is_file() and p.stat().st_size)
    chunks = [place for place in places if place.name != "zarr.json"]
    silent = []
    for number, place in enumerate(chunks[::3]):
        data = place.read_bytes()
        damaged = bytearray(data)
        damaged[number * 31 % len(data)] ^= 1 << number % 8
        place.write_bytes(damaged)
        try:
            if files_of(store, tmp_path / "out") != before:
                silent.append(place)
        except (IntegrityError, CorruptFileError):
            pass
        place.write_bytes(data)
    assert silent == []
    assert files_of(store, tmp_path / "out") == before
