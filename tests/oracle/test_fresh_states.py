"""Engines load exact masters without states, and their optimizers begin with the first step."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from tests.oracle.cases import BF16, BF16_OPTIMIZER, FP16, FP32, SUB_GROUPS
from tests.oracle.laws import (
    test_both_roads_write_the_same_bytes,
    test_deepspeed_would_have_written_the_same_files,
    test_the_resumed_engine_holds_what_was_saved,
)
from tests.oracle.models import Case, fused_adam_without_kernel
from tests.oracle.reshardings import Places, Resharding, carry
from tests.oracle.truth import Truth

__all__ = [
    "test_both_roads_write_the_same_bytes",
    "test_deepspeed_would_have_written_the_same_files",
    "test_the_resumed_engine_holds_what_was_saved",
]
UNTESTED = {"zero_allow_untested_optimizer": True}
FUSED = Case("z2-fused", 2, "bf16", UNTESTED, optimizer=fused_adam_without_kernel)
"""It counts its steps in the param groups."""
NADAM = Case("z2-nadam", 2, "bf16", UNTESTED, optimizer=torch.optim.NAdam)
"""One of its states begins with 1."""


@dataclass(frozen=True)
class Fresh(Resharding):
    """One whose optimizer starts fresh."""

    def alike(self, saved: Truth, resumed: Truth) -> tuple[Truth, Truth]:
        groups = [
            {
                **group,
                "scalars": {},
                "hyper_parameters": {
                    key: value for key, value in group["hyper_parameters"].items() if key != "step"
                },
            }
            for group in saved.groups
        ]
        masters = {"fp32": saved.states["fp32"]}
        return super().alike(replace(saved, states=masters, groups=groups), resumed)

    def is_known(self, line: str) -> bool:
        """Before 0.16.4 DeepSpeed counted padding on the last rank alone."""
        is_counted = "['group_paddings']" in line or "['single_partition_of_fp32_groups']" in line
        return self.saved_by == "0.14.5" and is_counted


def fresh(case: Case, source: int, target: int, **more: object) -> Fresh:
    return Fresh(case, source, target, options={"fresh_states": True}, **more)  # type: ignore[arg-type]


RESHARDINGS: list[Resharding] = [
    *(fresh(case, 3, 2) for case in (BF16[1], BF16_OPTIMIZER, SUB_GROUPS, FUSED, NADAM)),
    *(fresh(case, 2, 3) for case in (BF16[2], FP16[1], FP32[0])),
    *(
        fresh(case, 2, 3, saved_by=version, resumed_by=version)
        for version, case in (("0.14.5", BF16[1]), ("0.14.5", BF16_OPTIMIZER), ("0.16.9", BF16[2]))
    ),
]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    return carry(RESHARDINGS, Path(tmp_path_factory.mktemp("fresh")))


def test_its_steps_are_counted_from_the_first(one: Resharding, places: Places) -> None:
    before, after = places.resumed(one), places.trained_on(one)
    assert before.states.keys() == {"fp32"}
    assert after.states.keys() == places.saved(one).states.keys()
    skipped = after.counters["skipped_steps"] - before.counters["skipped_steps"]
    for group in after.groups:
        counted = {**group["hyper_parameters"], **group["scalars"]}
        assert int(counted["step"]) == one.further_steps - skipped > 0
