"""Stores that zarr-python rewrote: everything reads them, and other elements never pass."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
import torch
import zarr
from zarr.codecs import BloscCodec, GzipCodec

import streamshard
from streamshard.errors import (
    CorruptFileError,
    IncompleteError,
    IntegrityError,
    MemoryLimitError,
    SourceError,
    StreamshardError,
    UnsupportedError,
    UsageError,
)
from streamshard.formats.zarr.chunks import serialize_checksum
from streamshard.formats.zarr.documents import small_array_document
from streamshard.source.source import open_source
from tests.fabricated import client_state, edit, optimizer_file, write
from tests.formats.conftest import files_of
from tests.job import LEAN, Job
from tests.rewriting import REWRITES, copy_store, halves, rewrite_array

ARRAY = "state/exp_avg/embed.weight"
BF16 = "module/embed.weight"
ZEROS = 400
"""Bytes of a tensor of zeros: zarr-python writes no chunk of it."""
JOB = replace(LEAN, world_size=3, client_state={**client_state(), "z": torch.zeros(ZEROS // 4)})


def written(store: Path, out: Path, world_size: int = 2) -> dict[str, bytes]:
    """Rebuild the checkpoint, and return its files."""
    streamshard.repartition(store, out, world_size=world_size, verify=True)
    return files_of(out)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a store; not to be changed."""
    directory = tmp_path_factory.mktemp("original")
    write(JOB, directory / "run")
    streamshard.convert(directory / "run", directory / "x.zarr", codec="zstd", chunk_size=100)
    return directory / "x.zarr"


@pytest.fixture
def store(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "x.zarr"))


@pytest.fixture
def rewritten(store: Path) -> Path:
    """Make a store in which one array was rewritten, in chunks without any checksum."""
    rewrite_array(store, ARRAY, chunks=halves((11, 4)), compressors=None)
    return store


@pytest.fixture(scope="module")
def digests(original: Path) -> Mapping[str, str]:
    return streamshard.verify(original).digests


@pytest.mark.parametrize("how", REWRITES)
def test_a_copy_holds_what_the_original_does(
    original: Path, digests: Mapping[str, str], tmp_path: Path, how: str
) -> None:
    store = copy_store(original, tmp_path / "copy.zarr", REWRITES[how])
    found = streamshard.verify(store)
    assert found.problems == ()
    assert found.digests == digests
    assert found.tensors == len(found.digests)
    assert "rewritten by another tool" in " ".join(found.notes)


def test_a_copy_is_read_by_every_verb(original: Path, tmp_path: Path) -> None:
    """They all read elements in order, here from parts of many chunks."""
    store = copy_store(original, tmp_path / "copy.zarr", REWRITES["columns"])
    assert written(store, tmp_path / "a") == written(original, tmp_path / "b")
    for source, out in ((store, tmp_path / "ours"), (original, tmp_path / "theirs")):
        streamshard.convert(source, out / "again.zarr")
        streamshard.export(source, out / "weights")
    assert files_of(tmp_path / "ours") == files_of(tmp_path / "theirs")
    assert streamshard.verify(store, against=original.parent / "run").is_good
    assert streamshard.diff(original, store).is_equal


def test_inspect_says_so(original: Path, tmp_path: Path) -> None:
    """Consolidated metadata is read over: it repeats what the documents say."""
    store = copy_store(original, tmp_path / "copy.zarr", REWRITES["gzip"], consolidates=True)
    found, before = streamshard.inspect(store), streamshard.inspect(original)
    assert "rewritten by another tool" in found.notes[0]
    assert found.notes[1:] == before.notes == ()
    assert found.parameters[0].name == before.parameters[0].name
    assert found.files == len([p for p in store.rglob("*") if p.is_file()])
    assert streamshard.verify(store).is_good


