"""Stores of the files of a pipeline's layers: their tensors are read inside of these files."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.serialization import config

import streamshard
from streamshard.degrees.layered import layered
from streamshard.errors import DisagreementError, IntegrityError, UnsupportedError
from streamshard.formats.torch import torch_file
from streamshard.layout.cutting import whole_segment
from streamshard.operations.compact.weights_only import WeightsOnlyStore
from streamshard.source.source import open_source
from tests.cli.conftest import tree
from tests.comparing import compare
from tests.exported import same
from tests.fabricated import edit, load
from tests.fabricated_pipes import CUTS, PipeJob, layer_file, write_pipe
from tests.job import TAG, Shapes
from tests.samples import sampled

WIDE: Shapes = (("up", (5, 30)), ("bias", (3,)), ("old", (40, 2)), ("running", (4,)))
"""Tensors of more bytes than the smallest chunk has."""
JOB = PipeJob(world_size=2, layers=("embed", WIDE, None, WIDE, WIDE, "embed"))
JOBS = {
    "one-rank": JOB,
    "two-ranks": replace(JOB, tensor=2, cuts=CUTS),
}
OTHER = replace(JOB, tensor=3, cuts=CUTS, starts=(0, 2, 4), world_size=1)


def content_of(source: Path) -> dict[tuple[str, str], tuple[str, Any]]:
    """Read all that can be opened: its kind and its bits, by name and state."""
    with streamshard.open(source) as ckpt:
        return {
            (name, state): (held.kind, tensor.bits().tolist())
            for name, held in ckpt.items()
            for state, tensor in held.tensors.items()
        }


def is_cut(store: Path) -> bool:
    """Tell whether a layer's tensor lies in several chunks."""
    source = layered(open_source(store)).source
    first = len(open_source(store).checkpoint.tensors)
    tensors = range(first, len(source.checkpoint.tensors))
    wholes = [whole_segment(n, source.checkpoint.tensors[n].numel) for n in tensors]
    return any(len(source.cutting.locate(s, target_itemsize=1).file) > 1 for s in wholes)


def without_alignment(run: Path) -> None:
    """Save the layers' files as torch may be configured to: a large tensor is unaligned."""
    for path in (run / TAG).glob("layer_*"):
        content = load(path)
        for padding in ("x", "xx"):
            content._metadata = {"": {"padding": padding}}
            with config.patch({"save.storage_alignment": 1}):  # type: ignore[attr-defined]
                torch.save(content, path)
            storages = torch_file.read(path, 0).storages.values()
            if max(storages, key=lambda storage: storage.nbytes).offset % 2:
                break
        else:
            raise AssertionError("aligned")


@pytest.mark.parametrize(
    ("name", "codec", "chunk_size"),
    [("one-rank", "none", 1 << 20), ("two-ranks", "zstd", 200)],
)
def test_what_is_made_of_a_store_is_what_is_made_of_the_files(
    tmp_path: Path, name: str, codec: str, chunk_size: int
) -> None:
    """With small chunks, tensors in files lie in several; a store is a reference as files are."""
    run, store = write_pipe(JOBS[name], tmp_path / "run"), tmp_path / "run.zarr"
    like = write_pipe(OTHER, tmp_path / "like")
    streamshard.convert(run, store, codec=codec, chunk_size=chunk_size)
    assert is_cut(store) == (chunk_size < 1000)
    content = content_of(store)
    assert content == content_of(run)
    assert ("1.running", "module") in content
    assert streamshard.diff(store, like).is_equal
    streamshard.convert(like, tmp_path / "like.zarr", codec="zstd")
    degrees: dict[str, Any] = {"tensor_parallel": 3, "pipeline_parallel": 3, "world_size": 9}
    for source, place, told in ((run, "direct", like), (store, "of-store", tmp_path / "like.zarr")):
        out = tmp_path / place
        streamshard.export(source, out / "fp32", dtype="fp32", verify=True)
        streamshard.repartition(source, out / "run", like=told, verify=True, **degrees)
    assert tree(tmp_path / "of-store") == tree(tmp_path / "direct")
    compare(tmp_path / "of-store" / "run" / TAG, like / TAG)


