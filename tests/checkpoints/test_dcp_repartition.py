"""Distributed checkpoints of PyTorch become ZeRO's files, with a reference or the job's config."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

import streamshard
from streamshard.errors import DisagreementError, StreamshardError, UnsupportedError, UsageError
from tests.fabricated import edit, load, wrapped, write
from tests.fabricated_dcp import Saved, adamw, mesh
from tests.job import Job, buffers

GROUPS = [[name for name, _ in group] for group in Job().groups]
BESIDE = {
    "old.weight": torch.randn(5, 3),
    "old.bias": torch.randn(1),
    **{name: tensor.clone() for name, tensor in buffers().items()},
}


def saved(job: Job, **given: Any) -> Saved:  # noqa: ANN401
    """Make up a distributed checkpoint of a job's model, with other values than the job has."""
    cut = {name: mesh(shape, [2] * len(shape)) for name, shape in job.shapes.items()}
    options: dict[str, Any] = {"buffers": BESIDE, "groups": GROUPS[::-1], "cut": cut, **given}
    made = adamw(job.shapes, **options)
    # FSDP saves what is tied under each of its names.
    (key,) = (k for k, path in made.paths.items() if path[-1] == "embed.weight")
    tied = key.replace("embed.weight", "head.weight")
    made.tensors[tied] = made.tensors[key]
    made.paths[tied] = (*made.paths[key][:-1], "head.weight")
    return made


def require_moved(made: Saved, out: Path, dtype: torch.dtype) -> None:
    """Compare what an opened ZeRO checkpoint holds with what was saved."""
    seen = set()
    with streamshard.open(out) as found:
        for key, (tensor, _) in made.tensors.items():
            text = ".".join(map(str, made.paths[key]))
            if ".state." in text:
                name, state = text.split(".state.")[1].rsplit(".", 1)
                if state != "step":
                    assert np.array_equal(found[name].tensors[state][...], tensor.numpy()), text
                    seen.add((name, state))
                continue
            name = made.paths[key][-1]
            if name == "head.weight":
                assert found[name].tied_to == "embed.weight"
            elif name not in BESIDE:
                assert np.array_equal(found[name].tensors["fp32"][...], tensor.numpy()), text
                seen.add((name, "fp32"))
            else:
                wanted = tensor.to(dtype) if name.startswith("old.") else tensor
                assert torch.equal(found[name].tensors["module"].torch(), wanted), text
        assert {(n, s) for n, p in found.items() for s in p.states if not p.tied_to} == seen
        assert len(seen) == 3 * len(Job().shapes)


def test_values_are_the_distributed_checkpoint_s(tmp_path: Path) -> None:
    """Of one that was nested in another way than those in `test_laws_of_readers` are."""
    job, out = Job(stage=2, world_size=2), tmp_path / "out"
    reference, dcp = write(job, tmp_path / "like"), tmp_path / "dcp"
    made = saved(job, style="titan")
    made.write(dcp)
    streamshard.repartition(dcp, out, world_size=3, zero_stage=3, like=reference, verify=True)
    require_moved(made, out, job.dtype)
    shown = streamshard.inspect(out)
    assert (shown.world_size, shown.zero_stage) == (3, 3)
    assert [group.states["step"] for group in shown.groups] == [3.0, 3.0]
    # The group that was first saved is the second one of the reference.
    assert [group.hyper_parameters["lr"] for group in shown.groups] == [5e-4, 1e-3]


def test_what_was_made_differs_in_nothing_but_a_step_would(tmp_path: Path) -> None:
    reference, out = write(Job(), tmp_path / "like"), tmp_path / "out"
    saved(Job()).write(tmp_path / "dcp")
    saved(Job(), step=4.0).write(tmp_path / "later")
    streamshard.repartition(tmp_path / "dcp", out, world_size=3, like=reference)
    found = streamshard.diff(tmp_path / "dcp", out)
    # Frozen weights are cast; their values differ, and so do their dtypes.
    assert {t.name for t in found.changed} <= {"module/old.weight", "module/old.bias"}
    assert {d.name for d in found.differences} == {"module/old.weight", "module/old.bias"}
    with_like = streamshard.verify(out, against=tmp_path / "dcp", like=reference)
    # There the reference tells that they are kept in 16 bits.
    assert with_like.is_good
    assert with_like.tensors > len(found.tensors)
    later = streamshard.diff(tmp_path / "later", out)
    assert any("4.0 here, 3.0 there" in one.message for one in later.differences)


