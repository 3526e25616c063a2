"""Stages of a pipeline that begin at listed layers: what they have is certain, or refused."""

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import streamshard
from streamshard.cli.main import main
from streamshard.errors import DisagreementError, StreamshardError, UnsupportedError, UsageError
from tests.comparing import compare
from tests.fabricated import edit, load, write
from tests.fabricated_parts import TensorJob
from tests.fabricated_pipes import BLOCK, CUTS, SHARED, PipeJob, layer_file, write_pipe
from tests.job import EXPERTS, TAG, Job

TWO = PipeJob(layers=("embed", None, BLOCK, BLOCK, BLOCK, "embed", None), world_size=3)
UNSHARED = replace(TWO, layers=(None, BLOCK, BLOCK, BLOCK, None, BLOCK, BLOCK), shared=())
KEYS = replace(
    TWO,
    # Layers use `a` first, and those of the second stage `b`.
    layers=("a", "b", BLOCK, BLOCK, BLOCK, "b", BLOCK, "a"),
    shared=(("b", SHARED), ("a", SHARED)),
)


def moved(run: Path, job: PipeJob, starts: tuple[int, ...], **options: Any) -> Path:  # noqa: ANN401
    out = run.parent / "out"
    world_size = job.world_size * job.tensor * len(starts)
    streamshard.repartition(run, out, world_size=world_size, stages=starts, **options)
    return out / TAG


@pytest.mark.parametrize(
    ("job", "starts"),
    [
        (TWO, (0,)),
        (TWO, (0, 4)),
        (TWO, (0, 3, 4)),
        (TWO, (0, 2, 3, 4)),
        (UNSHARED, (0,)),
        (UNSHARED, (0, 2)),
        (UNSHARED, (0, 2, 4, 6)),
        (replace(UNSHARED, starts=(0, 2, 4, 6)), (0, 5)),
        (KEYS, (0,)),
        (replace(KEYS, layers=KEYS.layers[:7]), (0, 4)),
    ],
)
@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("files_of_shared", [True, False])
def test_stages_begin_where_the_list_says(
    tmp_path: Path, job: PipeJob, starts: tuple[int, ...], *, tensor: int, files_of_shared: bool
) -> None:
    job = replace(job, tensor=tensor, files_of_shared=files_of_shared)
    other = replace(job, starts=starts, world_size=2)
    run, wanted = write_pipe(job, tmp_path / "run"), write_pipe(other, tmp_path / "wanted")
    compare(moved(run, other, starts, pipeline_parallel=len(starts), verify=True), wanted / TAG)


ASCENDING = "give the first layer of each stage, ascending from 0"
USAGE = [
    (TWO, (), ASCENDING),
    (TWO, (1, 3), ASCENDING),
    (TWO, (0, 4, 4), ASCENDING),
    (TWO, (0, 3), "there its stages begin already; leave it out"),
    (TWO, (0, 6), "the last layer that is known is 5"),
    (UNSHARED, (0, 1), "stage 0, from layer 0 on, would have no parameters to train; list"),
    (
        replace(UNSHARED, layers=(*[BLOCK] * 4, (("bias", (3,)),))),
        (0, 2, 4),
        "stage 2, from layer 4 on, would have no parameters of",
    ),
]


@pytest.mark.parametrize(("job", "starts", "message"), USAGE)
def test_lists_that_make_no_sense_are_refused(
    tmp_path: Path, job: PipeJob, starts: tuple[int, ...], message: str
) -> None:
    run = write_pipe(job, tmp_path / "run")
    with pytest.raises(UsageError, match=rf"stages={re.escape(str(starts))}: {message}"):
        moved(run, job, starts)


HIDDEN = replace(TWO, layers=("embed", None, BLOCK, BLOCK, None, BLOCK, "embed"))
"""Has a layer without a file that may use the shared module."""


@pytest.mark.parametrize(
    ("job", "starts", "message"),
    [
        (
            HIDDEN,
            (0, 3, 5),
            r"not known which of layers 4, 6, 7 use 'tied_modules\.embed', which se",
        ),
        (KEYS, (0, 4), r"from layer 4 on has tied_modules\.a\., tied_modules\.b\., which several"),
        (
            replace(UNSHARED, layers=(BLOCK, BLOCK), starts=(0, 1)),
            (0,),
            "no stage trains several layers, so in which order one would have them is not known",
        ),
    ],
)
def test_what_is_not_certain_is_refused_and_a_reference_tells_it(
    tmp_path: Path, job: PipeJob, starts: tuple[int, ...], message: str
) -> None:
    run, stages = write_pipe(job, tmp_path / "run"), len(starts)
    advice = f"In place of stages=, say pipeline_parallel={stages}, and start that job"
    with pytest.raises(UnsupportedError, match=f"{run}.*{message}.*{advice}"):
        moved(run, job, starts)
    like, out = write_pipe(replace(job, starts=starts), tmp_path / "like"), tmp_path / "out"
    ranks = job.world_size * stages
    streamshard.repartition(run, out, world_size=ranks, pipeline_parallel=stages, like=like)
    compare(out / TAG, like / TAG)


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


