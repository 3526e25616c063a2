"""Checkpoints taken to other tensor and pipeline parallel degrees load in DeepSpeed bit for bit."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import zarr
from safetensors.torch import load_file

import streamshard
from streamshard.errors import UnsupportedError
from tests.fabricated import edit
from tests.oracle.compare import close, differences
from tests.oracle.files import file_differences
from tests.oracle.jobs import Job, Resume, Train, after_path
from tests.oracle.models import Case
from tests.oracle.ranks import require_success, run_jobs
from tests.oracle.topology.cases import BF16_OPTIMIZER, ROUND_ROBIN
from tests.oracle.topology.pipeline import Pipeline
from tests.oracle.topology.tensor import TensorParallel
from tests.oracle.truth import Truth
from tests.oracle.universal import universal_of
from tests.oracle.values import value_differences
from tests.oracle.whole_model import whole

FURTHER_STEPS = 2
TOLERANCE = 1e-4
"""How far from the uninterrupted run in fp32, as a share of the movement since the save."""


@dataclass(frozen=True)
class Move:
    """One case, taken from a topology to another one."""

    name: str
    source: Case
    ranks: int
    target: Case
    target_ranks: int
    options: Mapping[str, Any]
    """Those that ask for the other degrees."""
    goes_on: bool = False
    """Whether the model computes the same at both degrees."""

    @property
    def has_like(self) -> bool:
        """Whether the target is told by a reference: a whole model needs none, but may have one."""
        return not self.is_autotp or self.options != {"tensor_parallel": 1} or self.name == "merged"

    @property
    def is_autotp(self) -> bool:
        """Whether DeepSpeed cuts the model, and not the model itself."""
        return isinstance(self.source.topology, TensorParallel)


def _case(name: str, stage: int, dtype: str, topology: object, **overrides: object) -> Case:
    return Case(name, stage, dtype, overrides, topology=topology)  # type: ignore[arg-type]


def _tensor(degree: int, stage: int = 2, dtype: str = "bf16", **overrides: object) -> Case:
    return _case(f"t{degree}-z{stage}-{dtype}", stage, dtype, TensorParallel(degree), **overrides)


def _fused(degree: int) -> Case:
    return _case(f"fused{degree}", 1, "bf16", TensorParallel(degree, fused=True))


def _pipe(stages: int, dtype: str = "fp32") -> Case:
    return _case(f"p{stages}-{dtype}", 1, dtype, Pipeline(stages=stages, extra=True))


def _with_norms(stages: int) -> Case:
    return _case(f"p{stages}-norms", 1, "bf16", Pipeline(stages=stages, norms=True))


def _by_scales(stages: int) -> Case:
    grid = Pipeline(stages=stages, extra=True, method="type:scale")
    return _case(f"p{stages}-by-scales", 1, "bf16", grid)


def _shared_pipe(stages: int) -> Case:
    return _case(f"p{stages}-t2", 1, "bf16", Pipeline(stages=stages, tensor=2, extra=True))


def _told_pipe(stages: int, tensor: int, dtype: str = "fp32") -> Case:
    topology = Pipeline(stages=stages, tensor=tensor, extra=True, told=True)
    return _case(f"p{stages}-told{tensor}-{dtype}", 1, dtype, topology)


def _named(case: Case, suffix: str) -> Case:
    return Case(f"{case.name}-{suffix}", case.zero_stage, case.dtype, case.ds_overrides,
                topology=case.topology)  # fmt: skip


def tensor(degree: int) -> dict[str, Any]:
    return {"tensor_parallel": degree}


def pipeline(degree: int) -> dict[str, Any]:
    return {"pipeline_parallel": degree}


MOVES = [
    Move("merged", _tensor(2, 2, "fp32"), 2, _tensor(1, 2, "fp32"), 2, tensor(1), goes_on=True),
    Move("split", _tensor(1), 2, _tensor(2), 4, tensor(2)),
    Move("uneven", _tensor(2, 1, "fp32"), 4, _tensor(3, 1, "fp32"), 3, tensor(3), goes_on=True),
    Move("fused", _fused(2), 4, _fused(3), 3, tensor(3)),
    Move("fused-back", _fused(3), 3, _fused(2), 2, tensor(2)),
    Move("stage-3", _tensor(2, 3, "fp32"), 2, _tensor(1, 3, "fp32"), 2, tensor(1), goes_on=True),
    Move("stage-3-split", _tensor(1, 3), 2, _tensor(2, 3), 4, tensor(2)),
    Move("to-stage-3", _tensor(2), 4, _tensor(3, 3), 3, tensor(3)),
    Move("from-stage-3", _tensor(2, 3), 4, _tensor(1, 1), 2, tensor(1)),
    Move("fewer-stages", _pipe(3), 3, _pipe(2), 4, pipeline(2), goes_on=True),
    Move("stages-of-two", _shared_pipe(2), 4, _shared_pipe(1), 2, pipeline(1)),
    Move("told-merged", _told_pipe(2, 2), 4, _told_pipe(2, 1), 4, tensor(1), goes_on=True),
    Move("told-both", _told_pipe(1, 2), 4, _told_pipe(2, 3), 6, {**tensor(3), **pipeline(2)}),
    Move(
        "told-bf16",
        _told_pipe(2, 2, "bf16"),
        4,
        _told_pipe(1, 3, "bf16"),
        3,
        {**tensor(3), **pipeline(1)},
    ),
    Move("more-stages", _pipe(2, "bf16"), 4, _pipe(3, "bf16"), 3, pipeline(3)),
    Move("stages-by-scales", _pipe(2, "bf16"), 4, _by_scales(3), 3, pipeline(3)),
    Move("one-stage", _pipe(3), 3, _pipe(1), 2, pipeline(1)),
    Move("shared-norms", _with_norms(2), 2, _with_norms(1), 2, pipeline(1)),
]
MOVES += [
    Move(
        name,
        _named(_tensor(2, stage, "bf16", **more), name),
        4,
        _named(_tensor(1, stage, "bf16", **more), name),
        2,
        tensor(1),
    )
    for name, stage, more in (
        ("round-robin", 2, ROUND_ROBIN),
        ("bf16-optimizer", 1, BF16_OPTIMIZER),
    )
]


@dataclass(frozen=True)
class Places:
    """Where each thing of the session lies."""

    root: Path
    errors: dict[str, str]

    def source(self, move: Move) -> Path:
        return self.root / f"{move.source.name}-at{move.ranks}"

    def like(self, move: Move) -> Path:
        return self.root / f"like-{move.target.name}-at{move.target_ranks}"

    def out(self, move: Move) -> Path:
        return self.root / f"{move.name}-out"

    def resaved(self, move: Move) -> Path:
        return self.root / f"{move.name}-resaved"

    def truth(self, run_dir: Path) -> Path:
        return run_dir.with_name(f"{run_dir.name}.truth.pt")


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    """All sources trained, taken to the other degrees, resumed and saved again."""
    places = Places(tmp_path_factory.mktemp("degrees"), {})
    jobs: dict[int, dict[Path, Job]] = {}
    for move in MOVES:
        source, like = places.source(move), places.like(move)
        jobs.setdefault(move.ranks, {})[source] = Train(
            move.source, source, places.truth(source), further_steps=FURTHER_STEPS
        )
        if not move.has_like:
            continue
        # Before its first step, with other weights: whatever is right afterwards is the source's.
        jobs.setdefault(move.target_ranks, {})[like] = Train(
            move.target, like, None, steps=0, seed=99
        )
    for ranks, of_ranks in sorted(jobs.items()):
        require_success(run_jobs(ranks, list(of_ranks.values()), places.root / "ranks"))
    for move in MOVES:
        streamshard.repartition(
            places.source(move),
            places.out(move),
            world_size=move.target_ranks,
            **move.options,
            zero_stage=move.target.zero_stage,
            like=places.like(move) if move.has_like else None,
            verify=True,
        )
    for ranks in sorted({move.target_ranks for move in MOVES}):
        moves = [move for move in MOVES if move.target_ranks == ranks]
        resumes = [_resume(places, move) for move in moves]
        for move, done in zip(moves, run_jobs(ranks, resumes, places.root / "ranks"), strict=True):
            if done.error is not None:
                places.errors[move.name] = done.error
    return places


def _resume(places: Places, move: Move) -> Resume:
    out = places.out(move)
    return Resume(move.target, out, places.truth(out), places.resaved(move), FURTHER_STEPS)


@pytest.fixture(params=MOVES, ids=lambda move: move.name)
def move(request: pytest.FixtureRequest, places: Places) -> Move:
    """One move that an engine resumed from."""
    one: Move = request.param
    if one.name in places.errors:
        pytest.fail(places.errors[one.name], pytrace=False)
    return one


def test_the_resumed_engine_holds_what_was_saved(move: Move, places: Places) -> None:
    source, out = places.source(move), places.out(move)
    saved = whole(Truth.load(places.truth(source)), source)
    resumed = whole(Truth.load(places.truth(out)), out)
    assert saved.states.keys() == {"fp32", "exp_avg", "exp_avg_sq"}
    assert differences(saved, resumed) == []


def test_the_engine_saves_the_same_again(move: Move, places: Places) -> None:
    out, resaved = places.out(move), places.resaved(move)
    tag = (out / "latest").read_text()
    assert file_differences(out / tag, resaved / tag) == []


@pytest.mark.parametrize("name", [move.name for move in MOVES if move.is_autotp])
def test_lists_of_patterns_tell_what_maps_tell(name: str, places: Places, tmp_path: Path) -> None:
    """AutoTP saves both since 0.19.8, and lists alone before."""
    move = next(move for move in MOVES if move.name == name)
    source = without_maps(places.source(move), tmp_path / "source")
    like = without_maps(places.like(move), tmp_path / "like") if move.has_like else None
    wanted, out = without_maps(places.out(move), tmp_path / "wanted"), tmp_path / "out"
    streamshard.repartition(
        source,
        out,
        world_size=move.target_ranks,
        **move.options,
        zero_stage=move.target.zero_stage,
        like=like,
    )
    tag = (out / "latest").read_text()
    assert file_differences(out / tag, wanted / tag) == []


@pytest.mark.parametrize("name", ["uneven", "fused", "fused-back", "to-stage-3"])
def test_widths_are_recomputed_as_autotp_does(name: str, places: Places, tmp_path: Path) -> None:
    """Without a reference come the same files, what they tell of the cut included."""
    move = next(move for move in MOVES if move.name == name)
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(places.source(move), source)
    # Heads of these models would be cut otherwise than the source is.
    (source / "config.json").write_text('{"num_key_value_heads": 1}')
    streamshard.repartition(
        source,
        out,
        world_size=move.target_ranks,
        **move.options,
        zero_stage=move.target.zero_stage,
    )
    tag = (out / "latest").read_text()
    assert file_differences(out / tag, places.out(move) / tag) == []


@pytest.mark.parametrize("name", ["merged", "from-stage-3", "uneven", "fewer-stages", "told-both"])
def test_a_store_of_the_other_degree_leads_to_the_same_files(
    name: str, places: Places, tmp_path: Path
) -> None:
    """Of one part, it has whole tensors; the job's own world size need not be told."""
    move = next(move for move in MOVES if move.name == name)
    store, out = tmp_path / "run.zarr", tmp_path / "out"
    streamshard.convert(
        places.source(move),
        store,
        **move.options,
        like=places.like(move) if move.has_like else None,
        verify=True,
    )
    if move.options == {"tensor_parallel": 1}:
        truth = whole(Truth.load(places.truth(places.source(move))), places.source(move))
        for state, tensors in truth.states.items():
            arrays = {name: zarr.open_array(store / "state" / state / name) for name in tensors}
            found = {name: torch.tensor(held[...]) for name, held in arrays.items()}
            assert not list(value_differences(found, tensors, state))
    streamshard.repartition(
        store, out, world_size=move.target_ranks, zero_stage=move.target.zero_stage
    )
    tag = (out / "latest").read_text()
    assert file_differences(out / tag, places.out(move) / tag) == []