def test_an_optimizer_that_keeps_no_states_begins_without_any(tmp_path: Path) -> None:
    """As SGD without momentum, or any before its first step."""
    made = saved(Job())
    for key in [key for key in made.tensors if ".state." in key]:
        del made.tensors[key], made.paths[key]
    made.write(tmp_path / "dcp")
    reference = write(Job(), tmp_path / "like")
    out = tmp_path / "out"
    streamshard.repartition(tmp_path / "dcp", out, world_size=3, like=reference, verify=True)
    shown = streamshard.inspect(out).groups
    assert [group.states for group in shown] == [{}, {}]
    assert [group.hyper_parameters["lr"] for group in shown] == [5e-4, 1e-3]


@pytest.mark.parametrize(("stage", "layout"), [(1, "accelerate"), (2, "titan"), (3, "torch")])
def test_what_is_exported_comes_back(stage: int, layout: str, tmp_path: Path) -> None:
    run = write(Job(stage=stage), tmp_path / "run")
    report = streamshard.export(run, tmp_path / "dcp", format="dcp", layout=layout)
    assert report.tensors
    steps = [*(tmp_path / "dcp").glob("step-*")]
    source = steps[0] if steps else tmp_path / "dcp"
    assert streamshard.verify(source).is_good
    assert not streamshard.diff(source, run).changed
    streamshard.repartition(source, tmp_path / "out", world_size=3, like=run, verify=True)
    streamshard.repartition(tmp_path / "out", tmp_path / "back", world_size=2)
    found = streamshard.verify(tmp_path / "back", against=run)
    assert [d for d in found.differences if not d.name.startswith("file/")] == []
    assert found.tensors > 20


def test_the_reference_s_training_state_comes_along(tmp_path: Path) -> None:
    rng = torch.arange(100, dtype=torch.uint8)
    reference = write(Job(client_state={"rng": rng, "note": "kept"}), tmp_path / "like")
    streamshard.convert(reference, tmp_path / "like.zarr", codec="zstd")
    saved(Job()).write(tmp_path / "dcp")
    for number, like in enumerate((reference, tmp_path / "like.zarr")):
        out = tmp_path / f"out{number}"
        streamshard.repartition(tmp_path / "dcp", out, world_size=2, like=like)
        held = load(out / "dcp" / "mp_rank_00_model_states.pt")
        assert torch.equal(held["rng"], rng)
        assert held["note"] == "kept"


def without(made: Saved, name: str) -> Saved:
    del made.tensors[f"model.{name}"]
    del made.paths[f"model.{name}"]
    return made


def halved() -> Saved:
    made = saved(Job())
    tensor, boxes = made.tensors["model.embed.bias"]
    made.tensors["model.embed.bias"] = tensor.bfloat16(), boxes
    return made


def without_states(beside: str = ".") -> Saved:
    made = saved(Job())
    for key in [key for key in made.tensors if ".state.embed.bias." in key or key == beside]:
        del made.tensors[key], made.paths[key]
    return made


def model_alone() -> Saved:
    tensors = saved(Job()).tensors
    return Saved({key: held for key, held in tensors.items() if key.startswith("model.")})


LORA = {**BESIDE, "lora.weight": torch.zeros(3)}
NARROW = {**BESIDE, "norm.count": torch.zeros_like(BESIDE["norm.count"], dtype=torch.int16)}
LONGER = {**BESIDE, "rotary.inv_freq": torch.zeros(9)}
ONE_GROUP = [[*GROUPS[0], *GROUPS[1]]]
THREE_GROUPS = [GROUPS[0][:1], GROUPS[0][1:], GROUPS[1]]
REFUSED: list[tuple[Saved, type[StreamshardError], str]] = [
    (without(saved(Job()), "norm.count"), DisagreementError, r"lacks what .* has: norm\.count"),
    (saved(Job(), buffers=LORA), DisagreementError, r"the checkpoint .* lacks what is in it: lora"),
    (saved(Job(), buffers=LONGER), DisagreementError, r"'rotary\.inv_freq' is \[9\], in .* \[8\]"),
    (saved(Job(), buffers=NARROW), DisagreementError, r"count' is int16 \[.*, in .* int64 \["),
    (saved(Job(), groups=ONE_GROUP), StreamshardError, "are in one param group, in .* in two"),
    (saved(Job(), groups=THREE_GROUPS), StreamshardError, "in .* they are in one param group"),
    (saved(Job(), groups=GROUPS[:1]), StreamshardError, "is in no param group of it"),
    (halved(), UnsupportedError, r"'embed\.bias' is bfloat16 and .* groups of one dtype"),
    (without_states(), UnsupportedError, r"no states of embed\.bias, which no gradient has"),
    (without_states("model.embed.bias"), UnsupportedError, "its optimizer lists embed.bias, which"),
    (model_alone(), UnsupportedError, "holds no states of an optimizer"),
]


