"""What a config means: what the installed DeepSpeed makes of it, or a refusal by name.

DeepSpeed's own parser and the engine's own rules are asked, for every key that shapes files, in
every spelling and type.
"""

import copy
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from deepspeed.runtime import constants
from deepspeed.runtime.config import DeepSpeedConfig, DtypeEnum
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import (
    DeepSpeedZeroOffloadOptimizerConfig,
    OffloadDeviceEnum,
)

import streamshard
from streamshard.errors import UsageError
from streamshard.formats.deepspeed import ds_config
from streamshard.formats.deepspeed.ds_versions import Version
from streamshard.formats.deepspeed.given_config import mistyped
from streamshard.live import live_engine
from tests.cli.conftest import streamshard as run_cli
from tests.fabricated import edit, load, write
from tests.job import EXPERTS, TAG, Job

Meaning = Mapping[str, object]

BF16 = {"bf16": {"enabled": True}}
FP32_GRADIENTS = {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}
DTYPES = [name for member in DtypeEnum for name in member._all_values if isinstance(name, str)]
DEVICES = [device.value for device in OffloadDeviceEnum]
SPELLINGS: list[Any] = [
    None, True, False, 0, 1, 2, 3, 4, -1, 0.0, 1.0, 2.0, 0.5, 2.5, 1e9, 1e30, 2**70,
    "0", "1", "2", " 2 ", "2.0", "2.", "0.5", "1e9", "1_000", "+2", "-1", "02", "0x2", "٣", "nan",
    "true", "True", "TRUE", "false", "False", "yes", "no", "on", "off", "t", "f", "y", "n", "T",
    " true", "auto", "Auto", "", "none", "None", "null", "CPU", "gpu", [], [1], {},
    *DTYPES, *(name.upper() for name in DTYPES), *DEVICES,
]  # fmt: skip
TAKEN_AS_THEY_ARE = (
    "expert_parallel.enabled",
    "checkpoint.load_universal",
    "use_data_before_expert_parallelism",
)
"""Switches that DeepSpeed does not convert: the text "false" is true to it."""
SHAPING = (
    *TAKEN_AS_THEY_ARE,
    "zero_optimization",
    "zero_optimization.stage",
    "zero_optimization.sub_group_size",
    "zero_optimization.round_robin_gradients",
    "zero_optimization.parameter_alignment",
    "zero_optimization.cpu_offload",
    "zero_optimization.cpu_offload_param",
    "zero_optimization.offload_optimizer",
    "zero_optimization.offload_optimizer.device",
    "zero_optimization.offload_optimizer.ratio",
    "zero_optimization.offload_optimizer.super_offload",
    "zero_optimization.offload_param.device",
    "zero_optimization.zenflow",
    "zero_optimization.zero_quantized_nontrainable_weights",
    "zero_optimization.load_from_fp32_weights",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "bf16",
    "bf16.enabled",
    "bfloat16",
    "bfloat16.enabled",
    "fp16.enabled",
    "data_types",
    "data_types.grad_accum_dtype",
    "tensor_parallel.autotp_size",
    "expert_parallel",
)
OF_EACH_STAGE = (
    "zero_optimization.stage",
    "zero_optimization.round_robin_gradients",
    "zero_optimization.parameter_alignment",
    "bf16.enabled",
    "bfloat16.enabled",
    "fp16.enabled",
    "data_types.grad_accum_dtype",
)
"""Settings whose meaning depends on the stage, or on the dtype."""
BASES: dict[str, dict[str, Any]] = {
    "empty": {},
    "stage 1": {"zero_optimization": {"stage": 1}, **FP32_GRADIENTS},
    "stage 2": {"zero_optimization": {"stage": 2}, **BF16},
    "stage 3": {
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        "fp16": {"enabled": True},
    },
}
STRICTER = {"1_000", "2.", -1, "-1"}
"""Counts that DeepSpeed understands in some places, and that are refused here."""


def with_value(base: Mapping[str, Any], place: str, value: object) -> dict[str, Any]:
    config = copy.deepcopy(dict(base))
    section, (*outer, key) = config, place.split(".")
    for name in outer:
        section = section.setdefault(name, {})
    section[key] = value
    return config


