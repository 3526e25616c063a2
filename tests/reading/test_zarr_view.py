"""A checkpoint as a Zarr store that nobody wrote: the bytes of the store that `convert` writes."""

import asyncio
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from numpy.typing import NDArray
from safetensors.torch import save_file
from zarr.abc.store import OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core.buffer import default_buffer_prototype

import streamshard
from streamshard.engine.run.region import RegionFiller
from streamshard.errors import CorruptFileError, IntegrityError
from tests.fabricated import optimizer_file, write
from tests.job import Job
from tests.reading.conftest import Made, flip, make

MANIFEST = {"meta/manifest/zarr.json", "meta/manifest/c/0"}
CHUNK_BYTES = 300
PROTOTYPE = default_buffer_prototype()


async def _content(view: Store) -> dict[str, bytes]:
    found = {}
    async for key in view.list():
        buffer = await view.get(key, PROTOTYPE)
        assert buffer is not None
        assert await view.exists(key)
        found[key] = buffer.to_bytes()
        assert await view.getsize(key) == len(found[key])
    return found


def content(view: Store) -> dict[str, bytes]:
    """Read all keys."""
    return asyncio.run(_content(view))


def names(view: Store, prefix: str) -> list[str]:
    async def listed() -> list[str]:
        return [name async for name in view.list_dir(prefix)]

    return asyncio.run(listed())


def get(view: Store, key: str, wanted: object = None) -> bytes | None:
    found = asyncio.run(view.get(key, PROTOTYPE, wanted))  # type: ignore[arg-type]
    return None if found is None else found.to_bytes()


def files(store: Path) -> dict[str, bytes]:
    """Read all files of a store except the manifest's."""
    below = {p.relative_to(store).as_posix(): p for p in store.rglob("*") if p.is_file()}
    return {key: below[key].read_bytes() for key in below.keys() - MANIFEST}


def arrays(group: zarr.Group) -> dict[str, NDArray[Any]]:
    members = dict(group.members(max_depth=None))
    return {k: np.asarray(v[...]) for k, v in members.items() if isinstance(v, zarr.Array)}


def array_of(group: zarr.Group, path: str) -> "zarr.Array[Any]":
    found = group[path]
    assert isinstance(found, zarr.Array)
    return found


def require_same(source: Path, place: Path, **options: Path) -> None:
    """Require that a view has the keys and the bytes of the store that `convert` writes."""
    settings = {"codec": "none", "chunk_size": CHUNK_BYTES, **options}
    streamshard.convert(source, place / "wanted.zarr", **settings)  # type: ignore[arg-type]
    with streamshard.open(source, **options) as opened:  # type: ignore[arg-type]
        view = opened.zarr(chunk_size=CHUNK_BYTES)
    wanted = files(place / "wanted.zarr")
    assert len([key for key in wanted if not key.endswith("zarr.json")]) > 9
    assert content(view) == wanted
    for directory in {str(Path(key).parent) for key in wanted} - {"."} | {""}:
        below = {path.name for path in (place / "wanted.zarr" / directory).iterdir()}
        assert set(names(view, directory)) == below - {"manifest"}
    group, store = zarr.open_group(view, mode="r"), zarr.open_group(place / "wanted.zarr", mode="r")
    found, known = arrays(group), arrays(store)
    del known["meta/manifest"]
    assert {k: (v.dtype, v.shape, v.tobytes()) for k, v in found.items()} == {
        k: (v.dtype, v.shape, v.tobytes()) for k, v in known.items()
    }


@pytest.mark.parametrize(
    "kind", ["native-1", "native-2", "native-3", "dumps-2", "chunks-none", "chunks-zstd"]
)
def test_a_view_has_the_bytes_of_a_store(kind: str, made: Made, tmp_path: Path) -> None:
    require_same(made(kind), tmp_path)


def test_so_has_that_of_a_packed_store(made: Made, tmp_path: Path) -> None:
    streamshard.convert(made("native-3"), tmp_path / "x.zarr.zip", codec="zstd", chunk_size=64)
    require_same(tmp_path / "x.zarr.zip", tmp_path)