def shared_by_no_layer(run: Path) -> None:
    with_buffers("0.running", "1.running")(run)
    shutil.copy(layer_file(run, 2), layer_file(run, 1))


def as_layer(number: int) -> Callable[[Path], object]:
    return lambda run: shutil.copy(layer_file(run, 0), layer_file(run, number))


def unchanged(run: Path) -> None: ...


_ENDLESS = with_buffers(f"{'9' * 5000}.running")
_UNORDERED = Unordered(layers=TWO.layers, world_size=2)
ODD: list[tuple[PipeJob, Callable[[Path], object], type[StreamshardError], str]] = [
    (TWO, with_buffers("3.running"), UnsupportedError, "not have one layer .* as under DualPipeV"),
    (
        TWO,
        with_buffers("loss_fn.weight"),
        UnsupportedError,
        r"'loss_fn\.weight' is of no layer, so",
    ),
    (TWO, _ENDLESS, UnsupportedError, "'99999.*9' is of no layer"),
    (TWO, tied_by_hand, UnsupportedError, r"'2\.other' of one layer is tied to '0\.up' of another"),
    (_UNORDERED, unchanged, UnsupportedError, "does not have its parameters layer by layer"),
    (TWO, shared_by_no_layer, DisagreementError, "stage 0 has a module .* and no layer that may"),
    (TWO, as_layer(10**12), UnsupportedError, "has a layer 1000000000000; 1000000 are the most"),
]


@pytest.mark.parametrize(("job", "damage", "kind", "message"), ODD)
def test_stages_that_are_not_as_deepspeed_builds_them_are_refused(
    tmp_path: Path,
    job: PipeJob,
    damage: Callable[[Path], object],
    kind: type[StreamshardError],
    message: str,
) -> None:
    run = write_pipe(job, tmp_path / "run")
    damage(run)
    with pytest.raises(kind, match=message):
        moved(run, TWO, (0,))


def test_layers_of_which_it_is_not_known_what_they_share_may_be_on_one_stage(
    tmp_path: Path,
) -> None:
    run, out = write_pipe(HIDDEN, tmp_path / "run"), tmp_path / "out"
    with pytest.raises(UnsupportedError, match=r"with all of these layers on one stage it would"):
        streamshard.repartition(run, out, world_size=3, stages=[0, 3, 5])
    other = replace(HIDDEN, starts=(0, 2, 4))
    compare(moved(run, other, other.starts), write_pipe(other, tmp_path / "wanted") / TAG)


