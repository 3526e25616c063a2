"""Experts are spread over another count of ranks: what is written, and what is refused."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import streamshard
from streamshard.cli.main import main
from streamshard.errors import DisagreementError, StreamshardError, UnsupportedError, UsageError
from tests.comparing import compare
from tests.fabricated import (
    DUMPS,
    edit,
    edit_all,
    edit_optimizers,
    optimizer_file,
    wrapped,
    write,
    write_dumps,
)
from tests.fabricated_parts import TensorJob
from tests.fabricated_pipes import PipeJob, write_pipe
from tests.job import EXPERT, TAG, Job, Shapes, local_experts

COUNT = 4
"""Experts of the layer."""
VARIANTS = {
    "stage-1": (replace(EXPERT, stage=1), 1),
    "data-first": (replace(EXPERT, data_before_experts=True), 2),
    "tensor-round-robin": (replace(EXPERT, parts=2, round_robin=True, alignment=True), 2),
    "tensor-data-first": (replace(EXPERT, parts=2, data_before_experts=True), 4),
}
"""Jobs, and over how many ranks their experts are spread."""
SHARED = replace(EXPERT, parts=2)
TWO = TensorJob(parts=2, world_size=4).told()
PATTERN = r"^moe\.deepspeed_moe\.experts\.deepspeed_experts\.0\.weight$"
MODEL = "mp_rank_00_model_states.pt"


def spread(job: Job, degree: int, world_size: int) -> Job:
    """Return the same job with its experts over another count of ranks."""
    experts = local_experts(COUNT // degree)
    return replace(job, world_size=world_size, experts=experts, expert_parallel=degree)


@pytest.mark.parametrize(("job", "degree"), VARIANTS.values(), ids=VARIANTS)
def test_the_files_are_those_of_the_job_with_the_other_degree(
    tmp_path: Path, job: Job, degree: int
) -> None:
    """Down and up, on more and fewer ranks, from either road; so there and back changes nothing."""
    run, store = write(spread(job, degree, 4), tmp_path / "run"), tmp_path / "run.zarr"
    streamshard.convert(run, store, chunk_size=100)
    targets = {1: [(2, 6), (4, 4)], 2: [(1, 3), (4, 8)], 4: [(1, 4), (2, 2)]}
    for source, (target, ranks) in zip((run, store), targets[degree], strict=True):
        wanted = write(spread(job, target, ranks), tmp_path / f"wanted-{target}")
        out = tmp_path / f"out-{target}"
        streamshard.repartition(source, out, world_size=ranks * job.parts, expert_parallel=target)
        compare(out / TAG, wanted / TAG)


def test_another_degree_is_no_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = VARIANTS["tensor-round-robin"]
    source, out = str(write(run, tmp_path / "run")), str(tmp_path / "out")
    line = ["repartition", source, out, "--world-size", "8", "--expert-parallel", "4"]
    assert main(line) == 0
    for one, other in ((source, out), (out, source)):
        assert main(["diff", one, other]) == 0
        assert "Equal to the bit" in capsys.readouterr().out
    assert main(["verify", out, "--against", source]) == 0


def _in_group(number: int, **changed: object) -> Callable[[dict[str, Any]], object]:
    return lambda content: _state(content)["param_groups"][number].update(changed)


EXPERT_0 = "optimizer/group of moe.deepspeed_moe.experts.deepspeed_experts.0.weight"
EXPERT_2 = EXPERT_0.replace(".0.", ".2.")
DIFFERING: dict[str, tuple[Sequence[int], Callable[[dict[str, Any]], object], *tuple[str, ...]]] = {
    "step of a rank": ([1, 3], lambda c: _state(c)["state"][2]["step"].add_(1), f"{EXPERT_2}.step"),
    "step of all": (
        range(4),
        lambda c: _state(c)["state"][2]["step"].add_(1),
        f"{EXPERT_0}.step",
        f"{EXPERT_2}.step",
    ),
    "rate": (range(4), _in_group(2, lr=0.5), f"{EXPERT_0}.lr"),
    "name": (range(4), _in_group(2, name="mine"), f"{EXPERT_0}.name"),
    "name of the other count": (range(4), _in_group(2, name="ep_size_1"), f"{EXPERT_0}.name"),
    "rate of others": (range(4), _in_group(1, lr=0.5), "optimizer/wrapped.param_groups[1].lr"),
    "step of others": (
        range(4),
        lambda c: _state(c)["state"][1]["step"].add_(1),
        "optimizer/state.group 1.step",
    ),
}


@pytest.fixture(scope="module")
def on_one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make of `EXPERT` a run whose ranks have all experts."""
    place = tmp_path_factory.mktemp("one")
    run, out = write(EXPERT, place / "run"), place / "out"
    streamshard.repartition(run, out, world_size=4, expert_parallel=1)
    return out


