"""Directories of HF Trainer, Accelerate and Lightning stay what they are at another world size.

The frameworks themselves save, resume from what was made of it, and directly from the source, and
train on: whatever a job finds after the load and does then is the same in both ways.
"""

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import streamshard
from tests.oracle.compare import differences
from tests.oracle.files import digests
from tests.oracle.frameworks.common import Seen, generator_digest
from tests.oracle.frameworks.journey import (
    FURTHER_STEPS,
    KEEPSAKE,
    MOVES,
    STALE,
    Journey,
    Move,
    Way,
)
from tests.oracle.values import value_differences


@pytest.fixture(scope="module")
def journey(tmp_path_factory: pytest.TempPathFactory) -> Journey:
    """Every checkpoint of every framework saved, resharded, and resumed in both ways."""
    journey = Journey(tmp_path_factory.mktemp("frameworks"))
    journey.run()
    return journey


def _each(moves: list[Move]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("move", moves, ids=lambda move: move.name)


def _of(*kinds: str) -> list[Move]:
    return [move for move in MOVES if move.kind in kinds]


HF, RANKED = _of("hf"), _of("hf", "accelerate")
"""The latter save random generators of each rank."""
KNOWN = _of("hf", "accelerate", "lightning", "fabric")
"""Those of which a truth is gathered."""


@_each(KNOWN)
def test_the_engine_holds_what_was_saved(move: Move, journey: Journey) -> None:
    saved = journey.saved_truth(move)
    assert differences(saved, journey.loaded_truth(move)) == []
    assert differences(saved, journey.loaded_truth(move, "direct")) == []


@_each(MOVES)
def test_the_tag_keeps_its_name(move: Move, journey: Journey) -> None:
    tag = (journey.out(move) / "latest").read_text()
    assert tag == (journey.source(move) / "latest").read_text()
    names = {
        "hf": f"global_step{move.steps}",
        "accelerate": "pytorch_model",
        "lightning": "checkpoint",
    }
    assert tag == names[move.saved_by]
    assert (journey.out(move) / tag).is_dir()


@_each(MOVES)
def test_what_belongs_to_no_rank_comes_along(move: Move, journey: Journey) -> None:
    source, out = _others(journey.source(move)), _others(journey.out(move))
    assert out.keys() == source.keys()
    for name, path in out.items():
        assert path.read_bytes() == source[name].read_bytes(), name
    assert str(KEEPSAKE) in out
    if move.kind == "hf":
        assert {"trainer_state.json", "training_args.bin", "model.safetensors"} <= out.keys()
        assert ("scheduler.pt" in out) == (move.stage != 2)
    if move.kind == "accelerate":
        assert {"scheduler.bin", "custom_checkpoint_0.pkl"} <= out.keys()


@_each(MOVES)
def test_the_way_through_a_store_gives_the_same_files(move: Move, journey: Journey) -> None:
    assert digests(journey.out_of_store(move)) == digests(journey.out(move))


@_each(RANKED)
def test_ranks_before_and_after_keep_their_random_files(move: Move, journey: Journey) -> None:
    before, after = _saved_by_ranks(move, journey), _rank_files(journey.out(move))
    kept = set(range(min(move.source, move.target)))
    new = set(range(move.source, move.target)) if move.saved_by == "accelerate" else set()
    assert after.keys() == kept | new
    for rank in kept:
        assert after[rank].read_bytes() == before[rank].read_bytes()


@_each(RANKED)
def test_files_are_named_as_the_framework_names_them(move: Move, journey: Journey) -> None:
    out, resaved = _names(journey.out(move)), _names(journey.resaved(move))
    if move.target == 1:
        resaved -= {STALE[move.kind]}  # which was put there for the next move
    new = {f"rng_state_{rank}.pth" for rank in range(move.source, move.target)}
    assert resaved - out == (new if move.saved_by == "hf" else set())
    assert out - resaved == set()


@_each(RANKED)
@pytest.mark.parametrize("way", ["converted", "direct"])
def test_each_rank_gets_its_own_generator_and_no_other(
    way: Way, move: Move, journey: Journey
) -> None:
    files = _rank_files(journey.source(move))
    if move.source == 1:
        files |= {1: journey.source(move) / STALE[move.kind]}
    saved = {rank: generator_digest(_generator(path)) for rank, path in files.items()}
    assert len(set(saved.values())) == len(files) >= 2
    for rank, seen in enumerate(journey.seen(move, way)):
        if rank < move.source:
            assert seen["generator"] == saved[rank]
        else:
            assert seen["generator"] not in saved.values()
            # The job's own seed, untouched. HF Trainer's data loader draws from it on the way.
            assert move.kind == "hf" or seen["generator"] == seen["generator_before"]


@_each(HF)
def test_the_trainer_goes_on(move: Move, journey: Journey) -> None:
    steps = move.steps
    ranks = journey.seen(move)
    assert len(ranks) == move.target
    saved = journey.saving_ranks(move)[0]
    assert len(saved["saved_schedule"]) == 2
    for seen in ranks:
        assert seen["first_step"] == seen["engine_step"] == steps
        assert seen["last_step"] == steps + FURTHER_STEPS
        assert len(seen["losses"]) == steps + FURTHER_STEPS
        assert seen["losses"][:steps] == saved["losses"]
        assert seen["schedule"] == saved["saved_schedule"]


@_each(_of("accelerate"))
def test_accelerate_goes_on_with_all_ranks_in_step(move: Move, journey: Journey) -> None:
    ranks = journey.seen(move)
    assert len(ranks) == move.target
    saved = journey.saving_ranks(move)[0]["saved"]
    assert saved["step"] > 0
    assert [_counters(seen) for seen in ranks] == [saved] * move.target
    assert {tuple(seen["synced"]) for seen in ranks} == {(False, True) * FURTHER_STEPS}
    assert len({seen["saved"]["step"] for seen in ranks}) == 1


@_each([move for move in _of("accelerate") if move.target > move.source])
def test_accelerate_s_new_ranks_get_the_step_and_nothing_else(move: Move, journey: Journey) -> None:
    files = _rank_files(journey.out(move))
    step = journey.saving_ranks(move)[0]["saved"]["step"]
    for rank in range(move.source, move.target):
        assert torch.load(files[rank], weights_only=True) == {"step": step}


@_each(_of("lightning"))
def test_lightning_s_state_is_in_every_model_file_and_it_goes_on(
    move: Move, journey: Journey
) -> None:
    before, *_ = journey.source(move).glob("checkpoint/*_model_states.pt")
    held = torch.load(before, weights_only=False)
    state = {key: held[key] for key in ("epoch", "global_step", "loops", "callbacks")}
    files = sorted((journey.out(move) / "checkpoint").glob("*_model_states.pt"))
    assert len(files) == (move.target if move.stage == 3 else 1)
    for file in files:
        content = torch.load(file, weights_only=False)
        found = {key: content.get(key) for key in state}
        assert list(value_differences(state, found, file.name)) == []
    for seen in journey.seen(move):
        assert (seen["last_step"], seen["engine_step"]) == (move.steps + FURTHER_STEPS,) * 2


@_each(MOVES)
def test_ranks_see_the_same_in_both_ways(move: Move, journey: Journey) -> None:
    """Steps, losses, samples, schedule and random generators of all ranks."""
    direct = journey.seen(move, "direct")
    assert len(direct) == move.target
    assert direct == journey.seen(move)
    for seen in direct:
        assert seen["engine_step" if "engine_step" in seen else "first_step"] >= move.steps


@_each([*RANKED, *_of("lightning")])
def test_training_goes_on_to_the_same_bits(move: Move, journey: Journey) -> None:
    converted = journey.trained_truth(move, "converted")
    assert converted.counters["global_steps"] == move.steps + FURTHER_STEPS
    assert differences(converted, journey.trained_truth(move, "direct")) == []


@_each(MOVES)
def test_the_source_is_loaded_once_on_all_ranks(move: Move, journey: Journey) -> None:
    (report,) = journey.reports(move)
    assert (report["source_world_size"], report["world_size"]) == (move.source, move.target)
    assert report["is_plain"] == (move.stage == 0)


@_each(MOVES)
def test_notes_tell_what_running_jobs_can_use(move: Move, journey: Journey) -> None:
    notes = "\n".join(journey.reports(move)[0]["notes"])
    saves_generators = move.kind in STALE
    assert ("for the new rank" in notes) == (saves_generators and move.target > move.source)
    assert ("has no rank 1, so the random state of that rank is not used" in notes) == (
        saves_generators and move.target < move.source
    )
    assert ("not used, because a job of another world size" in notes) == (
        saves_generators and move.source == 1
    )
    assert ("advances the scheduler" in notes) == (move.kind == "accelerate")
    assert "Symbolic links that are not carried" in journey.notes[move.name]
    words = ("Symbolic links", "OUT", "ds-config", "copied", "sub_group", "robin", "the old arg")
    for word in words:
        assert word not in notes


@_each([*RANKED, *_of("fabric")])
def test_a_job_with_another_global_batch_gets_the_advice(move: Move, journey: Journey) -> None:
    """The same as that of the conversion."""
    notes = journey.reports(move)[0]["notes"]
    (batch,) = (note for note in notes if "This job has a global batch of " in note)
    advice = batch.partition(". ")[2]
    assert advice.startswith("The global batch of " if move.target == 3 else "To keep the global")
    assert advice in journey.notes[move.name]
    if move.kind == "hf":
        size = journey.seen(move, "direct")[0]["global_batch"]
        (position,) = (note for note in notes if "Trainer skips the data" in note)
        assert "With this job's arguments (per_device_train_batch_size=2, grad" in position
        assert f"and so a global batch of {size}, Trainer skips {size * move.steps} " in position


@pytest.mark.parametrize("size", [1, 3])
def test_notes_are_printed_once_and_on_rank_0(size: int, journey: Journey) -> None:
    """At the level at which DeepSpeed prints, unless told otherwise."""
    moves = [move for move in MOVES if move.target == size]
    printed = journey.output(size, 0)
    for (report,) in map(journey.reports, moves):
        assert f"{report['source']}, tag {report['tag']}: " in printed
        for note in report["notes"]:
            assert note in printed
    assert printed.count(", tag ") == len(moves)
    for rank in range(1, size):
        assert ", tag " not in journey.output(size, rank)


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


def _saved_by_ranks(move: Move, journey: Journey) -> dict[int, Path]:
    """The files of the ranks that saved, without what an earlier job has left."""
    files = _rank_files(journey.source(move))
    assert files.keys() >= set(range(move.source))
    return {rank: path for rank, path in files.items() if rank < move.source}


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
