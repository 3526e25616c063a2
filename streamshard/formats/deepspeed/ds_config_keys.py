"""Lists the keys of a DeepSpeed config that are read here, and finds keys that look mistyped.

DeepSpeed ignores an unknown key at the top level: a job with `zero_optimisation` trains without
ZeRO. In most sections it refuses an unknown key.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Final

_READ: Final[Mapping[tuple[str, ...], tuple[str, ...]]] = {
    (): (
        "zero_optimization",
        "bf16",
        "fp16",
        "data_types",
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "optimizer",
        "checkpoint",
        "tensor_parallel",
        "expert_parallel",
        "data_parallel_size",
        "sequence_parallel_size",
        "use_data_before_expert_parallelism",
    ),
    ("zero_optimization",): (
        "stage",
        "sub_group_size",
        "round_robin_gradients",
        "parameter_alignment",
        "offload_optimizer",
        "cpu_offload",
        "mics_shard_size",
        "zenflow",
        "zero_quantized_nontrainable_weights",
    ),
    ("zero_optimization", "offload_optimizer"): ("device", "ratio", "super_offload"),
    ("bf16",): ("enabled",),
    ("bfloat16",): ("enabled",),
    ("fp16",): ("enabled",),
    ("data_types",): ("grad_accum_dtype",),
    ("tensor_parallel",): ("autotp_size",),
    ("expert_parallel",): ("enabled",),
    ("checkpoint",): ("load_universal",),
}
"""Section → keys that are read from it."""
_OTHERS: Final = frozenset({"bfloat16"})
"""DeepSpeed's own keys that resemble one of these but are not mistyped."""
_NEAR: Final = 0.8
"""Minimum similarity of two keys; equal keys have 1."""


def mistyped(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Find the first unknown key that resembles a known key which the config lacks.

    Returns both keys, each with its section before it. A key that does not begin with a letter,
    such as `"_fp16"`, was disabled by the user on purpose.

    >>> mistyped({"zero_optimisation": {"stage": 3}})
    ('zero_optimisation', 'zero_optimization')
    >>> mistyped({"fp16": {"enable": True}})
    ('fp16.enable', 'fp16.enabled')
    >>> mistyped({"fp16": {"enabled": True}, "_bf16": {}})
    """
    for section, known in _READ.items():
        found: Any = config
        for key in section:
            found = found.get(key) if isinstance(found, Mapping) else None
        if not isinstance(found, Mapping):
            continue
        absent = [key for key in known if key not in found]
        for key in found:
            if key in known or key in _OTHERS or not key[:1].isalpha():
                continue
            near = get_close_matches(key.lower(), absent, n=1, cutoff=_NEAR)
            if near:
                return ".".join([*section, key]), ".".join([*section, *near])
    return None