def meaning_to_deepspeed(config: Mapping[str, Any]) -> Meaning:
    """Ask DeepSpeed's parser, and the rule by which its engine chooses an optimizer."""
    engine = object.__new__(DeepSpeedEngine)
    parsed = DeepSpeedConfig({**copy.deepcopy(dict(config)), "train_micro_batch_size_per_gpu": 1})
    engine._config = parsed
    engine.pipeline_parallelism = False
    zero, offload = parsed.zero_config, parsed.zero_config.offload_optimizer
    model_dtype, _ = engine.get_data_types()
    kind, stage = None, int(engine.zero_optimization_stage())
    if stage:  # without ZeRO nothing is cut
        with patch("deepspeed.runtime.engine.is_zero_supported_optimizer"):  # it wants ranks
            kind = DeepSpeedEngine._do_optimizer_sanity_check(engine, None)
    is_flat = stage in (1, 2) and kind == "zero_optimization"
    experts = parsed.expert_parallel_config
    return {
        "stage": stage,
        "round_robin": is_flat and zero.round_robin_gradients,
        "parameter_alignment": is_flat and zero.parameter_alignment,
        "sub_group_size": int(zero.sub_group_size),
        "bf16_optimizer": kind == "bf16",
        "module_dtype": str(model_dtype).removeprefix("torch."),
        "offload": offload is not None and offload.device != "none",
        "swaps_optimizer": offload is not None and offload.device == "nvme",
        "offload_ratio": 1.0 if offload is None else offload.ratio,
        "super_offload": offload is not None and offload.super_offload,
        "zenflow": zero.zenflow is not None,
        "quantized_frozen": zero.zero_quantized_nontrainable_weights,
        "tensor_parallel": max(1, parsed.tensor_parallel_config.autotp_size),
        "auto_experts": experts.autoep_size if experts.enabled else None,
        "loads_universal": bool(parsed.load_universal_checkpoint),
        "loads_masters": zero.load_from_fp32_weights,
        "data_before_experts": bool(parsed.use_data_before_expert_parallel_),
    }


def meaning_here(config: Mapping[str, Any]) -> Meaning:
    stage = ds_config.zero_stage(config) or 0
    layout = ds_config.zero_layout(config, stage=stage, world_size=2)
    features = ds_config.features(config)
    return {
        "stage": layout.stage,
        "round_robin": layout.round_robin,
        "parameter_alignment": layout.parameter_alignment,
        "sub_group_size": layout.sub_group_size,
        "bf16_optimizer": layout.bf16_optimizer,
        "module_dtype": ds_config.module_dtype(config),
        "offload": layout.offload,
        "swaps_optimizer": features.swaps_optimizer,
        "offload_ratio": features.offload_ratio,
        "super_offload": features.super_offload,
        "zenflow": features.zenflow,
        "quantized_frozen": features.quantized_frozen,
        "tensor_parallel": features.tensor_parallel,
        "auto_experts": features.auto_experts,
        "loads_universal": features.loads_universal,
        "loads_masters": features.loads_masters,
        "data_before_experts": layout.data_before_experts,
    }


def meaning_or_refusal(config: Mapping[str, Any]) -> tuple[Meaning | None, str]:
    """Ask the reader of configs, which may refuse one with a message."""
    try:
        return meaning_here(config), ""
    except UsageError as error:
        return None, str(error)


@pytest.mark.parametrize(
    ("place", "base"),
    [
        (place, base)
        for place in SHAPING
        for base in BASES
        if place in OF_EACH_STAGE
        or "." not in place
        or base == ("stage 3" if "offload" in place else "stage 2")
    ],
)
def test_every_spelling_means_what_it_means_to_deepspeed_or_is_refused_by_name(
    place: str, base: str
) -> None:
    understood = 0
    for value in SPELLINGS:
        config = with_value(BASES[base], place, value)
        try:
            asked = meaning_to_deepspeed(config)
        except Exception:
            continue  # no job runs with it
        found, message = meaning_or_refusal(config)
        if found is None:
            assert place.split(".")[-1] in message
            assert is_refused_for_good(place, value), (value, message)
            continue
        assert found == asked, value
        understood += 1
    assert understood or place == "zero_optimization", "DeepSpeed understands no spelling at all"


