"""What FSDP's ranks saved goes to another count of ranks, and real ranks go on with it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import streamshard
from tests.dtensor_parts import load, rank_differences
from tests.oracle import fsdp_ranks_jobs
from tests.oracle.fsdp_ranks_jobs import LoadRanks, SaveRanks, after
from tests.oracle.ranks import require_success, run_jobs
from tests.oracle.values import value_differences


@dataclass(frozen=True)
class Move:
    """What ranks of one mesh saved, and ranks of another load."""

    name: str
    source: tuple[int, ...]
    target: tuple[int, ...]
    keyed: str = "numbers"
    version: int = 2


MOVES = [
    Move("two to three", (2,), (3,)),
    Move("three to two by names", (3,), (2,), "names"),
    Move("replicas", (2, 2), (3, 2)),
    Move("replicas to none", (2, 2), (2,)),
    Move("to one", (3,), (1,)),
    Move("from one flat", (1,), (3,), "flat"),
    Move("FSDP1", (2,), (3,), version=1),
    Move("FSDP1 to fewer", (3,), (2,), version=1),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory in which ranks saved, others loaded what was made of it, and saved again."""
    root = tmp_path_factory.mktemp("ranks")
    _run({m.source: [] for m in MOVES} | _by_mesh("source", root), root)
    for move in MOVES:
        ranks = torch.Size(move.target).numel()
        streamshard.repartition(
            root / move.name / "saved", root / move.name / "made",
            world_size=ranks, format="fsdp-ranks", verify=True,
            facts={"source": {"wrapped": ["blocks.*", "narrow"]}} if move.version == 1 else None,
        )  # fmt: skip
    _run(_by_mesh("target", root), root)
    return root


def _by_mesh(side: str, root: Path) -> dict[tuple[int, ...], list[Any]]:
    jobs: dict[tuple[int, ...], list[Any]] = {}
    for move in MOVES:
        place = root / move.name
        mesh = getattr(move, side)
        job: Any = SaveRanks(
            place / "saved", place / "truth", mesh, keyed=move.keyed, version=move.version
        )
        if side == "target":
            job = LoadRanks(
                place / "made", place / "held", mesh, move.keyed, move.version,
                further_steps=2, save_dir=place / "again",
            )  # fmt: skip
        jobs.setdefault(mesh, []).append(job)
    return jobs


def _run(jobs: dict[tuple[int, ...], list[Any]], root: Path) -> None:
    by_ranks: dict[int, list[Any]] = {}
    for mesh, some in jobs.items():
        by_ranks.setdefault(torch.Size(mesh).numel(), []).extend(some)
    for ranks, some in by_ranks.items():
        require_success(run_jobs(ranks, some, root / "work", fsdp_ranks_jobs.run))


@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.name)
def test_other_ranks_hold_the_same_bits(move: Move, root: Path) -> None:
    place = root / move.name
    assert not list(value_differences(load(place / "held"), load(place / "truth"), move.name))


@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.name)
def test_they_train_on_as_the_others_do(move: Move, root: Path) -> None:
    place = root / move.name
    found, wanted = load(after(place / "held")), load(after(place / "truth"))
    for name, weight in wanted["weights"].items():
        torch.testing.assert_close(found["weights"][name], weight, rtol=2e-2, atol=1e-5)


@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.name)
def test_what_they_save_is_what_was_written(move: Move, root: Path) -> None:
    """Names, order, meshes and placements are those that torch itself saves on these ranks."""
    made, again = root / move.name / "made", root / move.name / "again"
    files = sorted(path.name for path in made.iterdir() if path.suffix in (".pt", ".json"))
    assert files == sorted(path.name for path in again.iterdir())
    for name in files:
        if name.endswith(".json"):
            assert (again / name).read_text() == (made / name).read_text()
            continue
        is_alone = len(move.source) == len(move.target) == 1
        assert not rank_differences(made / name, again / name, names_groups=is_alone)
