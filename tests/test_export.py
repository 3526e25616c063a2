"""Exported weights hold what a fabricated job holds, whatever it was cut into."""

import json
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import safe_open

import streamshard
from streamshard.errors import UnsupportedError, UsageError
from tests.exported import JOBS, same
from tests.fabricated import edit, load, write
from tests.job import EXPERTS, TAG, Job, buffers, expected, values


def held(job: Job) -> dict[str, torch.Tensor]:
    """Say what the model holds: masters, frozen weights and buffers, in their own dtypes."""
    found = {name: values("fp32", name, shape) for name, shape in job.shapes.items()}
    frozen = {name: values("frozen", name, shape).to(job.dtype) for name, shape in job.frozen}
    return found | frozen | buffers()


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast what is not a count and no mask."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_every_tensor_is_there_once_and_cast_as_torch_does(
    name: str, dtype: str, tmp_path: Path
) -> None:
    job = JOBS[name]
    source = write(job, tmp_path / "run")
    report = streamshard.export(source, tmp_path / "out", dtype=dtype, verify=True)
    path = tmp_path / "out" / "model.safetensors"
    torch_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    wanted = {key: cast(tensor, torch_dtype) for key, tensor in held(job).items()}
    same(safetensors.torch.load_file(path), wanted)
    # The library would have written the same file.
    assert path.read_bytes() == safetensors.torch.save(wanted, metadata={"format": "pt"})
    assert (report.tensors, report.dtype, report.overflowed) == (len(wanted), dtype, 0)
    assert any("head.weight = embed.weight" in note for note in report.notes)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]


def test_a_store_gives_the_same_bytes(tmp_path: Path) -> None:
    source = write(JOBS["stage 3"], tmp_path / "run")
    outs = []
    for codec, chunk_size in (("none", 40), ("zstd", 1 << 20)):
        store = tmp_path / f"{codec}.zarr"
        streamshard.convert(source, store, codec=codec, chunk_size=chunk_size)
        outs.append(tmp_path / f"of-{codec}")
        streamshard.export(store, outs[-1], verify=True)
    streamshard.export(source, tmp_path / "direct")
    direct = (tmp_path / "direct" / "model.safetensors").read_bytes()
    assert [(out / "model.safetensors").read_bytes() for out in outs] == [direct, direct]


def shard_files(out: Path, form: str) -> dict[str, dict[str, torch.Tensor]]:
    """Load every file of weights, after the index's account of them has been found right."""
    stem, suffix = {"safetensors": ("model", "safetensors"), "torch": ("pytorch_model", "bin")}[
        form
    ]
    index = json.loads((out / f"{stem}.{suffix}.index.json").read_text())
    files = sorted(out.glob(f"*.{suffix}"))
    count = len(files)
    numbers = range(1, count + 1)
    assert [f.name for f in files] == [f"{stem}-{n:05d}-of-{count:05d}.{suffix}" for n in numbers]
    found = {}
    for path in files:
        if form == "safetensors":
            found[path.name] = safetensors.torch.load_file(path)
            with safe_open(path, "pt") as opened:
                assert opened.metadata() == {"format": "pt"}
        else:
            found[path.name] = torch.load(path, weights_only=True)
    where = {name: path for path, tensors in found.items() for name in tensors}
    assert index["weight_map"] == where
    storages = {
        tensor.untyped_storage().data_ptr() or name: tensor.nbytes
        for tensors in found.values()
        for name, tensor in tensors.items()
    }
    assert index["metadata"]["total_size"] == sum(storages.values())
    return found


@pytest.mark.parametrize("form", ["safetensors", "torch"])
def test_files_are_as_large_as_allowed_and_the_index_tells_of_each(
    form: str, tmp_path: Path
) -> None:
    job = JOBS["stage 3"]
    source = write(job, tmp_path / "run")
    report = streamshard.export(
        source, tmp_path / "out", format=form, max_shard_size=150, verify=True
    )
    found = shard_files(tmp_path / "out", form)
    assert len(found) == report.files - 1 > 3
    wanted = {name: cast(tensor, torch.float32) for name, tensor in held(job).items()}
    if form == "torch":
        wanted["head.weight"] = wanted["embed.weight"]
    same({name: tensor for tensors in found.values() for name, tensor in tensors.items()}, wanted)
    for tensors in found.values():
        own = {tensor.untyped_storage().data_ptr(): tensor.nbytes for tensor in tensors.values()}
        assert sum(own.values()) <= 150 or len(own) == 1
    assert report.bytes_written == sum(p.stat().st_size for p in (tmp_path / "out").iterdir())