@pytest.mark.parametrize("name", ["uneven", "fused", "told-merged", "told-both"])
def test_deepspeed_s_own_conversion_makes_the_same_of_both(
    name: str, places: Places, tmp_path: Path
) -> None:
    """Its universal checkpoints of the source, and of what was made of it."""
    move = next(move for move in MOVES if move.name == name)
    saved = universal_of(places.source(move), tmp_path / "saved")
    ours = universal_of(places.out(move), tmp_path / "ours")
    paths = sorted(path.relative_to(saved) for path in (saved / "zero").rglob("*.pt"))
    assert paths == sorted(path.relative_to(ours) for path in (ours / "zero").rglob("*.pt"))
    for path in paths:
        if not (saved / path).with_name("exp_avg.pt").exists():
            # The rest of the optimizer's file, and frozen weights: a copy on each rank becomes as
            # many in a row there.
            continue
        both = (torch.load(root / path, weights_only=False) for root in (saved, ours))
        # Beside a parameter is how it was cut, which nothing tells of one rank.
        one, two = (held["param"] if isinstance(held, dict) else held for held in both)
        assert not list(value_differences(one, two, str(path)))


@pytest.mark.parametrize(
    ("name", "starts"),
    [
        ("fewer-stages", [0, 5]),
        ("one-stage", [0]),
        ("shared-norms", [0]),
        ("stages-of-two", [0]),
        ("stages-by-scales", [0, 4, 6]),
    ],
)
def test_a_list_of_first_layers_does_as_well_as_a_reference(
    name: str, starts: list[int], places: Places, tmp_path: Path
) -> None:
    move = next(move for move in MOVES if move.name == name)
    out = tmp_path / "out"
    streamshard.repartition(
        places.source(move), out, world_size=move.target_ranks, stages=starts, verify=True
    )
    tag = (out / "latest").read_text()
    assert file_differences(out / tag, places.out(move) / tag) == []


