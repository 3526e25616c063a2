"""Checkpoints taken to other tensor and pipeline parallel degrees load in DeepSpeed bit for bit."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import zarr
from safetensors.torch import load_file

import streamshard
from tests.fabricated import edit
from tests.oracle.compare import close, differences
from tests.oracle.files import file_differences
from tests.oracle.jobs import Job, Resume, Train, after_path
from tests.oracle.models import Case, Topology
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
    """A job taken from a topology to another one."""

    name: str
    divided: Topology
    ranks: int
    target_divided: Topology
    target_ranks: int
    options: Mapping[str, Any]
    """Those that ask for the other degrees."""
    stage: int = 1
    target_stage: int | None = None
    """Where it is another one."""
    dtype: Literal["bf16", "fp32"] = "bf16"
    overrides: Mapping[str, Any] = field(default_factory=dict)
    goes_on: bool = False
    """Whether the model computes the same at both degrees."""

    @property
    def source(self) -> Case:
        return self._case(self.divided, self.stage)

    @property
    def target(self) -> Case:
        return self._case(self.target_divided, self.target_stage or self.stage)

    def _case(self, divided: Topology, stage: int) -> Case:
        name = f"{divided}-z{stage}-{self.dtype}{''.join(self.overrides)}"
        return Case(name, stage, self.dtype, self.overrides, topology=divided)

    @property
    def asked(self) -> dict[str, Any]:
        """What a conversion is asked for."""
        stage = self.target.zero_stage
        return {"world_size": self.target_ranks, "zero_stage": stage, **self.options}

    @property
    def has_like(self) -> bool:
        """Whether the target is told by a reference: a whole model needs none, but may have one."""
        return not self.is_autotp or self.options != tensor(1) or self.name == "merged"

    @property
    def is_autotp(self) -> bool:
        """Whether DeepSpeed cuts the model, and not the model itself."""
        return isinstance(self.divided, TensorParallel)


def tensor(degree: int) -> dict[str, Any]:
    return {"tensor_parallel": degree}


def pipeline(degree: int) -> dict[str, Any]:
    return {"pipeline_parallel": degree}


Tensor, Pipe = TensorParallel, partial(Pipeline, extra=True)
OfFive, Dual = partial(Pipe, stages=3, micro_batches=5), partial(Pipe, dual=True, micro_batches=5)
Fused, Told = partial(TensorParallel, fused=True), partial(Pipe, told=True)
IN_FP32: dict[str, Any] = {"dtype": "fp32", "goes_on": True}
MOVES = [
    Move("merged", Tensor(2), 2, Tensor(1), 2, tensor(1), stage=2, **IN_FP32),
    Move("split", Tensor(1), 2, Tensor(2), 4, tensor(2), stage=2),
    Move("uneven", Tensor(2), 4, Tensor(3), 3, tensor(3), **IN_FP32),
    Move("fused", Fused(2), 4, Fused(3), 3, tensor(3)),
    Move("to-stage-3", Tensor(2), 4, Tensor(3), 3, tensor(3), stage=2, target_stage=3),
    Move("from-stage-3", Tensor(2), 4, Tensor(1), 2, tensor(1), stage=3, target_stage=1),
    Move("round-robin", Tensor(2), 4, Tensor(1), 2, tensor(1), stage=2, overrides=ROUND_ROBIN),
    Move("bf16-optimizer", Tensor(2), 4, Tensor(1), 2, tensor(1), overrides=BF16_OPTIMIZER),
    Move("fewer-stages", Pipe(stages=3), 3, Pipe(stages=2), 4, pipeline(2), **IN_FP32),
    Move("more-stages", Pipe(stages=2), 4, Pipe(stages=3), 3, pipeline(3)),
    Move(
        "stages-by-scales",
        Pipe(stages=2),
        4,
        Pipe(stages=3, method="type:scale"),
        3,
        pipeline(3),
    ),
    Move("stages-of-two", Pipe(2), 4, Pipe(2, stages=1), 2, pipeline(1)),
    Move(
        "shared-norms",
        Pipeline(norms=True),
        2,
        Pipeline(stages=1, norms=True),
        2,
        pipeline(1),
    ),
    Move("two-stages-a-rank", Dual(), 2, OfFive(), 3, pipeline(3)),
    Move("to-two-stages-a-rank", OfFive(), 3, Dual(), 4, pipeline(2)),
    Move("told-merged", Told(2), 4, Told(1), 4, tensor(1), **IN_FP32),
    Move("told-both", Told(2, stages=1), 4, Told(3), 6, tensor(3) | pipeline(2), dtype="fp32"),
]
DRIFTING = [
    Move("stages-on-6", Pipe(stages=2), 6, Pipe(stages=1), 2, pipeline(1)),
    Move("autotp-on-6", Tensor(2), 6, Tensor(1), 2, tensor(1), stage=2),
]
"""Of three replicas, whose sums of gradients differ in the last bits from stage to stage:
there is no one truth of all ranks to gather."""


@dataclass(frozen=True)
class Places:
    """Where each thing of the session lies."""

    root: Path

    def source(self, move: Move) -> Path:
        return self.root / f"{move.source.name}-at{move.ranks}"

    def like(self, move: Move) -> Path | None:
        if not move.has_like:
            return None
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
    places = Places(tmp_path_factory.mktemp("degrees"))
    jobs: dict[int, dict[Path, Job]] = {}
    for move in MOVES:
        source, like = places.source(move), places.like(move)
        jobs.setdefault(move.ranks, {})[source] = Train(
            move.source, source, places.truth(source), further_steps=FURTHER_STEPS
        )
        if like is not None:
            # Before its first step, with other weights: what is right afterwards is the source's.
            first = Train(move.target, like, None, steps=0, seed=99)
            jobs.setdefault(move.target_ranks, {})[like] = first
    for ranks, of_ranks in sorted(jobs.items()):
        require_success(run_jobs(ranks, list(of_ranks.values()), places.root / "ranks"))
    for move in MOVES:
        source, out = places.source(move), places.out(move)
        streamshard.repartition(source, out, **move.asked, like=places.like(move), verify=True)
    for ranks in sorted({move.target_ranks for move in MOVES}):
        moves = [move for move in MOVES if move.target_ranks == ranks]
        resumes = [_resume(places, move) for move in moves]
        require_success(run_jobs(ranks, resumes, places.root / "ranks"))
    return places


def _resume(places: Places, move: Move) -> Resume:
    out = places.out(move)
    return Resume(move.target, out, places.truth(out), places.resaved(move), FURTHER_STEPS)


def unlike(one: Path, other: Path) -> list[str]:
    """List what differs in the files of two runs."""
    tag = (one / "latest").read_text()
    return file_differences(one / tag, other / tag)


def each(*names: str) -> pytest.MarkDecorator:
    """Ask about these moves, or about all."""
    moves = [move for move in MOVES if not names or move.name in names]
    assert len(moves) == len(names or MOVES)
    return pytest.mark.parametrize("move", moves, ids=lambda move: move.name)


@each()
def test_the_resumed_engine_holds_what_was_saved(move: Move, places: Places) -> None:
    source, out = places.source(move), places.out(move)
    saved = whole(Truth.load(places.truth(source)), source)
    resumed = whole(Truth.load(places.truth(out)), out)
    assert saved.states.keys() == {"fp32", "exp_avg", "exp_avg_sq"}
    assert differences(saved, resumed) == []


@each()
def test_the_engine_saves_the_same_again(move: Move, places: Places) -> None:
    assert unlike(places.out(move), places.resaved(move)) == []


@each("merged", "fused", "to-stage-3", "from-stage-3")
def test_lists_of_patterns_tell_what_maps_tell(move: Move, places: Places, tmp_path: Path) -> None:
    """AutoTP saves both since 0.19.8, and lists alone before."""
    source = without_maps(places.source(move), tmp_path / "source")
    told = places.like(move)
    like = None if told is None else without_maps(told, tmp_path / "like")
    wanted, out = without_maps(places.out(move), tmp_path / "wanted"), tmp_path / "out"
    streamshard.repartition(source, out, **move.asked, like=like)
    assert unlike(out, wanted) == []


@each("merged", "from-stage-3", "uneven", "fewer-stages", "told-both")
def test_a_store_of_the_other_degree_leads_to_the_same_files(
    move: Move, places: Places, tmp_path: Path
) -> None:
    """Of one part, it has whole tensors; the job's own world size need not be told."""
    store, out = tmp_path / "run.zarr", tmp_path / "out"
    source, like = places.source(move), places.like(move)
    streamshard.convert(source, store, **move.options, like=like, verify=True)
    if move.options == {"tensor_parallel": 1}:
        truth = whole(Truth.load(places.truth(source)), source)
        for state, tensors in truth.states.items():
            arrays = {name: zarr.open_array(store / "state" / state / name) for name in tensors}
            found = {name: torch.tensor(held[...]) for name, held in arrays.items()}
            assert not list(value_differences(found, tensors, state))
    streamshard.repartition(
        store, out, world_size=move.target_ranks, zero_stage=move.target.zero_stage
    )
    assert unlike(out, places.out(move)) == []


