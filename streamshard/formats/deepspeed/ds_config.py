"""Reads the settings of a DeepSpeed config that shape the checkpoint files, and no others.

Key names and defaults: `deepspeed/runtime/zero/config.py`, `runtime/precision_config.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from streamshard.errors import CorruptFileError, UsageError
from streamshard.formats import strict_json
from streamshard.formats.deepspeed.ds_config_keys import mistyped
from streamshard.formats.pickle.inert import show
from streamshard.io.entries import read_document
from streamshard.model import ZeroLayout

Config = Mapping[str, Any]

_DEFAULT_SUB_GROUP_SIZE: Final = 1_000_000_000

_ZERO: Final = "zero_optimization"
_ON: Final = ("1", "true", "t", "yes", "y", "on")
_OFF: Final = ("0", "false", "f", "no", "n", "off")
_PRECISIONS: Final = {"float16": ("fp16",), "bfloat16": ("bf16", "bfloat16")}
"""Sections that switch a 16-bit type on, by the dtype they stand for."""


def read_file(path: Path) -> Config:
    """Read a DeepSpeed config file.

    Raises
    ------
    UsageError
        The file cannot be read, is not a JSON object, or has a key that looks mistyped.
    """
    try:
        config = strict_json.parse(read_document(path))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from error
    except CorruptFileError as error:
        raise UsageError(str(error)) from error
    except ValueError as error:
        raise UsageError(f"{path}: not a DeepSpeed config in JSON ({error})") from error
    if not isinstance(config, dict):
        raise UsageError(f"{path}: not a DeepSpeed config: the JSON in it is not an object")
    found = mistyped(config)
    if found is not None:
        message = f"{path}: {show(found[0])} is no known key; did you mean {found[1]!r}? Correct it"
        raise UsageError(f"{message} there, as DeepSpeed would ignore or refuse it as well")
    return config


def _zero(config: Config) -> Mapping[str, Any]:
    section = config.get(_ZERO, {})
    if isinstance(section, bool):  # before 0.3 a bare `true` meant stage 1
        return {"stage": int(section)}
    return section if isinstance(section, Mapping) else {}


def _number(section: Config, key: str) -> int | None:
    """Read a count; None if the config does not give it.

    Raises
    ------
    UsageError
        The value is not a count.
    """
    value = section.get(key)
    if value is None or value == "auto":
        return None
    try:
        return int(float("nan" if isinstance(value, bool) else value))
    except (TypeError, ValueError, OverflowError) as error:
        message = f"DeepSpeed config: {key} is {show(value)}, which is not a count"
        raise UsageError(message) from error


def _flag(section: Config, key: str) -> bool:
    """Read a switch as DeepSpeed's config models do, which accept 1 and "true". Default: off.

    Raises
    ------
    UsageError
        The value is not a switch.
    """
    value = section.get(key)
    if value is None or value == "auto":
        return False
    text = str(value).lower() if isinstance(value, bool | int | str) else ""
    if text not in (*_ON, *_OFF):
        raise UsageError(f"DeepSpeed config: {key} is {show(value)}, which is not a switch")
    return text in _ON


def zero_stage(config: Config) -> int | None:
    """Return the ZeRO stage that a config sets, None if it sets none."""
    return _number(_zero(config), "stage")


def zero_layout(
    config: Config, *, stage: int, world_size: int, bf16_optimizer: bool | None = None
) -> ZeroLayout:
    """Return how an engine with this config would partition its optimizer state.

    Parameters
    ----------
    bf16_optimizer
        Whether the engine has a `BF16_Optimizer`; by default, derived from the config.
    """
    zero = _zero(config)
    size = _number(zero, "sub_group_size")
    if bf16_optimizer is None:
        bf16_optimizer = stage == 1 and _uses_bf16_optimizer(config)
    flat = 0 < stage < 3 and not bf16_optimizer
    return ZeroLayout(
        stage=stage,
        world_size=world_size,
        round_robin=flat and _flag(zero, "round_robin_gradients"),
        parameter_alignment=flat and _flag(zero, "parameter_alignment"),
        sub_group_size=_DEFAULT_SUB_GROUP_SIZE if size is None else size,
        bf16_optimizer=bf16_optimizer,
        data_before_experts=_flag(config, "use_data_before_expert_parallelism"),
        offload=_offloads(config),
    )


def _offloads(config: Config) -> bool:
    """Tell whether the optimizer's states are offloaded from the accelerator."""
    zero = _zero(config)
    section = zero.get("offload_optimizer")
    if isinstance(section, Mapping):
        return section.get("device", "none") not in ("none", None)
    return _flag(zero, "cpu_offload")  # the older key, which DeepSpeed still accepts


def sequence_parallel_size(config: Config) -> int | None:
    """Return how many ranks share each sequence, None if the config does not say."""
    return _number(config, "sequence_parallel_size")


def sequence_mesh(config: Config) -> tuple[int, int] | None:
    """Read (data-parallel ranks, ranks that share each sequence) if a config gives both.

    Then only the data-parallel ranks partition the state (`deepspeed.initialize`, 0.19.8). With
    a model-parallel unit, all ranks do.
    """
    data, sequence = _number(config, "data_parallel_size"), sequence_parallel_size(config)
    return (data, sequence) if data and sequence and sequence > 1 else None


