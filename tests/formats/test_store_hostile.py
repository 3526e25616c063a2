"""Stores with something wrong: an error of the right kind, never other bytes.

What is damaged has wrong checksums; what is made to mislead has right ones, by whoever made it.
"""

import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import google_crc32c
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
from streamshard.formats.checkpoint import Checkpoint, ModuleEntry, OtherFile
from streamshard.formats.deepspeed.states import Scalar
from streamshard.formats.zarr import store_state
from streamshard.formats.zarr.chunks import BloscChunk, serialize_checksum
from streamshard.model import FILE, LogicalTensor, Note
from tests.formats.conftest import files_of

CHUNK = "state/exp_avg/embed.weight/c/1/0"
SMALL = ("meta/manifest/c/0", "meta/state/c/0")


def flipped(data: bytes, place: int, bit: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda data: data[:-1],
    "extended": lambda data: data + b"\0",
    "first flipped": lambda data: flipped(data, 0, 0),
    "last flipped": lambda data: flipped(data, len(data) - 1, 7),
    "empty": lambda data: b"",
}


def rebuilt(store: Path, out: Path) -> dict[str, bytes]:
    shutil.rmtree(out, ignore_errors=True)
    streamshard.repartition(store, out, world_size=3, overwrite=True)
    return files_of(out)


@pytest.mark.parametrize(
    ("which", "damage", "codec"),
    [
        (which, damage, codec)
        for which in (CHUNK, *SMALL)
        for damage in DAMAGES
        for codec in ("none", "zstd")
        if (which, damage) != (CHUNK, "last flipped")  # a chunk's own CRC-32C, for other tools
        if which == CHUNK or codec == "zstd"  # which does not compress the others
    ],
)
def test_what_is_damaged_is_named(store: Path, tmp_path: Path, which: str, damage: str) -> None:
    (store / which).write_bytes(DAMAGES[damage]((store / which).read_bytes()))
    with pytest.raises(IntegrityError, match=which):
        rebuilt(store, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("which", [CHUNK, *SMALL])
def test_what_is_missing_is_named_and_not_taken_for_zeros(
    store: Path, tmp_path: Path, which: str
) -> None:
    (store / which).unlink()
    with pytest.raises(IncompleteError, match=which):
        rebuilt(store, tmp_path / "out")


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
    store: Path, text: str, kind: type[StreamshardError]
) -> None:
    (store / "zarr.json").write_text(text)
    with pytest.raises(kind, match=r"x\.zarr"):
        streamshard.inspect(store)


# Made to mislead ----------------------------------------------------------------------------------


def put(store: Path, what: str, data: bytes) -> None:
    place = store / "meta" / what / "c/0"
    place.write_bytes(data + serialize_checksum(google_crc32c.value(data)))


def restate(
    store: Path,
    change: Callable[[Checkpoint], Checkpoint],
    shapes: Callable[[list[tuple[int, ...]]], list[tuple[int, ...]]] = list,
) -> None:
    checkpoint, chunk_shapes = store_state.load((store / "meta/state/c/0").read_bytes()[:-4])
    put(store, "state", store_state.dump(change(checkpoint), shapes(list(chunk_shapes))))


def renamed(path: str) -> Callable[[Checkpoint], Checkpoint]:
    def change(checkpoint: Checkpoint) -> Checkpoint:
        tensors = tuple(replace(t, name=path) if t.state == FILE else t for t in checkpoint.tensors)
        return replace(checkpoint, tensors=tensors, files=(OtherFile(path, 0o644),))

    return change


def other_tensors(change: Callable[[LogicalTensor], LogicalTensor]) -> Any:  # noqa: ANN401
    return lambda c: replace(c, tensors=tuple(map(change, c.tensors)))


def other_model_part(**changes: Any) -> Callable[[Checkpoint], Checkpoint]:  # noqa: ANN401
    return lambda c: replace(c, model_parts=(replace(c.model_parts[0], **changes),))


def huge(checkpoint: Checkpoint) -> Checkpoint:
    """Make every matrix a large one, in all that tells of it."""

    def of(shape: tuple[int, ...]) -> tuple[int, ...]:
        return (1 << 20, 1 << 20) if len(shape) == 2 else shape

    module = [replace(entry, shape=of(entry.shape)) for entry in checkpoint.model_parts[0].module]
    changed = other_model_part(module=tuple(module))(checkpoint)
    return other_tensors(lambda t: replace(t, shape=of(t.shape)))(changed)  # type: ignore[no-any-return]


