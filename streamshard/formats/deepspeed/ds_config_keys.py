"""Which keys of a DeepSpeed config are read here, and which look like a mistyped one of them.

DeepSpeed ignores a key at the top that it does not know, so that a job with `zero_optimisation`
trains without ZeRO; in most sections it refuses the key.
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
"""Section → keys in it that say something here."""
_OTHERS: Final = frozenset({"bfloat16"})
"""Keys of DeepSpeed's own that are near to one of these, and something else."""
_NEAR: Final = 0.8
"""How alike two keys have to be: 1 where they are the same."""


def mistyped(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Find the first key that looks like one that is read here and is not given.

    Returns the key and what it looks like, each with its section before it. What begins with a
    sign, as in `"_fp16"`, has been put aside by somebody.

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
