"""`--verify`: what was written is read back from the disk, and nothing wrong takes its place."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import streamshard
from streamshard.errors import IntegrityError
from streamshard.io.page_cache import drop_cached
from streamshard.transfer import plan
from tests.cli.conftest import flip as flip_middle
from tests.cli.conftest import model_file, tree
from tests.fabricated import DUMPS, edit, save, write, write_dumps
from tests.job import TAG
from tests.verify.conftest import SMALL, Damage, files_of


def test_what_is_right_takes_its_place(tmp_path: Path) -> None:
    run = write(SMALL, tmp_path / "run")
    bytes_ = []
    for verify in (False, True):
        out = tmp_path / f"out-{verify}"
        report = streamshard.repartition(run, out, world_size=2, zero_stage=3, verify=verify)
        assert report.is_verified == verify
        bytes_.append({f.relative_to(out): f.read_bytes() for f in files_of(out)})
    assert bytes_[0] == bytes_[1]


@pytest.mark.parametrize("stage", [2, 3])
def test_dumps(tmp_path: Path, stage: int) -> None:
    run = write(replace(SMALL, stage=stage), tmp_path / "run")
    template = write_dumps(run, tmp_path / "dumps")
    like = run if stage == 3 else None
    streamshard.repartition(
        template, tmp_path / "out" / DUMPS, world_size=2, like=like, verify=True
    )
    assert len(files_of(tmp_path / "out" / DUMPS)) == 2


def test_what_needs_another_checkpoint_to_be_written(tmp_path: Path) -> None:
    job = replace(SMALL, stage=2, muon=(0,))
    run = write(job, tmp_path / "run")
    like = write(replace(job, stage=3), tmp_path / "like")
    out = tmp_path / "out"
    streamshard.repartition(run, out, world_size=2, zero_stage=3, like=like, verify=True)
    assert streamshard.verify(run).is_good
    found = streamshard.verify(out, against=run)
    assert (found.problems, found.differences) == ((), ())


@pytest.mark.parametrize(
    ("framework", "world_size"),
    [("HF Trainer", 1), ("HF Trainer", 5), ("Accelerate", 2), ("Accelerate", 3)],
)
def test_files_of_ranks_that_come_and_go(tmp_path: Path, framework: str, world_size: int) -> None:
    """Random generators belong to ranks; a new rank has none, which is not a difference."""
    run = write(SMALL, tmp_path / "run", "pytorch_model")
    for rank in range(4):  # the last is one that an earlier run left behind
        if framework == "Accelerate":
            save({"step": 6, "generator": torch.arange(rank)}, run / f"random_states_{rank}.pkl")
        else:
            save(torch.arange(rank), run / f"rng_state_{rank}.pth")
    if framework == "HF Trainer":
        (run / "trainer_state.json").write_text("{}")
    out = tmp_path / "out"
    streamshard.repartition(run, out, world_size=world_size, verify=True)
    for one, other in ((out, run), (run, out)):
        assert streamshard.verify(one, against=other).is_good
    assert streamshard.verify(out).is_good
    kept = out / ("random_states_0.pkl" if framework == "Accelerate" else "rng_state_0.pth")
    if kept.exists():
        save({"step": 6, "generator": torch.arange(9)}, kept)
        assert not streamshard.verify(out, against=run).is_good


def damage_written(monkeypatch: pytest.MonkeyPatch, damage: Damage) -> list[Path]:
    """Damage what was written once it is synced, as a disk might; returns where that was."""
    places: list[Path] = []

    def drop(place: Path) -> None:
        places.append(place)
        damage(place)
        drop_cached(place)

    monkeypatch.setattr(plan, "drop_cached", drop)
    return places


def flip(name: str) -> Damage:
    return lambda place: flip_middle(next(place.rglob(name)))


def rewrite(change: Callable[[dict[str, Any]], object]) -> Damage:
    """Change a value and write it so that every checksum is right, as a bug of ours might."""

    return lambda place: edit(model_file(place), change)


def remove(name: str) -> Damage:
    return lambda place: next(place.rglob(name)).unlink()


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (flip("bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"), "pp_rank_1_mp_rank_00_optim"),
        (flip("zero_to_fp32.py"), "file/zero_to_fp32.py"),
        (rewrite(lambda c: c["module"]["v"].view(torch.int16)[3].add_(1)), "module/v"),
        (rewrite(lambda c: c.update(global_steps=8)), "global_steps"),
        (rewrite(lambda c: c["rng"][9:10].add_(1)), "model/rng"),
        (remove("bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"), "rank 1"),
        (remove("zero_to_fp32.py"), "file/zero_to_fp32.py"),
    ],
    ids=["bit", "script", "weight", "counter", "tensor", "missing rank", "missing file"],
)
def test_what_is_wrong_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Damage, named: str
) -> None:
    run = write(SMALL, tmp_path / "run")
    places = damage_written(monkeypatch, damage)
    with pytest.raises(IntegrityError, match=r"not put into its place") as caught:
        streamshard.repartition(run, tmp_path / "out", world_size=2, verify=True)
    assert named in str(caught.value)
    assert places == [tmp_path / "out.partial"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    streamshard.repartition(run, tmp_path / "unverified", world_size=2)
    assert len(places) == 1


@pytest.mark.parametrize(
    ("codec", "which"),
    [("none", "state/fp32/v/c/0"), ("zstd", "state/fp32/v/c/0"), ("zstd", "meta/manifest/c/0")],
)
def test_a_store_that_is_wrong_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str, which: str
) -> None:
    run = write(SMALL, tmp_path / "run")
    damage_written(monkeypatch, flip(which))
    with pytest.raises(IntegrityError, match=which):
        streamshard.convert(run, tmp_path / "run.zarr", codec=codec, verify=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_a_bug_in_the_cutting_would_be_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters of one size that have changed places, with right checksums everywhere."""
    groups = ((("a", (6,)), ("b", (6,))),)
    run = write(replace(SMALL, groups=groups, tied={}, world_size=2), tmp_path / "run")
    kept = tree(run)

    def turn(content: dict[str, Any]) -> None:
        state = content["optimizer_state_dict"]["base_optimizer_state"]["state"][0]
        state["exp_avg"] = state["exp_avg"].flip(0)

    def swap(place: Path) -> None:
        for path in (place / TAG).glob("*_optim_states.pt"):
            edit(path, turn)

    damage_written(monkeypatch, swap)
    with pytest.raises(IntegrityError, match=r"state/exp_avg/a: 6 of 6 elements differ"):
        streamshard.repartition(run, tmp_path / "out", world_size=2, verify=True)
    assert tree(run) == kept
