"""What torch's optimizers (2.13) keep in param groups and states, where DeepSpeed's differ.

torch loads a distributed checkpoint only if it has every key of the optimizer that loads.
"""

import struct
from collections.abc import Mapping
from typing import Final

from streamshard.errors import UnsupportedError
from streamshard.formats.checkpoint import ScalarState
from streamshard.formats.pickle.inert import Node, show

STEP: Final = "step"
OF_TORCH: Final = "foreach"
"""Hyper-parameter that only torch's own optimizers have: they count steps in a tensor."""
_BIAS_CORRECTION: Final = "bias_correction"
_SWITCHES: Final = {"maximize": False, "foreach": None, "differentiable": False}
_DEFAULTS: Final[tuple[tuple[frozenset[str], Mapping[str, Node]], ...]] = (
    (
        frozenset({"betas", "eps", "weight_decay"}),
        # AdamW sets decoupled_weight_decay whenever it loads, and for Adam it is False.
        {
            "amsgrad": False,
            **_SWITCHES,
            "capturable": False,
            "fused": None,
            "decoupled_weight_decay": False,
        },
    ),
    (frozenset({"momentum", "nesterov"}), {**_SWITCHES, "fused": None}),
    (frozenset({"lr_decay", "initial_accumulator_value"}), {**_SWITCHES, "fused": None}),
    (frozenset({"alpha", "centered"}), {**_SWITCHES, "capturable": False}),
)
"""Hyper-parameters that tell Adam, SGD, Adagrad and RMSprop → other keys, with their defaults."""
_EXACT: Final = 1 << 24
"""Counts up to this are exact in float32."""


def missing_keys(group: Mapping[str, Node]) -> dict[str, Node]:
    """Return the keys, with torch's defaults, that a param group lacks of torch's optimizer.

    >>> sorted(missing_keys({"lr": 0.1, "momentum": 0.9, "nesterov": False, "foreach": None}))
    ['differentiable', 'fused', 'maximize']
    """
    if group.get(_BIAS_CORRECTION, True) is not True and group.get(_BIAS_CORRECTION) != 1:
        message = "the optimizer runs without bias correction, which torch's Adam always makes"
        raise UnsupportedError(f"{message}: export the weights alone, as safetensors")
    found: dict[str, Node] = {}
    for known, defaults in _DEFAULTS:
        if known <= group.keys():
            found |= {key: value for key, value in defaults.items() if key not in group}
    return found


def step_of(value: Node) -> bytes:
    """Return a step counter as torch keeps it, the bytes of one float32."""
    count = value.number() if isinstance(value, ScalarState) else value
    if isinstance(count, bool) or not isinstance(count, int | float):
        raise UnsupportedError(f"the optimizer's step {show(value)} is not a count of steps")
    if not (0 <= count <= _EXACT and count == int(count)):
        raise UnsupportedError(f"the optimizer's step {count} is not exact in torch's float32")
    return struct.pack("<f", count)
