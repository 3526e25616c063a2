"""What `verify`, `diff`, `export` and plans print, and where; their exit codes and JSON."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import streamshard as api
from streamshard import Distance, TensorDiff
from streamshard.cli.diff_command import diff_text, most_changed_first
from tests.cli.conftest import Saved, flip, in_process, passed, refused, tree
from tests.fabricated import edit, optimizer_file, write
from tests.job import TAG
from tests.verify.conftest import SMALL

# verify -------------------------------------------------------------------------------------------


def test_every_problem_is_printed_and_the_exit_code_is_6(stage_2: Path) -> None:
    assert json.loads(in_process("verify", stage_2, "--json").out)["problems"] == []
    missing, damaged = optimizer_file(stage_2, 3), optimizer_file(stage_2, 1)
    missing.unlink()
    flip(damaged)
    done = in_process("verify", stage_2)
    assert (done.code, done.err) == (6, f"streamshard: {stage_2}: 2 problems\n")
    for kind, path in (("missing", missing), ("damaged", damaged)):
        assert f"{kind}: {path}" in done.out
    done = in_process("verify", stage_2, "-q")
    assert (done.code, done.out) == (6, "")
    assert str(damaged) in done.err
    done = in_process("verify", stage_2, "--json")
    found = json.loads(done.out)
    assert [(p["kind"], p["file"]) for p in found["problems"]] == [
        ("missing", str(missing)),
        ("damaged", str(damaged)),
    ]
    assert done.code == 6
    assert found["bytes_read"] > 0
    assert found["peak_bytes"] <= found["projected_bytes"]


# diff ---------------------------------------------------------------------------------------------

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
    api.convert(other, tmp_path / "other.zarr")
    return one, tmp_path / "other.zarr"


def test_the_text_of_a_diff(pair: tuple[Path, Path]) -> None:
    found = replace(api.diff(*pair), left="A", right="B", seconds=2.0)
    assert diff_text(found, verbose=False) == GOLDEN
    full = diff_text(found, verbose=True)
    rows = full.split("\n\n")[2].splitlines()[2:]
    assert sorted(row.split()[0] for row in rows) == sorted(t.name for t in found.tensors)
    equal = api.diff(pair[0], pair[0])
    assert diff_text(equal, verbose=False).endswith(
        "Equal to the bit. Checksums were not looked at: verify does that."
    )
    shown = diff_text(replace(equal, states=(), tensors=()), verbose=False)
    assert "relative L2" not in shown
    assert "No tensor is in both with the same shape." in shown


ALL_CHANGED = Distance(4, 4, 1.0, 1.0, 1.0, 1.0, -1.0, (0, 0), (0, 0))


def tensor(name: str, distance: Distance) -> TensorDiff:
    return TensorDiff(name, "fp32", ("float32",) * 2, (distance.numel,), distance)


def test_what_cannot_be_told_comes_first_and_what_is_equal_last() -> None:
    kinds = {
        "zeros": replace(ALL_CHANGED, changed=0, fraction_changed=0.0, max_abs=0.0, cosine=None),
        "bytes": replace(ALL_CHANGED, changed=1, fraction_changed=0.25, max_abs=None),
        "turned": ALL_CHANGED,
        "gone": replace(ALL_CHANGED, max_abs=2.0, mean_abs=2.0, relative_l2=None, cosine=None),
    }
    tensors = [tensor(name, distance) for name, distance in kinds.items()]
    names = [t.name for t in most_changed_first(tensors)]
    assert names == ["gone", "turned", "bytes", "zeros"]


def test_exit_codes_and_streams_of_diff(pair: tuple[Path, Path]) -> None:
    one, other = pair
    done = in_process("diff", one, one)
    assert (done.code, done.err, "Equal to the bit." in done.out) == (0, "", True)
    done = in_process("diff", one, other, "-q")
    message = f"streamshard: {one}: differs from {other}: 3 of 23 tensors, 1 other difference\n"
    assert (done.code, done.out, done.err) == (6, "", message)
    assert in_process("diff", one, other, "--param", "u", "-q").code == 0
    assert in_process("diff", one, other, "--param", "nothing").code == 2
    assert in_process("diff", one, f"{other}.gone").code == 3
    assert in_process("diff", one, other, "--memory-limit", "1MiB").code == 5


def test_json_of_diff_is_complete_and_its_keys_stay(pair: tuple[Path, Path]) -> None:
    done = in_process("diff", *pair, "--json")
    found = json.loads(done.out, parse_constant=pytest.fail)
    assert done.code == 6
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


# export, convert ----------------------------------------------------------------------------------


# Plans --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    ["repartition SRC OUT --world-size 3", "export SRC OUT --format torch --max-shard-size 100KB"],
)
def test_a_dry_run_touches_nothing_and_tells_the_exact_size(
    command: str, saved: Saved, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    words = command.replace("SRC", str(saved(3))).replace("OUT", str(out)).split()
    planned = json.loads(in_process(*words, "-n", "--json").out)
    assert list(tmp_path.iterdir()) == []
    done = json.loads(in_process(*words, "--json").out)
    assert planned["seconds"] is None
    assert planned.keys() - done.keys() == {"estimate"}
    assert planned["files"] == done["files"] == len(tree(out)) > 3
    assert planned["bytes_written"] == sum(map(len, tree(out).values()))
    assert planned["estimate"]["written_bytes"] == done["bytes_written"]


def test_a_dry_run_tells_what_it_would_write(run: Path, tmp_path: Path) -> None:
    command = ("repartition", run, tmp_path / "out", "--world-size", 3, "-n")
    done = passed(*command)
    for text in ("would write", "memory  ", "space  ", "For the job that resumes:"):
        assert text in done.out
    assert "zero_pp_rank_{0..2}_mp_rank_00" in done.out
    assert "zero_pp_rank_2_mp_rank_00" in in_process(*command, "-v").out


def test_what_is_advised_is_not_what_was_given(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command, advised = ("convert", run, out), "If this is already done, --if-needed"
    assert in_process(*command).code == 0
    assert advised in refused(4, "exists; use --overwrite", *command).err
    (out / "stranger").write_text("")
    assert advised not in refused(4, "stranger", *command, "--if-needed").err