@pytest.mark.parametrize("name", DIFFERING)
def test_what_differs_beside_another_degree_is_found(
    tmp_path: Path, on_one: Path, name: str
) -> None:
    ranks, change, *places = DIFFERING[name]
    run, out = write(EXPERT, tmp_path / "run"), on_one
    for rank in ranks:
        edit(optimizer_file(run, rank), change)
    for one, other in ((run, out), (out, run)):
        assert [found.name for found in streamshard.diff(one, other).differences] == places


def test_the_source_s_own_degree_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write(EXPERT, tmp_path / "run")
    line = ["repartition", str(run), str(tmp_path / "out"), "--world-size", "4", "--if-needed"]
    assert main([*line, "--expert-parallel", "2"]) == 0
    assert not (tmp_path / "out").exists()
    assert main([*line, "--expert-parallel", "4"]) == 0
    assert "2 ranks shared, are spread over 4" in capsys.readouterr().out
    compare(tmp_path / "out" / TAG, write(spread(EXPERT, 4, 4), tmp_path / "wanted") / TAG)


DENSE: dict[str, tuple[Callable[[Path], Path], dict[str, int]]] = {
    "tensor, changed": (partial(write, TWO), {"world_size": 4, "tensor_parallel": 1}),
    "stage 3": (partial(write, Job(world_size=4, stage=3)), {"world_size": 2}),
    "pipeline": (partial(write_pipe, PipeJob(world_size=4)), {"world_size": 4}),
}


@pytest.mark.parametrize(("make", "options"), DENSE.values(), ids=DENSE)
def test_one_rank_is_the_degree_of_a_model_without_experts(
    tmp_path: Path, make: Callable[[Path], Path], options: dict[str, Any]
) -> None:
    run, out, wanted = make(tmp_path / "run"), tmp_path / "out", tmp_path / "wanted"
    for degree in (0, 2):
        with pytest.raises(UsageError, match="the model has no experts of DeepSpeed's MoE layers"):
            streamshard.repartition(run, out, expert_parallel=degree, **options)
    streamshard.repartition(run, out, expert_parallel=1, **options)
    streamshard.repartition(run, wanted, **options)
    compare(out / TAG, wanted / TAG)


def _state(content: dict[str, Any]) -> dict[str, Any]:
    state: dict[str, Any] = content["optimizer_state_dict"]["base_optimizer_state"]
    return state


def _other_step(run: Path) -> None:
    for rank in (1, 3):
        edit(optimizer_file(run, rank), lambda c: _state(c)["state"][2]["step"].add_(1))


def _other_group_name(run: Path) -> None:
    edit_optimizers(run, lambda state: wrapped(state)["param_groups"][2].update(name="mine"))


def _older(run: Path) -> None:
    """Add what DeepSpeed 0.16.9 saves for each expert rank also where ZeRO has its own files."""
    for rank in range(2):
        name = f"expp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer": None}, run / TAG / name)


