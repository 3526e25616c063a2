"""PyTorch's distributed checkpoints hold what a fabricated job holds, as torch reads them."""

import io
import struct
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import streamshard
from streamshard.errors import IntegrityError, UnsupportedError, UsageError
from streamshard.formats.dcp import dcp_writer
from streamshard.operations.export.export import ExportWriter
from tests.cli.conftest import tree
from tests.exported import JOBS, in_fp32, items, metadata_of, read, same, states
from tests.fabricated import edit_all, edit_optimizers, wrapped, write
from tests.job import EXPERTS, MUON, Job, buffers


@pytest.mark.parametrize("name", JOBS)
def test_torch_reads_every_tensor_bit_for_bit(name: str, tmp_path: Path) -> None:
    job = JOBS[name]
    run, out = write(job, tmp_path / "run"), tmp_path / "out"
    plan = streamshard.plan_export(run, out, format="dcp", verify=True)
    sizes = dict(plan.sizes())
    report = plan.run()
    assert sizes == {path.name: path.stat().st_size for path in out.iterdir()}
    assert (report.files, report.bytes_written) == (len(sizes), sum(sizes.values()))
    assert report.tensors == 3 * len(job.shapes) + len(in_fp32(job)) - len(job.shapes) - 1 + 2
    found = read(out)
    same(found["model"], in_fp32(job))
    optimizer = found["optim"]
    assert optimizer["state"].keys() == states(job).keys()
    for param, wanted in states(job).items():
        same(optimizer["state"][param], wanted)
    hyper = {"betas": (0.9, 0.95), "weight_decay": 0.1}
    assert optimizer["param_groups"] == [
        {**hyper, "lr": 0.001 * (1 + number), "params": [param for param, _ in group]}
        for number, group in enumerate(job.groups)
    ]
    for number, group in enumerate(job.groups):
        for param, _ in group:
            assert optimizer[f"param_groups.{param}.lr"] == 0.001 * (1 + number)


@pytest.mark.parametrize("item_bytes", [1, 24, 100])
def test_items_are_whole_rows_of_bounded_size(
    item_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dcp_writer, "_ITEM_BYTES", item_bytes)
    job = JOBS["stage 3"]
    out = tmp_path / "out"
    streamshard.export(write(job, tmp_path / "run"), out, format="dcp", verify=True, dtype="bf16")
    same(
        read(out)["model"],
        {n: t if n in buffers() else t.bfloat16() for n, t in in_fp32(job).items()},
    )
    for key, described in metadata_of(out).state_dict_metadata.items():
        if not isinstance(described, TensorStorageMetadata):
            continue
        row = described.size[1:].numel() * described.properties.dtype.itemsize
        rows = [chunk.sizes[0] for chunk in described.chunks if chunk.sizes]
        assert all(count * row <= item_bytes or count == 1 for count in rows), key
        # Two of them would not have fitted into one item.
        full = rows[:-1]
        assert all((count + 1) * row > item_bytes for count in full), key


def test_items_fill_their_files_and_each_is_a_sound_zip(tmp_path: Path) -> None:
    out = tmp_path / "out"
    streamshard.export(write(JOBS["stage 2"], tmp_path / "run"), out, format="dcp")
    places: dict[str, set[tuple[int, int]]] = {}
    for file, offset, data in items(out):
        places.setdefault(file, set()).add((offset, offset + len(data)))
        with zipfile.ZipFile(io.BytesIO(data)) as opened:
            assert opened.testzip() is None
            assert {name.partition("/")[0] for name in opened.namelist()} == {"archive"}
            # testzip() does not look at what stands behind the data.
            for one in opened.infolist():
                assert struct.pack("<I", one.CRC) in data or not one.file_size
    assert places.keys() == {path.name for path in out.iterdir()} - {".metadata"}
    for file, found in places.items():
        ordered = sorted(found)
        ends = [end for _, end in ordered]
        assert [start for start, _ in ordered] == [0, *ends[:-1]]
        assert ends[-1] == (out / file).stat().st_size


@pytest.mark.parametrize("layout", ["torch", "titan", "accelerate"])
def test_a_store_gives_the_same_bytes_and_a_rerun_may_replace_them(
    layout: str, tmp_path: Path
) -> None:
    run, out = write(JOBS["stage 3"], tmp_path / "run"), tmp_path / "out"
    streamshard.convert(run, tmp_path / "store.zarr", codec="zstd")
    streamshard.export(run, out, format="dcp", layout=layout)
    direct = tree(out)
    for road in (tmp_path / "store.zarr", run):
        streamshard.export(road, out, format="dcp", layout=layout, overwrite=True)
        assert tree(out) == direct


