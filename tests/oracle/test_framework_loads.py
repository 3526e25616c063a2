"""HF Trainer, Accelerate and Lightning resume directly on another number of ranks.

Whatever a job finds after the load and does then is what it finds and does if the checkpoint was
converted for it.
"""

from pathlib import Path

import pytest
import torch

import streamshard
from tests.oracle.compare import differences
from tests.oracle.frameworks.common import Seen, generator_digest
from tests.oracle.frameworks.direct_loads import (
    FURTHER_STEPS,
    GROWING,
    SHRINKING,
    STALE,
    DirectLoads,
    Resumption,
)
from tests.oracle.truth import Truth

pytestmark = pytest.mark.engine

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