@each("shared-norms", "stages-of-two")
def test_one_stage_needs_no_reference(move: Move, places: Places, tmp_path: Path) -> None:
    streamshard.repartition(places.source(move), tmp_path / "out", **move.asked, verify=True)
    assert unlike(tmp_path / "out", places.out(move)) == []


def without_maps(run: Path, to: Path) -> Path:
    """Copy a checkpoint; of how its parameters are cut, only the lists are left."""
    shutil.copytree(run, to)
    for path in to.glob("*/*model_states.pt"):
        edit(path, lambda held: held.get("universal_checkpoint_info", {}).pop("affine_map", None))
    return to


@each("fewer-stages", "more-stages", "told-both")
def test_a_pipeline_s_layers_are_put_together(move: Move, places: Places, tmp_path: Path) -> None:
    """What an engine saved, and what was made of it for other stages, are the same model."""
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


@each(*(move.name for move in MOVES if move.goes_on))
def test_training_goes_on_as_if_uninterrupted(move: Move, places: Places) -> None:
    source, out = places.source(move), places.out(move)
    start = whole(Truth.load(places.truth(source)), source)
    uninterrupted = whole(Truth.load(after_path(places.truth(source))), source)
    resumed = whole(Truth.load(after_path(places.truth(out))), out)
    assert close(uninterrupted, resumed, start=start, tolerance=TOLERANCE) == []


