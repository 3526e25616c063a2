"""States and hyper-parameters: what cannot be cut is said, what is a tensor stays one.

States are fabricated as bitsandbytes and torchao keep them, which are too much to install for this.
"""

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import streamshard
from streamshard.errors import DisagreementError, SourceError, UnsupportedError
from tests.comparing import both_roads, differences
from tests.fabricated import edit, optimizer_file, optimizer_state, wrapped, write
from tests.job import EXPERTS, Job

States = dict[str, Any]
Made = Callable[[int, int, int], States | None]
"""Gets rank, group and the partition's length; None leaves the states as they are."""


class OptimState8bit(Tensor):
    """Stands in for torchao's: a tensor without data, that holds tensors."""

    codes: Tensor
    scale: Tensor
    qmap: Tensor

    @classmethod
    def of(cls, codes: Tensor, scale: Tensor, qmap: Tensor) -> "OptimState8bit":
        """Wrap what a state is quantised to."""
        made: OptimState8bit = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)
        made.codes, made.scale, made.qmap = codes, scale, qmap
        return made

    @classmethod
    def __torch_dispatch__(cls, *arguments: Any) -> Any:  # noqa: ANN401
        raise NotImplementedError(arguments)


@contextmanager
def torchao() -> Iterator[None]:
    """Let pickle find the stand-in under torchao's name."""
    name = "torchao.optim.subclass_8bit"
    parts = ["torchao", "torchao.optim", name]
    for part in parts:
        sys.modules[part] = types.ModuleType(part)
    OptimState8bit.__module__ = name
    sys.modules[name].OptimState8bit = OptimState8bit  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for part in parts:
            del sys.modules[part]