def test_consolidated_metadata_alone_is_no_damage(store: Path) -> None:
    with pytest.warns(UserWarning, match="Consolidated metadata"):
        zarr.consolidate_metadata(store)
    found = streamshard.verify(store)
    assert found.is_good
    assert found.notes == ("1 zarr.json were serialized again by another tool, and say the same.",)


def test_one_array_is_rewritten_in_its_place(
    rewritten: Path, original: Path, tmp_path: Path
) -> None:
    (note,) = streamshard.verify(rewritten).notes
    assert f"{ARRAY} was rewritten" in note
    assert written(rewritten, tmp_path / "a") == written(original, tmp_path / "b")
    with streamshard.open(rewritten) as ours, streamshard.open(original) as theirs:
        for name in theirs:
            for state in ("fp32", "exp_avg"):
                if hasattr(theirs[name], state):
                    one, other = getattr(ours[name], state), getattr(theirs[name], state)
                    assert one.bits().tobytes() == other.bits().tobytes()
        part = ours["embed.weight"].exp_avg[7:9, 1:3]
        assert part.tobytes() == theirs["embed.weight"].exp_avg[7:9, 1:3].tobytes()
        with pytest.raises(UsageError, match="was rewritten by another tool, in"):
            ours["embed.weight"].exp_avg.memmap()


def test_an_array_of_several_pieces(tmp_path: Path) -> None:
    """Each piece has whole rows of chunks; the last one is shorter."""
    shape = (1100, 1000)
    job = Job(groups=((("w", shape),),), tied={}, frozen=(), world_size=2)
    write(job, tmp_path / "run")
    streamshard.convert(tmp_path / "run", tmp_path / "x.zarr")
    rewrite_array(tmp_path / "x.zarr", "state/fp32/w", chunks=(100, 300))
    source = open_source(tmp_path / "x.zarr")
    pieces = [f for f in source.files if type(f.decoder).__name__ == "RewrittenPiece"]
    assert len(pieces) == 6
    assert source.codec_bytes < 4 << 20
    assert streamshard.verify(tmp_path / "x.zarr").is_good
    with streamshard.open(tmp_path / "x.zarr") as ours, streamshard.open(tmp_path / "run") as run:
        assert ours["w"].fp32[1050:].tobytes() == run["w"].fp32[1050:].tobytes()
        assert ours["w"].fp32[...].tobytes() == run["w"].fp32[...].tobytes()


def refused(store: Path, tmp_path: Path, kind: type[StreamshardError], match: str) -> None:
    """Require that nothing is written from a store, and that `verify` finds the problem too."""
    out = tmp_path / "refused"
    with pytest.raises(kind, match=re.escape(match)):
        streamshard.repartition(store, out, world_size=2)
    assert not out.exists()
    shutil.rmtree(out.with_name("refused.partial"), ignore_errors=True)
    assert match in " ".join(problem.message for problem in streamshard.verify(store).problems)


def test_a_missing_chunk_is_not_taken_for_zeros(rewritten: Path, tmp_path: Path) -> None:
    (rewritten / ARRAY / "c/1/0").unlink()
    refused(rewritten, tmp_path, IntegrityError, "takes the fill value for them: c/1/0")


def test_a_missing_chunk_inside_of_a_zarr_shard(store: Path, tmp_path: Path) -> None:
    """Its place in the shard's index is empty. Nothing but the digest knows what was there."""
    rewrite_array(store, ARRAY, chunks=halves((11, 4)), shards=(12, 4), compressors=None)
    (shard,) = [p for p in (store / ARRAY / "c").rglob("*") if p.is_file()]
    data = bytearray(shard.read_bytes())
    index = memoryview(data)[-4 - 4 * 16 : -4]
    index[16:32] = b"\xff" * 16
    data[-4:] = serialize_checksum(google_crc32c.value(bytes(index)))
    shard.write_bytes(data)
    refused(store, tmp_path, IntegrityError, "and not with the same elements")


