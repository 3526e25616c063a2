"""Keys of a DeepSpeed config that look mistyped, and all that DeepSpeed has, which never do."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from deepspeed.runtime import constants
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig

from streamshard.formats.deepspeed.ds_config import mistyped
from tests.cli.conftest import streamshard
from tests.fabricated import write
from tests.job import Job

SECTIONS = {
    ("zero_optimization",): DeepSpeedZeroConfig,
    ("zero_optimization", "offload_optimizer"): DeepSpeedZeroOffloadOptimizerConfig,
    ("fp16",): DeepSpeedFP16Config,
    ("bf16",): DeepSpeedBF16Config,
}


def nested(section: tuple[str, ...], key: str) -> Mapping[str, Any]:
    """Make a config that has one key in a section."""
    config: Mapping[str, Any] = {key: 0}
    for name in reversed(section):
        config = {name: config}
    return config


def test_no_key_of_deepspeed_s_own_looks_mistyped() -> None:
    top = [value for value in vars(constants).values() if isinstance(value, str)]
    assert {"bf16", "bfloat16", "data_types", "gradient_clipping"} <= set(top)
    assert [key for key in top if key.isidentifier() and mistyped({key: {}})] == []
    for section, model in SECTIONS.items():
        keys = {name for key, field in model.model_fields.items() for name in (key, field.alias)}
        assert [key for key in keys if key and mistyped(nested(section, key))] == []


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("zero_optimisation", "zero_optimization"),
        ("zero_optimization.stages", "zero_optimization.stage"),
        ("zero_optimization.sub_groupsize", "zero_optimization.sub_group_size"),
        ("zero_optimization.round_robin_gradient", "zero_optimization.round_robin_gradients"),
        (
            "zero_optimization.offload_optimizer.devise",
            "zero_optimization.offload_optimizer.device",
        ),
        ("bf16.enable", "bf16.enabled"),
        ("BF16", "bf16"),
        ("gradient_acumulation_steps", "gradient_accumulation_steps"),
    ],
)
def test_what_is_near_is_named(wrong: str, near: str) -> None:
    *section, key = wrong.split(".")
    assert mistyped(nested(tuple(section), key)) == (wrong, near)


@pytest.mark.parametrize("key", ["_fp16", "//zero_optimization", "wandb", "comment", ""])
def test_what_is_near_to_nothing_or_put_aside_is_left_alone(key: str) -> None:
    assert mistyped({key: {}}) is None
    assert mistyped({"zero_optimization": {}, "zero_optimization_before": {}}) is None


def test_the_command_line_names_it_and_writes_nothing(tmp_path: Path) -> None:
    run = write(Job(stage=2), tmp_path / "run")
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"zero_optimisation": {"stage": 3}, "bf16": {"enabled": True}}))
    resize = ["repartition", run, tmp_path / "out", "--world-size", 3, "--ds-config", config]
    done = streamshard(*resize)
    assert (done.code, done.out, (tmp_path / "out").exists()) == (2, "", False)
    message = f"streamshard: {config}: 'zero_optimisation' is no known key; did you mean "
    assert done.err.startswith(f"{message}'zero_optimization'?")
    config.write_text(config.read_text().replace("isation", "ization").replace("3}", "2}"))
    done = streamshard(*resize)
    assert (done.code, done.err) == (0, "")
