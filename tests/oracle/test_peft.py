"""LoRA under HF Trainer, of a model whose frozen embedding is tied: resumed at all stages.

The Trainer saves such models with `exclude_frozen_parameters`, and under one of its names the
embedding is saved all the same.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

import streamshard
from tests.oracle.compare import differences
from tests.oracle.frameworks.common import run
from tests.oracle.frameworks.hf_trainer import HfTrain
from tests.oracle.ranks import require_success, run_jobs
from tests.oracle.truth import Truth

STAGES = (1, 2, 3)
STEPS = 3
WAYS = [(one, other) for one in STAGES for other in STAGES]


@dataclass(frozen=True)
class Places:
    """Where each thing lies, and what went wrong on the way."""

    root: Path
    errors: dict[tuple[int, int], str | None] = field(default_factory=dict)

    def source(self, stage: int) -> Path:
        return self.root / f"z{stage}" / f"checkpoint-{STEPS}"

    def out(self, way: tuple[int, int]) -> Path:
        return self.root / f"z{way[0]}-to-z{way[1]}"


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    """LoRA trained at 2 ranks and every stage, and resumed at 3 ranks and every stage."""
    made = Places(tmp_path_factory.mktemp("peft"))
    root = made.root
    jobs = [
        HfTrain(
            z, root / f"z{z}", root / f"z{z}.json", STEPS, saved_truth=root / f"z{z}.pt", lora=True
        )
        for z in STAGES
    ]
    require_success(run_jobs(2, jobs, root / "ranks", run))
    for way in WAYS:
        streamshard.repartition(
            made.source(way[0]), made.out(way), world_size=3, zero_stage=way[1], verify=True
        )
    resumed = [_resume(made, way) for way in WAYS]
    for way, end in zip(WAYS, run_jobs(3, resumed, root / "ranks", run), strict=True):
        made.errors[way] = end.error
    return made


def _resume(made: Places, way: tuple[int, int]) -> HfTrain:
    out = made.out(way)
    place, seen, loaded = (out.with_name(out.name + end) for end in ("-on", ".json", ".pt"))
    return HfTrain(way[1], place, seen, STEPS + 1, out, loaded, lora=True)


@pytest.mark.parametrize("stage", STAGES)
def test_the_trainer_leaves_out_what_is_frozen(stage: int, places: Places) -> None:
    tag = places.source(stage) / (places.source(stage) / "latest").read_text()
    path = sorted(tag.glob("*model_states.pt"))[0]
    held = torch.load(path, weights_only=False)
    assert held["frozen_param_shapes"] is held["frozen_param_fragments"] is None
    left = [name for name in held["module"] if "lora_" not in name]
    assert left == ["base_model.model.lm_head.weight"]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_the_trainer_resumes(way: tuple[int, int], places: Places) -> None:
    assert places.errors[way] is None, places.errors[way]
    out = places.out(way)
    saved = Truth.load(places.root / f"z{way[0]}.pt")
    resumed = Truth.load(out.with_name(f"{out.name}.pt"))
    if (way[0] == 3) != (way[1] == 3):
        # Accelerate makes trained weights fp32, which stage 3 leaves so and the others do not.
        saved, resumed = (replace(truth, weights={}) for truth in (saved, resumed))
    assert saved.frozen.keys() > {"base_model.model.transformer.wte.weight"}
    assert differences(saved, resumed) == []
