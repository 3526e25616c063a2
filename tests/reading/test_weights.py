"""A model's weights in safetensors files: looked at, compared with checkpoints, exported."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

import streamshard
from streamshard.cli.main import main
from streamshard.errors import SourceError, StreamshardError, UnsupportedError, UsageError
from tests.fabricated import write
from tests.job import Job

WEIGHTS = {
    "up.weight": torch.randn(5, 3).bfloat16(),
    "up.bias": torch.randn(5),
    "count": torch.tensor(3),
    "none": torch.empty(0, 4),
}


def save(place: Path, parts: list[dict[str, Tensor]]) -> Path:
    """Save as transformers does: one file, or several with an index."""
    place.mkdir(parents=True)
    (place / "config.json").write_text("{}")
    if len(parts) == 1:
        save_file(parts[0], place / "model.safetensors")
        return place
    where: dict[str, str] = {}
    for number, part in enumerate(parts, start=1):
        name = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        save_file(part, place / name)
        where |= dict.fromkeys(part, name)
    index = {"metadata": {}, "weight_map": where}
    (place / "model.safetensors.index.json").write_text(json.dumps(index))
    return place


def halves() -> list[dict[str, Tensor]]:
    names = list(WEIGHTS)
    return [{n: WEIGHTS[n] for n in part} for part in (names[:2], names[2:])]


def test_every_tensor_is_read(tmp_path: Path) -> None:
    """Of one file; `test_laws_of_readers` reads several with an index."""
    place = save(tmp_path / "model", [WEIGHTS])
    with streamshard.open(place) as found:
        assert set(found) == set(WEIGHTS)
        for name, parameter in found.items():
            assert torch.equal(parameter.module.torch(), WEIGHTS[name]), name
    shown = streamshard.inspect(place)
    assert (shown.kind, shown.weights, shown.groups) == ("weights", 4, ())
    assert shown.module_dtype == "bfloat16"  # of most elements: "count" comes first in the file
    assert main(["inspect", str(place)]) == 0


def test_an_export_equals_its_source(tmp_path: Path) -> None:
    job = Job(stage=3)
    run = write(job, tmp_path / "run")
    out = tmp_path / "out"
    streamshard.export(run, out, dtype="fp32", max_shard_size=500)
    found = streamshard.diff(out, run)
    trained = [t for t in found.tensors if t.name.removeprefix("module/") in job.shapes]
    assert len(trained) == len(job.shapes)
    assert not found.changed
    tensors = load_file(next(out.glob("*.safetensors")))
    name = next(name for name in tensors if name in job.shapes)
    tensors[name].view(-1)[0] += 1
    save_file(tensors, next(out.glob("*.safetensors")))
    assert [t.name for t in streamshard.diff(out, run).changed] == [f"module/{name}"]


def test_weights_of_16_bits_are_compared_with_the_job_s_own(tmp_path: Path) -> None:
    run = write(Job(stage=2), tmp_path / "run")
    streamshard.export(run, tmp_path / "out", dtype="bf16")
    found = streamshard.diff(tmp_path / "out", run)
    assert not found.changed
    assert {"module/embed.weight", "module/rotary.inv_freq"} <= {t.name for t in found.tensors}


@pytest.mark.parametrize("verb", ["convert", "repartition"])
def test_no_job_resumes_from_weights(verb: str, tmp_path: Path) -> None:
    place = save(tmp_path / "model", [WEIGHTS])
    with pytest.raises(UnsupportedError, match="without an optimizer's state"):
        getattr(streamshard, verb)(place, tmp_path / "out")


def test_weights_are_no_reference(tmp_path: Path) -> None:
    place = save(tmp_path / "model", [WEIGHTS])
    with pytest.raises(
        UsageError, match=r"does not tell what is lacking.*compared by 'export' alone"
    ):
        streamshard.inspect(write(Job(), tmp_path / "run"), like=place)


def test_an_export_is_compared_with_its_base_model(tmp_path: Path) -> None:
    run = write(Job(stage=3), tmp_path / "run")
    streamshard.export(run, tmp_path / "whole")
    base = load_file(tmp_path / "whole" / "model.safetensors")
    # A model may list what is tied under either name, and with any dtype.
    (kept,) = {"head.weight", "embed.weight"} & base.keys()
    (other,) = {"head.weight", "embed.weight"} - base.keys()
    base[other] = base.pop(kept)
    place = save(tmp_path / "base", [{name: t.half() for name, t in base.items()}])
    streamshard.export(run, tmp_path / "same", like=place)
    exported = (tmp_path / "same" / "model.safetensors").read_bytes()
    assert exported == (tmp_path / "whole" / "model.safetensors").read_bytes()
    part = ["block.*"]
    streamshard.export(run, tmp_path / "part", like=place, include=part)


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        (
            {"embed.bias": None},
            {},
            r"run: the base model .* lacks embed\.bias: leave out with excl",
        ),
        ({"embed.bias": torch.zeros(2)}, {}, r"'embed\.bias' is \[1\], in the base model .* \[2\]"),
        ({"more": torch.zeros(2)}, {}, r"run: lacks more, which the base model"),
        ({}, {"format": "dcp"}, "compared with those of files of weights alone; leave like= out"),
    ],
)
def test_another_model_than_the_base_is_refused(
    changes: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    run = write(Job(stage=2), tmp_path / "run")
    streamshard.export(run, tmp_path / "whole")
    base = {**load_file(tmp_path / "whole" / "model.safetensors"), **changes}
    place = save(tmp_path / "base", [{name: t for name, t in base.items() if t is not None}])
    with pytest.raises(StreamshardError, match=message):
        streamshard.export(run, tmp_path / "out", like=place, **options)
    assert not (tmp_path / "out").exists()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    place = save(tmp_path / "model", halves())
    (place / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(SourceError, match=r"model-00002-of-00002\.safetensors: missing"):
        streamshard.inspect(place)
    assert main(["verify", str(place)]) == 6


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "not an index"),
        ('{"weight_map": 3}', "not an index"),
        ('{"weight_map": {"a": "../x"}}', "is not the name of a file next to it"),
        ('{"weight_map": {"a": "x.safetensors"}}', r"x\.safetensors: missing"),
        ('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}', "which .* says is in"),
    ],
)
def test_wrong_indices_are_refused(index: str, message: str, tmp_path: Path) -> None:
    place = save(tmp_path / "model", halves())
    (place / "model.safetensors.index.json").write_text(index)
    with pytest.raises(SourceError, match=message):
        streamshard.inspect(place)


def save_parts(place: Path) -> Path:
    """Save as each rank of transformers' distributed checkpoints does."""
    writer = HuggingFaceStorageWriter(str(place), save_distributed=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is .*uninitialized")
        save_distributed(halves()[0], storage_writer=writer, no_dist=True)
    return place


def test_whole_files_are_read_next_to_those_of_ranks(tmp_path: Path) -> None:
    """As transformers' `consolidate_distributed_checkpoint` makes them; and it is said."""
    from transformers.distributed.checkpoint import consolidate_distributed_checkpoint  # slow

    place = save_parts(tmp_path / "model")
    consolidate_distributed_checkpoint(place)
    for notes in (streamshard.verify(place).notes, streamshard.inspect(place).notes):
        assert any("Not read: shard-00001-model-00001-of-00001" in note for note in notes)
    streamshard.export(place, tmp_path / "out", dtype="bf16")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: held.tolist() for name, held in found.items()} == {
        name: held.bfloat16().tolist() for name, held in halves()[0].items()
    }


def test_a_part_of_a_tensor_is_not_taken_for_the_whole(tmp_path: Path) -> None:
    place = save_parts(tmp_path / "model")
    (shard,) = place.iterdir()
    names = [*load_file(shard)]
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, shard.name)}
    (place / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UnsupportedError, match=r"index.json lists one of the files of ranks"):
        streamshard.inspect(place)
    told = {name: {"saved_offsets": [0, 0]} for name in names} | {names[1]: {"saved_offsets": [3]}}
    for path in place.iterdir():
        path.unlink()
    held = {name: torch.ones(3) for name in names}
    save_file(held, place / "model.safetensors", {"DCP_SHARDING_INFO": json.dumps(told)})
    with pytest.raises(UnsupportedError, match=rf"model.safetensors: holds a part of '{names[1]}'"):
        streamshard.inspect(place)
    save_file(held, place / "model.safetensors", {"DCP_SHARDING_INFO": "[1]"})
    with pytest.raises(SourceError, match="its header is not a safetensors header"):
        streamshard.inspect(place)