def bitsandbytes(numel: int) -> States:
    """What AdamW8bit keeps of a tensor, by block of 256 elements: here less than a block."""
    blocks = -(-numel // 256)
    return {
        "step": 7,
        "state1": torch.arange(numel).to(torch.uint8),
        "qmap1": torch.linspace(-1, 1, 256),
        "state2": torch.arange(numel).to(torch.uint8),
        "qmap2": torch.linspace(0, 1, 256),
        "absmax1": torch.rand(blocks),
        "absmax2": torch.rand(blocks),
    }


def as_of_today(states: States) -> States:
    """What the `state_dict` of bitsandbytes 0.50.2 makes of its states."""
    return {"step": states.pop("step"), "__bnb_optimizer_quant_state__": states}


def torchao_8_bit(numel: int) -> States:
    """What torchao's AdamW8bit keeps."""
    codes = torch.arange(numel).to(torch.uint8)
    made = OptimState8bit.of(codes, torch.rand(-(-numel // 256)), torch.linspace(-1, 1, 256))
    return {"step": torch.tensor(7.0), "exp_avg": made, "exp_avg_sq": made}


def adam(numel: int) -> States:
    return {"step": torch.tensor(7.0), "exp_avg": torch.rand(numel)}


REFUSED: dict[str, tuple[Callable[[int], States], str]] = {
    "bitsandbytes-of-today": (
        lambda n: as_of_today(bitsandbytes(n)),
        r"'absmax1' of group 0 has shape \(1,\) for \d+ elements of 8 bits",
    ),
    "bitsandbytes-wrapped-in-other-forms": (
        lambda n: {"step": 7, "__bnb_optimizer_quant_state__": [torch.rand(n)]},
        "'__bnb_optimizer_quant_state__' of group 0 is of type list, which has tensors in it",
    ),
    "torchao": (
        torchao_8_bit,
        r"'exp_avg' of group 0 is of class torchao\.optim\.subclass_8bit\.OptimState8bit,",
    ),
    "fp8": (
        lambda n: {"exp_avg": torch.zeros(n, dtype=torch.float8_e4m3fn)},
        "'exp_avg' of group 0 holds codes of float8_e4m3fn",
    ),
    "factored": (
        lambda n: {"exp_avg_sq_row": torch.rand(5), "exp_avg_sq_col": torch.rand(n // 5)},
        r"'exp_avg_sq_row' of group 0 has shape \(5,\)",
    ),
    "matrix": (lambda n: {"GG": torch.rand(3, 3)}, r"'GG' of group 0 has shape \(3, 3\)"),
    "list": (
        lambda n: {"Q": [torch.rand(n), None]},
        "'Q' of group 0 is of type list, which has tensors in it",
    ),
    "dict": (
        lambda n: {"m": {"of": (torch.rand(n),)}},
        "'m' of group 0 is of type dict, which has tensors in it",
    ),
    "sparse": (
        lambda n: {"exp_avg": torch.eye(3).to_sparse()},
        r"'exp_avg' of group 0 is of class torch\._utils\._rebuild_sparse_tensor",
    ),
    "numpy": (
        lambda n: {"exp_avg": np.zeros(4096)},
        r"'exp_avg' of group 0 is of class numpy\..* bytes, which is not a plain value",
    ),
    "numbers": (
        lambda n: {"exp_avg": [0.5] * 200},
        r"'exp_avg' of group 0 is of type list and takes 1,\d+ bytes, which is not a plain value",
    ),
}


def with_optimizers(job: Job, run_dir: Path, change: Callable[[int, States], object]) -> Path:
    """Save a job, and change the state dict of each rank's optimizer."""
    write(job, run_dir)
    for rank in range(job.world_size):

        def change_held(held: States, rank: int = rank) -> None:
            change(rank, wrapped(held["optimizer_state_dict"]))

        with torchao():
            edit(optimizer_file(run_dir, rank), change_held)
    return run_dir


def with_states(job: Job, run_dir: Path, new: Made) -> Path:
    """Save a job with other states of its optimizer."""

    def change(rank: int, optimizer: States) -> None:
        states = optimizer["state"]
        for group, own in states.items():
            states[group] = new(rank, group, len(own["exp_avg"])) or own

    return with_optimizers(job, run_dir, change)


@pytest.mark.parametrize(("states", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_cut_is_named_with_the_file_and_what_to_do(
    tmp_path: Path, states: Callable[[int], States], message: str
) -> None:
    run = with_states(Job(world_size=1), tmp_path / "run", lambda rank, group, n: states(n))
    place = rf"{optimizer_file(run, 0)}: optimizer state "
    with pytest.raises(UnsupportedError, match=place + message) as error:
        streamshard.repartition(run, tmp_path / "out", world_size=3)
    told = "on as many ranks as saved it, at the same ZeRO stage, or start the optimizer again"
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("name", "stage", "world_size"),
    [("bitsandbytes-of-today", 2, 1), ("torchao", 3, 2)],
)
def test_what_cannot_be_cut_is_kept_as_it_is(
    tmp_path: Path, name: str, stage: int, world_size: int
) -> None:
    states, message = REFUSED[name]
    job = Job(stage=stage, world_size=world_size)
    run = with_states(job, tmp_path / "run", lambda rank, group, numel: states(numel))
    place = rf"{optimizer_file(run, 0)}: optimizer state "
    for form in ("universal", "dcp"):
        with pytest.raises(UnsupportedError, match=place + message):
            streamshard.export(run, tmp_path / "out", format=form)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    streamshard.convert(run, tmp_path / "store.zarr", verify=True)
    for source, out in zip((run, tmp_path / "store.zarr"), "ab", strict=True):
        streamshard.repartition(source, tmp_path / out, world_size=world_size)
        assert streamshard.verify(tmp_path / out, against=run).is_good
    with pytest.raises(UnsupportedError, match=rf"store.zarr: optimizer state {message}"):
        streamshard.repartition(tmp_path / "store.zarr", tmp_path / "out", world_size=3)
    with torchao():
        edit(optimizer_file(tmp_path / "b", world_size - 1), one_state_changed)
    assert not streamshard.verify(tmp_path / "b", against=run).is_good


def test_states_that_cannot_be_cut_may_be_longer_on_some_ranks(tmp_path: Path) -> None:
    run = with_states(
        Job(stage=3, world_size=3),
        tmp_path / "run",
        lambda rank, group, numel: {"Q": [torch.rand(1 + 1000 * rank)], "sizes": [*range(rank)]},
    )
    out = tmp_path / "out"
    report = streamshard.repartition(run, out, world_size=3, verify=True)
    assert report.bytes_written == sum(p.stat().st_size for p in out.rglob("*") if p.is_file())
    assert streamshard.verify(out, against=run).is_good


def adafactor(numel: int, steps: int, rms: float | Tensor) -> States:
    """What Adafactor of transformers keeps of a flat tensor: `RMS` is computed of its elements."""
    return {"step": steps, "exp_avg_sq": torch.rand(numel), "RMS": rms}


RANKS = Job(stage=2, world_size=2)
SUB_GROUPS = Job(stage=3, world_size=1, sub_group_size=1)
BOTH = replace(SUB_GROUPS, world_size=2)


@pytest.mark.parametrize(
    ("job", "message", "made"),
    [
        (RANKS, "group 0 differs between ranks: each computes it", float),
        (BOTH, "group 0 differs between ranks: each computes it", torch.tensor),
        (
            SUB_GROUPS,
            "'RMS' differs between sub-groups: each computes it",
            lambda n: torch.tensor(n) if n > 1 else 1,
        ),
    ],
    ids=["", "0-d", "both"],
)
def test_a_number_that_is_computed_of_what_a_rank_has_is_kept(
    tmp_path: Path, job: Job, message: str, made: Callable[[float], float | Tensor]
) -> None:
    run = with_states(
        job, tmp_path / "run", lambda rank, unit, n: adafactor(n, 7, made(0.5 + rank + 4 * unit))
    )
    assert streamshard.verify(run).is_good
    streamshard.convert(run, tmp_path / "store.zarr", verify=True)
    streamshard.repartition(tmp_path / "store.zarr", tmp_path / "out", world_size=job.world_size)
    assert streamshard.verify(tmp_path / "out", against=run).is_good
    with pytest.raises(UnsupportedError, match=message):
        streamshard.repartition(run, tmp_path / "other", world_size=3)
    streamshard.export(run, tmp_path / "weights")


@pytest.mark.parametrize(
    ("job", "made"),
    [
        (RANKS, lambda n, step: adafactor(n, 7 + step, 0.5 + step)),
        (SUB_GROUPS, lambda n, step: adafactor(n, 7 + step, 0.5 + step)),
        (BOTH, lambda n, step: adafactor(n, 7, 5 + step)),
        (RANKS, lambda n, step: {"exp_avg_sq": torch.rand(n), "RMS": 0.5 + step, "mode": 1}),
        (SUB_GROUPS, lambda n, step: {"exp_avg_sq": torch.rand(n), "RMS": 0.5 + step, "k": 7}),
        (RANKS, lambda n, step: {**adafactor(n, 7, 0.5 + step), "mode": "ab"[step % 2]}),
    ],
    ids=["steps", "steps-of-units", "counts", "no-step", "k-is-no-step", "modes"],
)
def test_other_numbers_than_those_show_several_saves(
    tmp_path: Path, job: Job, made: Callable[[int, int], States]
) -> None:
    run = with_states(job, tmp_path / "run", lambda rank, unit, n: made(n, rank + 4 * unit + unit))
    with pytest.raises(DisagreementError):
        streamshard.export(run, tmp_path / "weights")


def with_numbers(job: Job, run_dir: Path, made: Callable[[int], States]) -> Path:
    """Save a job whose param groups have more entries, of each rank."""

    def change(rank: int, optimizer: States) -> None:
        groups, entries = optimizer["param_groups"], made(rank)
        last, added = entries.pop("last", {}), entries.pop("added", 0)
        for group in groups:
            group.update(entries)
        groups[-1].update(last)
        groups += groups[:added]

    return with_optimizers(job, run_dir, change)


def prodigy(rank: int) -> States:
    """What Prodigy keeps in a param group: `d` is computed of the rank's elements."""
    return {"d0": 1e-6, "d": 0.5 + rank, "d_numerator": -0.25 * rank, "k": 7}


OF_GROUPS = [
    Job(stage=2, world_size=2),
    Job(stage=3, world_size=2, sub_group_size=1),
    Job(stage=2, world_size=2, experts=EXPERTS, expert_parallel=2),
]


def test_a_number_of_each_rank_in_param_groups_is_kept(tmp_path: Path) -> None:
    job = OF_GROUPS[0]
    run = with_numbers(job, tmp_path / "run", prodigy)
    assert streamshard.verify(run).is_good
    assert "d" not in streamshard.inspect(run).groups[0].hyper_parameters
    streamshard.convert(run, tmp_path / "store.zarr", verify=True)
    out = tmp_path / "out"
    streamshard.repartition(tmp_path / "store.zarr", out, world_size=2, verify=True)
    for rank in range(2):
        groups = (wrapped(optimizer_state(one, rank))["param_groups"] for one in (out, run))
        assert differences(*groups) == []
    for stage, world_size in ((job.stage, 4), (5 - job.stage, 2)):
        with pytest.raises(UnsupportedError, match="'d' of param group 0 differs between rank"):
            streamshard.repartition(
                run, tmp_path / "other", world_size=world_size, zero_stage=stage
            )
    assert [note for note in streamshard.export(run, tmp_path / "w").notes if "'d' of" in note]
    other = with_numbers(job, tmp_path / "b", lambda rank: prodigy(rank) | {"d": 0.75 + rank})
    found = streamshard.verify(out, against=other).differences
    assert found
    assert all("optim_states.pt" in one.name for one in found)


@pytest.mark.parametrize("other_steps", [False, True])
def test_numbers_of_each_rank_are_no_second_problem(tmp_path: Path, other_steps: bool) -> None:
    job = Job(stage=2, world_size=4)

    def made(rank: int) -> States:
        return prodigy(rank) | {"k": 8 if other_steps and rank == 3 else 7}

    damaged = optimizer_file(with_numbers(job, tmp_path / "run", made), 1)
    damaged.write_bytes(damaged.read_bytes()[:-1])
    found = streamshard.verify(tmp_path / "run").problems
    assert [one.kind for one in found] == ["malformed", "disagreement"][: 1 + other_steps]


@pytest.mark.parametrize(
    ("job", "made"),
    [
        (OF_GROUPS[0], lambda rank: prodigy(rank) | {"k": 7 + rank}),
        (OF_GROUPS[1], lambda rank: prodigy(rank) | {"lr": 0.5 + rank}),
        (OF_GROUPS[2], lambda rank: prodigy(rank) | {"betas": (0.9, 0.5 + rank)}),
        (OF_GROUPS[0], lambda rank: prodigy(rank) | ({"more": 1} if rank else {})),
        (OF_GROUPS[1], lambda rank: prodigy(rank) | {"last": {"betas": (0.9, 0.5 + rank)}}),
        (OF_GROUPS[2], lambda rank: prodigy(rank) | {"added": rank}),
        (OF_GROUPS[0], lambda rank: {"d": 5 + rank, "k": 7}),
    ],
    ids=["steps", "lr", "betas", "more-keys", "one-group", "more-groups", "counts"],
)
def test_param_groups_that_differ_otherwise_show_several_saves(
    tmp_path: Path, job: Job, made: Callable[[int], States]
) -> None:
    run = with_numbers(job, tmp_path / "run", made)
    with pytest.raises(SourceError, match=r"param group|not laid out"):
        streamshard.export(run, tmp_path / "weights")


def one_state_changed(held: dict[str, Any]) -> None:
    """Keep the last state of the first group otherwise."""
    states = wrapped(held["optimizer_state_dict"])["state"][0]
    key, value = states.popitem()
    states[key] = (value, 0)


@pytest.mark.parametrize(("states", "stage"), [(bitsandbytes, 2), (torchao_8_bit, 3)])
def test_what_is_not_such_a_state_is_read(
    tmp_path: Path, states: Callable[[int], States], stage: int
) -> None:
    job = Job(stage=stage, world_size=2)
    run = with_states(job, tmp_path / "run", lambda rank, group, numel: states(numel))
    plain = write(job, tmp_path / "plain")
    found = streamshard.inspect(run)
    assert found.groups[0].states == {}
    reason = "Not all of the optimizer's state can be cut for other ranks: "
    assert [note for note in found.notes if note.startswith(reason)]
    verified = streamshard.verify(run)
    assert verified.is_good
    assert [note for note in verified.notes if note.startswith(reason)]
    with streamshard.open(run) as ckpt, streamshard.open(plain) as other:
        assert {*ckpt} == {*other}
        for name, parameter in ckpt.items():
            for state, tensor in parameter.tensors.items():
                assert np.array_equal(tensor[...], other[name].tensors[state][...])
    for source in (run, plain):
        streamshard.export(source, tmp_path / f"{source.name}-out")
    one, wanted = (tmp_path / f"{name}-out" / "model.safetensors" for name in ("run", "plain"))
    assert one.read_bytes() == wanted.read_bytes()
    same = streamshard.diff(run, run)
    assert same.is_equal
    assert [note for note in same.notes if reason in note]
    kinds = {d.kind for d in streamshard.diff(run, plain).differences}
    assert kinds == {"missing", "extra", "value"}  # extra: the files of the ranks
    again = streamshard.repartition(run, tmp_path / "out", world_size=2, if_needed=True)
    assert again.found == "source"


ONE_ELEMENT = Job(stage=3, groups=((("w", (3, 5)),), (("gain", (1,)),)), tied={})
"""Where a rank holds one element of a group, shapes alone do not tell a scalar."""
DIFFERING: list[tuple[Job, Made, type[SourceError], str]] = [
    (
        Job(),
        lambda _, group, n: bitsandbytes(n) if group == 1 else None,
        UnsupportedError,
        "'absmax1' of group 1",
    ),
    (
        Job(world_size=3),
        lambda rank, _, n: adam(n if rank != 1 else n - 1),
        UnsupportedError,
        r"rank_1_.*: .*'exp_avg' of group 0 has shape",
    ),
    (
        Job(),
        lambda rank, _, n: adam(n) if rank else {**adam(n), "step": 7},
        DisagreementError,
        r"rank_0_.*'step' of group 0 is of type int",
    ),
    (
        Job(),
        lambda rank, _, n: {"step": torch.tensor(7.0 + rank)},
        DisagreementError,
        "'step' of group 0",
    ),
    (
        ONE_ELEMENT,
        lambda rank, _, n: {"max1": torch.rand(1) * 0, **adam(n)},
        SourceError,
        "'max1' of group 0 is a scalar, and in another",
    ),
    (
        Job(stage=3, sub_group_size=20),
        lambda _, unit, n: {**adam(n), "step": torch.tensor(7.0 + (unit == 1))},
        DisagreementError,
        "sub-groups of a param group differ in state",
    ),
]


@pytest.mark.parametrize(("job", "states", "kind", "message"), DIFFERING)
def test_ranks_and_groups_must_have_the_same_kind_of_states(
    tmp_path: Path, job: Job, states: Made, kind: type[SourceError], message: str
) -> None:
    run = with_states(job, tmp_path / "run", states)
    with pytest.raises(kind, match=message):
        streamshard.repartition(run, tmp_path / "out", world_size=4)


def small(numel: int) -> States:
    """What bitsandbytes keeps with 32 bits, and of small tensors always."""
    return {"step": 7, "state1": torch.arange(numel) / 7, "state2": torch.arange(numel) / 3}


def test_states_of_bitsandbytes_with_32_bits_are_like_any_other(tmp_path: Path) -> None:
    """The dict that newer versions wrap them in changes nothing: each version loads either form."""
    kept: list[list[Any]] = []
    forms: list[Callable[[States], States]] = [dict, as_of_today]
    for form in forms:

        def own(rank: int, group: int, numel: int, form: Any = form) -> States:  # noqa: ANN401
            return dict(form(small(numel)))

        run = with_states(Job(), tmp_path / form.__name__ / "run", own)
        kept += [
            [wrapped(optimizer_state(out, rank))["state"] for rank in range(3)]
            for out in both_roads(run, world_size=3)
        ]
    assert list(kept[0][0][0]) == ["step", "state1", "state2"]
    assert kept[0][0][0]["state1"].count_nonzero()
    for other in kept[1:]:
        assert not differences(other, kept[0])


def with_rates(job: Job, run_dir: Path, lr: Callable[[int], list[Tensor]]) -> Path:
    """Save a job whose param groups have the learning rates that `lr` makes for a rank."""

    def change(rank: int, optimizer: States) -> None:
        for group, value in zip(optimizer["param_groups"], lr(rank), strict=True):
            group["lr"] = value

    return with_optimizers(job, run_dir, change)


def rates(run: Path, zero_stage: int) -> Iterator[list[Tensor]]:
    """Yield the learning rates of every rank's param groups after either road to 3 ranks."""
    for out in both_roads(run, world_size=3, zero_stage=zero_stage):
        for rank in range(3):
            yield [group["lr"] for group in wrapped(optimizer_state(out, rank))["param_groups"]]


@pytest.mark.parametrize(("stage", "target"), [(2, 3), (3, 2)])
def test_each_group_has_a_tensor_of_its_own(tmp_path: Path, stage: int, target: int) -> None:
    job = Job(stage=stage, sub_group_size=20)
    run = with_rates(job, tmp_path / "run", lambda _: [torch.tensor(0.1), torch.tensor(0.2)])
    for first, second in rates(run, target):
        assert torch.equal(first, torch.tensor(0.1))
        first.fill_(7)
        assert torch.equal(second, torch.tensor(0.2))


def test_ranks_must_agree_about_tensors_of_param_groups(tmp_path: Path) -> None:
    run = with_rates(Job(), tmp_path / "run", lambda rank: [torch.tensor(0.1 + rank)] * 2)
    with pytest.raises(DisagreementError, match=r"rank_1_.*param groups"):
        streamshard.inspect(run)
