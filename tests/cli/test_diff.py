"""`diff` as a user meets it: the text, the order of what is shown, exit codes, JSON."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import streamshard
from streamshard import Distance, TensorDiff
from streamshard.cli.main import main
from streamshard.cli.text.diff_text import ORDERS, diff_text
from tests.cli.conftest import without_progress
from tests.fabricated import edit, optimizer_file, write
from tests.job import TAG, Job
from tests.verify.conftest import SMALL

GOLDEN = """\
from     A (DeepSpeed shards), global_step7
to       B (Zarr store), global_step7
tensors  3 changed, 20 equal
read     10.9 KiB in 2.0 s, 5.4 KiB/s

state       tensors  elements  changed  relative L2  max abs  mean abs     cosine
----------  -------  --------  -------  -----------  -------  --------  ---------
fp32         1 of 3        26    3.85%      0.00105        1    0.0385  >0.999999
exp_avg      0 of 3        26        0            0        0         0          1
exp_avg_sq   0 of 3        26        0            0        0         0          1
module       1 of 8        44    2.27%      7.9e-05        1    0.0227  >0.999999
training     0 of 5     5,073        0            -        -         -          -
file         1 of 1        22    4.55%            -        -         -          -

tensor                elements  changed  relative L2  max abs  mean abs     cosine
--------------------  --------  -------  -----------  -------  --------  ---------
module/w                    15    6.67%      0.00115        1    0.0667  >0.999999
state/fp32/w                15    6.67%      0.00115        1    0.0667  >0.999999
file/zero_to_fp32.py        22    4.55%            -        -         -          -

Other differences:
value: model/global_steps: 7 here, 8 there"""


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint, and a store of one that differs a little."""
    one = write(SMALL, tmp_path / "one")
    other = write(replace(SMALL, changed=("fp32", "w", 3)), tmp_path / "other")
    edit(other / TAG / "mp_rank_00_model_states.pt", lambda content: content.update(global_steps=8))
    (other / "zero_to_fp32.py").write_text("#!/usr/bin/env pythoN\n")
    streamshard.convert(other, tmp_path / "other.zarr")
    return one, tmp_path / "other.zarr"


def test_the_text(pair: tuple[Path, Path]) -> None:
    found = replace(streamshard.diff(*pair), left="A", right="B", seconds=2.0)
    assert diff_text(found, sort="relative", verbose=False) == GOLDEN
    full = diff_text(found, sort="name", verbose=True)
    assert [line.split()[0] for line in full.split("\n\n")[2].splitlines()[2:]] == [
        tensor.name for tensor in found.tensors
    ]
    equal = streamshard.diff(pair[0], pair[0])
    assert diff_text(equal, sort="max", verbose=False).endswith(
        "Equal to the bit. Checksums were not looked at: verify does that."
    )


def test_shares_are_not_rounded_to_nothing_or_all() -> None:
    tensor = streamshard.TensorDiff(
        "x", "fp32", ("float32",) * 2, (10**7,),
        Distance(10**7, 1, 1e-7, 1e-20, 1e-27, 1e-22, 1.0, (0, 0), (0, 0)),
    )  # fmt: skip
    report = streamshard.DiffReport(
        "A", "B", ("native",) * 2, ("t",) * 2, (tensor,), (), (), (), 0, 0, 0, 0, 0, 1.0
    )
    almost = replace(tensor, distance=replace(tensor.distance, changed=10**7 - 1,
                                              fraction_changed=1 - 1e-7, cosine=0.25))  # fmt: skip
    for shown, share in ((tensor, "<0.01%"), (almost, ">99.99%")):
        text = diff_text(replace(report, tensors=(shown,)), sort="changed", verbose=False)
        assert f" {share} " in text
    assert text.endswith(" 0.250000")


def test_models_of_other_parts_have_nothing_to_be_measured(tmp_path: Path) -> None:
    one = write(Job(), tmp_path / "one")
    other = write(Job(parts=2), tmp_path / "other")
    found = streamshard.diff(one, other)
    assert (found.tensors, found.is_equal) == ((), False)
    text = diff_text(found, sort="relative", verbose=True)
    assert "value: the model: 1 and 2 tensor or pipeline parallel parts" in text