def test_a_file_of_unaligned_elements_has_to_be_in_one_chunk(tmp_path: Path) -> None:
    """Its tensors are needed one by one."""
    run = write_pipe(replace(JOB, layers=("embed", WIDE, WIDE)), tmp_path / "run")
    without_alignment(run)
    for chunk_size in (1 << 20, 64):
        streamshard.convert(run, tmp_path / f"{chunk_size}.zarr", chunk_size=chunk_size)
    assert content_of(tmp_path / f"{1 << 20}.zarr") == content_of(run)
    with pytest.raises(UnsupportedError, match=r"layer_\d\d-model_states\.pt' lies in two chunks"):
        streamshard.export(tmp_path / "64.zarr", tmp_path / "out")
    streamshard.repartition(tmp_path / "64.zarr", tmp_path / "back", world_size=2)
    for path in (run / TAG).glob("layer_*"):
        assert (tmp_path / "back" / TAG / path.name).read_bytes() == path.read_bytes()


def test_a_store_of_weights_has_its_layers(tmp_path: Path) -> None:
    """The layers' files stay, so what is frozen and the buffers are there, but no job resumes."""
    run, store = write_pipe(JOBS["two-ranks"], tmp_path / "run"), tmp_path / "run.zarr"
    streamshard.convert(run, store, codec="zstd", chunk_size=333)
    weights = tmp_path / "w.zarr"
    WeightsOnlyStore.of(store, at="2026-11-23T00:00:00+00:00", why="by hand").write(weights)
    for source, name in ((run, "direct"), (weights, "of-weights")):
        streamshard.export(source, tmp_path / name, dtype="fp32")
    direct, found = (
        load_file(tmp_path / name / "model.safetensors") for name in ("direct", "of-weights")
    )
    same(found, direct)


@sampled(5)
@pytest.mark.parametrize(("codec", "chunk_size"), [("none", 128), ("zstd", 1 << 20)])
def test_damage_of_a_layer_is_never_taken_over(
    tmp_path: Path, codec: str, chunk_size: int, one_in: int
) -> None:
    """Bytes that nothing needs, such as a zip's padding, may be left unread."""
    run, store = write_pipe(JOB, tmp_path / "run"), tmp_path / "run.zarr"
    streamshard.convert(run, store, codec=codec, chunk_size=chunk_size)
    streamshard.export(store, tmp_path / "sound", format="torch")
    sound, noticed = tree(tmp_path / "sound"), 0
    chunks = sorted((store / "file").glob("*layer_03*/c/*"))[::one_in]
    for number, path in enumerate(chunks):
        content = path.read_bytes()
        path.write_bytes(content[:20] + bytes([content[20] ^ 1]) + content[21:])
        found = message_of_damage(store, tmp_path / str(number))
        if found:
            assert str(path) in found
            noticed += 1
        else:
            assert tree(tmp_path / str(number)) == sound
        path.write_bytes(content)
    assert noticed > len(chunks) // 2


def message_of_damage(store: Path, out: Path) -> str:
    try:
        streamshard.export(store, out, format="torch")
    except IntegrityError as error:
        return str(error)
    return ""


def test_what_is_refused_of_files_is_refused_of_a_store(tmp_path: Path) -> None:
    run, store = write_pipe(JOB, tmp_path / "run"), tmp_path / "run.zarr"
    edit(layer_file(run, 5), lambda held: held["weight"].view(-1)[3:4].add_(1))
    streamshard.convert(run, store, chunk_size=333)
    with pytest.raises(DisagreementError, match=r"1 of 14 .* layer_05-model_states\.pt and"):
        streamshard.export(store, tmp_path / "out")
