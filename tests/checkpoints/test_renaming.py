"""Rules that rename the tensors of distributed checkpoints, and split or join fused ones."""

import json
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import streamshard
from streamshard.errors import CorruptFileError, DisagreementError, UnsupportedError, UsageError
from tests.cli.conftest import in_process
from tests.fabricated import write
from tests.fabricated_dcp import adamw, mesh, save_index
from tests.job import Job
from tests.unpacking import unpack

SAVES = Path(__file__).parent / "megatron_saves"
WHOLE, FLATTENED = "0.16.1-fully_reshardable", "0.13.1-fully_sharded_model_space"
PAGE = Path(__file__).parents[2] / "docs" / "reading.md"
STATES = ("fp32", "exp_avg", "exp_avg_sq")
HEAD, QUERIES, GROUPS = 4, 2, 2
"""Of the model in the archives: rows of a head, query heads of a group, groups."""
PLAIN = {
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "decoder.final_layernorm.weight": "norm.weight",
    "embedding.word_embeddings.weight": "embed_tokens.weight",
    "output_layer.weight": "lm_head.weight",
}
"""Names in a layer, or in the model."""


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("megatron")
    for name in (WHOLE, FLATTENED):
        unpack(SAVES / f"{name}.tar.xz", place)
    return place


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    path = tmp_path / "llama.rules"
    path.write_text(llama_rules())
    return path


def names(rules: Path) -> dict[str, Any]:
    return {"source": {"rename": rules}}


def llama_rules() -> str:
    """Return the rules in the documents, for the model in the archives."""
    (rules,) = re.findall(r"```text\n(decoder.*?)```", PAGE.read_text(), re.DOTALL)
    return str(rules).replace("8 x 4:1:1", f"{GROUPS} x {QUERIES}:1:1")


def held_in(source: Path, state: str) -> dict[str, torch.Tensor]:
    with streamshard.open(source) as found:
        return {name: parameter.tensors[state].torch() for name, parameter in found.items()}


def as_llama(
    held: Mapping[str, torch.Tensor], plain: Mapping[str, str] = PLAIN
) -> dict[str, torch.Tensor]:
    """Take fused tensors apart as Megatron's converters do, with reshapes of torch."""
    layers = {
        name.replace("layers.", f"layers.{number}."): layer
        for name, tensor in held.items()
        if re.search(r"layers\.\D.*weight", name)
        for number, layer in enumerate(tensor)
    }
    made = {}
    for name, tensor in {**held, **layers}.items():
        if re.search(r"layers\.\D.*weight", name):
            continue
        layer = re.search(r"layers\.(\d+)\.", name)
        start = f"model.layers.{layer[1]}." if layer else "model."
        if name.endswith("linear_qkv.weight"):
            fused = tensor.reshape(GROUPS, QUERIES + 2, HEAD, -1)
            cuts = {"q": slice(QUERIES), "k": slice(QUERIES, -1), "v": slice(-1, None)}
            for part, cut in cuts.items():
                whole = fused[:, cut].reshape(-1, tensor.shape[1])
                made[f"{start}self_attn.{part}_proj.weight"] = whole
        elif name.endswith("linear_fc1.weight"):
            gate, up = tensor.chunk(2)
            made |= {f"{start}mlp.gate_proj.weight": gate, f"{start}mlp.up_proj.weight": up}
        else:
            own = name.removeprefix(f"decoder.layers.{layer[1]}." if layer else "")
            new = start + plain[own] if own in plain else name
            made[new.replace("model.lm_head", "lm_head")] = tensor
    return made


