"""Reads the settings of a DeepSpeed config that shape the checkpoint files, and no others.

Key names and defaults: `deepspeed/runtime/zero/config.py`, `runtime/precision_config.py`.

DeepSpeed understands values in two ways. The models of most sections (`DeepSpeedConfigModel` of
`runtime/config_utils.py`, on pydantic) convert values, and leave out a key whose value is "auto".
Other keys are taken as they are, so that the text "false" is true there. What DeepSpeed refuses is
refused here too, and so is what its versions understand in different ways.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from streamshard.errors import Option, UsageError
from streamshard.formats.deepspeed import ds_versions, names
from streamshard.formats.deepspeed.ds_versions import Version
from streamshard.formats.pickle.inert import show
from streamshard.model import ZeroLayout

_AUTO: Final = "auto"
_ON: Final = ("1", "true", "t", "yes", "y", "on")
_OFF: Final = ("0", "false", "f", "no", "n", "off")
_COUNT: Final = re.compile(r"\s*([+-]?[0-9]{1,30})(\.0+)?\s*", re.ASCII)
_NUMBER: Final = re.compile(r"\s*[+-]?[0-9.]{1,30}([eE][+-]?[0-9]{1,3})?\s*", re.ASCII)
_MOST: Final = float(1 << 63)
"""From here on pydantic takes a float for no integer."""
_DTYPES: Final[Mapping[str, str]] = {
    name: dtype
    for dtype, names in {
        "float16": ("torch.float16", "fp16", "float16", "half"),
        "float32": ("torch.float32", "fp32", "float32", "float"),
        "int8": ("torch.int8", "int8"),
        "bfloat16": ("torch.bfloat16", "bf16", "bfloat16"),
    }.items()
    for name in names
}
"""Name in a config → dtype, by `DtypeEnum` of `runtime/config.py`."""


@dataclass(frozen=True, slots=True)
class Section:
    """A section of a DeepSpeed config; every method raises `UsageError` for a senseless value."""

    values: Mapping[str, Any]
    path: str = ""
    """Keys that lead to it, each with a dot after it."""

    def section(self, key: str) -> "Section":
        """Return a section in this one; an empty one if there is none."""
        found = self.values.get(key, {})
        if not isinstance(found, Mapping):
            self.refuse(key, "not a section")
        return Section(found, f"{self.path}{key}.")

    def has(self, key: str) -> bool:
        """Tell whether a model sees a key."""
        return bool(self.values.get(key, _AUTO) != _AUTO)

    def flag(self, key: str) -> bool:
        """Read a switch of a model. Default: off."""
        if not self.has(key):
            return False
        value = self.values[key]
        if isinstance(value, float) and value in (0, 1):
            value = int(value)
        text = str(value).lower() if isinstance(value, bool | int | str) else ""
        if text not in (*_ON, *_OFF):
            self.refuse(key, "not a switch")
        return str(text) in _ON

    def count(self, key: str, least: int = 0) -> int | None:
        """Read a count of a model; None if the config does not give it."""
        if not self.has(key):
            return None
        value = self.values[key]
        if isinstance(value, str) and (found := _COUNT.fullmatch(value)):
            value = int(found[1])
        if isinstance(value, float) and value.is_integer() and value < _MOST:
            value = int(value)
        if not isinstance(value, int) or value < least:
            self.refuse(key, "not a count")
        return int(value)

    def fraction(self, key: str) -> float:
        """Read a number from 0 to 1 of a model. Default: 1."""
        if not self.has(key):
            return 1.0
        value = self.values[key]
        try:
            is_number = isinstance(value, int | float) or _NUMBER.fullmatch(value)
            fraction = float(value) if is_number else math.nan
        except (TypeError, ValueError, OverflowError):
            fraction = math.nan
        if not 0 <= fraction <= 1:
            self.refuse(key, "not a part of 1")
        return fraction

    def choice(self, key: str, choices: tuple[str, ...]) -> str:
        """Read one of some names of a model. Default: the first."""
        value = self.values[key] if self.has(key) else choices[0]
        if value not in choices:
            self.refuse(key, f"none of {', '.join(choices)}")
        return str(value)

    def dtype(self, key: str) -> str | None:
        """Read a dtype that is taken as it is; None if the config does not give it."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, str) or value not in _DTYPES:
            self.refuse(key, "no dtype that DeepSpeed knows")
        return _DTYPES[value]

    def plain_flag(self, key: str) -> bool:
        """Read a switch that is taken as it is. Default: off."""
        value = self.values.get(key)
        if not isinstance(value, bool | int | None):
            self.refuse(key, "not true or false, without quotation marks")
        return bool(value)

    def plain_count(self, key: str) -> int | None:
        """Read a count that is taken as it is; None if the config does not give it."""
        value = self.values.get(key)
        if value is None or value == _AUTO:
            return None
        if isinstance(value, float) and value.is_integer() and value < _MOST:
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            self.refuse(key, "not a count")
        return int(value)

    def refuse(self, key: str, what: str) -> NoReturn:
        found = show(self.values.get(key))
        raise UsageError(f"DeepSpeed config: {self.path}{key} is {found}, which is {what}")