def test_torch_files_share_tied_weights_and_are_as_torch_makes_them(tmp_path: Path) -> None:
    job = JOBS["stage 2"]
    source = write(job, tmp_path / "run")
    report = streamshard.export(source, tmp_path / "out", format="torch", dtype="bf16")
    path = tmp_path / "out" / "pytorch_model.bin"
    found = torch.load(path, weights_only=True)
    wanted = {name: cast(tensor, torch.bfloat16) for name, tensor in held(job).items()}
    wanted["head.weight"] = wanted["embed.weight"]
    same(found, wanted)
    assert found["head.weight"].data_ptr() == found["embed.weight"].data_ptr()
    assert not any("Tied" in note for note in report.notes)
    torch.save({name: found[name] for name in found}, tmp_path / "pytorch_model.bin")
    assert path.stat().st_size <= (tmp_path / "pytorch_model.bin").stat().st_size


SELECTIONS: dict[str, tuple[dict[str, Any], Any]] = {
    "include": ({"include": ["block.*", "embed.bias"]}, lambda name: name[:2] in ("bl", "em")),
    "exclude": ({"exclude": ["*.bias", "mask"]}, lambda name: "bias" not in name),
    "both": ({"include": ["block.*"], "exclude": ["*.bias"]}, lambda name: True),
    "no frozen": ({"frozen": False}, lambda name: "old" not in name),
}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("what", SELECTIONS)
def test_names_are_chosen_by_patterns(what: str, stage: int, tmp_path: Path) -> None:
    options, rough = SELECTIONS[what]
    source = write(Job(stage=stage), tmp_path / "run")
    streamshard.export(source, tmp_path / "out", **options)
    found = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors").keys()
    include, exclude = options.get("include", ["*"]), options.get("exclude", [])
    wanted = {
        name
        for name in [*held(Job()), "head.weight"]
        if any(fnmatchcase(name, p) for p in include)
        and not any(fnmatchcase(name, p) for p in exclude)
        and (options.get("frozen", True) or not name.startswith("old."))
    }
    assert found == wanted - {"head.weight"}
    assert all(map(rough, found))
    assert 0 < len(found) < len(held(Job()))


def test_a_tied_weight_is_stored_under_the_name_that_is_left(tmp_path: Path) -> None:
    source = write(Job(stage=3), tmp_path / "run")
    streamshard.export(source, tmp_path / "out", exclude=["embed.weight"])
    found = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(found["head.weight"], values("fp32", "embed.weight", (11, 4)))


def test_what_is_kept_is_not_cast(tmp_path: Path) -> None:
    job = Job(stage=2)
    source = write(job, tmp_path / "run")
    kept = ["block.0.*", "old.bias", "rotary*"]
    streamshard.export(source, tmp_path / "out", dtype="fp16", keep_dtype=kept, verify=True)
    wanted = {
        name: tensor
        if any(fnmatchcase(name, pattern) for pattern in kept)
        else cast(tensor, torch.float16)
        for name, tensor in held(job).items()
    }
    assert {wanted[name].dtype for name in ("block.0.bias", "rotary.inv_freq")} == {torch.float32}
    assert wanted["old.bias"].dtype == torch.bfloat16
    same(safetensors.torch.load_file(tmp_path / "out" / "model.safetensors"), wanted)


def test_prefixes_are_taken_off(tmp_path: Path) -> None:
    source = write(Job(stage=3), tmp_path / "run")
    streamshard.export(source, tmp_path / "out", strip_prefix=["block.", "1."])
    found = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    renamed = {"block.0.mlp": "0.mlp", "block.1.bias": "bias", "embed.bias": "embed.bias"}
    assert set(renamed.values()) < found.keys()
    for name, short in renamed.items():
        assert torch.equal(found[short], held(Job())[name])


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("include=['layer", {"include": ["layer"]}),
    ("exclude=['nothing", {"exclude": ["nothing.*"]}),
    ("keep_dtype=['norms", {"keep_dtype": ["norms.*"]}),
    ("strip_prefix=['module", {"strip_prefix": ["module."]}),
    ("leave nothing", {"exclude": ["*"]}),
    ("as 'weight'", {"strip_prefix": ["embed.", "head."], "format": "torch"}),
    ("dtype=fp8", {"dtype": "fp8"}),
    ("format=gguf", {"format": "gguf"}),
    ("max_shard_size=0", {"max_shard_size": 0}),
]