def require_equal(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("name", [WHOLE, FLATTENED])
def test_megatrons_tensors_are_exported_as_llamas(
    name: str, saves: Path, llama: Path, tmp_path: Path
) -> None:
    """The oracle are reshapes of torch, of what is opened, which is what Megatron loads."""
    if name == FLATTENED:  # it has all layers in one tensor
        llama.write_text(llama.read_text().replace("decoder.layers.*.", "decoder.layers."))
    report = streamshard.export(saves / name, tmp_path / "out", facts=names(llama), verify=True)
    wanted = as_llama(held_in(saves / name, "fp32"))
    require_equal(load_file(tmp_path / "out" / "model.safetensors"), wanted)
    notes = " ".join(report.notes)
    counts = "1 tensor to 6" if name == FLATTENED else "2 tensors to 6"
    assert f"({counts}, a part has 4 rows)" in notes
    assert "No rule is for" in notes
    assert "layernorm.bias" in notes


SHAPES = {"h.0.q": (8, 6), "h.0.k": (4, 6), "h.0.v": (4, 6), "stack": (3, 4, 2), "norm": (6,)}
JOIN = "h.*.{q,k,v} -> layers.*.qkv : 2 x 2:1:1"


@pytest.mark.parametrize("style", ["torch", "titan"])
def test_tensors_are_joined_and_layers_unstacked(
    style: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = {name: mesh(shape, [2] * len(shape)) for name, shape in SHAPES.items()}
    adamw(SHAPES, cut=cut, style=style).write(tmp_path / "dcp")
    rules = tmp_path / "rules"
    rules.write_text(f"{JOIN}  # fused\n\nstack -> layers.*.w\n")
    streamshard.export(tmp_path / "dcp", tmp_path / "out", facts=names(rules), verify=True)
    wanted = {state: joined(held_in(tmp_path / "dcp", state)) for state in STATES}
    require_equal(load_file(tmp_path / "out" / "model.safetensors"), wanted["fp32"])
    monkeypatch.setattr("tests.fabricated.buffers", dict)
    shapes = tuple((name, tuple(tensor.shape)) for name, tensor in wanted["fp32"].items())
    write(Job(groups=(shapes,), frozen=(), tied={}), tmp_path / "like")
    streamshard.repartition(
        tmp_path / "dcp",
        tmp_path / "zero",
        world_size=3,
        like=tmp_path / "like",
        facts=names(rules),
    )
    for state in STATES:
        require_equal(held_in(tmp_path / "zero", state), wanted[state])


def joined(held: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    q, k, v = (held[f"h.0.{name}"].reshape(2, -1, 6) for name in "qkv")
    made = {"layers.0.qkv": torch.cat([q, k, v], 1).reshape(-1, 6), "norm": held["norm"]}
    return made | {f"layers.{number}.w": layer for number, layer in enumerate(held["stack"])}


def test_what_rules_make_is_compared_before_and_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.fabricated.buffers", dict)
    adamw(SHAPES).write(tmp_path / "dcp")
    wanted = joined(held_in(tmp_path / "dcp", "fp32"))
    shapes = tuple((name, tuple(tensor.shape)) for name, tensor in wanted.items())
    write(Job(groups=(shapes,), frozen=(), tied={}), tmp_path / "like")
    dcp, zero, rules = tmp_path / "dcp", tmp_path / "zero", tmp_path / "rules"
    rules.write_text(f"{JOIN}\nstack -> layers.*.w\n")
    streamshard.repartition(dcp, zero, world_size=3, like=tmp_path / "like", facts=names(rules))

    assert streamshard.verify(dcp, against=zero, facts=names(rules)).is_good
    assert streamshard.diff(dcp, zero, facts=names(rules)).is_equal
    assert not streamshard.diff(dcp, zero).is_equal
    streamshard.export(dcp, tmp_path / "model", facts=names(rules))
    (told,) = [
        n
        for n in streamshard.diff(dcp, tmp_path / "model", facts=names(rules)).notes
        if "only" in n
    ]
    assert told.startswith("One side is a model's weights in safetensors files, without")
    measured = streamshard.verify(dcp, facts=names(rules))
    seen = streamshard.inspect(dcp, facts=names(rules))
    assert {one.name for one in seen.parameters} == wanted.keys()
    assert seen.notes == measured.notes
    assert seen.notes[0] == f"Renamed: {JOIN} (3 tensors to 1, a part has 2 rows)."
    with streamshard.open(dcp, facts=names(rules)) as found:
        require_equal({name: one.fp32.torch() for name, one in found.items()}, wanted)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ("", "has no rule"),
        ("# nothing", "has no rule"),
        ("norm = y", "line 1: 'norm = y' is no rule"),
        ("norm -> a.{x,y} : 1", "2 names for 1 parts"),
        ("norm -> a.{x,y}", "braces need"),
        ("norm -> y : 2 x 1", "1 names for 1 parts"),
        ("norm -> {x,y}.{a,b} : 1:1", "one pair of braces"),
        ("{norm,b} -> {x,y} : 1:1", "one pair of braces"),
        ("norm -> {x,x} : 1:1", "twice in the braces"),
        ("norm -> {x,y} : 0 x 1:1", "at least 1"),
        ("h.*.q -> q", "too few stars"),
        ("h.{q,k}.x -> y.* : 1:1", "as many stars"),
        ("h.** -> y.**", "between two stars"),
        ("\nnone.* -> a.*", "line 2: 'none.* -> a.*' is for no tensor; there are h.0.q, "),
        ("norm -> stack", "'stack' and 'norm' both become 'stack'"),
        ("h.0.q -> a\nnorm -> a", "'h.0.q' and 'norm' both become 'a'"),
        ("norm -> a\nn*m -> b*", "lines 1 and 2 are both for 'norm'"),
        ("norm -> {a,b} : 4 x 1:1", r"of [6] has rows that cannot be divided into 4 groups of 2"),
        ("norm -> a.*.b.*", "line 1: 'norm' is [6]: it cannot be taken apart by 2 dimensions"),
        (
            "h.*.{q,k} -> y.* : 1 x 1:1",
            "so one that is joined with it is of [8, 6], not float32 of [4, 6]",
        ),
        ("h.*.{q,x} -> y.* : 1 x 1:1", "is to be joined with 'h.0.x', which is not there"),
    ],
)
def test_rules_that_do_not_fit_are_refused(rules: str, message: str, tmp_path: Path) -> None:
    adamw(SHAPES).write(tmp_path / "dcp")
    (tmp_path / "rules").write_text(rules)
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        streamshard.export(tmp_path / "dcp", tmp_path / "out", facts=names(tmp_path / "rules"))
    assert str(tmp_path / "rules") in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_parts_of_different_param_groups_are_not_joined(tmp_path: Path) -> None:
    saved = adamw(SHAPES, groups=[["h.0.q", "norm", "stack"], ["h.0.k", "h.0.v"]])
    saved.write(tmp_path / "dcp")
    (tmp_path / "rules").write_text(JOIN)
    with pytest.raises(UnsupportedError, match=r"'h\.0\.q' and 'h\.0\.k' are"):
        streamshard.export(tmp_path / "dcp", tmp_path / "out", facts=names(tmp_path / "rules"))


def test_parts_with_other_states_are_not_joined(tmp_path: Path) -> None:
    saved = adamw(SHAPES)
    del saved.tensors["optimizer.state.h.0.k.exp_avg_sq"]
    saved.write(tmp_path / "dcp")
    (tmp_path / "rules").write_text(JOIN)
    with pytest.raises(DisagreementError, match=r"'h\.0\.k' of the same param group not at all"):
        streamshard.export(tmp_path / "dcp", tmp_path / "out", facts=names(tmp_path / "rules"))


def test_nothing_that_lies_outside_of_a_tensor_is_left_out(tmp_path: Path) -> None:
    saved = adamw({"norm": (6,)}, cut={"norm": mesh((6,), (1,))})
    metadata = saved.write(tmp_path / "dcp")
    for listed in metadata.state_dict_metadata.values():
        if isinstance(listed, TensorStorageMetadata) and listed.size == (6,):
            listed.size = torch.Size([4])
    save_index(metadata, tmp_path / "dcp")
    (tmp_path / "rules").write_text("norm -> {a,b} : 1:1")
    with pytest.raises(CorruptFileError, match="reaches out of"):
        streamshard.export(tmp_path / "dcp", tmp_path / "out", facts=names(tmp_path / "rules"))


def test_other_kinds_refuse_rules_by_name(tmp_path: Path) -> None:
    write(Job(), tmp_path / "run")
    (tmp_path / "rules").write_text("a -> b")
    run, rules = tmp_path / "run", tmp_path / "rules"
    for verb in (
        partial(streamshard.export, run, tmp_path / "out"),
        partial(streamshard.verify, run),
        partial(streamshard.diff, run, run),
        partial(streamshard.inspect, run),
        partial(streamshard.open, run),
    ):
        with pytest.raises(
            UsageError,
            match=r"source\.rename given .* is for .*PyTorch and Megatron; .*: DeepSpeed shards",
        ):
            verb(facts=names(rules))


def test_a_config_does_not_tell_the_order_of_other_names(tmp_path: Path) -> None:
    adamw(SHAPES).write(tmp_path / "dcp")
    (tmp_path / "rules").write_text("norm -> last")
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    with pytest.raises(UnsupportedError, match="the order of the parameters: they were renamed"):
        streamshard.repartition(
            tmp_path / "dcp",
            tmp_path / "out",
            world_size=2,
            ds_config_file=tmp_path / "ds.json",
            facts=names(tmp_path / "rules"),
        )


def test_a_dry_run_says_what_is_renamed(tmp_path: Path) -> None:
    adamw(SHAPES).write(tmp_path / "dcp")
    facts = tmp_path / "facts.toml"
    facts.write_text('[source]\nrename = ["h.0.k -> a", "h.0.v -> b"]\n')
    words = ("export", str(tmp_path / "dcp"), str(tmp_path / "out"), "--facts", str(facts))
    done = in_process(*words, "--dry-run")
    assert done.code == 0
    assert "Renamed: h.0.k -> a (1 tensor)." in done.out
    assert "No rule is for 3 tensors: h.0.q, stack, norm." in done.out
