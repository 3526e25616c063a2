"""Client state: whatever a training script saves comes out as it went in, under any name."""

from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
import torch

import streamshard
from streamshard.errors import SourceError, UnsupportedError
from tests.comparing import both_roads
from tests.fabricated import edit, edit_all, load, write
from tests.job import LEAN, TAG, Job
from tests.oracle.values import value_differences

# torch itself looks at the storage of what it rebuilds.
pytestmark = [
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
]
ONE = torch.tensor([1.5, -2.0])


def quantised() -> dict[str, Any]:
    """Make quantised tensors: of every dtype with whole bytes, per tensor and per channel."""
    values = torch.arange(-6.0, 6.0).view(3, 4)
    scales, zeros = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0, 1, 2])
    dtypes = {"qint8": torch.qint8, "quint8": torch.quint8, "qint32": torch.qint32}
    whole = {name: torch.quantize_per_tensor(values, 0.1, 3, d) for name, d in dtypes.items()}
    channels = torch.quantize_per_channel(values, scales, zeros, 0, torch.qint8)
    return {**whole, "channels": channels, "view": whole["qint8"][1:]}


def model_file(run: Path) -> Path:
    found: Path = sorted((run / TAG).glob("*model_states.pt"))[0]
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_quantised_tensors_are_carried(stage: int, tmp_path: Path) -> None:
    job = replace(LEAN, stage=stage, client_state={"table": quantised()})
    run = write(job, tmp_path / "run")
    streamshard.convert(run, tmp_path / "run.zarr", verify=True)
    for source, out in (("run", "direct"), ("run.zarr", "of-store")):
        target = tmp_path / out
        options: dict[str, Any] = {"world_size": 3, "zero_stage": 5 - stage}
        streamshard.repartition(tmp_path / source, target, verify=True, **options)
        found = load(model_file(target))["table"]
        for name, wanted in quantised().items():
            assert found[name].qscheme() == wanted.qscheme()
            assert torch.equal(found[name].int_repr(), wanted.int_repr())
            assert torch.equal(found[name].dequantize(), wanted.dequantize())
        assert found["view"].untyped_storage().data_ptr() == (
            found["qint8"].untyped_storage().data_ptr()
        )
        assert streamshard.verify(target, against=run).differences == ()


@pytest.mark.parametrize("stage", [2, 3])
def test_buffers_that_are_still_to_be_conjugated_or_negated(stage: int, tmp_path: Path) -> None:
    """The elements of `x.conj()` are those of `x`, in memory and in files."""
    lazy = {"conj": torch.randn(3, dtype=torch.complex64).conj(), "neg": torch._neg_view(ONE)}

    def add(held: dict[str, Any]) -> None:
        held["module"].update(lazy)
        held["buffer_names"] = [*held["buffer_names"], *lazy]

    run = write(replace(LEAN, stage=stage), tmp_path / "run")
    edit_all(run, "*model_states.pt", add)
    for out in both_roads(run, world_size=3):
        for path in (out / TAG).glob("*model_states.pt"):
            found = load(path)["module"]
            assert all(torch.equal(found[name], value) for name, value in lazy.items())
    with pytest.raises(UnsupportedError, match=r"'conj' .* of which resolve_conj\(\) is due"):
        streamshard.export(run, tmp_path / "weights")
    plain = write(replace(LEAN, stage=stage), tmp_path / "plain")
    lazy = {name: value.resolve_conj().resolve_neg() for name, value in lazy.items()}
    edit_all(plain, "*model_states.pt", add)
    assert not streamshard.diff(run, plain).is_equal


def test_a_difference_in_a_quantised_tensor_is_found(tmp_path: Path) -> None:
    one, other = (write(Job(client_state={"table": quantised()}), tmp_path / name) for name in "ab")
    assert streamshard.verify(one, against=other).differences == ()

    def change(model: dict[str, Any]) -> None:
        zeros = torch.zeros(3, 4)
        model["table"]["quint8"] = torch.quantize_per_tensor(zeros, 0.1, 3, torch.quint8)

    edit(model_file(other), change)
    (found,) = streamshard.verify(one, against=other).differences
    assert found.name.startswith("model/table.quint8")
    assert (found.count, found.numel) == (11, 12)


LOOKED_INTO = (
    *("module", "buffer_names", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"),
    *("shared_params", "num_experts"),
)
CARRIED = (
    *("optimizer", "lr_scheduler", "data_sampler", "random_ltd", "skipped_steps", "global_steps"),
    *("global_samples", "ds_config", "ds_version", "universal_checkpoint_info", "folding"),
    *("sparse_tensor_module_names", "optimizer_state_dict", "zero_stage", "param_groups"),
)
"""Names that DeepSpeed (0.19.8) has at the top of a file, by whether the values matter to us."""
VALUES: dict[str, Any] = {
    "dict": {"mine": torch.arange(3.0), "more": [1, "x"]},
    "list": [1.5, "x"],
    "text": "mine",
    "tensor": torch.arange(4.0),
}


@pytest.mark.parametrize(("first", "stage"), [(0, 2), (1, 3), (2, 2), (3, 3)])
def test_client_state_of_names_of_deepspeed_is_carried(
    first: int, stage: int, tmp_path: Path
) -> None:
    """Each name with a value of each kind, next to names with values of other kinds."""
    kinds = islice(cycle(VALUES.values()), first, None)
    given = dict(zip(CARRIED, kinds, strict=False))
    run = write(Job(stage=stage, client_state=given), tmp_path / "run")
    out = tmp_path / "out"
    streamshard.repartition(run, out, world_size=3, verify=True)
    found = load(model_file(out))
    assert list(value_differences(given, {name: found[name] for name in given}, "")) == []
    assert streamshard.verify(out, against=run).differences == ()


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("name", LOOKED_INTO)
def test_client_state_in_place_of_what_matters_is_refused(
    name: str, stage: int, tmp_path: Path
) -> None:
    for kind, value in VALUES.items():
        run = write(Job(stage=stage, client_state={name: value}), tmp_path / kind)
        with pytest.raises(SourceError, match=f"{name}|is not a shape"):
            streamshard.inspect(run)