@pytest.mark.parametrize(("said", "options"), REFUSED, ids=lambda value: str(value)[:20])
def test_what_makes_no_sense_is_refused(said: str, options: dict[str, Any], tmp_path: Path) -> None:
    source = write(Job(stage=3), tmp_path / "run")
    with pytest.raises(UsageError) as caught:
        streamshard.export(source, tmp_path / "out", **options)
    assert said in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_model_in_parts_is_refused_by_name(tmp_path: Path) -> None:
    source = write(Job(stage=2, parts=2), tmp_path / "run")
    with pytest.raises(UnsupportedError, match="2 tensor or pipeline parallel parts"):
        streamshard.export(source, tmp_path / "out")


EXPERT = Job(world_size=4, experts=EXPERTS, expert_parallel=2)


def test_experts_are_numbered_throughout_the_model(tmp_path: Path) -> None:
    source = write(EXPERT, tmp_path / "run")
    streamshard.export(source, tmp_path / "out", verify=True)
    shared = replace(EXPERT, experts=())
    experts = {
        EXPERT.in_model(name, rank): EXPERT.values("fp32", name, rank)
        for name, _ in EXPERTS
        for rank in range(2)
    }
    found = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    wanted = {**held(shared), **experts}
    same(found, {name: cast(tensor, torch.float32) for name, tensor in wanted.items()})


def test_experts_that_a_training_script_speaks_of_are_looked_for(tmp_path: Path) -> None:
    source = write(Job(client_state={"num_experts": [2]}), tmp_path / "run")
    with pytest.raises(UnsupportedError, match=r"layer_0_expert_0_.*: missing, although"):
        streamshard.export(source, tmp_path / "out")


def test_what_only_the_files_of_experts_hold_is_not_left_out(tmp_path: Path) -> None:
    source = write(EXPERT, tmp_path / "run")
    streamshard.convert(source, tmp_path / "run.zarr")
    with pytest.raises(UnsupportedError, match="with 'streamshard repartition', export these"):
        streamshard.export(tmp_path / "run.zarr", tmp_path / "out")
    streamshard.repartition(tmp_path / "run.zarr", tmp_path / "again")
    streamshard.export(tmp_path / "again", tmp_path / "out")
    frozen = {"moe.deepspeed_moe.experts.deepspeed_experts.3.old": torch.zeros(3)}
    path = source / TAG / "layer_0_expert_3_mp_rank_00_model_states.pt"
    edit(path, lambda content: content.update(frozen))
    with pytest.raises(UnsupportedError, match=r"has 'moe\..*3\.old', and not trained weights"):
        streamshard.export(source, tmp_path / "other")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_universal_checkpoint_has_a_file_for_each_state(stage: int, tmp_path: Path) -> None:
    job = Job(stage=stage, world_size=3, round_robin=stage == 2)
    source = write(job, tmp_path / "run")
    streamshard.convert(source, tmp_path / "store.zarr")
    outs = [tmp_path / "direct", tmp_path / "of-store"]
    for road, out in zip((source, tmp_path / "store.zarr"), outs, strict=True):
        report = streamshard.export(road, out, format="universal", verify=True)
    files, of_store = (
        {p.relative_to(out): p.read_bytes() for p in out.rglob("*") if p.is_file()} for out in outs
    )
    assert files == of_store
    assert files[Path("latest_universal")] == TAG.encode()
    assert (report.files, report.bytes_written) == (len(files), sum(map(len, files.values())))
    for (state, name), tensor in expected(job).items():
        if state != "module":
            held = load(outs[0] / TAG / "zero" / name / f"{state}.pt")
            found = held.view(tensor.shape) if stage == 3 else held["param"]
            assert torch.equal(found, tensor), (state, name)
    assert any("load_universal" in note for note in report.notes)
    assert any("round_robin_gradients off" in note for note in report.notes) == job.round_robin


def test_what_no_engine_would_load_as_universal_is_refused(tmp_path: Path) -> None:
    jobs = {
        "has a meaning": Job(stage=2),
        "Muon": Job(stage=2, muon=(0,)),
        "directory's name": Job(stage=2, groups=((("../up", (3,)),),), tied={}),
        "experts": Job(stage=2, experts=EXPERTS, expert_parallel=2),
    }
    for number, (said, job) in enumerate(jobs.items()):
        source = write(job, tmp_path / f"run{number}")
        dtype = "bf16" if said == "has a meaning" else "fp32"
        with pytest.raises((UsageError, UnsupportedError), match=said):
            streamshard.export(source, tmp_path / "out", format="universal", dtype=dtype)
        assert not (tmp_path / "out").exists()