@pytest.mark.parametrize(("made", "kind", "message"), REFUSED)
def test_what_does_not_fit_the_reference_is_refused(
    made: Saved, kind: type[StreamshardError], message: str, tmp_path: Path
) -> None:
    reference = write(Job(), tmp_path / "like")
    made.write(tmp_path / "dcp")
    with pytest.raises(kind, match=f"dcp: .*{message}"):
        streamshard.convert(tmp_path / "dcp", tmp_path / "o.zarr", like=reference)


def test_a_reference_in_parts_is_refused(tmp_path: Path) -> None:
    reference = write(Job(parts=2), tmp_path / "like")
    saved(Job()).write(tmp_path / "dcp")
    with pytest.raises(UnsupportedError, match="cut by tensor or pipeline parallelism"):
        streamshard.convert(tmp_path / "dcp", tmp_path / "o.zarr", like=reference)


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


# With the job's config alone ----------------------------------------------------------------------

CONFIG: dict[str, Any] = {
    "train_batch_size": 6,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
}


def model() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3))


def by_shape(trained: nn.Module) -> torch.optim.Optimizer:
    """Make param groups of matrices and of the rest, each in the model's order."""
    params = list(trained.parameters())
    groups = [
        {"params": [p for p in params if p.ndim > 1], "lr": 0.25},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups)


def trained_and_saved(
    place: Path, trained: nn.Module, optimizer: torch.optim.Optimizer, *, flat: bool = False
) -> dict[str, Any]:
    """Train a step and save as torch does; returns the state dicts."""
    for param in trained.parameters():  # after a backward pass, no fork could do one
        param.grad = torch.randn_like(param) if param.requires_grad else None
    optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, states = get_state_dict(trained, optimizer, options=options)
    save_distributed(
        {"model": weights, "optimizer": states}, checkpoint_id=place / "dcp", no_dist=True
    )
    return {"model": weights, **states}


def config_file(place: Path, **changes: object) -> Path:
    path = place / "ds.json"
    path.write_text(json.dumps({**CONFIG, **changes}))
    return path


@pytest.mark.parametrize("flat", [False, True])
def test_parameters_without_states_keep_nothing_but_zero_from_being_written(
    flat: bool, tmp_path: Path
) -> None:
    """No gradient has reached an unused head, or an expert without tokens."""
    trained, dcp = model(), tmp_path / "dcp"
    trained[2].bias.requires_grad_(False)
    wanted = trained_and_saved(tmp_path, trained, by_shape(trained), flat=flat)
    assert [set(group.states) for group in streamshard.inspect(dcp).groups].count(set()) == 1
    assert streamshard.verify(dcp).is_good
    streamshard.export(dcp, tmp_path / "weights", format="safetensors")
    streamshard.export(dcp, tmp_path / "again", format="dcp")
    assert not streamshard.diff(tmp_path / "again", dcp).differences
    with streamshard.open(dcp) as found:
        assert found.keys() == wanted["model"].keys()
        assert "exp_avg" not in found["2.bias"].tensors
        assert torch.equal(found["2.bias"].tensors["fp32"].torch(), wanted["model"]["2.bias"])
    with pytest.raises(UnsupportedError, match=r"missing: the optimizer's states of 2\.bias"):
        streamshard.repartition(
            dcp, tmp_path / "out", world_size=2, ds_config_file=config_file(tmp_path)
        )


