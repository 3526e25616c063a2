"""What Megatron's ranks saved goes by rules into a DeepSpeed job whose model has other names."""

from pathlib import Path

import pytest
from torch import nn

import streamshard
from tests.checkpoints.test_renaming import (
    GROUPS,
    HEAD,
    PLAIN,
    QUERIES,
    SAVES,
    STATES,
    WHOLE,
    as_llama,
    held_in,
    llama_rules,
    names,
    require_equal,
)
from tests.oracle.jobs import Resume, Train
from tests.oracle.models import Case
from tests.oracle.ranks import require_success, run_jobs
from tests.oracle.truth import Truth
from tests.unpacking import unpack

WIDTH, INNER, VOCABULARY = 16, 24, 40
"""Of the model that was saved."""
BIASES = {
    "self_attention.linear_qkv.layer_norm_bias": "input_layernorm.bias",
    "mlp.linear_fc1.layer_norm_bias": "post_attention_layernorm.bias",
}
"""Names in a layer: Llama has none, the model in the archive does."""
LAST = {"decoder.final_layernorm.bias": "norm.bias"}


def projection(rows: int, columns: int = WIDTH) -> nn.Module:
    return nn.Linear(columns, rows, bias=False)


def layer() -> nn.Module:
    queries, keys = HEAD * QUERIES * GROUPS, HEAD * GROUPS
    heads = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "o_proj": WIDTH}
    inner = {"gate_proj": projection(INNER), "up_proj": projection(INNER)}
    return nn.ModuleDict(
        {
            "self_attn": nn.ModuleDict({name: projection(rows) for name, rows in heads.items()}),
            "mlp": nn.ModuleDict({**inner, "down_proj": projection(WIDTH, INNER)}),
            "input_layernorm": nn.LayerNorm(WIDTH),
            "post_attention_layernorm": nn.LayerNorm(WIDTH),
        }
    )


def model() -> nn.Module:
    """Make a model with the names of Llama, in an order of its own."""
    body = {
        "embed_tokens": nn.Embedding(VOCABULARY, WIDTH),
        "layers": nn.ModuleList(layer() for _ in range(2)),
        "norm": nn.LayerNorm(WIDTH),
    }
    return nn.ModuleDict({"lm_head": projection(VOCABULARY), "model": nn.ModuleDict(body)})


@pytest.mark.parametrize(("stage", "ranks"), [(2, 3), (3, 2)])
def test_an_engine_loads_every_bit_under_its_own_names(
    stage: int, ranks: int, tmp_path: Path
) -> None:
    case = Case("renamed", zero_stage=stage, dtype="bf16", model=model, one_group=True)
    like, out, truth = tmp_path / "like", tmp_path / "out", tmp_path / "truth.pt"
    rules, source = tmp_path / "rules", tmp_path / WHOLE
    unpack(SAVES / f"{WHOLE}.tar.xz", tmp_path)
    lines = [f"decoder.layers.*.{old} -> model.layers.*.{new}" for old, new in BIASES.items()]
    lines += [f"{old} -> model.{new}" for old, new in LAST.items()]
    rules.write_text("\n".join((llama_rules(), *lines)))
    require_success(run_jobs(2, [Train(case, like, None, steps=0)], tmp_path / "ranks"))
    streamshard.repartition(
        source, out, world_size=ranks, like=like, facts=names(rules), verify=True
    )
    require_success(run_jobs(ranks, [Resume(case, out, truth)], tmp_path / "ranks"))

    loaded = Truth.load(truth)
    for state in STATES:
        wanted = as_llama(held_in(source, state), PLAIN | BIASES | LAST)
        require_equal(loaded.states[state], wanted)
        if state == "fp32":
            require_equal(loaded.weights, {k: v.bfloat16() for k, v in wanted.items()})
    (group,) = loaded.groups
    assert group["scalars"]["step"] == 2
    assert group["hyper_parameters"]["lr"] == pytest.approx(1e-3)
    assert streamshard.diff(source, out, facts=names(rules)).is_equal