def is_refused_for_good(place: str, value: object) -> bool:
    """Tell whether a value may be refused that DeepSpeed takes: what it means there surprises."""
    if place in TAKEN_AS_THEY_ARE:
        return not isinstance(value, bool | int | None)
    return value in STRICTER


@pytest.mark.parametrize("place", SHAPING)
def test_an_engine_takes_its_own_default_for_auto_whatever_the_last_run_had(place: str) -> None:
    config = with_value(BASES["stage 2"], place, "auto")
    try:
        asked = meaning_to_deepspeed(config)
    except Exception:
        return
    plain = live_engine.without_auto(config)
    found, _ = meaning_or_refusal(ds_config.resolved(plain, BASES["stage 1"]))
    assert found == (None if place in TAKEN_AS_THEY_ARE else asked)


def test_auto_that_no_framework_replaces_is_deepspeed_s_default() -> None:
    kept = {
        "zero_optimization": {"stage": 2, "round_robin_gradients": True, "sub_group_size": 7},
        "bf16": {"enabled": True},
    }
    given = {
        "zero_optimization": {
            "stage": "auto", "round_robin_gradients": "auto", "sub_group_size": "auto"
        },
        "bf16": {"enabled": "auto"},
    }  # fmt: skip
    asked = meaning_to_deepspeed(
        {**given, "zero_optimization": {**given["zero_optimization"], "stage": 2}, **BF16}
    )
    assert meaning_here(ds_config.resolved(given, kept)) == asked


def test_objects_of_a_live_config_are_read_as_their_names() -> None:
    config = {**BF16, "data_types": {"grad_accum_dtype": torch.float32}}
    plain = json.loads(json.dumps(config, default=str))
    asked = meaning_to_deepspeed({**config, "zero_optimization": {"stage": 1}})
    assert meaning_here({**plain, "zero_optimization": {"stage": 1}}) == asked
    assert asked["bf16_optimizer"] is True


# Keys that look mistyped, and all that DeepSpeed has, which never do ------------------------------

SECTIONS = {
    ("zero_optimization",): DeepSpeedZeroConfig,
    ("zero_optimization", "offload_optimizer"): DeepSpeedZeroOffloadOptimizerConfig,
    ("fp16",): DeepSpeedFP16Config,
    ("bf16",): DeepSpeedBF16Config,
}


def nested(section: tuple[str, ...], key: str) -> Mapping[str, Any]:
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
    done = run_cli(*resize)
    assert (done.code, done.out, (tmp_path / "out").exists()) == (2, "", False)
    message = f"streamshard: {config}: 'zero_optimisation' is no known key; did you mean "
    assert done.err.startswith(f"{message}'zero_optimization'?")
    config.write_text(config.read_text().replace("isation", "ization").replace("3}", "2}"))
    done = run_cli(*resize)
    assert (done.code, done.err) == (0, "")


# Rules that changed between DeepSpeed's versions --------------------------------------------------

Versions = tuple[Version, Version]
FLAT_1: dict[str, Any] = {"zero_optimization": {"stage": 1, "round_robin_gradients": True}}
OFFLOADED = {
    "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}, **FP32_GRADIENTS
}  # fmt: skip
ALIGNED = {"zero_optimization": {"stage": 2, "parameter_alignment": True}}
BEFORE_EXPERTS = {"use_data_before_expert_parallelism": True}


@pytest.mark.parametrize(
    ("name", "stage", "config", "versions", "values"),
    [
        ("round_robin", 1, FLAT_1, ((0, 12, 6), (0, 13, 0)), (False, True)),
        ("round_robin", 2, FLAT_1, ((0, 9, 5), (0, 13, 0)), (True, True)),
        ("bf16_optimizer", 1, OFFLOADED, ((0, 10, 0), (0, 10, 1)), (True, False)),
        ("data_before_experts", 1, BEFORE_EXPERTS, ((0, 12, 3), (0, 12, 4)), (False, True)),
        ("parameter_alignment", 2, ALIGNED, ((0, 19, 6), (0, 19, 7)), (False, True)),
    ],
)
def test_a_setting_means_what_it_meant_to_the_version_of_the_job(
    name: str, stage: int, config: dict[str, Any], versions: Versions, values: tuple[bool, bool]
) -> None:
    found = [
        getattr(ds_config.zero_layout(config, stage=stage, world_size=2, version=version), name)
        for version in (*versions, None)
    ]
    assert found == [*values, values[1]]


