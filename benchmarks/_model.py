"""Models of any size, every element a function of (state, parameter, position).

So a checkpoint far larger than memory can be written piece by piece, and a result of any layout
checked piece by piece, without keeping a copy of what was written.
"""

import math
import zlib
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch

MASTER: Final = "fp32"
STATES: Final = (MASTER, "exp_avg", "exp_avg_sq")
STEP: Final = "step"
"""State whose elements all are `STEP_COUNT`."""
STEP_COUNT: Final = 7
MODULE: Final = "module"
PADDING: Final = ""
"""State of elements that belong to no parameter."""
PIECE_NUMEL: Final = 1 << 18
"""Elements that are made at once: few enough to stay in the cache."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Model:
    """What a training job holds: bf16 weights, Adam states in fp32."""

    groups: tuple[dict[str, Shape], ...]
    """Trained parameters of each param group."""
    tied: dict[str, str] = field(default_factory=dict)
    """Second name of a parameter → its first."""
    frozen: dict[str, Shape] = field(default_factory=dict)
    buffers: dict[str, Shape] = field(default_factory=dict)
    """Buffers, in fp32."""
    sub_group_numel: int = 1_000_000_000
    """`sub_group_size` of stage 3."""

    @property
    def trained(self) -> dict[str, Shape]:
        """Return all trained parameters."""
        return {name: shape for group in self.groups for name, shape in group.items()}

    @property
    def numel(self) -> int:
        """Count the trained elements."""
        return sum(map(math.prod, self.trained.values()))


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive elements of one state of one parameter."""

    state: str
    name: str
    start: int
    numel: int


def transformer(nbytes: int, *, stage: int, layers: int = 16, vocabulary: int = 8) -> Model:
    """Make up a model whose checkpoint has about this size.

    Sizes are odd on purpose, so that hardly a cut falls on a parameter's or a page's boundary.

    Parameters
    ----------
    vocabulary
        Rows of the embedding, as a multiple of the hidden size.
    """
    # Three states of 4 bytes; stages 1 and 2 keep the 2-byte weights too.
    wanted = nbytes / (12 if stage == 3 else 14)
    hidden = max(3, round(math.sqrt(wanted / (12 * layers + vocabulary + 1)))) | 1
    matrices: dict[str, Shape] = {"embed.weight": (vocabulary * hidden, hidden)}
    vectors: dict[str, Shape] = {}
    for layer in range(layers):
        at = f"layers.{layer}"
        matrices[f"{at}.attention.qkv"] = (3 * hidden, hidden)
        matrices[f"{at}.attention.out"] = (hidden, hidden)
        matrices[f"{at}.mlp.up"] = (4 * hidden, hidden)
        matrices[f"{at}.mlp.down"] = (hidden, 4 * hidden)
        vectors |= {f"{at}.norm": (hidden,), f"{at}.bias": (4 * hidden,), f"{at}.gate": ()}
    return Model(
        groups=(matrices, vectors),
        tied={"head.weight": "embed.weight"},
        frozen={"frozen.weight": (hidden, hidden)},
        buffers={"rotary.frequencies": (hidden,)},
        # About five sub-groups on eight ranks, fewer on more.
        sub_group_numel=max(1, int(wanted) // 40),
    )


def values(run: Run, dtype: torch.dtype) -> torch.Tensor:
    """Return the elements of a run: finite, of both signs, hardly two alike.

    bfloat16 module weights are casts of the float32 elements, as in training.
    """
    if run.state in (PADDING, STEP):
        return torch.full((run.numel,), STEP_COUNT if run.state == STEP else 0, dtype=dtype)
    bits = np.arange(run.numel, dtype=np.uint32)
    bits += np.uint32(run.start & 0xFFFFFFFF)
    bits *= np.uint32(0x9E3779B1)
    bits ^= np.uint32(zlib.crc32(f"{run.state}/{run.name}".encode()))
    bits ^= bits >> 15
    bits *= np.uint32(0x85EBCA77)
    bits ^= bits >> 13
    # Keep sign, mantissa and three bits of exponent; Adam's second moment has no sign.
    bits &= np.uint32(0x03FFFFFF if run.state == "exp_avg_sq" else 0x83FFFFFF)
    bits |= np.uint32(0x3C000000)
    return torch.from_numpy(bits.view(np.float32)).to(dtype)
