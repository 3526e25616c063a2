"""Exported weights hold what a fabricated job holds, and what they are used with comes along."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

import streamshard
from streamshard.errors import IntegrityError, UnsupportedError, UsageError
from streamshard.operations.export.export import ExportWriter
from streamshard.operations.export.weights import shards
from streamshard.transfer.target import partial_of
from tests.cli.conftest import model_file, tree
from tests.exported import JOBS, same
from tests.fabricated import edit, load, optimizer_file, write
from tests.job import EXPERT, EXPERTS, TAG, Job, buffers, expected, values


def held(job: Job) -> dict[str, torch.Tensor]:
    """Say what the model holds: masters, frozen weights and buffers, in their own dtypes."""
    found = {name: values("fp32", name, shape) for name, shape in job.shapes.items()}
    frozen = {name: values("frozen", name, shape).to(job.dtype) for name, shape in job.frozen}
    return found | frozen | buffers()


def cast(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast what is not a count and no mask; in 16 bits, engines leave buffers as they are."""
    is_kept = name in buffers() and dtype is not torch.float32
    return tensor.to(dtype) if tensor.is_floating_point() and not is_kept else tensor


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, "fp32") for name in JOBS), ("stage 2", "bf16"), ("stage 3", "bf16"),
     ("stage 2", "fp16"), ("stage 3, fp16", "fp16"), ("stage 3, fp16", "bf16")],
)  # fmt: skip
def test_every_tensor_is_there_once_and_cast_as_torch_does(
    name: str, dtype: str, tmp_path: Path
) -> None:
    job = JOBS[name]
    source = write(job, tmp_path / "run")
    report = streamshard.export(source, tmp_path / "out", dtype=dtype, verify=True)
    path = tmp_path / "out" / "model.safetensors"
    torch_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    wanted = {key: cast(key, tensor, torch_dtype) for key, tensor in held(job).items()}
    same(safetensors.torch.load_file(path), wanted)
    # The library would have written the same file.
    assert path.read_bytes() == safetensors.torch.save(wanted, metadata={"format": "pt"})
    assert (report.tensors, report.dtype, report.overflowed) == (len(wanted), dtype, 0)
    assert any("head.weight = embed.weight" in note for note in report.notes)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]


def test_a_store_gives_the_same_bytes(tmp_path: Path) -> None:
    source = write(JOBS["stage 3"], tmp_path / "run")
    streamshard.export(source, tmp_path / "direct")
    for codec, chunk_size in (("none", 40), ("zstd", 1 << 20)):
        store, out = tmp_path / f"{codec}.zarr", tmp_path / f"of-{codec}"
        streamshard.convert(source, store, codec=codec, chunk_size=chunk_size)
        streamshard.export(store, out, verify=True)
        assert tree(out) == tree(tmp_path / "direct")


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
    wanted = {name: cast(name, tensor, torch.float32) for name, tensor in held(job).items()}
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
    wanted = {name: cast(name, tensor, torch.bfloat16) for name, tensor in held(job).items()}
    wanted["head.weight"] = wanted["embed.weight"]
    same(found, wanted)
    assert found["head.weight"].data_ptr() == found["embed.weight"].data_ptr()
    assert not any("Tied" in note for note in report.notes)
    torch.save({name: found[name] for name in found}, tmp_path / "pytorch_model.bin")
    assert path.stat().st_size <= (tmp_path / "pytorch_model.bin").stat().st_size


BIASES = ("embed.bias", "block.0.bias", "block.1.bias")
OPTIONS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "include": (
        {"include": ["block.*", "embed.bias"]}, {"block.0.attn.weight", "block.0.mlp", *BIASES},
    ),
    "exclude": ({"exclude": ["*.bias", "mask"]}, {*held(Job())} - {"old.bias", "mask", *BIASES}),
    "both": ({"include": ["block.*"], "exclude": ["*.bias"]},
             {"block.0.attn.weight", "block.0.mlp"}),
    "other tied name": (
        {"exclude": ["embed.weight"]}, {*held(Job()), "head.weight"} - {"embed.weight"},
    ),
    "dtype": ({"exclude": ["old.*"], "dtype": "fp16"}, {*held(Job())} - {"old.weight", "old.bias"}),
}  # fmt: skip
"""Options, and the tensors that they leave; of tied names the first one that is left."""


