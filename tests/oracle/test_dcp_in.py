"""From FSDP to ZeRO: what FSDP's ranks saved, real DeepSpeed engines go on with."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import parallel

import streamshard
from tests.fabricated import load
from tests.oracle import fsdp_training
from tests.oracle.compare import relative_distance
from tests.oracle.fsdp_training import Style, TrainSharded, states_of
from tests.oracle.jobs import Resume, Train, after_path
from tests.oracle.models import Case, FullyTrainedModel
from tests.oracle.ranks import require_success, run_jobs
from tests.oracle.truth import Truth
from tests.oracle.values import value_differences

TOLERANCE = 1e-4
FURTHER_STEPS = 5
PLAIN: Mapping[str, Any] = {"gradient_clipping": 0.0}
CASES = {
    stage: Case(f"like{stage}", zero_stage=stage, dtype="fp32", ds_overrides=PLAIN)
    for stage in (1, 2, 3)
}
HALF = Case("half", zero_stage=2, dtype="bf16", ds_overrides=PLAIN)
TORCH_ADAM = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
CONFIGURED = [
    Case(
        f"configured{stage}", zero_stage=stage, dtype="fp32" if stage == 2 else "bf16",
        model=FullyTrainedModel,
        optimizer=None, ds_overrides={**PLAIN, "optimizer": TORCH_ADAM}, warms_up=False,
    )
    for stage in (1, 2, 3)
]  # fmt: skip
"""Jobs whose config tells all that a distributed checkpoint of such a model lacks."""


@dataclass(frozen=True)
class Move:
    """A checkpoint of FSDP that DeepSpeed resumes from."""

    name: str
    ranks: int
    target: int
    stage: int = 2
    style: Style = "torch"
    tensor_parallel: int = 1

    @property
    def job(self) -> Case:
        return CASES[self.stage]


MOVES = [
    Move("two to three", 2, 3),
    Move("three to two", 3, 2, stage=3),
    Move("titan", 2, 3, style="titan", stage=3),
    Move("accelerate", 3, 2, style="accelerate", stage=1),
    Move("fsdp1", 2, 3, style="fsdp1"),
    Move("mesh at stage 3", 4, 2, tensor_parallel=2, stage=3, style="titan"),
]


@dataclass(frozen=True)
class Moved:
    """Where everything lies."""

    root: Path

    def saved(self, move: Move) -> Path:
        return self.root / "saved" / move.name.replace(" ", "-")

    def truth(self, move: Move) -> dict[str, Any]:
        held: dict[str, Any] = torch.load(self.truth_path(move), weights_only=False)
        return held

    def truth_path(self, move: Move) -> Path:
        return self.root / "truths" / f"{move.name}.pt"

    def like(self, case: Case) -> Path:
        return self.root / case.name

    def out(self, move: Move) -> Path:
        return self.root / "out" / move.name

    def resumed_path(self, move: Move) -> Path:
        return self.root / "resumed" / f"{move.name}.pt"


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> Moved:
    """Every checkpoint saved, repartitioned, and resumed from."""
    made = Moved(tmp_path_factory.mktemp("dcp"))
    (made.root / "resumed").mkdir()
    cases = (*CASES.values(), HALF, *CONFIGURED)
    likes = [Train(case, made.like(case), None, steps=0) for case in cases]
    trained = TrainSharded(
        made.root / "saved" / "trained", made.root / "truths" / "trained.pt", further_steps=0,
        model=FullyTrainedModel,
    )  # fmt: skip
    for ranks in (2, 3, 4):
        jobs: list[object] = [
            TrainSharded(
                made.saved(move),
                made.truth_path(move),
                move.style,
                move.tensor_parallel,
                further_steps=FURTHER_STEPS,
            )
            for move in MOVES
            if move.ranks == ranks
        ]
        jobs += [*likes, trained] if ranks == 2 else []
        require_success(run_jobs(ranks, jobs, made.root / "ranks", fsdp_training.run))
    for move in MOVES:
        streamshard.repartition(
            made.saved(move),
            made.out(move),
            world_size=move.target,
            like=made.like(move.job),
            verify=True,
        )
    for case in CONFIGURED:
        config = made.root / f"{case.name}.json"
        config.write_text(json.dumps(case.ds_config()))
        source, outs = made.root / "saved" / "trained", made.root / "out" / case.name
        streamshard.repartition(
            source, outs / "config", world_size=3, ds_config_file=config, verify=True
        )
        streamshard.repartition(source, outs / "like", world_size=3, like=made.like(case))
    for ranks in (2, 3):
        resumes = [
            Resume(
                move.job,
                made.out(move),
                made.resumed_path(move),
                further_steps=FURTHER_STEPS,
            )
            for move in MOVES
            if move.target == ranks
        ]
        resumes += [
            Resume(
                case,
                made.root / "out" / case.name / by,
                made.root / "resumed" / f"{case.name}.{by}.pt",
                further_steps=FURTHER_STEPS,
            )
            for case in CONFIGURED
            for by in ("config", "like")
            if ranks == 3
        ]
        require_success(run_jobs(ranks, resumes, made.root / "ranks"))
    return made


@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.name)
def test_every_tensor_is_loaded_to_the_bit(moved: Moved, move: Move) -> None:
    truth, resumed = moved.truth(move), Truth.load(moved.resumed_path(move))
    seen: dict[str, set[str]] = {}
    for state, name, tensor in states_of(truth):
        assert torch.equal(resumed.states[state][name], tensor), (state, name)
        seen.setdefault(state, set()).add(name)
    assert {state: set(held) for state, held in resumed.states.items()} == seen
    for held in (resumed.frozen, resumed.buffers, resumed.weights):
        for name, tensor in held.items():
            assert torch.equal(tensor, truth["weights"][name]), name


@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.name)
def test_steps_and_hyper_parameters_are_loaded(moved: Moved, move: Move) -> None:
    truth, resumed = moved.truth(move), Truth.load(moved.resumed_path(move))
    saved = truth["optimizer"]
    for group in saved["param_groups"]:
        # Tied weights have several names; FSDP lists one.
        mine = next(g for g in resumed.groups if set(g["params"]) == set(group["params"]))
        for key in ("lr", "betas", "eps", "weight_decay", "role", "amsgrad"):
            assert mine["hyper_parameters"][key] == group[key], key
        steps = {float(saved["state"][name]["step"]) for name in group["params"]}
        assert steps == {3.0}
        assert float(mine["scalars"]["step"]) == 3.0


@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.name)
def test_training_goes_on_as_it_would_have(moved: Moved, move: Move) -> None:
    start = {(state, name): tensor for state, name, tensor in states_of(moved.truth(move))}
    path = after_path(moved.truth_path(move))
    wanted = torch.load(path, weights_only=False)
    resumed = Truth.load(after_path(moved.resumed_path(move)))
    for state, name, tensor in states_of(wanted):
        off = relative_distance(tensor, resumed.states[state][name], start[state, name])
        assert off <= TOLERANCE, (state, name, off)


@pytest.mark.parametrize("case", CONFIGURED, ids=lambda case: case.name)
def test_a_config_does_what_a_reference_does(moved: Moved, case: Case) -> None:
    by_config, by_like = (
        moved.root / "resumed" / f"{case.name}.{by}.pt" for by in ("config", "like")
    )
    loaded = Truth.load(by_config)
    truth = torch.load(moved.root / "truths" / "trained.pt", weights_only=False)
    seen = {(state, name) for state, held in loaded.states.items() for name in held}
    assert seen == {(state, name) for state, name, _ in states_of(truth)}
    for state, name, tensor in states_of(truth):
        assert torch.equal(loaded.states[state][name], tensor), (state, name)
    for one, other in ((by_config, by_like), (after_path(by_config), after_path(by_like))):
        found, wanted = vars(Truth.load(one)), vars(Truth.load(other))
        # The reference was saved with client state.
        for held in (found, wanted):
            held.pop("client_state")
        assert list(value_differences(wanted, found, "truth")) == []


def test_weights_of_a_16_bit_job_are_casts(moved: Moved, tmp_path: Path) -> None:
    move = MOVES[0]
    out = tmp_path / "out"
    streamshard.repartition(moved.saved(move), out, world_size=2, like=moved.like(HALF))
    require_success(run_jobs(2, [Resume(HALF, out, tmp_path / "truth.pt")], moved.root / "ranks"))
    truth, resumed = moved.truth(move), Truth.load(tmp_path / "truth.pt")
    for name, tensor in resumed.weights.items():
        assert torch.equal(tensor, truth["weights"][name].bfloat16()), name
    for state, name, tensor in states_of(truth):
        assert torch.equal(resumed.states[state][name], tensor), (state, name)


MESH_CONFIG = {
    "train_batch_size": 6,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1},
    "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
}


@dataclass(frozen=True)
class TrainMesh:
    """Train a step on a mesh of two times two ranks, and save as torch does."""

    save_dir: Path
    is_hybrid: bool
    """Whether the second dimension of the mesh shards and the first has copies (HSDP). Else the
    second one cuts linear layers and leaves norms whole (TP)."""


def model() -> nn.Sequential:
    """Make a model all of whose tensors are trained, the large ones not first."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8), nn.Linear(8, 4)
    )