def _in_model(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    return lambda run: edit(run / TAG / MODEL, change)


def _by_tensor(params: Shapes) -> Shapes:
    """Order the parameters of experts weight by weight, not expert by expert."""
    return (*params[::2], *params[1::2])


def _on_sequences(run: Path) -> None:
    """Say that two ranks have each partition, which saves it once."""
    mesh = {"data_parallel_size": 4, "sequence_parallel_size": 2}
    edit_all(run, "*_optim_states.pt", lambda held: held["ds_config"].update(mesh))


OTHER_LAYER = "other.deepspeed_moe.experts.deepspeed_experts.0.weight"


def _other_degree(run: Path) -> None:
    """Make experts of one param group that all ranks share: those of another layer."""
    own = {"moe": True, "name": "ep_size_1"}
    edit_optimizers(run, lambda state: wrapped(state)["param_groups"][1].update(own))

    def take_out(content: dict[str, Any]) -> None:
        weight = content["module"].pop(OTHER_LAYER)
        torch.save({OTHER_LAYER: weight}, run / TAG / f"layer_1_expert_0_{MODEL}")
        content["num_experts"] = [4, 1]

    edit(run / TAG / MODEL, take_out)


@pytest.mark.parametrize(
    ("job", "change", "message"),
    [
        (EXPERT, _on_sequences, "it was trained on sequences that ranks share"),
        (
            replace(EXPERT, groups=(EXPERT.groups[0], ((OTHER_LAYER, (3, 4)),))),
            _other_degree,
            r"has layers with expert parallel sizes \[1, 2\], of which not one alone",
        ),
        (
            replace(SHARED, client_state={"checkpoint_parallel_dimensions": {"pp_degree": 2}}),
            None,
            "of a pipeline, of which each stage has layers of its own",
        ),
        (
            replace(SHARED, client_state={"universal_checkpoint_info": {"rows": [PATTERN]}}),
            None,
            "'universal_checkpoint_info' names experts as one rank numbers them, as what AutoTP",
        ),
        (SHARED, _other_step, "mp_rank_00: param group 2 of expert rank 0 and .* differ"),
        (replace(EXPERT, muon=(0,)), None, "trained with Muon"),
        (
            Job(world_size=4, frozen=EXPERT.experts),
            None,
            "the model file has a weight of an expert",
        ),
        (EXPERT, _older, r"an older DeepSpeed saved it, with a file .*expp_rank_\* for each"),
        (EXPERT, _other_step, "group 2 of expert rank 0 and group 2 of expert rank 1 differ"),
        (EXPERT, _other_group_name, "named 'mine', and not 'ep_size_2'"),
        (
            replace(EXPERT, frozen=((f"{EXPERT.experts[0][0]}.old", (3,)),)),
            None,
            r"a weight of an expert, '.*deepspeed_experts\.0\.weight\.old'",
        ),
        (
            EXPERT,
            _in_model(lambda content: content.update(num_experts=[3])),
            r"train \[4\] experts of a layer, and its model file lists \[3\]",
        ),
        (
            replace(EXPERT, experts=_by_tensor(EXPERT.experts)),
            None,
            "param group 2 of experts is not ordered expert by expert.*give with like=",
        ),
        (
            EXPERT,
            _in_model(lambda content: content["module"].move_to_end("embed.weight")),
            "param group 0 is not in the order of the module.*give with like=",
        ),
        (
            replace(spread(EXPERT, 4, 4), groups=((("embed.weight", (11, 4)),),)),
            None,
            "in the order of the module, or sorted by size, the largest first.*give with like=",
        ),
    ],
)
def test_what_cannot_be_spread_is_refused(
    tmp_path: Path, job: Job, change: Callable[[Path], None] | None, message: str
) -> None:
    run = write(job, tmp_path / "run")
    if change is not None:
        change(run)
    ranks = 4 * job.parts
    with pytest.raises(StreamshardError, match=message):
        streamshard.repartition(run, tmp_path / "out", world_size=ranks, expert_parallel=1)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    # What the message advises: at the degree that saved it, it goes to other ranks.
    streamshard.repartition(run, tmp_path / "out", world_size=ranks)


def _other_counts(run: Path) -> None:
    edit(run / TAG / "mp_rank_01_model_states.pt", lambda held: held.update(num_experts=[2]))


def _of(job: Job) -> Callable[[Path], None]:
    """Have the second part of another job."""

    def change(run: Path) -> None:
        for path in (write(job, run.with_name("other")) / TAG).glob("*mp_rank_01*"):
            path.rename(run / TAG / path.name)

    return change


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (_other_counts, "experts"),
        (_of(replace(SHARED, experts=_by_tensor(SHARED.experts))), "param groups"),
        (_of(spread(SHARED, 4, 4)), "param groups"),
    ],
)
def test_parts_that_do_not_have_the_same_experts_are_refused(
    tmp_path: Path, change: Callable[[Path], None], what: str
) -> None:
    run = write(SHARED, tmp_path / "run")
    change(run)
    with pytest.raises(DisagreementError, match=f"mp_rank_00 and mp_rank_01 have different {what}"):
        streamshard.repartition(run, tmp_path / "out", world_size=8, expert_parallel=1)


EVERYWHERE = spread(EXPERT, 1, 4)
USAGE: list[tuple[Job, dict[str, int], str]] = [
    (EXPERT, {"expert_parallel": 3, "world_size": 6}, "=3: .*has 4 experts.* give 1, 2, 4"),
    (EXPERT, {"expert_parallel": 0, "world_size": 4}, "expert_parallel=0: .* give 1, 2, 4"),
    (EXPERT, {"expert_parallel": 4, "world_size": 6}, r"world_size=6: .*multiple of 4 \(4, 8, 12"),
    (
        SHARED,
        {"expert_parallel": 4, "world_size": 4},
        r"over 4 ranks \(expert_parallel=\) of each of 2 tensor .* multiple of 8 \(8, 16, 24",
    ),
    *(
        (job, {"expert_parallel": 1, "world_size": 2, "zero_stage": 3}, "stage 3 does not train wi")
        for job in (EXPERT, EVERYWHERE)
    ),
]