Config = Mapping[str, Any]
GIVEN: Final = Option("ds_config_file", what="the config")
"""What messages call the config of the job that is to resume."""

_DEFAULT_SUB_GROUP_SIZE: Final = 1_000_000_000

_ZERO: Final = "zero_optimization"
_STAGES: Final = range(4)
_NO_DEVICE: Final = "none"
_UNFILLED: Final = frozenset(
    {
        *(
            f"{_ZERO}.{key}"
            for key in (
                "sub_group_size", "round_robin_gradients", "parameter_alignment", "cpu_offload",
                "offload_optimizer", "offload_optimizer.ratio", "offload_optimizer.super_offload",
                "zenflow", "zero_quantized_nontrainable_weights", "mics_shard_size",
            )
        ),
        "data_types.grad_accum_dtype", "tensor_parallel.autotp_size", "expert_parallel.enabled",
        "expert_parallel.autoep_size",
        "checkpoint.load_universal", "use_data_before_expert_parallelism",
    }
)  # fmt: skip
"""Keys read here that neither transformers 5.23 nor accelerate 1.15 replaces if they are "auto"."""


def config_in(*holders: Mapping[str, Any]) -> Config:
    """Return the config that the first of some files' dicts holds which holds one; else none."""
    found = (holder.get(names.DS_CONFIG) for holder in holders)
    return next((config for config in found if isinstance(config, dict)), {})


def _zero(config: Config) -> Section:
    if isinstance(config.get(_ZERO), bool):  # before 0.3 a bare `true` meant stage 1
        return Section({"stage": int(config[_ZERO])}, f"{_ZERO}.")
    return Section(config).section(_ZERO)


def zero_stage(config: Config) -> int | None:
    zero = _zero(config)
    stage = zero.count("stage")
    if stage is not None and stage not in _STAGES:
        zero.refuse("stage", "no ZeRO stage")
    return stage


def zero_layout(
    config: Config,
    *,
    stage: int,
    world_size: int,
    bf16_optimizer: bool | None = None,
    version: Version | None = None,
) -> ZeroLayout:
    """Return how an engine with this config would partition its optimizer state.

    `bf16_optimizer`: whether the engine has a `BF16_Optimizer`; by default, derived from the
    config.
    `version`: DeepSpeed's; by default the newest.
    """
    zero = _zero(config)
    size = zero.count("sub_group_size")
    # All are read, whatever the stage: a value that makes no sense is not left to DeepSpeed.
    needs_bf16_optimizer = _needs_bf16_optimizer(config, version)
    round_robin, alignment = zero.flag("round_robin_gradients"), zero.flag("parameter_alignment")
    data_before_experts = Section(config).plain_flag("use_data_before_expert_parallelism")
    if stage == 1:
        round_robin &= ds_versions.has(ds_versions.ROUND_ROBIN_AT_STAGE_1, version)
    if bf16_optimizer is None:
        bf16_optimizer = stage == 1 and needs_bf16_optimizer
    flat = 0 < stage < 3 and not bf16_optimizer
    return ZeroLayout(
        stage=stage,
        world_size=world_size,
        round_robin=flat and round_robin,
        parameter_alignment=flat
        and alignment
        and ds_versions.has(ds_versions.PARAMETER_ALIGNMENT, version),
        sub_group_size=_DEFAULT_SUB_GROUP_SIZE if size is None else size,
        bf16_optimizer=bf16_optimizer,
        data_before_experts=data_before_experts
        and ds_versions.has(ds_versions.DATA_BEFORE_EXPERTS, version),
        offload=_offload_device(config) != _NO_DEVICE,
    )


