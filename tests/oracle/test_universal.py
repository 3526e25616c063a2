"""DeepSpeed's universal checkpoint, where it is right, as a second and independent oracle.

Its converter knows nothing of ours: what it makes of our files must be what it makes of the files
that the ranks saved. It is not an oracle under round robin, which it gets wrong without a word.
"""

from pathlib import Path

import pytest
import torch

import streamshard
from streamshard.errors import UnsupportedError
from tests.oracle.cases import FIRST_LIGHT
from tests.oracle.conftest import Places
from tests.oracle.universal import universal_of
from tests.oracle.values import value_differences

NAMES = ("z1-bf16-4to2", "z2-bf16-3to5", "z2-fp32-2to3", "z3-bf16-4to2", "z3-sub-groups-2to3")


@pytest.mark.parametrize("name", NAMES)
def test_universal_conversion_of_ours_and_of_the_saved_agree(
    name: str, light: Places, tmp_path: Path
) -> None:
    one = next(one for one in FIRST_LIGHT if one.name == name)
    saved = universal_of(light.source(one.case, one.source), tmp_path / "saved")
    ours = universal_of(light.out(one), tmp_path / "ours")
    with pytest.raises(UnsupportedError, match="a DeepSpeed universal checkpoint"):
        streamshard.inspect(ours)
    files = sorted(path.relative_to(saved) for path in (saved / "zero").rglob("*.pt"))
    assert files == sorted(path.relative_to(ours) for path in (ours / "zero").rglob("*.pt"))
    # 15 trained parameters with a master and two moments each.
    assert len([path for path in files if path.name != "optimizer_state.pt"]) >= 45
    for file in files:
        if file.name == "optimizer_state.pt":
            continue  # the rest of one rank's optimizer file, compared elsewhere
        before, after = (torch.load(root / file, weights_only=False) for root in (saved, ours))
        assert list(value_differences(before, after, str(file))) == []
