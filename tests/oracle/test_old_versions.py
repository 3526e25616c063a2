"""Checkpoints of older DeepSpeeds resume in the installed one, and in older ones what we wrote.

Real engines of each old version train and save. The installed version resumes from what we make of
that and saves it again; the old version resumes from what we make of its own files, and of those
that the installed version saved.
"""

from dataclasses import replace

import pytest
import torch

from tests.oracle import laws
from tests.oracle.cases import BF16, BF16_OPTIMIZER, ROUND_ROBIN
from tests.oracle.cases import STAGE_0 as WITHOUT_ZERO
from tests.oracle.laws import (  # noqa: F401
    test_an_engine_that_loads_directly_holds_the_same,
    test_both_roads_write_the_same_bytes,
    test_the_resumed_engine_holds_what_was_saved,
    test_training_goes_on_as_if_uninterrupted,
)
from tests.oracle.models import Case
from tests.oracle.reshardings import Places, Resharding
from tests.oracle.truth import Truth

VERSIONS = ("0.14.5", "0.16.9")
TRAINED, BY_NEW, BY_OLD = 3, 4, 2
"""World sizes: each version has its ranks started twice."""
STAGE_0 = Case("bf16-stage-0", 0, "bf16")
"""Before 0.17.6 a BF16_Optimizer did this, as it does stage 1 with gradients in fp32."""


class Between(Resharding):
    """A conversion with an old version at one end, or at both."""

    def alike(self, saved: Truth, resumed: Truth) -> tuple[Truth, Truth]:
        """Cast buffers: before 0.19.2 they have the dtype of the module."""
        others = resumed.buffers
        buffers = {name: held.to(others[name].dtype) for name, held in saved.buffers.items()}
        saved = replace(saved, buffers=buffers)
        keep = [end.keeps_scaler and end != STAGE_0 for end in (self.case, self.resuming)]
        if keep[0] != keep[1]:
            saved, resumed = replace(saved, scaler={}), replace(resumed, scaler={})
        return saved, resumed

    def trained_alike(self, expected: Truth, found: Truth) -> tuple[Truth, Truth]:
        """Leave out the buffers, which are trained on in the dtype that they have."""
        both = self.alike(expected, found)
        return replace(both[0], buffers={}), replace(both[1], buffers={})


def _to_new(version: str, case: Case, resume: Case | None = None) -> Resharding:
    return Between(case, TRAINED, BY_NEW, resume, saved_by=version)


def _in_old(version: str, case: Case) -> Resharding:
    return Between(case, TRAINED, BY_OLD, saved_by=version, resumed_by=version)


def _back(version: str, case: Case) -> Resharding:
    again = _to_new(version, case)
    return Between(case, BY_NEW, BY_OLD, resumed_by=version, saved_again=again)


OLDER, LATER = VERSIONS
RESHARDINGS = [
    *(_to_new(OLDER, case) for case in (BF16[1], BF16[2], ROUND_ROBIN)),
    *(_to_new(LATER, case) for case in (BF16[0], BF16[2])),
    _to_new(OLDER, STAGE_0, resume=BF16[1]),
    _to_new(LATER, STAGE_0, resume=BF16_OPTIMIZER),
    *(_in_old(OLDER, case) for case in (BF16[1], BF16[2], STAGE_0, WITHOUT_ZERO[0])),
    *(_in_old(LATER, case) for case in (BF16[0], BF16[2], ROUND_ROBIN, STAGE_0, WITHOUT_ZERO[2])),
    *(_back(OLDER, case) for case in (BF16[2], ROUND_ROBIN)),
    _back(LATER, BF16[0]),
]
"""Without ZeRO in fp16 the older one does not run without a GPU; in bf16 both save ZeRO's files."""


@pytest.mark.parametrize("version", VERSIONS)
def test_it_is_the_old_version_that_saved(version: str, places: Places) -> None:
    for one in RESHARDINGS:
        if one.saved_by == version:
            files = sorted(places.source(one).glob("*/*_states.pt"))
            per_rank = {3: 2 * TRAINED, 0: 1}.get(one.case.zero_stage, 1 + TRAINED)
            assert len(files) == (1 + TRAINED if one.case == STAGE_0 else per_rank)
            for path in files:
                assert torch.load(path, weights_only=False)["ds_version"] == version


IN_OLD = [one for one in RESHARDINGS if one.saved_by == one.resumed_by]


@pytest.mark.parametrize("one", IN_OLD, ids=lambda one: one.name, indirect=True)
def test_the_old_version_would_have_written_the_same_files(one: Resharding, places: Places) -> None:
    laws.test_deepspeed_would_have_written_the_same_files(one, places)