def test_chunks_of_zeros_that_are_not_stored_are_zeros(original: Path, tmp_path: Path) -> None:
    """zarr-python leaves them out by default; the digest proves that they were zeros."""
    store = copy_store(original, tmp_path / "copy.zarr", REWRITES["as zarr-python likes"])
    arrays = [place.parent for place in (store / "blob").rglob("*/zarr.json")]
    assert not all((array / "c").exists() for array in arrays)
    assert streamshard.verify(store).is_good


def test_a_flipped_bit_without_any_checksum(rewritten: Path, tmp_path: Path) -> None:
    chunk = rewritten / ARRAY / "c/0/1"
    data = bytearray(chunk.read_bytes())
    data[5] ^= 4
    chunk.write_bytes(data)
    refused(rewritten, tmp_path, IntegrityError, "and not with the same elements")
    with streamshard.open(rewritten) as ckpt, pytest.raises(IntegrityError, match=ARRAY):
        ckpt["embed.weight"].exp_avg[0, 0]  # of another chunk
    with pytest.raises(IntegrityError, match=ARRAY):
        streamshard.diff(rewritten, rewritten)


def test_a_chunk_that_is_cut_short_or_empty(store: Path, tmp_path: Path) -> None:
    rewrite_array(store, ARRAY, **REWRITES["gzip"]((11, 4)))
    chunk = min(p for p in (store / ARRAY / "c").rglob("*") if p.is_file())
    chunk.write_bytes(chunk.read_bytes()[:3])
    refused(store, tmp_path, IntegrityError, "cannot be decoded")
    chunk.write_bytes(b"")
    refused(store, tmp_path, IntegrityError, "Missing or empty")


@pytest.mark.parametrize("nbytes", [15, None])
def test_a_frame_of_blosc_that_ends_before_it_says(
    store: Path, tmp_path: Path, nbytes: int | None
) -> None:
    """Blosc would read past the end of what there is."""
    rewrite_array(store, ARRAY, compressors=BloscCodec())
    chunk = min(p for p in (store / ARRAY / "c").rglob("*") if p.is_file())
    data = chunk.read_bytes()
    more = (10**9).to_bytes(4, "little")
    chunk.write_bytes((data[:12] + more + data[16:])[:nbytes])
    refused(store, tmp_path, IntegrityError, "cannot be decoded (IntegrityError a frame of")


def put(key: str, value: Any) -> Callable[[dict[str, Any]], None]:  # noqa: ANN401
    return lambda document: document.update({key: value})


def grid(*chunk: object) -> Callable[[dict[str, Any]], None]:
    return put("chunk_grid", {"name": "regular", "configuration": {"chunk_shape": [*chunk]}})


def inner(codec: object) -> Callable[[dict[str, Any]], None]:
    codecs = [{"name": "bytes"}, codec]
    sharding = {"chunk_shape": [1, 1], "codecs": codecs, "index_codecs": [{"name": "bytes"}]}
    return put("codecs", [{"name": "sharding_indexed", "configuration": sharding}])


OTHER_ARRAYS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "shape": (put("shape", [4, 11]), "another shape"),
    "type": (put("data_type", "float16"), "another data_type"),
    "fill": (put("fill_value", 1.5), "another fill_value"),
    "attribute": (put("attributes", {"a": 1}), "another attributes"),
    "dimensions": (grid(4), "cannot open this array"),
    "zero": (grid(4, 0), "cannot open this array"),
    "text": (grid(4, "2"), "cannot open this array"),
    "grid": (put("chunk_grid", {"name": "rectilinear"}), "cannot open this array"),
    "codec": (
        put("codecs", [{"name": "bytes"}, {"name": "numcodecs.lz4"}]), "codec 'numcodecs.lz4'",
    ),
    "inner codec": (inner("pcodec"), "codec 'pcodec'"),
    "twice compressed": (
        put("codecs", [{"name": "bytes"}, {"name": "gzip"}, {"name": "zstd"}]), "zstd, and not",
    ),
    "none": (put("codecs", []), "cannot open this array"),
    "more": (put("storage_transformers", [{"name": "x"}]), "cannot open this array"),
}  # fmt: skip


