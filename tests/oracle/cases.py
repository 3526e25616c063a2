"""The cases of the first-light test and the world sizes each is taken between."""

from dataclasses import dataclass

from tests.oracle.models import Case, fused_adam_without_kernel


@dataclass(frozen=True)
class Resharding:
    """One conversion: `case` trained at `source` ranks and resumed at `target` ranks."""

    case: Case
    source: int
    target: int
    resume: Case | None = None
    """What resumes, where that is trained in another way; its config then goes to the converter."""
    expert_parallel: int | None = None
    """Over how many ranks what resumes has its experts, where that is another count."""

    @property
    def resuming(self) -> Case:
        """The case that loads the result."""
        return self.resume or self.case

    @property
    def consolidates(self) -> bool:
        """Whether DeepSpeed's `zero_to_fp32` can read both ends.

        It refuses BF16_Optimizer's and what was saved without ZeRO, maps files into memory, which
        takes the zip container, and knows no parallelism but that of data.
        """
        is_plain = self.case.topology is None and self.case not in (*LEGACY, *STAGE_0)
        return is_plain and self.keeps_scaler

    @property
    def keeps_scaler(self) -> bool:
        """Whether both ends save a loss scaler, which BF16_Optimizer has no need of."""
        return BF16_OPTIMIZER not in (self.case, self.resuming)

    @property
    def name(self) -> str:
        """A name for test ids and directories."""
        as_what = f"-as-{self.resume.name}" if self.resume else ""
        return f"{self.case.name}-{self.source}to{self.target}{as_what}"


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
LEGACY = [
    Case(f"z{stage}-legacy", stage, "bf16", {"checkpoint": {"checkpoint_serialization": False}})
    for stage in (2, 3)
]
"""Saved in torch's format from before the zip container."""
ZERO_INIT = Case("z3-zero-init", 3, "bf16", zero_init=True)

STAGE_0 = [
    *(_plain(0, dtype) for dtype in ("fp32", "bf16", "fp16")),
    Case("z0-fused", 0, "bf16", optimizer=fused_adam_without_kernel),
]
"""Without ZeRO: torch's optimizer alone, with masters one by one, with flat masters."""

BF16 = [_plain(stage, "bf16") for stage in (1, 2, 3)]
FP16 = [_plain(stage, "fp16") for stage in (1, 2, 3)]
FP32 = [_plain(stage, "fp32") for stage in (1, 2, 3)]

FIRST_LIGHT = [
    *(Resharding(case, n, m) for case in BF16 for n, m in ((4, 2), (2, 4), (3, 5), (1, 3), (4, 1))),
    *(Resharding(case, 2, 3) for case in FP16 + FP32),
    *(Resharding(case, 2, 3) for case in STAGE_0),
    *(Resharding(case, 4, 1) for case in STAGE_0[:2]),
    Resharding(BF16[1], 2, 2),
    Resharding(ROUND_ROBIN, 4, 3),
    Resharding(ALIGNED, 4, 3),
    Resharding(SUB_GROUPS, 4, 2),
    Resharding(SUB_GROUPS, 2, 3),
    Resharding(ZERO_INIT, 2, 3),
    Resharding(LEGACY[0], 4, 3),
    Resharding(LEGACY[1], 2, 3),
    Resharding(BF16_OPTIMIZER, 4, 3),
    Resharding(BF16_OPTIMIZER, 2, 4),
    Resharding(BF16_OPTIMIZER, 4, 2, resume=BF16[1]),
    Resharding(BF16_OPTIMIZER, 2, 3, resume=BF16[2]),
    Resharding(BF16[0], 4, 2, resume=BF16_OPTIMIZER),
    Resharding(BF16[2], 4, 3, resume=BF16_OPTIMIZER),
    Resharding(BF16[1], 4, 3, resume=ROUND_ROBIN),
    Resharding(ROUND_ROBIN, 4, 2, resume=ALIGNED),
    Resharding(ALIGNED, 4, 2, resume=BF16[1]),
    Resharding(SUB_GROUPS, 2, 3, resume=BF16[2]),
    Resharding(BF16[2], 4, 3, resume=SUB_GROUPS),
    Resharding(FP32[1], 2, 3, resume=BF16[1]),
    Resharding(BF16[1], 4, 2, resume=FP32[1]),
    Resharding(BF16[0], 4, 2, resume=BF16[1]),
    Resharding(BF16[1], 4, 2, resume=BF16[0]),
    Resharding(BF16[1], 4, 3, resume=BF16[2]),
    Resharding(BF16[2], 4, 3, resume=BF16[1]),
    Resharding(BF16[0], 2, 3, resume=SUB_GROUPS),
    Resharding(SUB_GROUPS, 4, 2, resume=ROUND_ROBIN),
]
"""Shrink, grow, same size, to and from one rank; every stage and dtype; the layout options, also
where the job that resumes has other ones."""