def test_weights_alone_can_be_looked_at(tmp_path: Path) -> None:
    """`convert` refuses them: there is no training state, here neither."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    rng = np.random.default_rng(0)
    tensors = {"w": torch.tensor(rng.random((5, 30), dtype=np.float32)), "one": torch.ones(())}
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    view = streamshard.open(tmp_path / "model").zarr(chunk_size=CHUNK_BYTES)
    assert not [key for key in content(view) if key.startswith("meta/state")]
    found = {k.rpartition("/")[2]: v for k, v in arrays(zarr.open_group(view, mode="r")).items()}
    for name, tensor in tensors.items():
        assert found[name].tobytes() == tensor.numpy().tobytes()


def test_xarray_opens_all_states_of_a_kind_at_once(made: Made) -> None:
    import xarray  # slow

    with streamshard.open(made("native-3")) as opened:
        found = xarray.open_zarr(opened.zarr(), group="state/fp32", consolidated=False)
        names = {parameter.tied_to or name for name, parameter in opened.items()}
        assert {*found.data_vars} == {name for name in names if "fp32" in opened[name].tensors}
        for name in found.data_vars:
            assert found[name].values.tobytes() == opened[name].fp32[...].tobytes()


def test_ranges_are_those_of_the_whole(made: Made) -> None:
    view = streamshard.open(made("native-2")).zarr()
    for key in ("zarr.json", "state/fp32/w/c/0/0"):
        whole = get(view, key)
        assert whole is not None
        for wanted, part in (
            (RangeByteRequest(3, 20), whole[3:20]),
            (RangeByteRequest(9, 1 << 40), whole[9:]),
            (OffsetByteRequest(5), whole[5:]),
            (SuffixByteRequest(4), whole[-4:]),
            (SuffixByteRequest(1 << 40), whole),
        ):
            assert get(view, key, wanted) == part
        both = asyncio.run(
            view.get_partial_values(PROTOTYPE, [(key, RangeByteRequest(0, 2)), ("none", None)])
        )
        assert [b and b.to_bytes() for b in both] == [whole[:2], None]


def test_nothing_can_be_written(made: Made) -> None:
    opened = streamshard.open(made("native-2"))
    view = opened.zarr()
    group = zarr.open_group(view, mode="r")
    with pytest.raises(ValueError, match="read-only"):
        array_of(group, "state/fp32/w")[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        group.create_array("more", shape=(1,), dtype="u1")
    for work in (
        view.set("a", PROTOTYPE.buffer.from_bytes(b"a")), view.delete("zarr.json"), view.clear()
    ):  # fmt: skip
        with pytest.raises((ValueError, NotImplementedError)):
            asyncio.run(work)
    with pytest.raises(ValueError, match="read-only"):
        view.with_read_only(read_only=False)
    same = view.with_read_only(read_only=True)
    assert same == view
    assert opened.zarr() != view


@pytest.mark.parametrize("kind", ["native-2", "chunks-none"])
@pytest.mark.parametrize("is_open", [False, True])
def test_a_source_that_changes_is_an_error(kind: str, is_open: bool, tmp_path: Path) -> None:
    source = make(kind, tmp_path)
    view = streamshard.open(source).zarr()
    if is_open:
        content(view)
    changed = [*source.rglob("state/fp32/w/c/*/*")] or [optimizer_file(source, 0)]
    for path in changed:
        os.utime(path, (1, 1))
    with pytest.raises(CorruptFileError, match="changed while it was being read") as raised:
        content(view)
    assert raised.value.path in changed


def test_a_change_while_a_chunk_is_read_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is open then, and was looked at when it was opened."""
    source = write(Job(stage=2), tmp_path / "run")
    view = streamshard.open(source).zarr()
    fill = RegionFiller.fill

    def disturbed(self: RegionFiller, into: memoryview) -> int | None:
        done = fill(self, into)
        for rank in (0, 1):
            os.utime(optimizer_file(source, rank))
        return done

    monkeypatch.setattr(RegionFiller, "fill", disturbed)
    key = next(key for key in asyncio.run(_keys(view)) if key.startswith("state/") and "/c" in key)
    with pytest.raises(CorruptFileError, match="changed while it was being read"):
        get(view, key)


async def _keys(view: Store) -> list[str]:
    return [key async for key in view.list()]


def test_a_damaged_store_gives_no_bytes(tmp_path: Path) -> None:
    store = make("chunks-none", tmp_path)
    (chunk,) = store.glob("state/fp32/w/c/0/0")
    flip(chunk)
    view = streamshard.open(store).zarr()
    with pytest.raises(IntegrityError):
        get(view, "state/fp32/w/c/0/0")
    assert get(view, "state/fp32/v/c/0") is not None
