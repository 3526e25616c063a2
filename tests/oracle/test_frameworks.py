"""Directories of HF Trainer, Accelerate and Lightning stay what they are at another world size.

The frameworks themselves save, resume from what was made of it, and train on.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import streamshard
from streamshard.errors import IncompleteError
from tests.cli.conftest import streamshard as command
from tests.oracle.compare import differences
from tests.oracle.frameworks.common import Seen, generator_digest, run
from tests.oracle.frameworks.hf_trainer import HfTrain
from tests.oracle.frameworks.journey import (
    ACCELERATE,
    FURTHER_STEPS,
    HF,
    KEEPSAKE,
    LIGHTNING,
    MOVES,
    Journey,
    Move,
)
from tests.oracle.frameworks.lightning_strategy import trainer_state
from tests.oracle.ranks import require_success, run_jobs
from tests.oracle.values import value_differences


@pytest.fixture(scope="session")
def journey(tmp_path_factory: pytest.TempPathFactory) -> Journey:
    """Every checkpoint of every framework saved, resharded, resumed and saved again."""
    journey = Journey(tmp_path_factory.mktemp("frameworks"))
    journey.run()
    return journey


@pytest.fixture
def move(request: pytest.FixtureRequest, journey: Journey) -> Move:
    """One resharding that was made and resumed without an error."""
    move: Move = request.param
    if move.name in journey.errors:
        pytest.fail(journey.errors[move.name], pytrace=False)
    return move


def _each(moves: list[Move]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("move", moves, indirect=True, ids=lambda move: move.name)


@_each(MOVES)
def test_the_resumed_engine_holds_what_was_saved(move: Move, journey: Journey) -> None:
    assert differences(journey.saved_truth(move), journey.loaded_truth(move)) == []


@_each(MOVES)
def test_the_tag_keeps_its_name(move: Move, journey: Journey) -> None:
    tag = (journey.out(move) / "latest").read_text()
    assert tag == (journey.source(move) / "latest").read_text()
    names = {
        "hf": f"global_step{journey.steps(move)}",
        "accelerate": "pytorch_model",
        "lightning": "checkpoint",
    }
    assert tag == names[move.framework]
    assert (journey.out(move) / tag).is_dir()


@_each(MOVES)
def test_what_belongs_to_no_rank_comes_along(move: Move, journey: Journey) -> None:
    source, out = _others(journey.source(move)), _others(journey.out(move))
    assert out.keys() == source.keys()
    for name, path in out.items():
        assert path.read_bytes() == source[name].read_bytes(), name
    assert str(KEEPSAKE) in out
    if move.framework == "hf":
        assert {"trainer_state.json", "training_args.bin", "model.safetensors"} <= out.keys()
        assert ("scheduler.pt" in out) == (move.stage != 2)
    if move.framework == "accelerate":
        assert {"scheduler.bin", "custom_checkpoint_0.pkl"} <= out.keys()


@_each(MOVES)
def test_the_way_through_a_store_gives_the_same_files(move: Move, journey: Journey) -> None:
    assert _contents(journey.out_of_store(move)) == _contents(journey.out(move))


@_each([*HF, *ACCELERATE])
def test_ranks_before_and_after_keep_their_random_files(move: Move, journey: Journey) -> None:
    before, after = _rank_files(journey.source(move)), _rank_files(journey.out(move))
    assert before.keys() == set(range(move.source))
    kept = set(range(min(move.source, move.target)))
    new = set(range(move.source, move.target)) if move.framework == "accelerate" else set()
    assert after.keys() == kept | new
    for rank in kept:
        assert after[rank].read_bytes() == before[rank].read_bytes()


@_each([*HF, *ACCELERATE])
def test_files_are_named_as_the_framework_names_them(move: Move, journey: Journey) -> None:
    out, resaved = _names(journey.out(move)), _names(journey.resaved(move))
    new = {f"rng_state_{rank}.pth" for rank in range(move.source, move.target)}
    assert resaved - out == (new if move.framework == "hf" else set())
    assert out - resaved == set()


@_each([*HF, *ACCELERATE])
def test_no_rank_gets_another_rank_s_generator(move: Move, journey: Journey) -> None:
    saved = {
        rank: generator_digest(_generator(path))
        for rank, path in _rank_files(journey.source(move)).items()
    }
    assert len(set(saved.values())) == move.source
    for rank, seen in enumerate(journey.resuming_ranks(move)):
        if rank in saved:
            assert seen["generator"] == saved[rank]
        else:
            assert seen["generator"] not in saved.values()
            # The job's own seed, untouched. HF Trainer's data loader draws from it on the way.
            assert move.framework == "hf" or seen["generator"] == seen["generator_before"]


@_each([*HF, *ACCELERATE])
def test_the_note_says_what_became_of_the_ranks(move: Move, journey: Journey) -> None:
    notes = journey.notes[move.name]
    assert ("no random state for the new rank" in notes) == (move.target > move.source)
    assert ("so the random state of" in notes) == (move.target < move.source)
    assert ("advances the scheduler" in notes) == (move.framework == "accelerate")


@_each(HF)
def test_the_trainer_goes_on(move: Move, journey: Journey) -> None:
    steps = journey.steps(move)
    ranks = journey.resuming_ranks(move)
    assert len(ranks) == move.target
    saved = journey.saving_ranks(move)[0]
    assert len(saved["saved_schedule"]) == 2
    for seen in ranks:
        assert seen["first_step"] == seen["engine_step"] == steps
        assert seen["last_step"] == steps + FURTHER_STEPS
        assert len(seen["losses"]) == steps + FURTHER_STEPS
        assert seen["losses"][:steps] == saved["losses"]
        assert seen["schedule"] == saved["saved_schedule"]


@_each(ACCELERATE)
def test_accelerate_goes_on_with_all_ranks_in_step(move: Move, journey: Journey) -> None:
    ranks = journey.resuming_ranks(move)
    assert len(ranks) == move.target
    saved = journey.saving_ranks(move)[0]["saved"]
    assert saved["step"] > 0
    assert [_counters(seen) for seen in ranks] == [saved] * move.target
    assert {tuple(seen["synced"]) for seen in ranks} == {(False, True) * FURTHER_STEPS}
    assert len({seen["saved"]["step"] for seen in ranks}) == 1


@_each([move for move in ACCELERATE if move.target > move.source])
def test_accelerate_s_new_ranks_get_the_step_and_nothing_else(move: Move, journey: Journey) -> None:
    files = _rank_files(journey.out(move))
    step = journey.saving_ranks(move)[0]["saved"]["step"]
    for rank in range(move.source, move.target):
        assert torch.load(files[rank], weights_only=True) == {"step": step}


@_each(LIGHTNING)
def test_lightning_s_state_is_in_every_model_file(move: Move, journey: Journey) -> None:
    files = sorted((journey.out(move) / "checkpoint").glob("*_model_states.pt"))
    assert len(files) == (move.target if move.stage == 3 else 1)
    for file in files:
        content = torch.load(file, weights_only=False)
        held = {key: content.get(key) for key in trainer_state()}
        assert list(value_differences(trainer_state(), held, file.name)) == []


@_each(LIGHTNING)
def test_lightning_s_own_loader_finds_its_state(move: Move, journey: Journey) -> None:
    ranks = journey.resuming_ranks(move)
    assert len(ranks) == move.target
    for seen in ranks:
        assert seen["returned"] == {key: repr(value) for key, value in trainer_state().items()}
        assert (seen["first_step"], seen["last_step"]) == (3, 4)


@_each(MOVES)
def test_exported_weights_are_what_the_engine_held(
    move: Move, journey: Journey, tmp_path: Path
) -> None:
    # Without ZeRO it is not told which master weights are whose.
    dtype = "fp32" if move.stage else "bf16"
    streamshard.export(journey.source(move), tmp_path / "model", dtype=dtype)
    found = safetensors.torch.load_file(tmp_path / "model" / "model.safetensors")
    truth = journey.saved_truth(move)
    weights = truth.states["fp32"] if move.stage else truth.weights
    wanted = {**weights, **truth.frozen, **truth.buffers}
    assert list(value_differences(wanted, found, "model")) == []


@_each(HF)
def test_exported_weights_are_those_that_the_trainer_saves_itself(
    move: Move, journey: Journey, tmp_path: Path
) -> None:
    source = journey.source(move)
    streamshard.export(source, tmp_path / "model", dtype="bf16", verify=True)
    saved, found = (
        safetensors.torch.load_file(place / "model.safetensors")
        for place in (source, tmp_path / "model")
    )
    if move.stage < 3:  # the Trainer clones its weights then, and does not see what is tied
        assert torch.equal(saved.pop("lm_head.weight"), saved["transformer.wte.weight"])
    assert list(value_differences(saved, found, "model")) == []
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "model" / name).read_bytes() == (source / name).read_bytes()


def _contents(directory: Path) -> dict[str, str]:
    """Every file with the digest of its bytes."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in directory.rglob("*")
        if path.is_file()
    }


