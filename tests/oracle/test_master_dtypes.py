"""Jobs that keep their master weights in another dtype than the job that saved.

The files hold what was saved. DeepSpeed rounds it, or widens it, when it loads.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import streamshard
from tests.oracle.cases import BF16
from tests.oracle.compare import differences
from tests.oracle.jobs import Job, Resume, Train
from tests.oracle.models import Case
from tests.oracle.ranks import require_success, run_jobs
from tests.oracle.truth import Truth
from tests.oracle.values import value_differences

SOURCE_RANKS, TARGET_RANKS = 2, 3
IN_BF16 = {"bf16": {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}


@dataclass(frozen=True)
class Change:
    """One job goes on where another one stopped."""

    saved: Case
    resumed: Case
    dtype: torch.dtype
    """Of the masters and states of the job that goes on."""

    @property
    def name(self) -> str:
        """A name for test ids and directories."""
        return f"{self.saved.name}-to-{self.resumed.name}"


NARROW = {stage: Case(f"z{stage}-bf16-masters", stage, "bf16", IN_BF16) for stage in (2, 3)}
WIDE = {stage: BF16[stage - 1] for stage in (2, 3)}
CHANGES = [
    change
    for stage in (2, 3)
    for change in (
        Change(WIDE[stage], NARROW[stage], torch.bfloat16),
        Change(NARROW[stage], WIDE[stage], torch.float32),
    )
]


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the truth of both jobs of every change."""
    root = tmp_path_factory.mktemp("masters")
    trained: list[Job] = [
        Train(change.saved, root / change.saved.name, _truth(root, change.saved.name))
        for change in CHANGES
    ]
    require_success(run_jobs(SOURCE_RANKS, trained, root / "ranks"))
    jobs: list[Job] = []
    for change in CHANGES:
        config = root / f"{change.name}.json"
        config.write_text(json.dumps(change.resumed.ds_config()))
        source, out = root / change.saved.name, root / change.name
        streamshard.repartition(source, out, world_size=TARGET_RANKS, ds_config_file=config)
        jobs.append(Resume(change.resumed, out, _truth(root, change.name), further_steps=1))
        loaded = _truth(root, f"{change.name}-loaded")
        jobs.append(Resume(change.resumed, source, loaded, reshards=True))
    require_success(run_jobs(TARGET_RANKS, jobs, root / "ranks"))
    return root


def _truth(root: Path, name: str) -> Path:
    return root / f"{name}.truth.pt"


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.name)
def test_deepspeed_casts_what_was_saved(change: Change, resumed: Path) -> None:
    before = Truth.load(_truth(resumed, change.saved.name))
    after = Truth.load(_truth(resumed, change.name))
    assert _dtypes(before) != _dtypes(after) == {change.dtype}
    cast = {state: _cast(tensors, change.dtype) for state, tensors in before.states.items()}
    assert list(value_differences(cast, after.states, "states")) == []
    assert list(value_differences(before.weights, after.weights, "weights")) == []


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.name)
def test_an_engine_that_loads_directly_holds_the_same(change: Change, resumed: Path) -> None:
    of_out, loaded = (
        Truth.load(_truth(resumed, name)) for name in (change.name, f"{change.name}-loaded")
    )
    assert differences(of_out, loaded) == []


def _dtypes(truth: Truth) -> set[torch.dtype]:
    return {tensor.dtype for tensors in truth.states.values() for tensor in tensors.values()}


def _cast(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}