@pytest.mark.parametrize("order", ORDERS)
def test_what_cannot_be_told_comes_first_and_what_is_equal_last(order: str) -> None:
    whole = Distance(4, 4, 1.0, 1.0, 1.0, 1.0, -1.0, (0, 0), (0, 0))
    kinds = {
        "zeros": replace(whole, changed=0, fraction_changed=0.0, max_abs=0.0, cosine=None),
        "bytes": replace(whole, changed=1, fraction_changed=0.25, max_abs=None),
        "turned": whole,
        "gone": replace(whole, max_abs=2.0, mean_abs=2.0, relative_l2=None, cosine=None),
    }
    tensors = [TensorDiff(name, "fp32", ("float32",) * 2, (4,), d) for name, d in kinds.items()]
    names = [t.name for t in sorted(tensors, key=ORDERS[order], reverse=True)]
    assert sorted(names[:2]) == ["gone", "turned"]
    assert names[2:] == ["bytes", "zeros"]
    assert order == "changed" or names[0] == "gone"


def test_the_most_changed_come_first(tmp_path: Path) -> None:
    names = [f"p{number:02d}" for number in range(25)]
    job = Job(groups=(tuple((name, (2,)) for name in names),), frozen=(), tied={})
    one, other = (write(job, tmp_path / name) for name in ("one", "other"))
    for rank in (0, 1):

        def change(content: dict[str, Any], rank: int = rank) -> None:
            with torch.no_grad():
                flat = content["optimizer_state_dict"]["single_partition_of_fp32_groups"][0]
                flat += torch.arange(len(flat)) + 100 * rank

        edit(optimizer_file(other, rank), change)
    found = streamshard.diff(one, other)
    for order in ("max", "mean"):
        table = diff_text(found, sort=order, verbose=False).split("\n\n")[2]
        shown = [line.split()[0] for line in table.splitlines()[2:]]
        assert shown == [f"state/fp32/{name}" for name in reversed(names)][:20]
    assert "5 more changed; -v shows all tensors." in diff_text(found, sort="max", verbose=False)


def test_exit_codes_and_streams(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = map(str, pair)
    assert main(["diff", one, one]) == 0
    shown = capsys.readouterr()
    assert (without_progress(shown.err), "Equal to the bit." in shown.out) == ("", True)
    assert main(["diff", one, other, "-q"]) == 6
    shown = capsys.readouterr()
    message = f"streamshard: {one}: differs from {other}: 3 of 23 tensors, 1 other difference\n"
    assert (shown.out, shown.err) == ("", message)
    assert main(["diff", one, other, "--param", "u", "-q"]) == 0
    assert main(["diff", one, other, "--param", "nothing"]) == 2
    assert main(["diff", one, f"{other}.gone"]) == 3
    assert main(["diff", one, other, "--memory-limit", "1MiB"]) == 5
    capsys.readouterr()


def test_json_is_complete_and_its_keys_stay(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", *map(str, pair), "--json"]) == 6
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert list(found) == [
        "left", "right", "kinds", "tags", "tensors", "states", "differences", "notes",
        "bytes_read", "floor_bytes", "limit_bytes", "projected_bytes", "peak_bytes", "seconds",
    ]  # fmt: skip
    assert list(found["tensors"][0]) == ["name", "state", "dtypes", "shape", "distance"]
    assert list(found["states"][0]) == ["state", "tensors", "changed_tensors", "distance"]
    figures = [
        "numel", "changed", "fraction_changed", "max_abs", "mean_abs", "relative_l2", "cosine",
        "nan", "inf",
    ]  # fmt: skip
    for held in (*found["tensors"], *found["states"]):
        assert list(held["distance"]) == figures
    assert found["tensors"][0]["name"] == "state/fp32/w"
    assert found["tensors"][0]["distance"]["max_abs"] == 1.0
    assert [d["name"] for d in found["differences"]] == ["model/global_steps"]
    assert 0 < found["peak_bytes"] <= found["projected_bytes"]
