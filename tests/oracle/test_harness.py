"""The oracle itself: it finds nothing where DeepSpeed resumes its own files, and can fail."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.oracle.cases import BF16, ROUND_ROBIN, SUB_GROUPS
from tests.oracle.compare import differences
from tests.oracle.files import Content, file_differences
from tests.oracle.jobs import Resume, Train, after_path
from tests.oracle.models import Case
from tests.oracle.ranks import Finished, require_success, run_jobs
from tests.oracle.truth import Truth

CASES = [*BF16, ROUND_ROBIN, SUB_GROUPS]
TAG = "global_step3"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Round:
    """Where one case's train, resume and re-save left their results."""

    root: Path

    @property
    def saved(self) -> Path:
        return self.root / "saved"

    @property
    def resaved(self) -> Path:
        return self.root / "resaved"

    def truth(self, name: str) -> Truth:
        return Truth.load(self.root / f"{name}.pt")


def _edit(path: Path, edit: Callable[[Content], None]) -> None:
    content = torch.load(path, weights_only=False)
    edit(content)
    torch.save(content, path)


def _flip_one_bit(content: Content) -> None:
    flat = content["optimizer_state_dict"]["single_partition_of_fp32_groups"][1].detach()
    flat.view(torch.int32)[5] ^= 1


def _swap_moments(content: Content) -> None:
    """Exchange exp_avg of blocks.0.up.bias with as many elements of the parameter before it."""
    moments = content["optimizer_state_dict"]["base_optimizer_state"]["state"][1]["exp_avg"]
    moments[:26] = moments[:26].view(2, 13).flip(0).reshape(26)


def _share_step(content: Content) -> None:
    """Equal in value, but the next optimizer step would count once per param group."""
    states = content["optimizer_state_dict"]["base_optimizer_state"]["state"]
    states[1]["step"] = states[0]["step"]


DAMAGES = {"flip-one-bit": _flip_one_bit, "swap-moments": _swap_moments}


@pytest.fixture(scope="session")
def rounds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Round]:
    """Every case trained and resumed at 2 ranks, and one checkpoint damaged in two ways."""
    root = tmp_path_factory.mktemp("harness")
    made = {case.name: Round(root / case.name) for case in CASES}
    for one in made.values():
        one.root.mkdir()
    trained = [_train(case, made[case.name]) for case in CASES]
    require_success(run_jobs(2, trained, root / "ranks"))
    for name, damage in DAMAGES.items():
        made[name] = Round(root / name)
        shutil.copytree(made["z2-bf16"].saved, made[name].saved)
        _edit(next((made[name].saved / TAG).glob("*rank_0_*optim_states.pt")), damage)
    resumed = [_resume(case, made[case.name]) for case in CASES]
    resumed += [_resume(BF16[1], made[name]) for name in DAMAGES]
    require_success(run_jobs(2, resumed, root / "ranks"))
    return made


def _train(case: Case, to: Round) -> Train:
    return Train(case, to.saved, to.root / "trained.pt", further_steps=2)


def _resume(case: Case, to: Round) -> Resume:
    return Resume(case, to.saved, to.root / "resumed.pt", to.resaved, further_steps=2)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_deepspeed_resumes_its_own_checkpoint_exactly(case: Case, rounds: dict[str, Round]) -> None:
    one = rounds[case.name]
    assert differences(one.truth("trained"), one.truth("resumed")) == []
    assert differences(one.truth("trained.after"), one.truth("resumed.after")) == []
    assert file_differences(one.saved / TAG, one.resaved / TAG) == []


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_truth_is_about_something(case: Case, rounds: dict[str, Round]) -> None:
    truth = rounds[case.name].truth("trained")
    assert truth.states.keys() == {"fp32", "exp_avg", "exp_avg_sq"}
    steps = {float(group["scalars"]["step"]) for group in truth.groups}
    assert steps == {truth.counters["global_steps"] - truth.counters["skipped_steps"]}
    for name, master in truth.states["fp32"].items():
        # Gathered apart from each other: a wrong offset would show.
        assert torch.equal(master.to(DTYPES[case.dtype]), truth.weights[name]), name
        assert truth.states["exp_avg_sq"][name].count_nonzero(), name
    assert len(truth.frozen) == 5
    assert truth.buffers.keys() == {"running", "calls"}


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (
            "flip-one-bit",
            "truth['states']['fp32']['blocks.0.norm.weight']: 1 of 13 elements differ",
        ),
        ("swap-moments", "truth['states']['exp_avg']['blocks.0.norm.weight']: 13 of 13 elements"),
    ],
)
def test_damage_is_reported(damage: str, expected: str, rounds: dict[str, Round]) -> None:
    one, good = rounds[damage], rounds["z2-bf16"]
    found = differences(good.truth("trained"), one.truth("resumed"))
    assert any(line.startswith(expected) for line in found), found
    assert file_differences(good.saved / TAG, one.resaved / TAG)


def test_a_shared_step_is_reported(tmp_path: Path, rounds: dict[str, Round]) -> None:
    good = rounds["z2-bf16"].saved / TAG
    bad = tmp_path / TAG
    shutil.copytree(good, bad)
    _edit(next(bad.glob("*rank_0_*optim_states.pt")), _share_step)
    found = file_differences(good, bad)
    assert len(found) == 1
    assert "share memory on the right only" in found[0]


def test_a_failing_job_is_reported_and_the_next_one_runs(
    tmp_path: Path, rounds: dict[str, Round]
) -> None:
    good = rounds["z1-bf16"]
    wrong = Resume(BF16[0], tmp_path, tmp_path / "wrong.pt")
    right = Resume(BF16[0], good.saved, tmp_path / "right.pt")
    first, second = run_jobs(2, [wrong, right], tmp_path / "ranks")
    assert isinstance(first, Finished)
    assert first.error is not None
    assert "DeepSpeed found no checkpoint" in first.error
    assert second.error is None
    assert not after_path(right.truth_path).exists()