def test_weights_are_read_next_to_states_by_number(tmp_path: Path) -> None:
    """`optimizer.state_dict()` as it is, which names no parameters."""
    trained, dcp = model(), tmp_path / "dcp"
    optimizer = by_shape(trained)
    trained_and_saved(tmp_path / "named", trained, optimizer)
    states = {"model": trained.state_dict(), "optimizer": optimizer.state_dict()}
    save_distributed(states, checkpoint_id=dcp, no_dist=True)
    assert any("get_optimizer_state_dict" in n for n in streamshard.inspect(dcp).notes)
    assert streamshard.verify(dcp).is_good
    streamshard.export(dcp, tmp_path / "weights", format="safetensors")
    with streamshard.open(dcp) as found:
        for name, tensor in trained.state_dict().items():
            assert torch.equal(found[name].tensors["module"].torch(), tensor)
    completed: list[dict[str, Any]] = [
        {"ds_config_file": config_file(tmp_path)},
        {"like": write(Job(), tmp_path / "like")},
    ]
    for known in completed:
        with pytest.raises(UnsupportedError, match=r"what .*get_optimizer_state_dict returns"):
            streamshard.repartition(dcp, tmp_path / "out", world_size=2, **known)


def test_tensors_in_the_format_of_safetensors_are_named(tmp_path: Path) -> None:
    trained = model()
    writer = FileSystemWriter(tmp_path, serialization_format=SerializationFormat.SAFETENSORS)
    save_distributed({"model": trained.state_dict()}, storage_writer=writer, no_dist=True)
    with pytest.raises(UnsupportedError, match="in the format of safetensors, and"):
        streamshard.inspect(tmp_path)


class Frozen(nn.Sequential):
    """A model with a buffer, a frozen weight and a tied one."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5))
        self.register_buffer("count", torch.zeros(2))
        self[1].bias.requires_grad_(False)
        self[2].weight = self[0].weight


class Widened(nn.Module):
    """Casts inputs."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.bfloat16()


def frozen(place: Path) -> None:
    trained = Frozen()
    params = [param for param in trained.parameters() if param.requires_grad]
    trained_and_saved(place, trained, torch.optim.AdamW(params))


def backwards(place: Path) -> None:
    """Save an optimizer that lists parameters in another order than the model."""
    trained = model()
    trained_and_saved(place, trained, torch.optim.AdamW(list(trained.parameters())[::-1]))


def in_16_bits(place: Path) -> None:
    trained = model().bfloat16()
    whole = nn.Sequential(Widened(), trained)
    trained_and_saved(place, whole, torch.optim.AdamW(trained.parameters()))


def by_momentum(place: Path) -> None:
    trained = model()
    trained_and_saved(place, trained, torch.optim.SGD(trained.parameters(), momentum=0.5))


def by(kind: type[torch.optim.Optimizer], place: Path, **options: Any) -> None:  # noqa: ANN401
    trained = model()
    trained_and_saved(place, trained, kind(trained.parameters(), **options))