@pytest.mark.parametrize(("options", "names"), OPTIONS.values(), ids=OPTIONS)
def test_names_and_dtypes_are_chosen_by_patterns(
    options: dict[str, Any], names: set[str], tmp_path: Path
) -> None:
    job = Job(stage=2)
    streamshard.export(write(job, tmp_path / "run"), tmp_path / "out", verify=True, **options)
    dtype = torch.float16 if "dtype" in options else torch.float32
    whole = held(job) | {"head.weight": held(job)["embed.weight"]}
    wanted = {name: cast(name, whole[name], dtype) for name in names}
    same(safetensors.torch.load_file(tmp_path / "out" / "model.safetensors"), wanted)


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("include=['layer", {"include": ["layer"]}),
    ("exclude=['nothing", {"exclude": ["nothing.*"]}),
    ("leave nothing", {"exclude": ["*"]}),
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
    same(found, {name: cast(name, tensor, torch.float32) for name, tensor in wanted.items()})


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
    files = tree(outs[0])
    assert files == tree(outs[1])
    assert files["latest_universal"] == TAG.encode()
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
        "is for files of weights": Job(stage=2),
        "Muon": Job(stage=2, muon=(0,)),
        "directory's name": Job(stage=2, groups=((("../up", (3,)),),), tied={}),
        "experts": Job(stage=2, experts=EXPERTS, expert_parallel=2),
    }
    for number, (said, job) in enumerate(jobs.items()):
        source = write(job, tmp_path / f"run{number}")
        dtype = "bf16" if said == "is for files of weights" else "fp32"
        with pytest.raises((UsageError, UnsupportedError), match=said):
            streamshard.export(source, tmp_path / "out", format="universal", dtype=dtype)
        assert not (tmp_path / "out").exists()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write(Job(stage=2), tmp_path / "training" / "run")


def test_what_is_no_weight_is_named_and_what_is_one_is_not_left_out(
    run: Path, tmp_path: Path
) -> None:
    held = {"block._extra_state": {"amax": 1.5}}
    edit(model_file(run), lambda model: model["module"].update(held))
    report = streamshard.export(run, tmp_path / "out")
    assert any("not weights: block._extra_state." in note for note in report.notes)
    loose = {"loose": torch.ones(3, 5).t()}
    edit(model_file(run), lambda model: model["module"].update(loose))
    with pytest.raises(UnsupportedError, match=r"loose.*elements in a row"):
        streamshard.export(run, tmp_path / "other")
    report = streamshard.export(run, tmp_path / "other", exclude=["loose"])
    assert not any("loose" in note for note in report.notes)
    assert "loose" not in safetensors.torch.load_file(tmp_path / "other" / "model.safetensors")


def test_what_no_param_group_trains_is_exported_as_the_module_has_it(
    run: Path, tmp_path: Path
) -> None:
    loose = {"loose": torch.tensor([1.5, -2.0], dtype=torch.float64)}
    edit(model_file(run), lambda model: model["module"].update(loose))
    streamshard.export(run, tmp_path / "out", dtype="fp16")
    found = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(found["loose"], torch.tensor([1.5, -2.0], dtype=torch.float16))


@pytest.mark.parametrize("form", ["safetensors", "torch"])
def test_float64_is_rounded_only_if_asked(run: Path, tmp_path: Path, form: str) -> None:
    count, loose = torch.tensor([[1 / 3, 1e300], [1e-300, 7]], dtype=torch.float64)

    def add(model: dict[str, Any]) -> None:
        model["module"] |= {"count": count, "loose": loose}
        model["buffer_names"].append("count")

    edit(model_file(run), add)
    kept = {"count": count, "loose": loose}
    wanted = {
        None: kept,
        "fp32": {name: tensor.float() for name, tensor in kept.items()},
        "bf16": {"count": count, "loose": loose.bfloat16()},
    }
    for dtype, tensors in wanted.items():
        out = tmp_path / str(dtype)
        report = streamshard.export(run, out, dtype=dtype, format=form, verify=True)
        found = (
            safetensors.torch.load_file(out / "model.safetensors")
            if form == "safetensors"
            else load(out / "pytorch_model.bin")
        )
        same({name: found[name] for name in kept}, tensors)
        said = [note for note in report.notes if "float64" in note]
        assert bool(said) == (dtype is None)
        assert all("count" in note and "dtype=fp32" in note for note in said)