def _others(directory: Path) -> dict[str, Path]:
    """The files outside the tag that belong to no rank, by their relative paths."""
    tag = (directory / "latest").read_text()
    ranked = set(_rank_files(directory).values())
    return {
        str(path.relative_to(directory)): path
        for path in directory.rglob("*")
        if path.is_file() and path not in ranked and path.relative_to(directory).parts[0] != tag
    }


def _names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir() if path.is_file()}


def _rank_files(directory: Path) -> dict[int, Path]:
    """Each rank's file of random generators."""
    if (directory / "rng_state.pth").exists():
        return {0: directory / "rng_state.pth"} | _numbered(directory, "rng_state_*.pth", start=1)
    return _numbered(directory, "rng_state_*.pth") | _numbered(directory, "random_states_*.pkl")


def _numbered(directory: Path, pattern: str, start: int = 0) -> dict[int, Path]:
    found = {int(path.stem.rpartition("_")[2]): path for path in directory.glob(pattern)}
    assert all(rank >= start for rank in found)
    return found


def _generator(path: Path) -> torch.Tensor:
    """The state of torch's generator in a rank's file."""
    content: dict[str, Any] = torch.load(path, weights_only=False)
    state: torch.Tensor = content["cpu" if path.suffix == ".pth" else "torch_manual_seed"]
    return state


