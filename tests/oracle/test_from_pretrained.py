"""What was exported loads in transformers, and answers as the engine did that was saved."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import streamshard
from tests.oracle.pretrained import CASES, RANKS, PretrainedCase, PretrainedTrain, logits, run
from tests.oracle.ranks import require_success, run_jobs

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every case trained, saved, and consolidated by DeepSpeed."""
    root = tmp_path_factory.mktemp("pretrained")
    jobs = [
        PretrainedTrain(case, root / case.name, root / f"{case.name}-16", root / f"{case.name}.pt")
        for case in CASES
    ]
    require_success(run_jobs(RANKS, jobs, root / "ranks", run))
    return root


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Compute as the ranks do: how sums are split among threads shows in their last bit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def load(case: PretrainedCase, place: Path) -> Any:  # noqa: ANN401
    """Load a model as users do; nothing may be missing, or left over."""
    model, found = case.model_class().from_pretrained(place, output_loading_info=True)
    assert not any(found.values()), found
    return model


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_shard_size": 2000},
        {"format": "torch"},
        {"format": "torch", "max_shard_size": 2000},
    ],
    ids=["one file", "files", "torch, one file", "torch, files"],
)
def test_a_loaded_model_answers_as_the_engine_did(
    case: PretrainedCase, options: dict[str, Any], trained: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    report = streamshard.export(trained / case.name, out, dtype=case.dtype, verify=True, **options)
    assert (report.files > 4) == ("max_shard_size" in options)
    model, theirs = load(case, out), load(case, trained / f"{case.name}-16")
    assert {p.dtype for p in model.parameters()} == {DTYPES[case.dtype]}
    mine = dict(model.named_parameters())
    for name, param in theirs.named_parameters():
        assert torch.equal(mine[name], param), name
    assert torch.equal(logits(model), logits(theirs))
    answered = torch.load(trained / f"{case.name}.pt")
    assert answered.std() > 0.01
    assert torch.equal(logits(model), answered)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_tied_weights_are_stored_as_transformers_stores_them(
    case: PretrainedCase, trained: Path, tmp_path: Path
) -> None:
    streamshard.export(trained / case.name, tmp_path / "ours", dtype=case.dtype)
    load(case, trained / f"{case.name}-16").save_pretrained(tmp_path / "theirs")
    names = []
    for place in (tmp_path / "ours", tmp_path / "theirs"):
        with safe_open(place / "model.safetensors", "pt") as opened:
            names.append(sorted(opened.keys()))
            assert opened.metadata() == {"format": "pt"}
    assert names[0] == names[1]
