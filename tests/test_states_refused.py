"""Optimizer states that cannot be cut: what they are is said, and nothing is written.

Fabricated as bitsandbytes and torchao keep them, which are too much to install for this.
"""

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import streamshard
from streamshard.errors import DisagreementError, SourceError, UnsupportedError
from tests.fabricated import load, optimizer_file, save, write
from tests.job import Job

States = dict[str, Any]
WORLD_SIZE = 2


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
    """What AdamW8bit keeps of a tensor, by block of 256 elements."""
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


def bitsandbytes_of_today(numel: int) -> States:
    """What the `state_dict` of newer versions makes of that."""
    states = bitsandbytes(numel)
    return {"step": states.pop("step"), "__bnb_optimizer_quant_state__": states}


def torchao_8_bit(numel: int) -> States:
    """What torchao's AdamW8bit keeps."""
    codes = torch.arange(numel).to(torch.uint8)
    made = OptimState8bit.of(codes, torch.rand(-(-numel // 256)), torch.linspace(-1, 1, 256))
    return {"step": torch.tensor(7.0), "exp_avg": made, "exp_avg_sq": made}


def adam(numel: int) -> States:
    """What torch's Adam keeps."""
    return {"step": torch.tensor(7.0), "exp_avg": torch.rand(numel)}


REFUSED: dict[str, tuple[Callable[[int], States], str]] = {
    "bitsandbytes": (bitsandbytes, r"'state1' of group 0 holds codes of uint8: 8-bit"),
    "bitsandbytes-of-today": (
        bitsandbytes_of_today,
        r"'__bnb_optimizer_quant_state__' of group 0 is of type dict, .*quantised in blocks",
    ),
    "torchao": (
        torchao_8_bit,
        r"'exp_avg' of group 0 is of class torchao\.optim\.subclass_8bit\.OptimState8bit,",
    ),
    "fp8": (
        lambda n: {"exp_avg": torch.zeros(n, dtype=torch.float8_e4m3fn)},
        "'exp_avg' of group 0 holds codes of float8_e4m3fn",
    ),
    "4-bit": (
        lambda n: {"exp_avg": torch.zeros(n // 2, dtype=torch.uint8)},
        "'exp_avg' of group 0 has shape",
    ),
    "factored": (
        lambda n: {"exp_avg_sq_row": torch.rand(5), "exp_avg_sq_col": torch.rand(n // 5)},
        r"'exp_avg_sq_row' of group 0 has shape \(5,\)",
    ),
    "matrix": (lambda n: {"GG": torch.rand(3, 3)}, r"'GG' of group 0 has shape \(3, 3\)"),
    "flat-but-for-an-axis": (
        lambda n: {"exp_avg": torch.rand(1, n)},
        r"'exp_avg' of group 0 has shape \(1, ",
    ),
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


def change(job: Job, run_dir: Path, new: Callable[[int, int, int], States | None]) -> None:
    """Replace states in all files; `new` gets rank, group and the partition's length."""
    with torchao():
        for rank in range(job.world_size):
            path = optimizer_file(run_dir, rank)
            content = load(path)
            state = content["optimizer_state_dict"]
            held = state.get("base_optimizer_state") or state["optimizer_state_dict"]
            for group, states in held["state"].items():
                made = new(rank, group, len(states["exp_avg"]))
                if made is not None:
                    states.clear()
                    states.update(made)
            save(content, path)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(("states", "message"), REFUSED.values(), ids=REFUSED)
def test_named_with_the_file_and_what_to_do(
    tmp_path: Path, states: Callable[[int], States], message: str, world_size: int, stage: int
) -> None:
    job = Job(stage=stage, world_size=world_size)
    write(job, tmp_path / "run")
    torch.manual_seed(0)
    change(job, tmp_path / "run", lambda rank, group, numel: states(numel))
    place = rf"{optimizer_file(tmp_path / 'run', 0)}: optimizer state "
    with pytest.raises(UnsupportedError, match=place + message) as error:
        streamshard.repartition(tmp_path / "run", tmp_path / "out", world_size=3)
    assert error.value.exit_code == 3
    assert "as many ranks as saved it, or start the optimizer again" in str(error.value)
    with pytest.raises(UnsupportedError, match=place + message):
        streamshard.convert(tmp_path / "run", tmp_path / "out.zarr")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_one_group_is_enough(tmp_path: Path) -> None:
    job = Job()
    write(job, tmp_path / "run")
    change(job, tmp_path / "run", lambda _, group, n: bitsandbytes(n) if group == 1 else None)
    with pytest.raises(UnsupportedError, match="'state1' of group 1"):
        streamshard.inspect(tmp_path / "run")


def test_states_of_bitsandbytes_with_32_bits_are_like_any_other(tmp_path: Path) -> None:
    job = Job()
    write(job, tmp_path / "run")
    change(
        job,
        tmp_path / "run",
        lambda rank, group, n: {"step": 7, "state1": torch.rand(n), "state2": torch.rand(n)},
    )
    streamshard.repartition(tmp_path / "run", tmp_path / "out", world_size=3)
    state = load(optimizer_file(tmp_path / "out", 2))["optimizer_state_dict"]
    assert list(state["base_optimizer_state"]["state"][0]) == ["step", "state1", "state2"]


def test_an_element_for_each_on_some_ranks_only(tmp_path: Path) -> None:
    job = Job(world_size=3)
    write(job, tmp_path / "run")
    change(job, tmp_path / "run", lambda rank, _, n: adam(n if rank != 1 else n - 1))
    place = rf"{optimizer_file(tmp_path / 'run', 1)}: .*'exp_avg' of group 0 has shape"
    with pytest.raises(UnsupportedError, match=place):
        streamshard.inspect(tmp_path / "run")


def test_a_tensor_on_some_ranks_only(tmp_path: Path) -> None:
    job = Job()
    write(job, tmp_path / "run")
    change(job, tmp_path / "run", lambda rank, _, n: adam(n) if rank else {**adam(n), "step": 7})
    with pytest.raises(DisagreementError, match=r"rank_0_.*'step' of group 0 is of type int"):
        streamshard.inspect(tmp_path / "run")


def test_a_scalar_that_ranks_disagree_about(tmp_path: Path) -> None:
    job = Job()
    write(job, tmp_path / "run")
    change(job, tmp_path / "run", lambda rank, _, n: {"step": torch.tensor(7.0 + rank)})
    with pytest.raises(DisagreementError, match="'step' of group 0"):
        streamshard.inspect(tmp_path / "run")


def test_a_scalar_that_looks_like_an_element(tmp_path: Path) -> None:
    """Where a rank holds one element of a group, shapes alone do not tell."""
    job = Job(stage=3, groups=((("w", (3, 5)),), (("gain", (1,)),)), tied={})
    write(job, tmp_path / "run")
    change(job, tmp_path / "run", lambda rank, _, n: {"max1": torch.rand(1) * 0, **adam(n)})
    with pytest.raises(SourceError, match="'max1' of group 0 is a scalar, and in another"):
        streamshard.inspect(tmp_path / "run")