def _counters(seen: Seen) -> dict[str, int]:
    return {key: seen[key] for key in ("step", "engine_step", "batches", "scheduler")}


@pytest.fixture(scope="module")
def trainer_output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What HF Trainer leaves after two checkpoints, and of a third that was cut off."""
    root = tmp_path_factory.mktemp("trainer")
    out = root / "out"
    first = HfTrain(2, out, root / "seen-2.json", last_step=2)
    second = HfTrain(2, out, root / "seen-3.json", last_step=3, resume_from=out / "checkpoint-2")
    third = HfTrain(2, out, root / "seen-4.json", last_step=4, resume_from=out / "checkpoint-3")
    require_success(run_jobs(2, [first, second, third], root / "ranks", run))
    (lost,) = (out / "checkpoint-4" / "global_step4").glob("*_pp_rank_0_*_optim_states.pt")
    lost.unlink()
    return out


def test_the_output_of_a_trainer_is_listed_and_each_checkpoint_is_one_of_it(
    trainer_output: Path,
) -> None:
    """Weights lie beside the shards of each of them, and do not make it a model."""
    assert (trainer_output / "checkpoint-2" / "model.safetensors").is_file()
    done = command("inspect", trainer_output, "--json")
    assert (done.code, done.err) == (0, "")
    found = [
        (one["path"], one["step"], one["world_size"], one["is_whole"], one["is_newest"])
        for one in json.loads(done.out)["checkpoints"]
    ]
    assert found == [
        ("checkpoint-2", 2, 2, True, False),
        ("checkpoint-3", 3, 2, True, False),
        ("checkpoint-4", 4, 2, False, True),
    ]
    report = streamshard.diff(
        trainer_output, trainer_output, tag="checkpoint-2", against_tag="checkpoint-3"
    )
    assert report.tags == ("global_step2", "global_step3")
    assert any(tensor.distance.changed for tensor in report.tensors)
    with pytest.raises(IncompleteError, match="rank 0 of at least 2 is missing"):
        streamshard.inspect(trainer_output, tag="checkpoint-4")