def other_entries(entry: ModuleEntry) -> Callable[[Checkpoint], Checkpoint]:
    return lambda c: other_model_part(module=(*c.model_parts[0].module, entry))(c)


LIES: dict[str, Callable[[Checkpoint], Checkpoint]] = {
    "a tag above": lambda c: replace(c, tag=".."),
    "a tag above, by a detour": lambda c: replace(c, tag="a/../../b"),
    "a tag in our trash": lambda c: replace(c, tag=".streamshard.trash/b"),
    "an absolute tag": lambda c: replace(c, tag="/tmp/a"),
    "a file above": renamed("../../evil"),
    "a file above, by a detour": renamed("a/../../evil"),
    "an absolute file": renamed("/tmp/evil"),
    "a file of no name": renamed("a//b"),
    "a file with an end in it": renamed("evil\0.txt"),
    "a family above": lambda c: other_tensors(lambda t: replace(t, model_part=".."))(
        replace(c, model_parts=tuple(replace(f, name="..") for f in c.model_parts))
    ),
    "a family deeper": other_tensors(lambda t: replace(t, model_part="a/../../b")),
    "two tensors of one name": lambda c: replace(c, tensors=(*c.tensors, c.tensors[0])),
    "no tensors": lambda c: replace(c, tensors=()),
    "a dtype of no size": other_tensors(lambda t: replace(t, dtype="float3")),
    "a tensor of any size": other_tensors(lambda t: replace(t, shape=(1 << 40, 1 << 40))),
    "a tensor of no size": other_tensors(lambda t: replace(t, shape=(-1,))),
    "no families": lambda c: replace(c, model_parts=()),
    "a family of no groups": other_model_part(groups=()),
    "an empty optimizer": other_model_part(optimizer_file={}),
    "an empty model file": other_model_part(model_state={"x": 1}),
    "a weight that is not there": other_entries(ModuleEntry("x", "param", "float32", (1,))),
    "a state that is not there": other_entries(ModuleEntry("x", "extra", "", ())),
    "tied to nothing": other_entries(ModuleEntry("x", "alias", "float32", (1,), "y")),
    "notes that are no text": lambda c: replace(c, notes=(Note([]),)),  # type: ignore[arg-type]
    "notes of no known kind": lambda c: replace(c, notes=(Note("", "x"),)),  # type: ignore[arg-type]
    "a weight that is larger than its tensor": lambda c: other_model_part(
        module=tuple(replace(e, shape=(*e.shape, 2)) for e in c.model_parts[0].module)
    )(c),
    "a weight without a dtype": lambda c: other_model_part(
        module=tuple(replace(e, dtype="") for e in c.model_parts[0].module)
    )(c),
    "a scalar of half an element": lambda c: other_model_part(
        groups=tuple(
            replace(g, states={**(g.states or {}), "x": Scalar("float32", (), b"ab")})
            for g in c.model_parts[0].groups
        )
    )(c),
    "ids that are no numbers": other_model_part(param_ids={"a": []}),
    "a stage that is none": lambda c: replace(c, layout=replace(c.layout, stage=7)),
    "no ranks": lambda c: replace(c, layout=replace(c.layout, world_size=0)),
}


@pytest.mark.parametrize("name", LIES)
def test_refused(name: str, store: Path, tmp_path: Path) -> None:
    restate(store, LIES[name])
    with pytest.raises(SourceError, match=r"x\.zarr/meta/state/c/0: "):
        streamshard.repartition(store, tmp_path / "out", world_size=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.zarr"]


def test_permissions_are_permissions_only(store: Path, tmp_path: Path) -> None:
    """And what is stated anew without a lie is read."""
    restate(store, lambda c: replace(c, files=tuple(replace(f, mode=0o6777) for f in c.files)))
    streamshard.repartition(store, tmp_path / "out", world_size=3)
    assert (tmp_path / "out/zero_to_fp32.py").stat().st_mode & 0o7777 == 0o777


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        pytest.param((1,), "chunks of", id="too few dimensions"),
        pytest.param((0, 1), "chunks of", id="chunks of nothing"),
        pytest.param((1, 1), "chunk", id="too many chunks"),
    ],
)
def test_chunks_that_do_not_fit(store: Path, shape: tuple[int, ...], says: str) -> None:
    restate(store, huge, lambda shapes: [shape if len(s) == 2 else s for s in shapes])
    with pytest.raises(CorruptFileError, match=says):
        streamshard.inspect(store)


