"""`export --adapter`: LoRA's weights alone, in the directory that PEFT reads."""

from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch

import streamshard
from streamshard.errors import UnsupportedError, UsageError
from tests.fabricated import write
from tests.fabricated_dcp import adamw
from tests.job import Job, Shapes

AT = "base_model.model.block.attn"
LORA: Shapes = (
    (f"{AT}.lora_A.default.weight", (3, 8)),
    (f"{AT}.lora_B.default.weight", (5, 3)),
    (f"{AT}.lora_magnitude_vector.default.weight", (5,)),
    ("base_model.model.head.modules_to_save.default.weight", (2, 5)),
)
FROZEN: Shapes = (
    (f"{AT}.base_layer.weight", (5, 8)),
    ("base_model.model.head.original_module.weight", (2, 5)),
)
JOB = Job(stage=3, groups=(LORA,), frozen=FROZEN, tied={})
NAMES = {
    f"{AT}.lora_A.weight": LORA[0][0],
    f"{AT}.lora_B.weight": LORA[1][0],
    f"{AT}.lora_magnitude_vector": LORA[2][0],
    "base_model.model.head.weight": LORA[3][0],
}
CONFIG = "adapter_config.json"


def run(job: Job, tmp_path: Path) -> Path:
    path = write(job, tmp_path / "training" / "run")
    (path / CONFIG).write_text('{"peft_type": "LORA"}')
    return path


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("form", ["safetensors", "torch"])
def test_an_adapter_has_its_own_names_and_files(stage: int, form: str, tmp_path: Path) -> None:
    job = replace(JOB, stage=stage)
    source, out = run(job, tmp_path), tmp_path / "out"
    report = streamshard.export(source, out, adapter=True, format=form, verify=True)
    weights = {"safetensors": "adapter_model.safetensors", "torch": "adapter_model.bin"}[form]
    assert {path.name for path in out.iterdir()} == {CONFIG, weights}
    if form == "torch":
        held = torch.load(out / weights, weights_only=True)
    else:
        held = safetensors.torch.load_file(out / weights)
    assert held.keys() == NAMES.keys()
    assert all(torch.equal(held[to], job.values("fp32", name)) for to, name in NAMES.items())
    assert any("base model's: " in note and "base_layer" in note for note in report.notes)
    assert not any("PEFT's model" in note for note in report.notes)
    streamshard.export(source, out, adapter=True, format=form, overwrite=True)


def test_a_whole_model_does_not_take_the_config_of_an_adapter(tmp_path: Path) -> None:
    """`from_pretrained` would add the adapter to it a second time."""
    report = streamshard.export(run(JOB, tmp_path), tmp_path / "out")
    assert not (tmp_path / "out" / CONFIG).exists()
    assert any("PEFT's model" in note and "adapter=True" in note for note in report.notes)


def test_a_missing_config_is_told(tmp_path: Path) -> None:
    source = run(JOB, tmp_path)
    (source / CONFIG).unlink()
    report = streamshard.export(source, tmp_path / "out", adapter=True)
    assert any(f"No {CONFIG}" in note for note in report.notes)


OTHER = ("base_model.model.norm.weight", (5,))
SECOND = (f"{AT}.lora_A.second.weight", (3, 8))
PREFIXED = tuple((f"module.{name}", shape) for name, shape in LORA)


@pytest.mark.parametrize(
    ("group", "error", "said"),
    [
        ((*LORA, OTHER), UnsupportedError, f"{OTHER[0]} was trained too"),
        ((*LORA, SECOND), UsageError, "there are 2 adapters"),
        ((OTHER,), UsageError, "no name has LoRA's form"),
        (PREFIXED, UsageError, "does not begin with 'base_model."),
    ],
)
def test_what_is_no_adapter_alone_is_refused(
    group: Shapes, error: type[Exception], said: str, tmp_path: Path
) -> None:
    source = run(replace(JOB, groups=(group,)), tmp_path)
    with pytest.raises(error) as caught:
        streamshard.export(source, tmp_path / "out", adapter=True)
    assert said in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_trained_bias_of_the_base_model_is_part_of_it(tmp_path: Path) -> None:
    bias = (f"{AT}.base_layer.bias", (5,))
    source = run(replace(JOB, groups=((*LORA, bias),)), tmp_path)
    streamshard.export(source, tmp_path / "out", adapter=True)
    held = safetensors.torch.load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert held.keys() == {*NAMES, bias[0]}


def test_other_files_than_zeros_tell_what_was_trained_too(tmp_path: Path) -> None:
    adamw(dict((*LORA, OTHER))).write(tmp_path / "dcp")
    with pytest.raises(UnsupportedError, match=r"norm\.weight was trained too"):
        streamshard.export(tmp_path / "dcp", tmp_path / "out", adapter=True)
    streamshard.export(tmp_path / "dcp", tmp_path / "out", adapter=True, exclude=["*.norm.*"])
    held = safetensors.torch.load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert held.keys() == NAMES.keys()


def test_two_weights_of_one_name_are_refused(tmp_path: Path) -> None:
    head = "base_model.model.head"
    both = tuple((f"{head}.{at}bias", (2,)) for at in ("modules_to_save.default.", ""))
    source = run(replace(JOB, groups=((*LORA, *both),)), tmp_path)
    with pytest.raises(UsageError, match="have one name without 'default'"):
        streamshard.export(source, tmp_path / "out", adapter=True)


@pytest.mark.parametrize("form", ["universal", "dcp"])
def test_other_formats_hold_whole_models(form: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="adapter"):
        streamshard.export(run(JOB, tmp_path), tmp_path / "out", adapter=True, format=form)