def by_older_torch(place: Path) -> None:
    """Save AdamW as torch before 2.7 does, which says nothing about weight decay."""
    trained = model()
    optimizer = torch.optim.AdamW(trained.parameters())

    def forget(_: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        for group in state["param_groups"]:
            del group["decoupled_weight_decay"]

    optimizer.register_state_dict_post_hook(forget)
    trained_and_saved(place, trained, optimizer)


def plain(place: Path, *, flat: bool = False) -> None:
    """Save what a config suffices for, unless the optimizer is flattened, as torchtitan's is."""
    trained = model()
    trained_and_saved(place, trained, by_shape(trained), flat=flat)


@pytest.mark.parametrize(
    ("save", "changes", "message"),
    [
        (frozen, {}, "missing: whether count, 1.bias, 2.weight are frozen weights, buffers, or"),
        (backwards, {}, "missing: the order of the parameters: its param groups have another one"),
        (
            partial(plain, flat=True),
            {},
            "missing: the order of the parameters: its optimizer is flattened",
        ),
        (in_16_bits, {}, r"missing: fp32 master weights of 1\.0\.weight"),
        (by_momentum, {}, "missing: the hyper-parameters of torch's Adam"),
        (partial(by, torch.optim.NAdam), {}, "torch's Adam, .*; an optimizer that keeps mu_prod"),
        (partial(by, torch.optim.RAdam), {}, "missing: the hyper-parameters of torch's Adam"),
        (partial(by, torch.optim.Adamax), {}, "; an optimizer that keeps exp_inf, which torch's"),
        (
            partial(by, torch.optim.Adam, weight_decay=0.1),
            {},
            r"the config's way of weight decay, decoupled \(AdamW\): the source's is added to",
        ),
        (
            partial(by, torch.optim.AdamW),
            {"optimizer": {"type": "Adam", "params": {"torch_adam": True, "adam_w_mode": False}}},
            r"way of weight decay, added to the gradients \(Adam\): the source's is decoupled",
        ),
        (by_older_torch, {}, r"decoupled \(AdamW\): the source's is not recorded"),
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


@pytest.mark.parametrize(
    ("kind", "options", "mode"),
    [
        (torch.optim.Adam, {}, True),  # without weight decay both are the same
        (torch.optim.Adam, {"weight_decay": 0.1}, False),
        (torch.optim.AdamW, {"amsgrad": True}, True),
    ],
)
def test_adams_of_the_config_s_kind_are_taken(
    kind: type[torch.optim.Optimizer], options: dict[str, Any], mode: bool, tmp_path: Path
) -> None:
    by(kind, tmp_path, **options)
    params = {"torch_adam": True, "adam_w_mode": mode}
    config = config_file(tmp_path, optimizer={"type": "Adam", "params": params})
    streamshard.repartition(
        tmp_path / "dcp", tmp_path / "out", world_size=2, ds_config_file=config, verify=True
    )


@pytest.mark.parametrize(
    ("save", "message"),
    [
        (partial(by, torch.optim.RAdam), "its optimizer has betas, that of .* another kind"),
        (partial(by, torch.optim.NAdam), "another kind|mu_product|exp_inf"),
        (partial(by, torch.optim.Adamax), "another kind|mu_product|exp_inf"),
        (partial(by, torch.optim.Adam, weight_decay=0.1), "_decay False, that of .* True: another"),
        (partial(by, torch.optim.Adam), ""),
        (partial(by, torch.optim.AdamW), ""),
        (by_older_torch, ""),
    ],
)
def test_a_reference_of_adamw_takes_no_other_kind(
    save: Callable[[Path], None], message: str, references: list[Path], tmp_path: Path
) -> None:
    save(tmp_path)
    for like in references:
        out = tmp_path / like.name
        with pytest.raises(StreamshardError, match=message) if message else nullcontext():
            streamshard.repartition(tmp_path / "dcp", out, world_size=2, like=like)


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Make checkpoints of one job with AdamW, which tell that in more and in fewer ways."""
    place = tmp_path_factory.mktemp("references")
    by(torch.optim.AdamW, place)
    ways = [fresh, without_the_way_of_weight_decay, of_deepspeed]
    made = {place / change.__name__: change for change in ways}
    for like, change in made.items():
        config = config_file(place)
        streamshard.repartition(place / "dcp", like, world_size=2, ds_config_file=config)
        for path in like.glob("dcp/*optim_states.pt"):
            edit(path, change)
    return [*made]


def fresh(held: dict[str, Any]) -> None:
    """Make it what a job saves before its first step."""
    wrapped(held["optimizer_state_dict"])["state"].clear()


def of_deepspeed(held: dict[str, Any]) -> None:
    fresh(held)
    for group in wrapped(held["optimizer_state_dict"])["param_groups"]:
        for key in group.keys() - {"lr", "betas", "eps", "weight_decay", "params"}:
            del group[key]
        group["bias_correction"] = True


def without_the_way_of_weight_decay(held: dict[str, Any]) -> None:
    for group in wrapped(held["optimizer_state_dict"])["param_groups"]:
        del group["decoupled_weight_decay"]


def test_without_a_config_the_message_names_it_where_it_may_do(tmp_path: Path) -> None:
    plain(tmp_path)
    with pytest.raises(UnsupportedError, match="ds_config_file= with the job's config may do"):
        streamshard.convert(tmp_path / "dcp", tmp_path / "out.zarr")
    with pytest.raises(UsageError, match="give world_size="):
        streamshard.repartition(
            tmp_path / "dcp", tmp_path / "out", ds_config_file=config_file(tmp_path)
        )