@pytest.mark.parametrize(("starts", "keeps"), [((0, 4), True), ((0, 2), False)])
def test_ties_go_with_their_layer(tmp_path: Path, starts: tuple[int, ...], *, keeps: bool) -> None:
    """DeepSpeed lists those of the first stage."""
    run, tied = write_pipe(TWO, tmp_path / "run"), {"2.other": "2.up"}
    path = run / TAG / "mp_rank_00_model_states.pt"
    edit(path, lambda held: held.update(shared_params=tied))
    out = moved(run, TWO, starts)
    found = [load(path)["shared_params"] for path in sorted(out.glob("mp_rank_*"))]
    assert found == [tied if keeps else {}, {}]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline_parallel": 3}, r"stages=\(0, 4\): are 2 stages, and pipeline_parallel= says 3"),
        (
            {"tensor_parallel": 2},
            r"stages=\(0, 4\): does not tell how tensor-parallel ranks cut tensors in a job",
        ),
        ({"like": True}, r"stages=\(0, 4\): the checkpoint given with like= tells that too"),
        ({"cut_rules_file": True}, "cut_rules_file=: no tensor is cut otherwise"),
    ],
)
def test_options_that_do_not_go_with_stages(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    run, like = (write_pipe(TWO, tmp_path / name) for name in ("run", "like"))
    (like / "rules").write_text(".*: replicated\n")
    places = {"like": like, "cut_rules_file": like / "rules"}
    given = {name: places.get(name, value) for name, value in options.items()}
    with pytest.raises(UsageError, match=message):
        moved(run, TWO, (0, 4), **given)


@pytest.mark.parametrize("job", [Job(world_size=2), TensorJob(parts=2, world_size=2).told()])
def test_a_job_without_a_pipeline_has_no_stages(tmp_path: Path, job: Job) -> None:
    run = write(job, tmp_path / "run")
    with pytest.raises(UsageError, match=r"stages=\[0, 4\]: but it is not of a pipeline"):
        streamshard.repartition(run, tmp_path / "out", world_size=4, stages=[0, 4])


def test_one_stage_needs_no_list(tmp_path: Path) -> None:
    run, out = write_pipe(TWO, tmp_path / "run"), tmp_path / "out"
    streamshard.repartition(run, out, world_size=2, pipeline_parallel=1)
    wanted = write_pipe(replace(TWO, starts=(0,), world_size=2), tmp_path / "wanted")
    compare(out / TAG, wanted / TAG)


def test_without_a_list_the_message_names_it(tmp_path: Path) -> None:
    run, out = write_pipe(TWO, tmp_path / "run"), tmp_path / "out"
    with pytest.raises(
        UsageError, match=r"say here like=RUN as well; or list with stages= the first layer"
    ):
        streamshard.repartition(run, out, world_size=3, pipeline_parallel=3)
    with pytest.raises(UsageError) as caught:
        streamshard.repartition(run, out, world_size=3, tensor_parallel=2)
    assert "stages=" not in str(caught.value)


def test_experts_and_stages_do_not_change_together(tmp_path: Path) -> None:
    run, out = write_pipe(TWO, tmp_path / "run"), tmp_path / "out"
    options: dict[str, Any] = {"world_size": 3, "stages": [0, 3, 4]}
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


def test_the_command_line_and_what_is_there_already(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_pipe(TWO, tmp_path / "run")
    wanted = write_pipe(replace(TWO, starts=(0, 3, 4)), tmp_path / "wanted")
    monkeypatch.chdir(tmp_path)
    command = ["repartition", "run", "out", "--world-size", "9", "--stages"]
    assert main([*command, "0,3,4"]) == 0
    compare(tmp_path / "out" / TAG, wanted / TAG)
    capsys.readouterr()
    assert main([*command, "0,3,4", "--if-needed"]) == 0
    assert "already" in capsys.readouterr().out
    assert main([*command, "0,2,4", "--if-needed"]) == 4
    own = ["repartition", "run", "own", "--world-size", "6", "--stages", "0,3"]
    assert main([*own, "--if-needed", "--print-path"]) == 0
    assert capsys.readouterr().out.strip() == "run"
    assert main(own) == 2
    with pytest.raises(SystemExit, match="2"):
        main([*command, "0;3"])
    assert "'0;3' is not a list of numbers, such as 0,4,7" in capsys.readouterr().err


@pytest.mark.parametrize("tensor", [1, 2])
def test_stages_change_on_the_road_over_a_store(tmp_path: Path, tensor: int) -> None:
    job = replace(TWO, tensor=tensor)
    other = replace(job, starts=(0, 3, 4))
    run, wanted = write_pipe(job, tmp_path / "run"), write_pipe(other, tmp_path / "wanted")
    streamshard.convert(run, tmp_path / "run.zarr")
    compare(moved(tmp_path / "run.zarr", other, (0, 3, 4), verify=True), wanted / TAG)
    streamshard.convert(run, tmp_path / "other.zarr", stages=[0, 3, 4], verify=True)
    streamshard.repartition(tmp_path / "other.zarr", tmp_path / "again", world_size=9 * tensor)
    compare(tmp_path / "again" / TAG, wanted / TAG)


@pytest.mark.parametrize("tensor", [1, 3])
def test_stages_of_a_store_of_another_tensor_parallel_degree(tmp_path: Path, tensor: int) -> None:
    """It has the tensors of the layers, and no files of them."""
    job = replace(TWO, tensor=2, cuts=CUTS)
    like = replace(TWO, tensor=tensor, cuts=CUTS, has_axis=True)
    wanted = write_pipe(replace(like, starts=(0, 3, 4)), tmp_path / "wanted")
    streamshard.convert(
        write_pipe(job, tmp_path / "run"),
        tmp_path / "run.zarr",
        tensor_parallel=tensor,
        like=write_pipe(like, tmp_path / "like"),
    )
    compare(moved(tmp_path / "run.zarr", like, (0, 3, 4), verify=True), wanted / TAG)
