"""All layers of a pipeline on one stage: what it has is certain, or refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import streamshard
from streamshard.errors import UnsupportedError, UsageError
from tests.comparing import compare
from tests.fabricated import edit, load, write
from tests.fabricated_pipes import BLOCK, SHARED, PipeJob, write_pipe
from tests.job import EXPERTS, TAG, Job

TWO = PipeJob(layers=("embed", None, BLOCK, BLOCK, BLOCK, "embed", None), world_size=2)
UNSHARED = replace(TWO, layers=(None, BLOCK, BLOCK, BLOCK, None, BLOCK, BLOCK), shared=())
KEYS = replace(
    TWO,
    # Layers use `a` first, and those of the second stage `b`.
    layers=("a", "b", BLOCK, BLOCK, BLOCK, "b", BLOCK, "a"),
    shared=(("b", SHARED), ("a", SHARED)),
)


def on_one(run: Path, job: PipeJob, **options: Any) -> Path:  # noqa: ANN401
    out = run.parent / "out"
    world_size = job.world_size * job.tensor
    streamshard.repartition(run, out, world_size=world_size, pipeline_parallel=1, **options)
    return out / TAG


@pytest.mark.parametrize(
    ("job", "tensor", "files_of_shared"),
    [
        (TWO, 2, False),
        (replace(UNSHARED, starts=(0, 2, 4, 6)), 1, True),
        (KEYS, 2, True),
        (KEYS, 1, False),
    ],
)
def test_all_layers_come_to_one_stage(
    tmp_path: Path, job: PipeJob, *, tensor: int, files_of_shared: bool
) -> None:
    job = replace(job, tensor=tensor, files_of_shared=files_of_shared)
    other = replace(job, starts=(0,), world_size=2)
    run, wanted = write_pipe(job, tmp_path / "run"), write_pipe(other, tmp_path / "wanted")
    compare(on_one(run, other, verify=True), wanted / TAG)


def test_an_order_that_is_not_certain_is_refused_and_a_reference_tells_it(tmp_path: Path) -> None:
    job = replace(UNSHARED, layers=(BLOCK, BLOCK), starts=(0, 1))
    run = write_pipe(job, tmp_path / "run")
    message = "no stage trains several layers, so in which order one would have them is not known"
    with pytest.raises(UnsupportedError, match=f"{run}.*{message}.*start that job.*like=RUN"):
        on_one(run, job)
    like = write_pipe(replace(job, starts=(0,)), tmp_path / "like")
    compare(on_one(run, job, like=like), like / TAG)


class Unordered(PipeJob):
    """Its optimizers have the last layer first."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "groups", tuple(group[::-1] for group in self.groups))


def with_buffers(*names: str) -> Callable[[Path], None]:
    """Name more buffers as the first stage's."""
    model = "mp_rank_00_model_states.pt"
    return lambda run: edit(run / TAG / model, lambda held: held["buffer_names"].extend(names))


def tied_by_hand(run: Path) -> None:
    tied = {"2.other": "0.up"}
    edit(run / TAG / "mp_rank_00_model_states.pt", lambda held: held.update(shared_params=tied))


def unchanged(run: Path) -> None: ...


_ENDLESS = with_buffers(f"{'9' * 5000}.running")
_UNORDERED = Unordered(layers=TWO.layers, world_size=2)
ODD: list[tuple[PipeJob, Callable[[Path], object], str]] = [
    (TWO, with_buffers("3.running"), "not have one layer .* as under DualPipeV"),
    (TWO, with_buffers("loss_fn.weight"), r"'loss_fn\.weight' is of no layer, so"),
    (TWO, _ENDLESS, "'99999.*9' is of no layer"),
    (TWO, tied_by_hand, r"'2\.other' of one layer is tied to '0\.up' of another"),
    (_UNORDERED, unchanged, "does not have its parameters layer by layer"),
]


@pytest.mark.parametrize(("job", "damage", "message"), ODD)
def test_stages_that_are_not_as_deepspeed_builds_them_are_refused(
    tmp_path: Path, job: PipeJob, damage: Callable[[Path], object], message: str
) -> None:
    run = write_pipe(job, tmp_path / "run")
    damage(run)
    with pytest.raises(UnsupportedError, match=message):
        on_one(run, TWO)


def test_ties_go_with_their_layer(tmp_path: Path) -> None:
    """DeepSpeed lists those of the first stage."""
    run, tied = write_pipe(TWO, tmp_path / "run"), {"2.other": "2.up"}
    path = run / TAG / "mp_rank_00_model_states.pt"
    edit(path, lambda held: held.update(shared_params=tied))
    (found,) = (load(path)["shared_params"] for path in sorted(on_one(run, TWO).glob("mp_rank_*")))
    assert found == tied


def test_other_stages_are_those_of_a_save(tmp_path: Path) -> None:
    run, out = write_pipe(TWO, tmp_path / "run"), tmp_path / "out"
    several: list[dict[str, Any]] = [{"pipeline_parallel": 3}, {"tensor_parallel": 2}]
    for degrees in several:
        with pytest.raises(UsageError, match=r"nothing tells how a job .* say here like=RUN"):
            streamshard.repartition(run, out, world_size=6, **degrees)


def test_experts_and_stages_do_not_change_together(tmp_path: Path) -> None:
    run, out = write_pipe(TWO, tmp_path / "run"), tmp_path / "out"
    options: dict[str, Any] = {"world_size": 3, "pipeline_parallel": 1}
    with pytest.raises(UsageError, match="the model has no experts"):
        streamshard.repartition(run, out, expert_parallel=3, **options)
    streamshard.repartition(run, out, expert_parallel=1, **options)  # its own: it has no experts
    job = Job(world_size=2, tied={}, experts=EXPERTS, expert_parallel=2)
    experts = write(job, tmp_path / "experts")
    asked = "expert_parallel=1 with tensor_parallel=2 pipeline_parallel=1"
    with pytest.raises(UnsupportedError, match=f"{asked}: experts are spread again only at the"):
        streamshard.repartition(
            experts, tmp_path / "none", world_size=4, tensor_parallel=2, expert_parallel=1
        )


def test_one_stage_on_the_road_over_a_store(tmp_path: Path) -> None:
    job = replace(TWO, tensor=2)
    other = replace(job, starts=(0,))
    run, wanted = write_pipe(job, tmp_path / "run"), write_pipe(other, tmp_path / "wanted")
    streamshard.convert(run, tmp_path / "run.zarr")
    compare(on_one(tmp_path / "run.zarr", other, verify=True), wanted / TAG)
    streamshard.convert(run, tmp_path / "other.zarr", pipeline_parallel=1, verify=True)
    streamshard.repartition(tmp_path / "other.zarr", tmp_path / "again", world_size=4)
    compare(tmp_path / "again" / TAG, wanted / TAG)
