"""LoRA under HF Trainer, of a model whose frozen embedding is tied: resumed at all stages.

The Trainer saves such models with `exclude_frozen_parameters`, and under one of its names the
embedding is saved all the same.
"""

import importlib
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import streamshard
from streamshard.operations.export.weights import renamed
from tests.oracle.compare import differences
from tests.oracle.frameworks.common import language_model, run
from tests.oracle.frameworks.hf_trainer import HfTrain
from tests.oracle.ranks import require_success, run_jobs
from tests.oracle.truth import Truth

peft: Any = importlib.import_module("peft")

STAGES = (1, 2, 3)
STEPS = 3
WAYS = [(1, 2), (2, 3), (3, 1)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """LoRA trained at 2 ranks and every stage, and resumed at 3 ranks and every stage."""
    root = tmp_path_factory.mktemp("peft")
    jobs = [
        HfTrain(
            z, root / f"z{z}", root / f"z{z}.json", STEPS, saved_truth=truth(root, z), lora=True
        )
        for z in STAGES
    ]
    require_success(run_jobs(2, jobs, root / "ranks", run))
    resumed = []
    for way in WAYS:
        out = root / f"z{way[0]}-to-z{way[1]}"
        streamshard.repartition(
            source(root, way[0]), out, world_size=3, zero_stage=way[1], verify=True
        )
        place, seen = root / f"{out.name}-on", root / f"{out.name}.json"
        resumed.append(HfTrain(way[1], place, seen, STEPS + 1, out, truth(root, *way), lora=True))
    require_success(run_jobs(3, resumed, root / "ranks", run))
    return root


def source(root: Path, stage: int) -> Path:
    return root / f"z{stage}" / f"checkpoint-{STEPS}"


def truth(root: Path, *stages: int) -> Path:
    """For what engines held: when they saved, or of two stages, when they had resumed."""
    return root / f"{stages}.pt"


@pytest.mark.parametrize("stage", STAGES)
def test_the_trainer_leaves_out_what_is_frozen(stage: int, root: Path) -> None:
    tag = source(root, stage) / (source(root, stage) / "latest").read_text()
    path = sorted(tag.glob("*model_states.pt"))[0]
    held = torch.load(path, weights_only=False)
    assert held["frozen_param_shapes"] is held["frozen_param_fragments"] is None
    left = [name for name in held["module"] if "lora_" not in name]
    assert left == ["base_model.model.lm_head.weight"]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_the_trainer_resumes(way: tuple[int, int], root: Path) -> None:
    saved, resumed = Truth.load(truth(root, way[0])), Truth.load(truth(root, *way))
    if 3 in way:
        # Accelerate makes trained weights fp32, which stage 3 leaves so and the others do not.
        saved, resumed = (replace(one, weights={}) for one in (saved, resumed))
    assert saved.frozen.keys() > {"base_model.model.transformer.wte.weight"}
    assert differences(saved, resumed) == []


@pytest.mark.parametrize("stage", STAGES)
def test_the_adapter_is_the_one_that_the_trainer_saves(stage: int, root: Path) -> None:
    place, out = source(root, stage), root / f"adapter-{stage}"
    streamshard.export(place, out, adapter=True, verify=True)
    assert {p.name for p in out.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    theirs = load_file(place / "adapter_model.safetensors")
    ours = load_file(out / "adapter_model.safetensors")
    assert ours.keys() == theirs.keys()
    # In bf16, where the Trainer saves what the engine computes with.
    assert all(torch.equal(ours[name].to(theirs[name].dtype), theirs[name]) for name in ours)
    masters = Truth.load(truth(root, stage)).states["fp32"]
    assert {name.replace(".default", ""): m.flatten().tolist() for name, m in masters.items()} == {
        name: weight.flatten().tolist() for name, weight in ours.items()
    }


KINDS: dict[str, dict[str, Any]] = {
    "dora": {"use_dora": True},
    "bias": {"lora_bias": True},
    "all biases": {"bias": "all"},
    "biases of LoRA's layers": {"bias": "lora_only"},
    "modules": {"modules_to_save": ["ln_f", "lm_head"]},
    "tokens": {"trainable_token_indices": {"wte": [1, 2]}},
    "embedding": {"target_modules": ["wte", "c_attn"]},
}


@pytest.mark.parametrize("kind", KINDS)
def test_names_are_those_of_peft(kind: str) -> None:
    given = {"r": 3, "target_modules": ["c_attn"], "fan_in_fan_out": True, **KINDS[kind]}
    with warnings.catch_warnings(action="ignore"):  # about tied and trained embeddings
        model = peft.get_peft_model(language_model(), peft.LoraConfig(**given))
        known = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    ours = {
        to: value
        for name, value in model.state_dict().items()
        if (to := renamed(name, "default", is_trained=name in trained)) is not None
    }
    assert known.keys() <= ours.keys()
    assert all(torch.equal(known[name], ours[name]) for name in known)
    # PEFT leaves out the second name of a tensor that is tied.
    held = {value.data_ptr() for value in known.values()}
    assert {value.data_ptr() for value in ours.values()} == held
    assert held >= {model.get_parameter(name).data_ptr() for name in trained}
