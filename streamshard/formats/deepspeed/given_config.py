"""Reads the DeepSpeed config that a user gives, and refuses keys that look mistyped."""

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from streamshard.errors import CorruptFileError, UsageError
from streamshard.formats import strict_json
from streamshard.formats.deepspeed.ds_config import Config
from streamshard.formats.pickle.inert import show
from streamshard.io.entries import read_document

_READ: Final[Mapping[tuple[str, ...], tuple[str, ...]]] = {
    (): (
        "zero_optimization", "bf16", "fp16", "data_types", "train_batch_size",
        "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
        "optimizer", "checkpoint", "tensor_parallel", "expert_parallel", "data_parallel_size",
        "sequence_parallel_size", "use_data_before_expert_parallelism",
    ),
    ("zero_optimization",): (
        "stage", "sub_group_size", "round_robin_gradients", "parameter_alignment",
        "offload_optimizer", "cpu_offload", "mics_shard_size", "zenflow",
        "zero_quantized_nontrainable_weights",
    ),
    ("zero_optimization", "offload_optimizer"): ("device", "ratio", "super_offload"),
    ("bf16",): ("enabled",),
    ("bfloat16",): ("enabled",),
    ("fp16",): ("enabled",),
    ("data_types",): ("grad_accum_dtype",),
    ("tensor_parallel",): ("autotp_size",),
    ("expert_parallel",): ("enabled", "autoep_size"),
    ("checkpoint",): ("load_universal",),
}  # fmt: skip
"""Section → keys that are read from it."""
_OTHERS: Final = frozenset({"bfloat16"})
"""DeepSpeed's own keys that resemble one of these but are not mistyped."""
_NEAR: Final = 0.8
"""Minimum similarity of two keys; equal keys have 1."""


def mistyped(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Find the first unknown key that resembles a known key which the config lacks.

    DeepSpeed ignores an unknown key at the top level: a job with `zero_optimisation` trains without
    ZeRO. In most sections it refuses an unknown key. Returns both keys, each with its section
    before it. A key that does not begin with a letter, such as `"_fp16"`, was disabled by the user
    on purpose.

    >>> mistyped({"zero_optimisation": {"stage": 3}})
    ('zero_optimisation', 'zero_optimization')
    >>> mistyped({"fp16": {"enable": True}})
    ('fp16.enable', 'fp16.enabled')
    >>> mistyped({"fp16": {"enabled": True}, "_bf16": {}})
    """
    for section, known_keys in _READ.items():
        entries: Any = config
        for key in section:
            entries = entries.get(key) if isinstance(entries, Mapping) else None
        if not isinstance(entries, Mapping):
            continue
        absent = [key for key in known_keys if key not in entries]
        for key in entries:
            if key in known_keys or key in _OTHERS or not key[:1].isalpha():
                continue
            near = get_close_matches(key.lower(), absent, n=1, cutoff=_NEAR)
            if near:
                return ".".join([*section, key]), ".".join([*section, *near])
    return None


def read_file(path: Path) -> Config:
    try:
        config = strict_json.parse(read_document(path))
    except OSError as error:
        raise UsageError(f"cannot be read ({error.strerror})", path=path) from error
    except CorruptFileError as error:
        raise UsageError(str(error)) from error
    except ValueError as error:
        raise UsageError(f"not a DeepSpeed config in JSON ({error})", path=path) from error
    if not isinstance(config, dict):
        raise UsageError("not a DeepSpeed config: the JSON in it is not an object", path=path)
    return checked(config, str(path))


def checked(config: dict[str, Any], name: str) -> Config:
    """Return a config that a user gives, without keys that look mistyped.

    `name`: where it is, for messages.
    """
    found = mistyped(config)
    if found is not None:
        message = f"{name}: {show(found[0])} is no known key; did you mean {found[1]!r}? Correct it"
        raise UsageError(f"{message} there, as DeepSpeed would ignore or refuse it as well")
    return config