@pytest.mark.parametrize("what", ["head", "elements", "checksum", "directory", "metadata", "end"])
def test_verify_lets_nothing_through(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(stage=2)
    run = write(job, tmp_path / "run")
    elements = job.values("exp_avg", "block.0.attn.weight").numpy().tobytes()
    check = ExportWriter.differences

    def damage_and_check(self: ExportWriter, place: Path, *rest: Any) -> list[str]:  # noqa: ANN401
        path = place / (".metadata" if what == "metadata" else "__0_0.distcp")
        data = bytearray(path.read_bytes())
        start = data.find(elements)
        stop = start + len(elements)
        at = {"head": start - 5, "elements": start + 40, "checksum": stop + 5}
        if what == "end":
            del data[-1]
        elif what == "directory":
            crc32 = bytes(data[stop + 4 : stop + 8])
            data[data.index(crc32, stop + 8)] ^= 1
        else:
            data[at.get(what, 20)] ^= 1
        path.write_bytes(data)
        return check(self, place, *rest)

    monkeypatch.setattr(ExportWriter, "differences", damage_and_check)
    with pytest.raises(IntegrityError, match="not put into its place"):
        streamshard.export(run, tmp_path / "out", format="dcp", verify=True)


REFUSED: dict[str, tuple[Job, dict[str, Any]]] = {
    "2 tensor or pipeline parallel parts": (Job(stage=2, parts=2), {}),
    "experts": (Job(stage=2, experts=EXPERTS, expert_parallel=2), {}),
    "include=: is for files of weights": (Job(), {"include": ["embed*"]}),
    "exclude=: is for files of weights": (Job(), {"exclude": ["embed*"]}),
    "max_shard_size=: is for files of weights": (Job(), {"max_shard_size": 100}),
    "layout=: is for a distributed checkpoint": (
        Job(), {"format": "safetensors", "layout": "titan"},
    ),
    "layout=fsdp": (Job(), {"layout": "fsdp"}),
}  # fmt: skip


@pytest.mark.parametrize("said", REFUSED)
def test_what_cannot_be_is_refused_by_name(said: str, tmp_path: Path) -> None:
    job, options = REFUSED[said]
    run = write(job, tmp_path / "run")
    with pytest.raises((UnsupportedError, UsageError), match=said):
        streamshard.export(run, tmp_path / "out", **{"format": "dcp", **options})
    assert not (tmp_path / "out").exists()


ADAM = {"lr": 0.25, "betas": [0.5, 0.75], "eps": 1e-5, "weight_decay": 0.0}
"""What DeepSpeed's own Adam keeps in a param group, all of it unlike torch's defaults."""
ADDED = ("amsgrad", "capturable", "decoupled_weight_decay", "differentiable", "foreach", "fused",
         "maximize")  # fmt: skip


def set_groups(run: Path, **values: object) -> None:
    """Give all param groups the same hyper-parameters."""

    def change(state: dict[str, Any]) -> None:
        for group in wrapped(state)["param_groups"]:
            params = group["params"]
            group.clear()
            group |= {**values, "params": params}

    edit_optimizers(run, change)


@pytest.mark.parametrize("table", [torch.ones(2, 3).t(), torch._neg_view(torch.ones(2))])
def test_a_hyper_parameter_is_never_written_in_another_order(
    tmp_path: Path, table: torch.Tensor
) -> None:
    run = write(Job(stage=2), tmp_path / "run")
    set_groups(run, **ADAM, table=table)
    with pytest.raises(UnsupportedError, match="table' holds tensors"):
        streamshard.export(run, tmp_path / "out", format="dcp")


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_what_torchs_optimizer_has_besides_is_its_default_and_told(
    kind: type[torch.optim.Optimizer], tmp_path: Path
) -> None:
    """That torch's optimizers go on with it is asked in `tests/oracle`."""
    run = write(Job(stage=2), tmp_path / "run")
    set_groups(run, **ADAM, bias_correction=True)
    config = {"type": "Adam", "params": {"adam_w_mode": kind is torch.optim.AdamW}}
    edit_all(run, "*.pt", lambda held: held["ds_config"].update(optimizer=config))
    report = streamshard.export(run, tmp_path / "out", format="dcp")
    (note,) = [note for note in report.notes if "torch's defaults" in note]
    assert any(f"Load it into {kind.__name__}, for" in note for note in report.notes)
    assert all(key in note for key in ADDED)
    default = kind([torch.zeros(1)]).param_groups[0]  # type: ignore[call-arg]
    for group in read(tmp_path / "out")["optim"]["param_groups"]:
        assert {key: group[key] for key in ADAM} == ADAM
        assert {key: group[key] for key in ADDED} == {key: default[key] for key in ADDED}


def test_no_way_of_weight_decay_is_claimed_that_no_config_tells(tmp_path: Path) -> None:
    run = write(Job(stage=2), tmp_path / "run")
    set_groups(run, **{**ADAM, "weight_decay": 0.1}, bias_correction=True)
    edit_all(run, "*.pt", lambda held: held["ds_config"].pop("optimizer"))
    report = streamshard.export(run, tmp_path / "out", format="dcp", verify=True)
    assert any("AdamW or Adam, whichever" in note for note in report.notes)
    for group in read(tmp_path / "out")["optim"]["param_groups"]:
        assert group["decoupled_weight_decay"] is None


def test_a_learning_rate_that_is_a_tensor_stays_one(tmp_path: Path) -> None:
    run = write(Job(stage=2), tmp_path / "run")
    set_groups(run, **{**ADAM, "lr": torch.tensor(0.125)})
    streamshard.export(run, tmp_path / "out", format="dcp", verify=True)
    for group in read(tmp_path / "out")["optim"]["param_groups"]:
        assert torch.equal(group["lr"], torch.tensor(0.125))


@pytest.mark.parametrize("step", [7, torch.tensor(7), torch.tensor([7.0]), 7.0])
def test_steps_become_what_torch_counts_in(step: object, tmp_path: Path) -> None:
    run = with_step(tmp_path, step)
    streamshard.export(run, tmp_path / "out", format="dcp")
    for state in read(tmp_path / "out")["optim"]["state"].values():
        assert (state["step"].dtype, state["step"].shape) == (torch.float32, ())
        assert state["step"] == 7


@pytest.mark.parametrize("step", [(1 << 24) + 1, -1, 7.5, torch.tensor([7.0, 8.0]), "seven", True])
def test_steps_that_torch_cannot_count_are_refused(step: object, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="step"):
        streamshard.export(with_step(tmp_path, step), tmp_path / "out", format="dcp")


def with_step(place: Path, step: object) -> Path:
    """Write a job whose optimizer counts in some other way."""
    run = write(Job(stage=2), place / "run")

    def change(state: dict[str, Any]) -> None:
        for held_state in wrapped(state)["state"].values():
            held_state["step"] = step

    edit_optimizers(run, change)
    return run


def test_before_the_first_step_there_are_no_states_and_a_note_says_so(tmp_path: Path) -> None:
    run = write(Job(stage=2), tmp_path / "run")
    edit_optimizers(run, lambda state: wrapped(state)["state"].clear())
    report = streamshard.export(run, tmp_path / "out", format="dcp", verify=True)
    assert any("before the optimizer's first step" in note for note in report.notes)
    found = read(tmp_path / "out")
    assert "state" not in found["optim"]
    assert [group["lr"] for group in found["optim"]["param_groups"]] == [0.001, 0.002]
    same(found["model"], in_fp32(Job()))


@pytest.mark.parametrize("stage", [2, 3])
def test_the_momentum_of_muon_goes_by_its_name(stage: int, tmp_path: Path) -> None:
    job = replace(MUON, stage=stage)
    streamshard.export(write(job, tmp_path / "run"), tmp_path / "out", format="dcp", verify=True)
    found = read(tmp_path / "out")["optim"]["state"]
    for number, group in enumerate(job.groups):
        for name, _ in group:
            if number in job.muon:
                wanted = {"momentum_buffer": job.values("momentum_buffer", name).bfloat16()}
            else:
                wanted = states(job)[name]
            same(found[name], wanted)


def test_adam_without_bias_correction_is_refused(tmp_path: Path) -> None:
    run = write(Job(stage=2), tmp_path / "run")
    set_groups(run, **ADAM, bias_correction=False)
    with pytest.raises(UnsupportedError, match="bias correction"):
        streamshard.export(run, tmp_path / "out", format="dcp")