@pytest.mark.parametrize("what", OTHER_ARRAYS)
def test_another_array_is_refused_by_name(rewritten: Path, tmp_path: Path, what: str) -> None:
    change, match = OTHER_ARRAYS[what]
    kind = CorruptFileError if match.startswith("another") else UnsupportedError
    place = rewritten / ARRAY / "zarr.json"
    document = json.loads(place.read_bytes())
    change(document)
    place.write_text(json.dumps(document))
    refused(rewritten, tmp_path, kind, match)
    with pytest.raises(kind, match=ARRAY):
        streamshard.inspect(rewritten)


def test_the_true_dtype_must_not_get_lost(store: Path, tmp_path: Path) -> None:
    """Zarr has no bfloat16: the attribute says that these integers are one."""
    rewrite_array(store, BF16, chunks=(11, 2))
    assert streamshard.verify(store).is_good
    rewrite_array(store, BF16, chunks=(11, 2), attributes={})
    refused(store, tmp_path, CorruptFileError, "another attributes")


@pytest.mark.parametrize("damage", ["gone", "cut", "flipped"])
def test_our_own_chunks_are_refused_as_ever(store: Path, tmp_path: Path, damage: str) -> None:
    """What the array's own zarr.json describes as before is damaged, not rewritten."""
    rewrite_array(store, BF16, chunks=(11, 2))
    chunk = store / ARRAY / "c/1/0"
    data = chunk.read_bytes()
    chunk.write_bytes(data[:-1] if damage == "cut" else bytes([data[0] ^ 1]) + data[1:])
    if damage == "gone":
        chunk.unlink()
    messages = {"gone": "missing", "cut": "bytes, ", "flipped": "damaged"}
    with pytest.raises((SourceError, IntegrityError), match=f"{ARRAY}/c/1/0: .*{messages[damage]}"):
        written(store, tmp_path / "out")
    kinds = {problem.kind for problem in streamshard.verify(store).problems}
    assert kinds == {"missing" if damage == "gone" else "damaged"}


def test_documents_serialized_anew_open_no_other_road(store: Path, tmp_path: Path) -> None:
    """They describe what is there, so a missing chunk is missing."""
    place = store / ARRAY / "zarr.json"
    place.write_text(json.dumps(json.loads(place.read_bytes())))
    assert streamshard.verify(store).is_good
    place.write_text(place.read_text() + " ")
    assert [problem.file for problem in streamshard.verify(store).problems] == [str(place)]
    place.write_text(json.dumps(json.loads(place.read_bytes())))
    (store / ARRAY / "c/1/0").unlink()
    with pytest.raises(SourceError, match=f"{ARRAY}/c/1/0: missing"):
        written(store, tmp_path / "out")


def test_without_a_digest_nothing_can_be_compared(rewritten: Path, tmp_path: Path) -> None:
    chunk = rewritten / "meta/manifest/c/0"
    document = json.loads(chunk.read_bytes()[:-4])
    del document["digests"][ARRAY]
    data = json.dumps(document).encode()
    chunk.write_bytes(data + serialize_checksum(google_crc32c.value(data)))
    (rewritten / "meta/manifest/zarr.json").write_bytes(small_array_document(len(data)))
    refused(rewritten, tmp_path, UnsupportedError, "no digest with which")


@pytest.mark.parametrize("which", ["meta/state", "meta/manifest"])
def test_a_rewritten_training_state_or_manifest_is_checked(store: Path, which: str) -> None:
    ours = (store / which / "c/0").read_bytes()
    rewrite_array(store, which, chunks=(64,), compressors=None)
    assert streamshard.verify(store).is_good
    chunk = store / which / "c/1"
    data = chunk.read_bytes()
    chunk.unlink()
    with pytest.raises((IncompleteError, IntegrityError), match=rf"{which}: .*for them: c/1$"):
        streamshard.inspect(store)
    if which == "meta/state":
        chunk.write_bytes(bytes([data[0] ^ 1]) + data[1:])
        with pytest.raises(IntegrityError, match="not what the manifest records"):
            streamshard.inspect(store)
    chunk.write_bytes(data)
    assert streamshard.verify(store).is_good
    assert len(data) == 64 < len(ours)