def test_what_cannot_be_cast_is_refused_and_can_be_left_out(run: Path, tmp_path: Path) -> None:

    def add(model: dict[str, Any]) -> None:
        model["module"]["scale"] = torch.ones(3).to(torch.float8_e4m3fn)
        model["buffer_names"].append("scale")

    edit(model_file(run), add)
    with pytest.raises(UnsupportedError, match=r"'scale'.*exclude=\['scale'\]"):
        streamshard.export(run, tmp_path / "out")
    streamshard.export(run, tmp_path / "out", exclude=["scale"], verify=True)
    found = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert "scale" not in found


def test_left_out_frozen_weights_are_told(run: Path, tmp_path: Path) -> None:

    def leave_out(model: dict[str, Any]) -> None:
        model |= {"frozen_param_shapes": None, "frozen_param_fragments": None}
        for name in ("old.weight", "old.bias"):
            del model["module"][name]

    edit(model_file(run), leave_out)
    report = streamshard.export(run, tmp_path / "out")
    assert any("exclude_frozen_parameters" in note for note in report.notes)
    assert any("No config.json" in note for note in report.notes)


def test_what_overflows_is_counted_and_named(run: Path, tmp_path: Path) -> None:

    def enlarge(held: dict[str, Any]) -> None:
        masters = held["optimizer_state_dict"]["single_partition_of_fp32_groups"]
        masters[0].data[:4] = torch.tensor([65520.0, -1e30, float("inf"), float("nan")])
        masters[1].data[0] = 7e4

    edit(optimizer_file(run, 0), enlarge)
    report = streamshard.export(run, tmp_path / "out", dtype="fp16", verify=True)
    assert report.overflowed == 3
    assert report.notes[0].startswith("3 finite elements are too large for fp16")
    assert "embed.weight (2), embed.bias (1)" in report.notes[0]
    found = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    first = found["embed.weight"].flatten()[:4]
    assert torch.equal(first[:3], torch.tensor([torch.inf, -torch.inf, torch.inf]).half())
    assert first[3].isnan()
    wide = streamshard.export(run, tmp_path / "wide", dtype="bf16")
    assert wide.overflowed == 0


NAMED = {"index": "*.index.json", "copy": "config.json"}
"""What is damaged that is not a file of weights."""


@pytest.mark.parametrize("form", ["safetensors", "torch"])
@pytest.mark.parametrize("what", ["weights", "header", "index", "copy", "length"])
def test_verify_lets_nothing_through(
    what: str, form: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run / "config.json").write_text(json.dumps({"model_type": "mine"}))
    check = ExportWriter.differences

    elements = Job(stage=2).values("fp32", "block.0.attn.weight").numpy().tobytes()

    def damage_and_check(self: ExportWriter, place: Path, *rest: Any) -> list[str]:  # noqa: ANN401
        (path,) = place.glob("*00002-of-0000?.*") if what not in NAMED else place.glob(NAMED[what])
        data = bytearray(path.read_bytes())
        if what == "weights":
            data[data.index(elements) + 40] ^= 1
        elif what == "length":
            del data[-1]
        else:
            data[20] ^= 1
        path.write_bytes(data)
        return check(self, place, *rest)

    monkeypatch.setattr(ExportWriter, "differences", damage_and_check)
    with pytest.raises(IntegrityError, match="not put into its place"):
        streamshard.export(run, tmp_path / "out", format=form, max_shard_size=200, verify=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["training"]


def test_a_plan_can_be_run_again(run: Path, tmp_path: Path) -> None:
    plan = streamshard.plan_export(run, tmp_path / "out", dtype="fp16")
    assert (plan.report.overflowed, plan.report.seconds) == (None, None)
    assert not (tmp_path / "out").exists()
    first = plan.run()
    (tmp_path / "out").rename(tmp_path / "first")
    assert plan.run().bytes_written == first.bytes_written
    assert partial_of(tmp_path / "out") == tmp_path / "out.partial"


@given(st.lists(st.integers(0, 30), max_size=30), st.integers(1, 40))
def test_files_hold_as_much_as_they_may_and_no_more(sizes: list[int], most: int) -> None:
    found = shards(sizes, most)
    assert [index for one in found for index in one] == list(range(len(sizes)))
    held = [sum(sizes[index] for index in one) for one in found]
    for one, nbytes in zip(found, held, strict=True):
        assert nbytes <= most or len(one) == 1
    for nbytes, following in zip(held, found[1:], strict=False):
        assert nbytes + sizes[following.start] > most


def test_without_tensors_there_is_one_file() -> None:
    assert shards([], 5) == [range(0)]