@pytest.fixture(scope="module")
def drifted(tmp_path_factory: pytest.TempPathFactory) -> Places:
    """Sources whose copies drifted apart, taken to one copy, resumed and saved again."""
    places = Places(tmp_path_factory.mktemp("drifted"))
    jobs = [Train(move.source, places.source(move), None) for move in DRIFTING]
    require_success(run_jobs(6, jobs, places.root / "ranks"))
    for move in DRIFTING:
        asked = {"world_size": move.target_ranks, **move.options}
        report = streamshard.repartition(
            places.source(move), places.out(move), **asked, verify=True
        )
        assert any("differ by rounding" in note for note in report.notes)
    require_success(run_jobs(2, [_resume(places, m) for m in DRIFTING], places.root / "ranks"))
    return places


@pytest.mark.parametrize("move", DRIFTING, ids=lambda move: move.name)
def test_copies_that_drifted_by_rounding_are_the_first(
    move: Move, drifted: Places, tmp_path: Path
) -> None:
    source, out = drifted.source(move), drifted.out(move)
    assert unlike(out, drifted.resaved(move)) == []
    resumed = Truth.load(drifted.truth(out))
    tag = source / (source / "latest").read_text()
    if move.is_autotp:
        first = torch.load(tag / "mp_rank_00_model_states.pt", weights_only=False)["module"]
        copies = {k: v for k, v in resumed.weights.items() if v.shape == first[k].shape}
        assert len(copies) > 5
        assert not list(value_differences({k: first[k] for k in copies}, copies, "module"))
        return
    # DeepSpeed's own conversion takes what these list from the first stage.
    tied = {"pipeline_replicated_parameter_patterns": [r"tied_modules\.embed\.weight"]}
    for path in tag.glob("mp_rank_*_model_states.pt"):
        edit(path, lambda held: held.update(universal_checkpoint_info=tied))
    wanted = universal_of(source, tmp_path / "universal")
    for state, tensors in resumed.states.items():
        for name, found in tensors.items():
            held = torch.load(wanted / "zero" / name / f"{state}.pt", weights_only=False)["param"]
            assert not list(value_differences(held.detach(), found, name))