@pytest.mark.parametrize(("job", "options", "message"), USAGE)
def test_counts_and_stages_that_do_not_fit_are_refused(
    tmp_path: Path, job: Job, options: dict[str, Any], message: str
) -> None:
    run = write(job, tmp_path / "run")
    with pytest.raises(UsageError, match=message):
        streamshard.repartition(run, tmp_path / "out", **options)


def test_what_lacks_the_experts_files_is_refused(tmp_path: Path) -> None:
    dumps = write_dumps(write(EXPERT, tmp_path / "run"), tmp_path / "dumps")
    with pytest.raises(UnsupportedError, match="raw dumps lack the experts' files"):
        streamshard.repartition(dumps, tmp_path / "out" / DUMPS, world_size=4, expert_parallel=1)


def test_a_reference_tells_an_order_that_is_not_the_module_s(tmp_path: Path) -> None:
    source = replace(SHARED, experts=_by_tensor(SHARED.experts))
    target = spread(SHARED, 1, 2)
    target = replace(target, experts=_by_tensor(target.experts))
    run, wanted = write(source, tmp_path / "run"), write(target, tmp_path / "wanted")
    out = tmp_path / "out"
    streamshard.repartition(run, out, world_size=4, expert_parallel=1, like=wanted)
    compare(out / TAG, wanted / TAG)


@pytest.mark.parametrize(
    ("like", "message"),
    [
        (EXPERT, "given with like= has its experts over 2 ranks, and 4 are asked for"),
        (
            replace(spread(EXPERT, 4, 4), groups=EXPERT.groups[::-1]),
            "has other parameters, or in other shapes, groups or anoth",
        ),
        (Job(world_size=4), "given with like=: the model has no experts"),
        (spread(SHARED, 4, 4), "like= is of a model in 2 parts, and this one in 1, which stay"),
    ],
)
def test_a_reference_of_another_job_is_refused(tmp_path: Path, like: Job, message: str) -> None:
    run, other = write(EXPERT, tmp_path / "run"), write(like, tmp_path / "like")
    with pytest.raises(StreamshardError, match=message):
        streamshard.repartition(run, tmp_path / "out", world_size=4, expert_parallel=4, like=other)


DIVIDED = replace(EXPERT, max_group=40, rates="base_lrs")
"""With two experts of 17 elements in each param group of them."""


def test_groups_that_an_engine_divides_for_their_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rate of the scheduler goes to the parts of its param group."""
    monkeypatch.setattr(
        "streamshard.formats.deepspeed.model_parallel.expert_groups.GROUP_NUMEL", 40
    )
    job = replace(DIVIDED, parts=2)
    run = write(spread(job, 2, 4), tmp_path / "run")
    for target in (1, 4):
        out, like = tmp_path / f"out-{target}", None
        wanted = write(spread(job, target, 4), tmp_path / f"wanted-{target}")
        if target == 1:
            with pytest.raises(UnsupportedError, match="more than 40 elements on a rank of that"):
                streamshard.repartition(run, out, world_size=8, expert_parallel=target)
            like = wanted
        streamshard.repartition(run, out, world_size=8, expert_parallel=target, like=like)
        compare(out / TAG, wanted / TAG)
        assert streamshard.diff(run, out).is_equal


def test_a_rate_of_a_divided_group_is_compared(tmp_path: Path) -> None:
    run = write(spread(DIVIDED, 1, 2), tmp_path / "run")
    other = write(spread(DIVIDED, 2, 2), tmp_path / "other")
    assert streamshard.diff(run, other).is_equal

    def change(content: dict[str, Any]) -> None:
        content["lr_scheduler"]["base_lrs"][-1] *= 2

    edit(run / TAG / MODEL, change)
    (found,) = streamshard.diff(run, other).differences
    assert found.name == f"{EXPERT_2}.lr_scheduler.base_lrs"


def test_groups_that_are_divided_otherwise_are_refused(tmp_path: Path) -> None:
    run = write(spread(DIVIDED, 1, 2), tmp_path / "run")
    with pytest.raises(UnsupportedError, match=r"group 2, 3 of experts is not divided as above"):
        streamshard.repartition(run, tmp_path / "out", world_size=2, expert_parallel=2)


def test_a_scheduler_whose_rates_are_not_told_apart_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "streamshard.formats.deepspeed.model_parallel.expert_groups.GROUP_NUMEL", 40
    )
    run = write(spread(replace(DIVIDED, rates="rates"), 1, 2), tmp_path / "run")
    with pytest.raises(UnsupportedError, match="3 param groups then, instead of 4, and 'rates'"):
        streamshard.repartition(run, tmp_path / "out", world_size=2, expert_parallel=2)