def _offload(config: Config) -> Section:
    """Return the section of the optimizer's offload; also the one that an older key stands for."""
    zero = _zero(config)
    if "cpu_offload" in zero.values and zero.has("cpu_offload"):
        if zero.has("offload_optimizer"):
            zero.refuse("cpu_offload", "the older name of offload_optimizer, given as well")
        is_on = zero.values["cpu_offload"] is not None and zero.flag("cpu_offload")
        return Section({"device": "cpu"} if is_on else {}, zero.path)
    is_given = zero.has("offload_optimizer") and zero.values["offload_optimizer"] is not None
    return zero.section("offload_optimizer") if is_given else Section({}, zero.path)


def _offload_device(config: Config) -> str:
    return _offload(config).choice("device", (_NO_DEVICE, "cpu", "nvme"))


def sequence_parallel_size(config: Config) -> int | None:
    """Return how many ranks share each sequence, None if the config does not say."""
    return Section(config).plain_count("sequence_parallel_size")


def sequence_mesh(config: Config, version: Version | None) -> tuple[int, int] | None:
    """Read (data-parallel ranks, ranks that share each sequence) if a config gives both.

    Then only the data-parallel ranks partition the state (`deepspeed.initialize`, 0.19.8). With
    a model-parallel unit, all ranks do.
    """
    data = Section(config).plain_count("data_parallel_size")
    sequence = sequence_parallel_size(config)
    if not ds_versions.has(ds_versions.SEQUENCE_MESH, version):
        return None
    return (data, sequence) if data and sequence and sequence > 1 else None


def sequence_replicas(config: Config, dp_world_size: int, version: Version | None) -> int:
    """Return how many ranks hold the same partition. One of them saves it."""
    mesh = sequence_mesh(config, version)
    return mesh[1] if mesh and mesh[0] == dp_world_size else 1


def wants_alignment(config: Config) -> bool:
    """Tell whether a config asks for `parameter_alignment`, which older versions refuse."""
    return _zero(config).flag("parameter_alignment")


def _needs_bf16_optimizer(config: Config, version: Version | None) -> bool:
    """Tell whether an engine at stage 1 would choose `BF16_Optimizer`.

    It does with bf16 weights, fp32 gradients, and no optimizer offload to the CPU; offload to NVMe
    does not count (`DeepSpeedEngine._do_optimizer_sanity_check`, 0.19.8).
    """
    gradients = Section(config).section("data_types").dtype("grad_accum_dtype")
    device = _offload_device(config)
    if not ds_versions.has(ds_versions.OFFLOAD_WITHOUT_BF16_OPTIMIZER, version):
        device = _NO_DEVICE
    return (module_dtype(config), gradients) == ("bfloat16", "float32") and device != "cpu"


def module_dtype(config: Config) -> str:
    """Return the dtype in which an engine with this config trains the module."""
    top = Section(config)
    # `get_bfloat16_config` reads the older name only where the newer one is missing.
    bf16 = "bfloat16" if config.get("bf16") is None else "bf16"
    is_bf16, is_fp16 = (top.section(key).flag("enabled") for key in (bf16, "fp16"))
    if is_bf16 and is_fp16:
        raise UsageError(f"DeepSpeed config: {bf16} and fp16 are both enabled; it can be one")
    return "bfloat16" if is_bf16 else "float16" if is_fp16 else "float32"


