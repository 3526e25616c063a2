"""HF Trainer, Accelerate and Lightning resume directly on another number of ranks.

Whatever a job finds after the load and does then is what it finds and does if the checkpoint was
converted for it.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import streamshard
from tests.oracle.compare import differences
from tests.oracle.frameworks.common import Seen, generator_digest
from tests.oracle.frameworks.direct_loads import (
    ADVISED,
    FURTHER_STEPS,
    GROWING,
    SHRINKING,
    STALE,
    DirectLoads,
    Resumption,
)
from tests.oracle.truth import Truth

ALL = [*SHRINKING, *GROWING]


@pytest.fixture(scope="module")
def loads(tmp_path_factory: pytest.TempPathFactory) -> DirectLoads:
    """Every checkpoint saved, and resumed in both ways."""
    loads = DirectLoads(tmp_path_factory.mktemp("loads"))
    loads.run()
    return loads


def _each(moves: list[Resumption]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("move", moves, ids=lambda move: move.name)


def _of(*kinds: str) -> list[Resumption]:
    return [move for move in ALL if move.kind in kinds]


@_each(ALL)
def test_ranks_see_what_they_see_after_a_conversion(move: Resumption, loads: DirectLoads) -> None:
    """Steps, losses, samples, schedule and random generators of all ranks."""
    direct = loads.seen(move, "direct")
    assert len(direct) == move.target
    assert direct == loads.seen(move, "converted")
    for seen in direct:
        assert seen["engine_step" if "engine_step" in seen else "first_step"] >= move.steps


@_each(_of("hf", "accelerate", "lightning", "fabric"))
def test_the_engine_holds_what_was_saved(move: Resumption, loads: DirectLoads) -> None:
    saved, direct = loads.saved_truth(move), loads.loaded_truth(move, "direct")
    assert differences(Truth.load(saved), Truth.load(direct)) == []


@_each(_of("hf", "accelerate"))
def test_training_goes_on_to_the_same_bits(move: Resumption, loads: DirectLoads) -> None:
    converted, direct = (
        Truth.load(loads.resaved(move, way).with_name("saved.pt"))
        for way in ("converted", "direct")
    )
    assert converted.counters["global_steps"] == move.steps + FURTHER_STEPS
    assert differences(converted, direct) == []


@_each(_of("lightning-fit"))
def test_lightning_s_trainer_saves_the_same_again(move: Resumption, loads: DirectLoads) -> None:
    converted, direct = loads.resaved(move, "converted"), loads.resaved(move, "direct")
    found = streamshard.verify(direct, against=converted)
    assert (found.problems, found.differences) == ((), ())
    assert found.tensors > 20


@_each(_of("hf", "accelerate"))
def test_each_rank_gets_its_own_generator_and_no_other(
    move: Resumption, loads: DirectLoads
) -> None:
    saved = _generators(move, loads)
    assert len(saved) == move.source
    for rank, seen in enumerate(loads.seen(move, "direct")):
        if rank in saved:
            assert seen["generator"] == saved[rank]
        else:
            stale = torch.load(_earlier(move, loads) / STALE[move.kind], weights_only=False)
            assert seen["generator"] not in {*saved.values(), _digest(stale)}


@_each([move for move in _of("accelerate") if move.target > move.source])
def test_accelerate_s_new_ranks_go_on_in_step(move: Resumption, loads: DirectLoads) -> None:
    step = torch.load(loads.source(move) / "random_states_0.pkl", weights_only=False)["step"]
    assert step > 0
    ranks = loads.seen(move, "direct")
    assert [_counters(seen) for seen in ranks] == [(step, [False, True] * FURTHER_STEPS)] * 3


@_each(ALL)
def test_the_source_is_loaded_once_on_all_ranks(move: Resumption, loads: DirectLoads) -> None:
    (report,) = loads.reports(move)
    assert (report["source_world_size"], report["world_size"]) == (move.source, move.target)
    assert report["is_plain"] == (move.stage == 0)


@_each([*ALL, *ADVISED])
def test_notes_tell_what_running_jobs_can_use(move: Resumption, loads: DirectLoads) -> None:
    notes = "\n".join(loads.reports(move)[0]["notes"])
    saves_generators = move.kind in STALE
    assert ("for the new rank" in notes) == (saves_generators and move.target > move.source)
    assert ("has no rank 1, so the random state of that rank is not used" in notes) == (
        saves_generators and move.target < move.source
    )
    assert ("not used, because a job of another world size" in notes) == (
        saves_generators and move.source == 1
    )
    assert ("advances the scheduler" in notes) == (move.kind == "accelerate")
    converted = loads.notes[replace(move, is_advised=False).name]
    assert "Symbolic links that are not carried" in converted
    words = ("Symbolic links", "OUT", "ds-config", "copied", "sub_group", "robin", "the old arg")
    for word in words:
        assert word not in notes


def test_who_loads_weights_alone_gets_no_notes(loads: DirectLoads) -> None:
    (weights,) = _of("fabric-weights")
    assert loads.reports(weights)[0]["notes"] == []


@_each(_of("hf", "accelerate", "lightning", "fabric"))
def test_a_job_with_another_global_batch_gets_the_advice(
    move: Resumption, loads: DirectLoads
) -> None:
    """The same as that of the conversion."""
    notes = loads.reports(move)[0]["notes"]
    (batch,) = (note for note in notes if "This job has a global batch of " in note)
    advice = batch.partition(". ")[2]
    assert advice.startswith("The global batch of " if move.target == 3 else "To keep the global")
    assert advice in loads.notes[move.name]
    if move.kind == "hf":
        size = loads.seen(move, "direct")[0]["global_batch"]
        (position,) = (note for note in notes if "Trainer skips the data" in note)
        assert "With this job's arguments (per_device_train_batch_size=2, grad" in position
        assert f"and so a global batch of {size}, Trainer skips {size * move.steps} " in position


def test_a_job_that_follows_the_advice_does_not_get_it_again(loads: DirectLoads) -> None:
    hf, accelerate, lightning, nearest = (loads.reports(move)[0]["notes"] for move in ADVISED)
    assert [note.partition(":")[0] for note in hf] == ["HF Trainer"]
    assert (
        "With this job's settings, N is the number of samples seen in this epoch / 2 "
        in (accelerate[1])
    )
    assert "Change nothing if the script has these lines already" in accelerate[2]
    assert len(accelerate) == 3
    assert [note.partition(" counts")[0] for note in lightning] == ["Lightning"]
    assert nearest[1].startswith(
        "This job has a global batch of 6, the job that saved had 8. The global batch of 8 cannot "
        "be kept on 3 ranks"
    )
    assert "TrainingArguments" not in "\n".join(nearest)
    assert (
        "With a global batch of 9, Trainer skips 27 samples: 3 samples are left out."
        in (nearest[2])
    )
    assert nearest[2].count("6 samples are seen twice") == 1
    sizes = [loads.seen(move, "direct")[0]["global_batch"] for move in ADVISED]
    assert sizes == [8, 8, 8, 6]


@pytest.mark.parametrize("size", [1, 3])
def test_notes_are_printed_once_and_on_rank_0(size: int, loads: DirectLoads) -> None:
    """At the level at which DeepSpeed prints, unless told otherwise."""
    moves = [move for move in (*ALL, *ADVISED) if move.target == size]
    printed = loads.output(size, 0)
    for (report,) in map(loads.reports, moves):
        assert f"{report['source']}, tag {report['tag']}: " in printed
        for note in report["notes"]:
            assert note in printed
    assert printed.count(", tag ") == len(moves)
    for rank in range(1, size):
        assert ", tag " not in loads.output(size, rank)


def _earlier(move: Resumption, loads: DirectLoads) -> Path:
    return loads.source(Resumption(move.kind, move.stage, 2, 1))


def _generators(move: Resumption, loads: DirectLoads) -> dict[int, str]:
    """The random state of torch that each rank saved."""
    alone = "rng_state.pth" if move.source == 1 else "rng_state_{}.pth"
    name = alone if move.kind == "hf" else "random_states_{}.pkl"
    paths = (loads.source(move) / name.format(rank) for rank in range(move.source))
    return {rank: _digest(torch.load(path, weights_only=False)) for rank, path in enumerate(paths)}


def _digest(content: dict[str, torch.Tensor]) -> str:
    return generator_digest(content["cpu" if "cpu" in content else "torch_manual_seed"])


def _counters(seen: Seen) -> tuple[int, list[bool]]:
    return seen["step"], seen["synced"]