def train_mesh(job: TrainMesh) -> None:
    trained: Any = model()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("first", "second"))
    if not job.is_hybrid:
        plan: dict[str, Any] = {"1": parallel.ColwiseParallel(), "2": parallel.RowwiseParallel()}
        trained = parallel.parallelize_module(trained, mesh["second"], plan)
    fsdp.fully_shard(trained, mesh=mesh if job.is_hybrid else mesh["first"])
    params: list[torch.nn.Parameter] = list(trained.parameters())
    groups: list[dict[str, Any]] = [
        {"params": [param for param in params if param.ndim > 1]},
        {"params": [param for param in params if param.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups)
    torch.manual_seed(distributed.get_rank() // (1 if job.is_hybrid else 2))
    trained(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    weights, states = get_state_dict(trained, optimizer)
    save_distributed({"model": weights, "optimizer": states}, checkpoint_id=job.save_dir)
    distributed.barrier()


@pytest.fixture(scope="module")
def meshes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save on both kinds of mesh."""
    root = tmp_path_factory.mktemp("order")
    saves = [TrainMesh(root / "hybrid", True), TrainMesh(root / "tensors", False)]
    require_success(run_jobs(4, saves, root / "ranks", train_mesh))
    return root


@pytest.mark.parametrize("kind", ["hybrid", "tensors"])
def test_copies_on_several_ranks_keep_the_order_of_parameters(
    kind: str, meshes: Path, tmp_path: Path
) -> None:
    """Of copies torch saves one, on the rank that has least to save: its index lists the keys in
    another order than the model has them."""
    config = tmp_path / "ds.json"
    config.write_text(json.dumps(MESH_CONFIG))
    out = tmp_path / "out"
    streamshard.repartition(meshes / kind, out, world_size=3, ds_config_file=config)
    assert streamshard.verify(out, against=meshes / kind).is_good
    held = load(out / kind / "mp_rank_00_model_states.pt")
    wanted = [name for name, _ in model().named_parameters()]
    assert list(held["module"]) == wanted
    matrices = [name for name, param in model().named_parameters() if param.ndim > 1]
    rest = [name for name in wanted if name not in matrices]
    assert [list(unit) for unit in held["param_shapes"]] == [matrices, rest]
