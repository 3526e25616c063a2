"""Distributed checkpoints of PyTorch, read without torch; torch itself wrote and loads them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

import streamshard
from streamshard.cli.main import main
from streamshard.errors import SourceError, UnsupportedError
from tests.fabricated_dcp import Saved, adamw, mesh, rows, save_index

SHAPES = {"up.weight": (7, 5), "up.bias": (7,), "down.weight": (3, 7)}
BUFFERS = {"norm.running": torch.arange(4.0), "norm.count": torch.tensor(3)}


def require_equal(saved: Saved, path: Path) -> None:
    """Compare what is opened with what was saved, under its name and its state."""
    seen = 0
    with streamshard.open(path) as found:
        for key, (tensor, _) in saved.tensors.items():
            parts = saved.paths[key]
            if ".step" in key:
                continue
            if "state" in key:
                name, state = ".".join(map(str, parts)).split("state.")[1].rsplit(".", 1)
                held = found[name].tensors[state]
            else:
                held = found[parts[-1]].tensors["fp32" if parts[-1] in SHAPES else "module"]
            assert np.array_equal(np.asarray(held[...]), tensor.numpy()), key
            seen += 1
    assert seen >= len(SHAPES)


@pytest.mark.parametrize("style", ["torch", "titan", "tutorial", "both"])
def test_every_way_of_nesting_is_read(style: str, tmp_path: Path) -> None:
    saved = adamw(SHAPES, buffers=BUFFERS, style=style)
    saved.write(tmp_path / "c")
    require_equal(saved, tmp_path / "c")
    shown = streamshard.inspect(tmp_path / "c")
    (group,) = shown.groups
    assert group.states["step"] == 3.0
    assert group.hyper_parameters["betas"] == [0.9, 0.999]
    assert shown.weights == len(BUFFERS)


@pytest.mark.parametrize("parts", [(1, 1), (2, 1), (1, 3), (3, 2), (7, 5)])
def test_boxes_of_a_mesh_are_put_together(parts: tuple[int, int], tmp_path: Path) -> None:
    cut = {name: rows(shape, 2) for name, shape in SHAPES.items()}
    cut["up.weight"] = mesh(SHAPES["up.weight"], parts)
    saved = adamw(SHAPES, cut=cut, files=3)
    saved.write(tmp_path)
    require_equal(saved, tmp_path)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_is_fabricated_here_torch_loads(tmp_path: Path) -> None:
    saved = adamw(
        SHAPES, buffers=BUFFERS, cut={n: mesh(s, [2] * len(s)) for n, s in SHAPES.items()}
    )
    saved.write(tmp_path)
    state = {key: torch.zeros_like(tensor) for key, (tensor, _) in saved.tensors.items()}
    load_distributed(state, checkpoint_id=tmp_path, no_dist=True)
    for key, (tensor, _) in saved.tensors.items():
        assert torch.equal(state[key], tensor)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_torch_saves_of_one_process_is_read(tmp_path: Path) -> None:
    saved = adamw(SHAPES, buffers=BUFFERS)
    nested: dict[str, object] = {}
    for key, parts in saved.paths.items():
        value = saved.tensors[key][0] if key in saved.tensors else saved.values[key]
        at = nested
        for part in parts[:-1]:
            at = at.setdefault(part, {})  # type: ignore[assignment]
        at[parts[-1]] = value
    groups = nested["optimizer"]["param_groups"]  # type: ignore[index]
    nested["optimizer"]["param_groups"] = [groups[n] for n in sorted(groups)]  # type: ignore[index]
    save_distributed(nested, checkpoint_id=tmp_path / "c", no_dist=True)
    require_equal(saved, tmp_path / "c")


def test_accelerate_keeps_model_and_optimizer_apart(tmp_path: Path) -> None:
    saved = adamw(SHAPES, buffers=BUFFERS)
    is_model = {key: key.startswith("model.") for key in saved.paths}
    for name, wanted in (("pytorch_model_fsdp_0", True), ("optimizer_0", False)):
        Saved(
            {k: v for k, v in saved.tensors.items() if is_model[k] is wanted},
            {k: v for k, v in saved.values.items() if is_model[k] is wanted},
            {k: v for k, v in saved.paths.items() if is_model[k] is wanted},
        ).write(tmp_path / name)
    require_equal(saved, tmp_path)
    shown = streamshard.inspect(tmp_path)
    assert {file.path for file in shown.file_list} >= {
        "pytorch_model_fsdp_0/.metadata", "optimizer_0/__1_0.distcp"
    }  # fmt: skip


def test_groups_keep_their_own_options(tmp_path: Path) -> None:
    order = [["up.weight", "down.weight"], ["up.bias"]]
    for style in ("torch", "titan"):
        adamw(SHAPES, groups=order, style=style).write(tmp_path / style)
        found = streamshard.inspect(tmp_path / style)
        assert [g.hyper_parameters["weight_decay"] for g in found.groups] == [0.1, 0.0]
        assert {p.name: p.group for p in found.parameters} == {
            "up.weight": 0, "down.weight": 0, "up.bias": 1
        }  # fmt: skip


def test_weights_of_data_parallel_wrappers_lose_the_prefix(tmp_path: Path) -> None:
    shapes = {f"module.{name}": shape for name, shape in SHAPES.items()}
    adamw(shapes).write(tmp_path)
    with streamshard.open(tmp_path) as found:
        assert set(found) == set(SHAPES)
        assert "exp_avg" in found["up.bias"].tensors


def test_tied_names_share_an_item(tmp_path: Path) -> None:
    saved = adamw(SHAPES)
    metadata = saved.write(tmp_path)
    listed, stored = metadata.state_dict_metadata, metadata.storage_data
    listed["model.head.weight"] = listed["model.up.weight"]
    for index, info in list(stored.items()):
        if index.fqn == "model.up.weight":
            stored[type(index)("model.head.weight", index.offset, index.index)] = info
    save_index(metadata, tmp_path)
    with streamshard.open(tmp_path) as found:
        assert found["head.weight"].tied_to == "up.weight"


def test_steps_that_differ_inside_a_group_are_refused(tmp_path: Path) -> None:
    saved = adamw(SHAPES)
    saved.tensors["optimizer.state.up.bias.step"] = torch.tensor(4.0), [((), ())]
    saved.write(tmp_path)
    with pytest.raises(SourceError, match=r"'up\.bias' of the same param group"):
        streamshard.inspect(tmp_path)


def test_options_that_are_kept_twice_must_agree(tmp_path: Path) -> None:
    saved = adamw(SHAPES, style="both")
    saved.values["optimizer.param_groups.up.bias.lr"] = 0.5
    saved.write(tmp_path)
    with pytest.raises(SourceError, match=r"up\.bias\.lr' is 0\.5, in param group 0 it is 0\.001"):
        streamshard.inspect(tmp_path)


def test_two_models_are_refused(tmp_path: Path) -> None:
    saved = adamw(SHAPES)
    copies = {k.replace("model.", "module.", 1): v for k, v in saved.tensors.items()}
    saved.tensors |= {k: v for k, v in copies.items() if k.startswith("module.")}
    saved.paths |= {k: ("module", k.removeprefix("module.")) for k in copies if k[:2] == "mo"}
    saved.write(tmp_path)
    with pytest.raises(UnsupportedError, match="2 state dicts that may be the model's"):
        streamshard.inspect(tmp_path)


@pytest.mark.parametrize("verb", ["convert", "repartition"])
def test_what_a_job_needs_besides_is_asked_for(verb: str, tmp_path: Path) -> None:
    adamw(SHAPES).write(tmp_path / "c")
    sizes = {"world_size": 2} if verb == "repartition" else {}
    with pytest.raises(UnsupportedError, match=r"order of the parameters.*like=RUN"):
        getattr(streamshard, verb)(tmp_path / "c", tmp_path / "out", **sizes)
    assert not (tmp_path / "out").exists()


def test_weights_are_exported(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    saved = adamw(SHAPES, buffers=BUFFERS)
    saved.write(tmp_path / "c")
    streamshard.export(tmp_path / "c", tmp_path / "out", dtype="fp32")
    held = load_file(tmp_path / "out" / "model.safetensors")
    assert held.keys() == SHAPES.keys() | BUFFERS.keys()
    for name, tensor in held.items():
        assert torch.equal(tensor, saved.tensors[f"model.{name}"][0])


def test_inspection_is_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adamw(SHAPES).write(tmp_path)
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "dcp"
