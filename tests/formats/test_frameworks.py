"""The policy for files that frameworks keep per rank."""

import pytest

from streamshard.formats.frameworks import ACCELERATE, HF_TRAINER, LIGHTNING, framework_of, resize

HF = ["config.json", "trainer_state.json"]


def rng(*ranks: int) -> list[str]:
    return [f"rng_state_{rank}.pth" for rank in ranks]


@pytest.mark.parametrize(
    ("tag", "paths", "framework"),
    [
        ("global_step3", HF, HF_TRAINER),
        ("pytorch_model", ["random_states_0.pkl"], ACCELERATE),
        ("checkpoint", [], LIGHTNING),
        ("global_step3", ["zero_to_fp32.py", "deep/trainer_state.json"], None),
    ],
)
def test_frameworks_are_told_by_names(tag: str, paths: list[str], framework: str | None) -> None:
    assert framework_of(tag, paths) == framework


@pytest.mark.parametrize(
    ("source", "target", "held", "kept"),
    [
        (2, 2, rng(0, 1), {name: name for name in rng(0, 1)}),
        (2, 4, rng(0, 1), {name: name for name in rng(0, 1)}),
        (4, 2, rng(0, 1, 2, 3), {name: name for name in rng(0, 1)}),
        (2, 1, rng(0, 1), {"rng_state_0.pth": "rng_state.pth"}),
        (1, 2, ["rng_state.pth"], {"rng_state.pth": "rng_state_0.pth"}),
        (2, 3, rng(0, 1, 2), {name: name for name in rng(0, 1)}),  # rank 2's is stale
        (2, 2, ["rng_state.pth", *rng(0, 1)], {name: name for name in rng(0, 1)}),
        (1, 1, ["rng_state.pth", *rng(0)], {"rng_state.pth": "rng_state.pth"}),
    ],
)
def test_hf_trainer_keeps_the_files_of_ranks_that_stay(
    source: int, target: int, held: list[str], kept: dict[str, str]
) -> None:
    found = resize("global_step3", [*HF, *held], source_world_size=source, world_size=target)
    assert found.paths == {**{name: name for name in HF}, **kept}
    assert found.new_steps == ()
    left_out = len(held) - len(kept)
    said = " ".join(found.notes)
    assert ("not used" in said) == (left_out > 0)
    assert ("for the new rank" in said) == (target > len(kept))


def test_a_scheduler_that_depends_on_the_world_size_is_mentioned() -> None:
    paths = ["scheduler.bin", "random_states_0.pkl"]
    found = resize("pytorch_model", paths, source_world_size=1, world_size=2)
    assert "scheduler" in found.schedule