MEASURED = """
import sys, streamshard
done = streamshard.repartition(*sys.argv[1:], world_size=2, workers=1)
print(done.peak_bytes, done.projected_bytes)
"""


@pytest.mark.memory
def test_measured_memory_is_what_was_projected(tmp_path: Path) -> None:
    """The worst case: compressed, in chunks that are most of what a run takes."""
    job = Job(groups=((("w", (1024, 3000)),),), tied={}, frozen=(), world_size=1)
    store, out = tmp_path / "x.zarr", tmp_path / "out"
    streamshard.convert(write(job, tmp_path / "run"), store)
    compressor = GzipCodec(level=1)
    rewrite_array(store, "state/fp32/w", chunks=(1024, 3000), compressors=compressor)
    with pytest.raises(MemoryLimitError, match="Nothing was read or written"):
        streamshard.plan_repartition(store, out, world_size=2, memory_limit=90 << 20)
    with pytest.raises(MemoryLimitError, match="Nothing was read or written"):
        streamshard.verify(store, memory_limit=90 << 20)
    command = [sys.executable, "-c", MEASURED, str(store), str(out)]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    measured, projected = map(int, found.stdout.split())
    assert measured <= projected


def test_a_chunk_that_changes_after_planning(rewritten: Path, tmp_path: Path) -> None:
    plan = streamshard.plan_repartition(rewritten, tmp_path / "out", world_size=2)
    chunk = rewritten / ARRAY / "c/0/0"
    chunk.write_bytes(chunk.read_bytes() + b"\0")
    with pytest.raises(CorruptFileError, match="changed while it was being read"):
        plan.run()
    assert not (tmp_path / "out").exists()


def test_a_link_out_of_the_store_is_not_followed(rewritten: Path, tmp_path: Path) -> None:
    chunk = rewritten / ARRAY / "c/0/0"
    chunk.rename(tmp_path / "elsewhere")
    chunk.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SourceError, match="leads out of"):
        streamshard.inspect(rewritten)


ORDINARY = """
import sys, streamshard
store, out = sys.argv[1:]
streamshard.inspect(store)
streamshard.repartition(store, out, world_size=2, verify=True)
streamshard.export(store, out + "-weights")
streamshard.convert(store, out + ".zarr")
streamshard.verify(store)
with streamshard.open(store) as ckpt:
    ckpt["embed.weight"].fp32[...]
print("zarr" in sys.modules)
"""


def test_zarr_python_is_imported_for_rewritten_arrays_only(original: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", ORDINARY, str(original), str(tmp_path / "out")]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


def test_bits_survive(tmp_path: Path) -> None:
    """NaNs with a payload, negative zeros: as bits they come through any codec."""
    odd = np.frombuffer(b"\x01\x00\xa0\x7f\x00\x00\x00\x80", dtype="<f4").copy()
    write(JOB, tmp_path / "run")

    def spoil(held: dict[str, Any]) -> None:
        flat = held["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["exp_avg"]
        flat[:2] = torch.from_numpy(odd)

    edit(optimizer_file(tmp_path / "run", 0), spoil)
    streamshard.convert(tmp_path / "run", tmp_path / "x.zarr")
    for how in ("big endian", "transposed", "zarr shards"):
        store = shutil.copytree(tmp_path / "x.zarr", tmp_path / f"{how}.zarr")
        rewrite_array(store, ARRAY, **REWRITES[how]((11, 4)))
        with streamshard.open(store) as ckpt:
            assert ckpt["embed.weight"].exp_avg[0, :2].tobytes() == odd.tobytes()