def test_two_sizes_make_a_mesh_since_0_15() -> None:
    config = {"data_parallel_size": 2, "sequence_parallel_size": 2}
    found = [ds_config.sequence_mesh(config, v) for v in ((0, 14, 5), (0, 15, 0), None)]
    assert found == [None, (2, 2), (2, 2)]


def stored(run_dir: Path) -> list[list[str]]:
    held = load(run_dir / TAG / "mp_rank_00_model_states.pt")
    return [list(unit) for unit in held["param_shapes"]]


def test_a_source_is_read_in_the_order_that_its_files_prove(tmp_path: Path) -> None:
    plain = write(Job(stage=2), tmp_path / "plain")
    shuffled = write(Job(stage=2, round_robin=True), tmp_path / "shuffled")
    assert stored(plain) != stored(shuffled)
    for run_dir, config in ((plain, True), (shuffled, False)):
        for path in (run_dir / TAG).glob("*.pt"):
            say_round_robin(path, on=config)
            edit(path, forget_version)
    assert streamshard.verify(plain, against=shuffled).is_good


def forget_version(held: dict[str, Any]) -> None:
    """Where it is known which version saved a file, its config is not doubted."""
    for part in (held, held.get("optimizer_state_dict", {})):
        part.pop("ds_version", None)


def say_round_robin(path: Path, *, on: bool) -> None:
    edit(path, lambda held: held["ds_config"]["zero_optimization"].update(round_robin_gradients=on))


def test_the_command_line_takes_a_version(tmp_path: Path) -> None:
    run_dir = write(Job(stage=1), tmp_path / "run")
    facts = tmp_path / "facts.toml"
    resize = ["repartition", run_dir, tmp_path / "out", "--world-size", 2, "--facts", facts]
    facts.write_text("[target]\nds_version = 'twelve'\n")
    done = run_cli(*resize)
    assert (done.code, done.out) == (2, "")
    assert "target.ds_version is 'twelve'; give a release of DeepSpeed" in done.err
    facts.write_text("[target]\nds_version = '0.14.0'\n")
    done = run_cli(*resize)
    assert (done.code, done.out) == (2, "")
    assert "target.ds_version is '0.14.0': files are written for 0.14.1 and later" in done.err
    facts.write_text("[target]\nds_version = '0.14.5'\n")
    done = run_cli(*resize)
    assert done.code == 0
    assert load(tmp_path / "out" / TAG / "mp_rank_00_model_states.pt")["ds_version"] == "0.14.5"


def test_what_an_older_version_saved_is_written_for_newer_ones(tmp_path: Path) -> None:
    """Its experts were in another order on the ranks, which a reader tells by the version."""
    job = Job(stage=2, world_size=4, experts=EXPERTS, expert_parallel=2)
    run = write(job, tmp_path / "run")
    for path in (run / TAG).glob("*.pt"):
        edit(path, lambda held: say_version(held, "0.12.3"))
        edit(path, lambda held: held.get("ds_config", {}).update(BEFORE_EXPERTS))
    report = streamshard.repartition(run, tmp_path / "out", world_size=4)
    assert any("DeepSpeed 0.12.3 saved it" in note for note in report.notes)
    assert streamshard.verify(tmp_path / "out", against=run).is_good
    wanted = write(replace(job, data_before_experts=True), tmp_path / "wanted")
    assert streamshard.verify(tmp_path / "out", against=wanted).is_good


def say_version(held: dict[str, Any], version: str) -> None:
    for part in (held, held.get("optimizer_state_dict", {})):
        if "ds_version" in part:
            part["ds_version"] = version