@pytest.mark.parametrize(
    "manifest",
    [
        pytest.param(b"[" * 100_000, id="deep"),
        pytest.param(b"[]", id="a list"),
        pytest.param(b'{"files": []}', id="a list of files"),
        pytest.param(b'{"files": {"a": [1e400, ""]}}', id="infinite"),
        pytest.param(b'{"files": {"a": [1, "?"]}}', id="no checksums"),
        pytest.param(
            b'{"files": {"../a": [1, ""]}, "block_bytes": 1048576, "codec": "none"}', id="above"
        ),
        pytest.param(b'{"files": {"a": [' + b"9" * 5000 + b', ""]}}', id="a huge number"),
    ],
)
def test_manifests_that_are_none(store: Path, manifest: bytes) -> None:
    put(store, "manifest", manifest)
    with pytest.raises(CorruptFileError, match=r"x\.zarr/meta/manifest/c/0: manifest"):
        streamshard.inspect(store)


def link(path: Path) -> None:
    place = path.parents[5] / "elsewhere"
    path.rename(place)
    path.symlink_to(place)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("change", [link, pipe])
def test_chunks_that_are_no_files(store: Path, change: Callable[[Path], None]) -> None:
    change(store / CHUNK)
    with pytest.raises(SourceError, match=r"not a regular file"):
        streamshard.inspect(store)


@pytest.mark.parametrize("path", [CHUNK, *SMALL])
def test_directories_that_lead_out(store: Path, path: str) -> None:
    for directory in list((store / path).parents)[: path.count("/")]:
        place = store.parent / "elsewhere"
        directory.rename(place)
        directory.symlink_to(place)
        with pytest.raises(SourceError, match=r"leads out of the store here, to .*elsewhere"):
            streamshard.inspect(store)
        directory.unlink()
        place.rename(directory)
    assert streamshard.inspect(store).world_size == 2


def test_a_root_document_that_leads_out(store: Path) -> None:
    (store / "zarr.json").rename(store.parent / "zarr.json")
    (store / "zarr.json").symlink_to(store.parent / "zarr.json")
    with pytest.raises(SourceError, match="leads out of the store"):
        streamshard.inspect(store)


def test_directories_and_whole_stores_may_be_links_within(store: Path) -> None:
    (store / CHUNK).parent.rename(store / "moved")
    (store / CHUNK).parent.symlink_to(store / "moved")
    link_to_all = store.parent / "link"
    link_to_all.symlink_to(store)
    assert streamshard.inspect(link_to_all).world_size == 2


@pytest.mark.parametrize("said", [0, 79, 0x7FFFFFFF, 0xFFFFFFFF])
def test_a_compressed_chunk_that_says_it_is_larger(said: int) -> None:
    codec = BloscChunk(4)
    stored = bytearray(codec.encode(memoryview(bytes(80))))
    stored[4:8] = said.to_bytes(4, "little")
    with pytest.raises(IntegrityError, match=rf"says it decodes to {said} bytes where 80 belong"):
        codec.decode(memoryview(stored), memoryview(bytearray(80)))


@pytest.mark.parametrize("name", ["\ud800", "x" * 5000], ids=["half a letter", "long"])
def test_names_that_are_none(store: Path, name: str) -> None:
    restate(store, other_entries(ModuleEntry(name, "extra", "", ())))
    with pytest.raises(CorruptFileError, match=r"is not a name of a tensor"):
        streamshard.inspect(store)


@pytest.mark.parametrize("place", range(6))
@pytest.mark.parametrize("key", ["tensors", "chunk_shapes"])
def test_lists_of_tensors_that_share_their_parts_without_end(key: str, place: int) -> None:
    endless: list[Any] = []
    for _ in range(60):
        endless = [endless] * 10
    tensor = [*("fp32", "a", "float32", (1,), "")[:place], endless]
    state: dict[str, Any] = {"chunk_shapes": [], "tensors": [], "families": [], "tag": "a"}
    state |= {"layout": (2, 1), "accelerate_step": None}
    state[key] = endless if place == 5 else [tensor]
    with pytest.raises(CorruptFileError, match=r"is not (a shape|as|text|a name)"):
        store_state.load(pickle.dumps(state, 2))