def test_what_a_layer_without_a_file_uses_is_not_known(places: Places, tmp_path: Path) -> None:
    """Layer 3 is a function of its own. As far as files tell, it could be one of the embedding."""
    move = next(move for move in MOVES if move.name == "more-stages")
    message = r"not known which of layers 0, 3 use 'tied_modules\.embed'"
    with pytest.raises(UnsupportedError, match=message):
        streamshard.repartition(
            places.source(move), tmp_path / "out", world_size=3, stages=[0, 3, 6]
        )


def without_maps(run: Path, to: Path) -> Path:
    """Copy a checkpoint; of how its parameters are cut, only the lists are left."""
    shutil.copytree(run, to)
    for path in to.glob("*/*model_states.pt"):
        edit(path, lambda held: held.get("universal_checkpoint_info", {}).pop("affine_map", None))
    return to


@pytest.mark.parametrize("name", ["fewer-stages", "more-stages", "told-both"])
def test_a_pipeline_s_layers_are_put_together(name: str, places: Places, tmp_path: Path) -> None:
    """What an engine saved, and what was made of it for other stages, are the same model."""
    move = next(move for move in MOVES if move.name == name)
    source = places.source(move)
    truth = whole(Truth.load(places.truth(source)), source)
    module = {**truth.weights, **truth.frozen, **truth.buffers}
    wanted = {**truth.frozen, **truth.buffers, **truth.states["fp32"]}
    assert streamshard.diff(source, places.out(move)).is_equal
    for run in (source, places.out(move)):
        with streamshard.open(run) as ckpt:
            assert ckpt.keys() == module.keys()
            found = {name: held.module.torch() for name, held in ckpt.items()}
            assert not list(value_differences(found, module, "module"))
            for state, tensors in truth.states.items():
                held = {name: ckpt[name].tensors[state].torch() for name in tensors}
                assert not list(value_differences(held, tensors, state))
        streamshard.export(run, tmp_path / run.name, dtype="fp32")
        exported = load_file(tmp_path / run.name / "model.safetensors")
        wide = {k: v.float() if v.is_floating_point() else v for k, v in wanted.items()}
        assert not list(value_differences(exported, wide, "exported"))


@pytest.mark.parametrize("name", [move.name for move in MOVES if move.goes_on])
def test_training_goes_on_as_if_uninterrupted(name: str, places: Places) -> None:
    move = next(move for move in MOVES if move.name == name)
    source, out = places.source(move), places.out(move)
    start = whole(Truth.load(places.truth(source)), source)
    uninterrupted = whole(Truth.load(after_path(places.truth(source))), source)
    resumed = whole(Truth.load(after_path(places.truth(out))), out)
    assert close(uninterrupted, resumed, start=start, tolerance=TOLERANCE) == []
