"""The cases of plain data parallelism, and the world sizes that each is taken between."""

from dataclasses import dataclass, replace

from tests.oracle.models import Case, fused_adam_without_kernel
from tests.oracle.reshardings import Resharding
from tests.oracle.truth import Tensors, Truth


@dataclass(frozen=True)
class Casting(Resharding):
    """From or to a job that keeps its masters in 16 bits: DeepSpeed casts them when it loads."""

    @property
    def trains_alike(self) -> bool:
        return False

    def alike(self, saved: Truth, resumed: Truth) -> tuple[Truth, Truth]:
        cast = {
            state: _like(tensors, resumed.states[state]) for state, tensors in saved.states.items()
        }
        return replace(saved, states=cast), resumed

    def is_known(self, line: str) -> bool:
        """The files hold what was saved, those of the engine what it made of that."""
        return ": dtype torch." in line


def _like(tensors: Tensors, others: Tensors) -> Tensors:
    return {name: tensor.to(others[name].dtype) for name, tensor in tensors.items()}


def _plain(zero_stage: int, dtype: str) -> Case:
    assert dtype in ("bf16", "fp16", "fp32")
    return Case(f"z{zero_stage}-{dtype}", zero_stage, dtype)  # type: ignore[arg-type]


ROUND_ROBIN = Case(
    "z2-round-robin", 2, "bf16", {"zero_optimization": {"round_robin_gradients": True}}
)
ALIGNED = Case("z2-aligned", 2, "bf16", {"zero_optimization": {"parameter_alignment": True}})
SUB_GROUPS = Case("z3-sub-groups", 3, "bf16", {"zero_optimization": {"sub_group_size": 150}})
BF16_OPTIMIZER = Case("bf16-optimizer", 1, "bf16", {"data_types": {"grad_accum_dtype": "fp32"}})
"""What DeepSpeed makes of stage 1 when gradients are fp32: another optimizer class, other files."""
FLOAT32 = Case(
    "float32-gradients",
    1,
    "bf16",
    {
        "data_types": {"grad_accum_dtype": "float32"},
        "zero_optimization": {"round_robin_gradients": True, "parameter_alignment": True},
    },
)
"""The same in another spelling, with two options that it does not know."""
ZERO_INIT = Case("z3-zero-init", 3, "bf16", zero_init=True)
IN_BF16 = {"bf16": {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
NARROW = [Case(f"z{stage}-bf16-masters", stage, "bf16", IN_BF16) for stage in (2, 3)]

STAGE_0 = [
    *(_plain(0, dtype) for dtype in ("fp32", "bf16", "fp16")),
    Case("z0-fused", 0, "bf16", optimizer=fused_adam_without_kernel),
]
"""Without ZeRO: torch's optimizer alone, with masters one by one, with flat masters."""

BF16 = [_plain(stage, "bf16") for stage in (1, 2, 3)]
FP16 = [_plain(stage, "fp16") for stage in (1, 2, 3)]
FP32 = [_plain(stage, "fp32") for stage in (1, 2, 3)]

FIRST_LIGHT = [
    *(Resharding(BF16[at], n, m) for at, n, m in ((0, 3, 5), (1, 1, 3), (1, 4, 1), (2, 3, 5))),
    *(Resharding(case, 2, 3) for case in (*FP16[1:], FP32[2], *STAGE_0)),
    Resharding(BF16[2], 4, 1),
    Resharding(BF16[1], 2, 2),
    Resharding(replace(BF16[2], name="z3-path-as-tag"), 2, 3, tag="epoch/3"),
    Resharding(ROUND_ROBIN, 4, 3),
    Resharding(ALIGNED, 4, 3),
    Resharding(SUB_GROUPS, 2, 3),
    Resharding(ZERO_INIT, 2, 3),
    Resharding(BF16_OPTIMIZER, 4, 3),
    Resharding(BF16_OPTIMIZER, 2, 3, resume=BF16[2]),
    Resharding(BF16[1], 4, 3, resume=FLOAT32),
    Resharding(ROUND_ROBIN, 4, 2, resume=ALIGNED),
    Resharding(ALIGNED, 4, 2, resume=BF16[1]),
    Resharding(BF16[2], 4, 3, resume=SUB_GROUPS),
    Resharding(SUB_GROUPS, 4, 2, resume=ROUND_ROBIN),
    Resharding(FP32[1], 2, 3, resume=BF16[1]),
    Resharding(BF16[1], 4, 2, resume=FP32[1]),
    Resharding(BF16[1], 4, 3, resume=BF16[2]),
    Casting(BF16[1], 2, 3, resume=NARROW[0]),
    Casting(NARROW[1], 2, 3, resume=BF16[2]),
]
"""Shrink, grow, same size, to and from one rank; every stage and dtype; the layout options, also
where the job that resumes has other ones."""