def resolved(config: Config, kept: Config, path: str = "") -> dict[str, Any]:
    """Return a job's config with "auto" replaced by the value of the last run.

    Frameworks replace "auto" when the job starts. A key that the last run did not have is removed.
    What no framework replaces stays "auto", for which DeepSpeed takes its own default.

    `path`: keys that lead to this section, each with a dot after it.
    """
    result: dict[str, Any] = {}
    for key, value in config.items():
        before = kept.get(key)
        if isinstance(value, Mapping):
            section = before if isinstance(before, Mapping) else {}
            result[key] = resolved(value, section, f"{path}{key}.")
        elif value != _AUTO or f"{path}{key}" in _UNFILLED:
            result[key] = value
        elif before is not None:
            result[key] = before
    return result


def with_stage(config: Config, stage: int) -> dict[str, Any]:
    return {**config, _ZERO: {**_zero(config).values, "stage": stage}}


def with_data_parallel_size(config: Config, data_parallel_size: int) -> dict[str, Any]:
    return {**config, "data_parallel_size": data_parallel_size}


def gradient_clipping(config: Config) -> float | None:
    value = config.get("gradient_clipping")
    try:
        return float(value) if isinstance(value, int | float) else None
    except OverflowError as error:
        message = f"DeepSpeed config: gradient_clipping is {show(value)}, which is not a float"
        raise UsageError(message) from error


def mapping_at(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key)
    return value if isinstance(value, Mapping) else {}


def decouples_weight_decay(config: Mapping[str, Any]) -> bool | None:
    """Tell whether the optimizer is AdamW: Adam is too, unless `adam_w_mode` turns it off.

    None if the config names neither. The rule: `DeepSpeedEngine._configure_basic_optimizer`.
    """
    section = mapping_at(config, "optimizer")
    kind = str(section.get("type")).lower()
    if kind not in ("adam", "adamw"):
        return None
    return kind == "adamw" or bool(mapping_at(section, "params").get("adam_w_mode", True))


def batch_sizes(config: Config) -> tuple[int | None, int | None, int | None]:
    """Read (train_batch_size, micro batch per GPU, gradient accumulation steps) as given."""
    top = Section(config)
    return (
        top.plain_count("train_batch_size"),
        top.plain_count("train_micro_batch_size_per_gpu"),
        top.plain_count("gradient_accumulation_steps"),
    )


_LOADS_MASTERS: Final = "load_from_fp32_weights"


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
    auto_experts: int | None
    """`expert_parallel.autoep_size`, by default 1; None without AutoEP."""
    loads_universal: bool
    """`checkpoint.load_universal`."""
    loads_masters: bool
    """`load_from_fp32_weights`, which is on by default."""


def features(config: Config) -> Features:
    top, zero, offload = Section(config), _zero(config), _offload(config)
    experts = _expert_parallel(top)
    shard_size = zero.count("mics_shard_size", least=-1)  # -1, its default, stands for none
    return Features(
        swaps_optimizer=_offload_device(config) == "nvme",
        offload_ratio=offload.fraction("ratio"),
        super_offload=offload.flag("super_offload"),
        zenflow=zero.has("zenflow") and zero.values["zenflow"] is not None,
        quantized_frozen=zero.flag("zero_quantized_nontrainable_weights"),
        mics_shard_size=shard_size if shard_size and shard_size > 0 else None,
        tensor_parallel=top.section("tensor_parallel").count("autotp_size") or 1,
        auto_experts=experts.count("autoep_size") or 1 if experts.plain_flag("enabled") else None,
        loads_universal=top.section("checkpoint").plain_flag("load_universal"),
        loads_masters=not zero.has(_LOADS_MASTERS) or zero.flag(_LOADS_MASTERS),
    )


def _expert_parallel(top: Section) -> Section:
    """Return AutoEP's section, which may be left empty in any way."""
    return top.section("expert_parallel") if top.values.get("expert_parallel") else Section({})
