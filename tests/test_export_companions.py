"""What else an export writes: files that the weights are used with, and what its report says."""

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import streamshard
from streamshard.engine.journals.journal import Journal, Written
from streamshard.errors import IntegrityError, UnsupportedError
from streamshard.operations.export import export_read_back
from streamshard.operations.transfer.target import partial_of
from tests.cli.conftest import model_file
from tests.fabricated import load, optimizer_file, save, write
from tests.job import TAG, Job


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A checkpoint in a directory of its own."""
    return write(Job(stage=2), tmp_path / "training" / "run")


def copied(out: Path) -> dict[str, str]:
    """Read what lies beside the weights."""
    return {
        path.relative_to(out).as_posix(): path.read_text()
        for path in out.rglob("*")
        if path.is_file() and path.suffix != ".safetensors"
    }


def test_files_in_the_source_and_beside_it_come_along(run: Path, tmp_path: Path) -> None:
    (run / "config.json").write_text("the run's")
    (run / TAG / "config.json").write_text("the tag's")
    (run / TAG / "tokenizer.json").write_text("a tokenizer")
    (run / "trainer_state.json").write_text("of no use")
    (run / "model.safetensors.index.json").write_text("of another save")
    (run.parent / "config.json").write_text("another model's")
    (run.parent / "chat_template.jinja").write_text("{{ chat }}")
    (run.parent / "generation_config.json").write_text("")
    (run.parent / "generation_config.json").chmod(0o640)
    (run.parent / "notes.txt").write_text("mine")
    (tmp_path / "vocab.json").write_text("{}")
    (run.parent / "vocab.json").symlink_to(tmp_path / "vocab.json")
    report = streamshard.export(run, tmp_path / "out", verify=True)
    assert copied(tmp_path / "out") == {
        "config.json": "the run's",
        "tokenizer.json": "a tokenizer",
        "chat_template.jinja": "{{ chat }}",
        "generation_config.json": "",
    }
    assert (tmp_path / "out" / "generation_config.json").stat().st_mode & 0o777 == 0o640
    (beside,) = [note for note in report.notes if "next to the source" in note]
    assert beside.endswith(f"{run.parent}: chat_template.jinja, generation_config.json.")
    assert any("Not copied" in note and "vocab.json" in note for note in report.notes)
    assert report.files == 5
    sizes = [path.stat().st_size for path in (tmp_path / "out").iterdir()]
    assert report.bytes_written == sum(sizes)


def test_a_framework_keeps_templates_deeper_and_a_store_keeps_them_all(
    run: Path, tmp_path: Path
) -> None:
    (run / "trainer_state.json").write_text("{}")
    (run / "additional_chat_templates").mkdir()
    (run / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    (run / "config.json").write_text("{}")
    streamshard.convert(run, tmp_path / "store.zarr")
    wanted = {"config.json": "{}", "additional_chat_templates/tools.jinja": "{{ tools }}"}
    for number, source in enumerate((run, tmp_path / "store.zarr", run / TAG)):
        streamshard.export(source, tmp_path / f"out{number}")
        assert copied(tmp_path / f"out{number}") == wanted


def test_a_directory_around_that_cannot_be_read_is_no_obstacle(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listing = os.scandir

    def refuse(path: Path) -> object:
        if path == run.parent:
            raise PermissionError(13, "Permission denied", str(path))
        return listing(path)

    monkeypatch.setattr(os, "scandir", refuse)
    report = streamshard.export(run, tmp_path / "out")
    assert any(f"{run.parent}: it cannot be read" in note for note in report.notes)


def test_what_is_no_weight_is_named_and_what_is_one_is_not_left_out(
    run: Path, tmp_path: Path
) -> None:
    model = load(model_file(run))
    model["module"]["block._extra_state"] = {"amax": 1.5}
    save(model, model_file(run))
    report = streamshard.export(run, tmp_path / "out")
    assert any("not weights: block._extra_state." in note for note in report.notes)
    model["module"]["loose"] = model["module"]["old.weight"].t().contiguous().t()
    save(model, model_file(run))
    with pytest.raises(UnsupportedError, match=r"loose.*elements in a row"):
        streamshard.export(run, tmp_path / "other")


def test_what_no_param_group_trains_is_exported_as_the_module_has_it(
    run: Path, tmp_path: Path
) -> None:
    model = load(model_file(run))
    model["module"]["loose"] = torch.tensor([1.5, -2.0], dtype=torch.float64)
    save(model, model_file(run))
    streamshard.export(run, tmp_path / "out", dtype="fp16")
    found = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(found["loose"], torch.tensor([1.5, -2.0], dtype=torch.float16))


def test_what_cannot_be_cast_is_refused_and_can_be_kept(run: Path, tmp_path: Path) -> None:
    model = load(model_file(run))
    model["module"]["scale"] = torch.ones(3).to(torch.float8_e4m3fn)
    model["buffer_names"].append("scale")
    save(model, model_file(run))
    with pytest.raises(UnsupportedError, match=r"'scale'.*keep_dtype=\['scale'\]"):
        streamshard.export(run, tmp_path / "out")
    streamshard.export(run, tmp_path / "out", keep_dtype=["scale"], verify=True)
    found = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert found["scale"].dtype == torch.float8_e4m3fn
    assert found["scale"].float().tolist() == [1, 1, 1]


def test_left_out_frozen_weights_are_told(run: Path, tmp_path: Path) -> None:
    model = load(model_file(run))
    model |= {"frozen_param_shapes": None, "frozen_param_fragments": None}
    for name in ("old.weight", "old.bias"):
        del model["module"][name]
    save(model, model_file(run))
    report = streamshard.export(run, tmp_path / "out")
    assert any("exclude_frozen_parameters" in note for note in report.notes)


def test_a_missing_configuration_is_told(run: Path, tmp_path: Path) -> None:
    report = streamshard.export(run, tmp_path / "out")
    assert any("No config.json" in note for note in report.notes)


def test_what_overflows_is_counted_and_named(run: Path, tmp_path: Path) -> None:
    state = load(optimizer_file(run, 0))
    masters = state["optimizer_state_dict"]["single_partition_of_fp32_groups"]
    masters[0].data[:4] = torch.tensor([65520.0, -1e30, float("inf"), float("nan")])
    masters[1].data[0] = 7e4
    save(state, optimizer_file(run, 0))
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
    check = export_read_back.export_differences

    elements = Job(stage=2).values("fp32", "block.0.attn.weight").numpy().tobytes()

    def damage_and_check(place: Path, *rest: Any) -> list[str]:  # noqa: ANN401
        (path,) = place.glob("*00002-of-0000?.*") if what not in NAMED else place.glob(NAMED[what])
        data = bytearray(path.read_bytes())
        if what == "weights":
            data[data.index(elements) + 40] ^= 1
        elif what == "length":
            del data[-1]
        else:
            data[20] ^= 1
        path.write_bytes(data)
        return check(place, *rest)

    monkeypatch.setattr(export_read_back, "export_differences", damage_and_check)
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


@pytest.mark.parametrize(("number", "overflowed"), [(1.0e5, 1), (float("inf"), 0)])
def test_what_became_infinite_is_counted_though_a_run_was_cut_off(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: float, overflowed: int
) -> None:
    """What an earlier run wrote does not tell whether it was infinite before the cast."""
    element = Job(stage=2).values("fp32", "block.0.attn.weight").numpy().tobytes()[:4]
    (file,) = (p for p in run.rglob("*optim_states.pt") if element in p.read_bytes())
    file.write_bytes(file.read_bytes().replace(element, struct.pack("<f", number), 1))
    note, written = Journal.note, []

    def once(self: Journal, path: str, offset: int, what: Written) -> None:
        note(self, path, offset, what)
        if path.endswith(".safetensors"):
            written.append(path)
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "note", once)
        with pytest.raises(KeyboardInterrupt):
            streamshard.export(run, tmp_path / "out", dtype="fp16", workers=1)
    assert written
    report = streamshard.export(run, tmp_path / "out", dtype="fp16")
    assert report.overflowed == overflowed
    assert any("became infinite" in note for note in report.notes) == bool(overflowed)
