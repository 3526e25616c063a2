"""A job's config stands in for a reference, if it has all that a checkpoint of FSDP lacks."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

import streamshard
from streamshard.errors import UnsupportedError, UsageError
from tests.fabricated import load

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

CONFIG: dict[str, Any] = {
    "train_batch_size": 6,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
}


def model() -> nn.Sequential:
    """Make a model whose tensors are all trained."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3))


def adamw(trained: nn.Module) -> torch.optim.Optimizer:
    """Make param groups of matrices and of the rest, each in the model's order."""
    params = list(trained.parameters())
    groups = [
        {"params": [p for p in params if p.ndim > 1], "lr": 0.25},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups)


def saved(
    place: Path,
    trained: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    flat: bool = False,
) -> dict[str, Any]:
    """Train a step and save as torch does; returns the state dicts."""
    trained(torch.randn(4, 5)).sum().backward()
    optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, states = get_state_dict(trained, optimizer, options=options)
    save_distributed(
        {"model": weights, "optimizer": states}, checkpoint_id=place / "dcp", no_dist=True
    )
    return {"model": weights, **states}


def config_file(place: Path, **changes: object) -> Path:
    """Write the job's config, with some sections replaced."""
    path = place / "ds.json"
    path.write_text(json.dumps({**CONFIG, **changes}))
    return path


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_files_hold_what_was_saved(stage: int, tmp_path: Path) -> None:
    trained = model()
    wanted = saved(tmp_path, trained, adamw(trained))
    config = config_file(tmp_path, zero_optimization={"stage": stage})
    report = streamshard.repartition(
        tmp_path / "dcp", tmp_path / "out", world_size=3, ds_config_file=config, verify=True
    )
    assert any("Made from the job's config" in note for note in report.notes)
    assert streamshard.verify(tmp_path / "out", against=tmp_path / "dcp").is_good
    shown = streamshard.inspect(tmp_path / "out")
    assert (shown.world_size, shown.zero_stage, shown.tag) == (3, stage, "dcp")
    assert [group.hyper_parameters["lr"] for group in shown.groups] == [0.25, 1e-3]
    assert [group.hyper_parameters["weight_decay"] for group in shown.groups] == [0.01, 0.0]
    with streamshard.open(tmp_path / "out") as found:
        assert found.keys() == wanted["model"].keys()
        for name, tensor in wanted["model"].items():
            assert torch.equal(found[name].tensors["fp32"].torch(), tensor)
            for state in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(found[name].tensors[state].torch(), wanted["state"][name][state])
    (path,) = (tmp_path / "out" / "dcp").glob("*rank_0_mp_rank_00_optim_states.pt")
    held = load(path)
    assert held["ds_config"]["zero_optimization"]["stage"] == stage
    assert held["optimizer_state_dict"]["loss_scaler"].cur_scale == 1.0


class Frozen(nn.Sequential):
    """A model with a buffer, a frozen weight and a tied one."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5))
        self.register_buffer("count", torch.zeros(2))
        self[1].bias.requires_grad_(False)
        self[2].weight = self[0].weight


def frozen(place: Path) -> None:
    """Save a model not all of whose tensors are trained."""
    trained = Frozen()
    params = [param for param in trained.parameters() if param.requires_grad]
    saved(place, trained, torch.optim.AdamW(params))


def backwards(place: Path) -> None:
    """Save an optimizer that lists parameters in another order than the model."""
    trained = model()
    saved(place, trained, torch.optim.AdamW(list(trained.parameters())[::-1]))


def flattened(place: Path) -> None:
    """Save a flattened optimizer, as torchtitan does."""
    trained = model()
    saved(place, trained, adamw(trained), flat=True)


def halved(place: Path) -> None:
    """Save a model in 16 bits."""
    trained = model().bfloat16()
    saved(place, nn.Sequential(Widened(), trained), torch.optim.AdamW(trained.parameters()))


class Widened(nn.Module):
    """Casts inputs."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.bfloat16()


def by_momentum(place: Path) -> None:
    """Save another kind of optimizer."""
    trained = model()
    saved(place, trained, torch.optim.SGD(trained.parameters(), momentum=0.5))


def plain(place: Path) -> None:
    """Save what a config suffices for."""
    trained = model()
    saved(place, trained, adamw(trained))


@pytest.mark.parametrize(
    ("save", "changes", "message"),
    [
        (frozen, {}, "missing: whether count, 1.bias, 2.weight are frozen weights, buffers, or"),
        (backwards, {}, "missing: the order of the parameters: its param groups have another one"),
        (flattened, {}, "missing: the order of the parameters: its optimizer is flattened"),
        (halved, {}, r"missing: fp32 master weights of 1\.0\.weight"),
        (by_momentum, {}, "missing: the hyper-parameters of torch's Adam"),
        (plain, {"optimizer": {"type": "AdamW"}}, "missing: the kind of the optimizer"),
        (plain, {"scheduler": {"type": "WarmupLR"}}, "missing: the state of the learning rate sch"),
        (plain, {"fp16": {"enabled": True}, "bf16": {}}, "missing: the state of the loss scaler"),
        (plain, {"bf16": {"enabled": True, "bf16_optimizer_states": True}}, "keeps for bf16.bf16_"),
        (plain, {"curriculum_learning": {}}, "missing: what an engine keeps for curriculum_lear"),
        (plain, {"gradient_clipping": "auto"}, r'values that "auto" stands for \(gradient_clipp'),
        (plain, {"zero_optimization": {}}, "missing: the ZeRO stage: the config sets none"),
        (frozen, {"scheduler": {}}, "or tied to other weights; the state of the learning rate"),
    ],
)
def test_what_is_missing_is_listed(
    save: Callable[[Path], None], changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save(tmp_path)
    config = config_file(tmp_path, **changes)
    with pytest.raises(UnsupportedError, match=f"{message}.*: give like=RUN"):
        streamshard.repartition(
            tmp_path / "dcp", tmp_path / "out", world_size=2, ds_config_file=config
        )
    assert not (tmp_path / "out").exists()


def test_without_a_config_the_message_names_it_where_it_may_do(tmp_path: Path) -> None:
    plain(tmp_path)
    with pytest.raises(UnsupportedError, match="ds_config_file= with the job's config may do"):
        streamshard.convert(tmp_path / "dcp", tmp_path / "out.zarr")
    with pytest.raises(UsageError, match="give world_size="):
        streamshard.repartition(
            tmp_path / "dcp", tmp_path / "out", ds_config_file=config_file(tmp_path)
        )