def sequence_replicas(config: Config, dp_world_size: int) -> int:
    """Return how many ranks hold the same partition. One of them saves it."""
    mesh = sequence_mesh(config)
    return mesh[1] if mesh and mesh[0] == dp_world_size else 1


def _uses_bf16_optimizer(config: Config) -> bool:
    """Tell whether an engine at stage 1 would choose `BF16_Optimizer`.

    It does with bf16 weights, fp32 gradients, and no optimizer offload to the CPU
    (`DeepSpeedEngine._do_optimizer_sanity_check`, 0.19.8).
    """
    types = config.get("data_types")
    gradients = types.get("grad_accum_dtype") if isinstance(types, Mapping) else None
    return module_dtype(config) == "bfloat16" and gradients == "fp32" and not _offloads(config)


def module_dtype(config: Config) -> str:
    """Return the dtype in which an engine with this config trains the module."""
    for dtype, names in _PRECISIONS.items():
        for name in names:
            section = config.get(name)
            if isinstance(section, Mapping) and _flag(section, "enabled"):
                return dtype
    return "float32"


def resolved(given: Config, kept: Config) -> dict[str, Any]:
    """Return a job's config with every "auto" replaced by the value of the last run.

    Frameworks replace "auto" when the job starts. A key that the last run did not have is removed.
    """
    result: dict[str, Any] = {}
    for key, value in given.items():
        before = kept.get(key)
        if isinstance(value, Mapping):
            result[key] = resolved(value, before if isinstance(before, Mapping) else {})
        elif value != "auto":
            result[key] = value
        elif before is not None:
            result[key] = before
    return result


def with_stage(config: Config, stage: int) -> dict[str, Any]:
    """Return the config with another ZeRO stage."""
    return {**config, _ZERO: {**_zero(config), "stage": stage}}


def with_data_parallel_size(config: Config, data_parallel_size: int) -> dict[str, Any]:
    """Return the config with another count of data-parallel ranks."""
    return {**config, "data_parallel_size": data_parallel_size}


def gradient_clipping(config: Config) -> float | None:
    """Return the gradient clipping that a config sets, None if it does not set one."""
    value = config.get("gradient_clipping")
    try:
        return float(value) if isinstance(value, int | float) else None
    except OverflowError as error:
        message = f"DeepSpeed config: gradient_clipping is {show(value)}, which is not a float"
        raise UsageError(message) from error


def batch_sizes(config: Config) -> tuple[int | None, int | None, int | None]:
    """Read (train_batch_size, micro batch per GPU, gradient accumulation steps) as given."""
    return (
        _number(config, "train_batch_size"),
        _number(config, "train_micro_batch_size_per_gpu"),
        _number(config, "gradient_accumulation_steps"),
    )


@dataclass(frozen=True, slots=True)
class Features:
    """Features that keep state outside of ZeRO's files, or change how the files store it.

    Keys and defaults: `deepspeed/runtime/zero/config.py`, `zero/offload_config.py`,
    `tensor_parallel/config.py` and `module_inject/auto_ep_config.py` (0.19.8).
    """

    swaps_optimizer: bool
    """`offload_optimizer.device` is `nvme`."""
    offload_ratio: float
    """`offload_optimizer.ratio`: the fraction of the sub-groups whose states are offloaded."""
    super_offload: bool
    zenflow: bool
    quantized_frozen: bool
    """`zero_quantized_nontrainable_weights`."""
    mics_shard_size: int | None
    """Ranks that hold all states together; None without MiCS, which 0.19.7 removed."""
    tensor_parallel: int
    """`tensor_parallel.autotp_size`, by default 1."""
    auto_experts: bool
    """`expert_parallel.enabled`, AutoEP's section."""
    loads_universal: bool
    """`checkpoint.load_universal`."""


def features(config: Config) -> Features:
    """Read the features that a config switches on.

    Raises
    ------
    UsageError
        The value of a switch is not a switch, or that of a count is not a count.
    """
    zero = _zero(config)
    offload = _section(zero, "offload_optimizer")
    shard_size = _number(zero, "mics_shard_size")
    return Features(
        swaps_optimizer=offload.get("device") == "nvme",
        offload_ratio=_fraction(offload, "ratio"),
        super_offload=_flag(offload, "super_offload"),
        zenflow=isinstance(zero.get("zenflow"), Mapping),
        quantized_frozen=_flag(zero, "zero_quantized_nontrainable_weights"),
        mics_shard_size=shard_size if shard_size is not None and shard_size > 0 else None,
        tensor_parallel=_number(_section(config, "tensor_parallel"), "autotp_size") or 1,
        auto_experts=_flag(_section(config, "expert_parallel"), "enabled"),
        loads_universal=_flag(_section(config, "checkpoint"), "load_universal"),
    )


def _section(config: Config, key: str) -> Config:
    found = config.get(key)
    return found if isinstance(found, Mapping) else {}


def _fraction(section: Config, key: str) -> float:
    """Read a number from 0 to 1; 1 if the config does not give it."""
    value = section.get(key)
    if value is None or value == "auto":
        return 1.0
    try:
        fraction = float("nan" if isinstance(value, bool) else value)
    except (TypeError, ValueError, OverflowError):
        fraction = float("nan")
    if not 0 <= fraction <= 1:
        raise UsageError(f"DeepSpeed config: {key} is {show(value)}, which is not a part of 1")
    return fraction
