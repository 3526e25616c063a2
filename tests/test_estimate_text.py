"""The text of a plan, letter by letter; memory, time and free space are filled in."""

from dataclasses import replace
from pathlib import Path

import pytest

import streamshard
from streamshard.cli.text.estimate_text import plan_text
from streamshard.operations.transfer.estimate import (
    Estimate,
    FileBytes,
    MemoryParts,
    Space,
    TimeEstimate,
)
from tests.fabricated import write
from tests.job import Job

MIB, GIB = 1 << 20, 1 << 30
MEMORY = MemoryParts(68 * MIB, 40 * MIB, 8 * MIB, 2, MIB, 2 * MIB, 0, 16 * MIB, GIB)
TIME = TimeEstimate(9.4, 2 * GIB, 64 * MIB, 800 * MIB, 56 * MIB, 0, 0, None)
SPACE = Space("/data", 100 * GIB, 92 * GIB, 0)


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")


def filled(told: Estimate) -> Estimate:
    """Fill in what differs from machine to machine."""
    return replace(told, memory=MEMORY, time=TIME, space=SPACE)


REPARTITION = """\
would write  out
from         run, tag global_step7
world size   4 -> 3, ZeRO stage 2
reads        1.8 KiB of content, from 9 files
writes       21.5 KiB, into 6 files
verifies     and reads 44.7 KiB more for that
memory       at most 28.0 MiB above the program's 40.0 MiB, of 1.0 GiB allowed: 8.0 MiB metadata + 2
             workers x (1.0 MiB window + 2.0 MiB scratch) + 16.0 MiB slack
time         about 9 s, which is an estimate: the source was read at 2.0 GiB/s, as it lies on disk
             or in the page cache (64.0 MiB of it), and a file next to the target was written and
             synced at 800.0 MiB/s (56.0 MiB, removed)
space        100.0 GiB free on the file system of /data, 92.0 GiB after

reads, in run                                                     files  bytes
----------------------------------------------------------------  -----  -----
global_step7/bf16_zero_pp_rank_{0..3}_mp_rank_00_optim_states.pt      4  1,728
global_step7/zero_pp_rank_{0..3}_mp_rank_00_model_states.pt           4     98
zero_to_fp32.py                                                       1     22

writes                                                            files   bytes
----------------------------------------------------------------  -----  ------
global_step7/bf16_zero_pp_rank_{0..2}_mp_rank_00_optim_states.pt      3  15,885
global_step7/mp_rank_00_model_states.pt                               1   6,058
zero_to_fp32.py                                                       1      22
latest                                                                1      12

For the job that resumes:
random generators  The checkpoint holds none for each rank. What is in the client state is kept.
global batch       To keep the global batch of 24 on 3 ranks, set in the DeepSpeed config:
                     "train_batch_size": 24,
                     "train_micro_batch_size_per_gpu": 2,
                     "gradient_accumulation_steps": 4
                   This holds unless sequences are cut among several ranks: the checkpoint's config
                   does not say.
data position      The engine counts on from step 7 and 168 samples. If the job skips the data that
                   it has seen, let it count samples: the number of batches of each rank is another
                   one now.
learning rate      The scheduler's state (last_epoch 7) and the learning rates of the param groups
                   are kept. The scheduler counts steps: its schedule stays the same if the global
                   batch does.

left out                   count   bytes  why
-------------------------  -----  ------  ---------------------------------------------------
padding, headers, pickles         48,662  not copied: newly written, or redundant among ranks

made            count  bytes  why
--------------  -----  -----  ----------------------------------------------
module weights           216  cast from the master weights, for ZeRO stage 2
padding                   48  zeros that fill up partitions

ZeRO stage 2, bfloat16, round_robin_gradients off, parameter_alignment off: from the config kept in
the checkpoint, then DeepSpeed's defaults."""

EXPORT = """\
would write  model
from         run, tag global_step7
tensors      12, bf16
reads        510 B of content, from 3 files
writes       1.1 KiB, into 1 file
memory       at most 28.0 MiB above the program's 40.0 MiB, of 1.0 GiB allowed: 8.0 MiB metadata + 2
             workers x (1.0 MiB window + 2.0 MiB scratch) + 16.0 MiB slack
time         not estimated: /data: cannot be written (Permission denied)
space        100.0 GiB free on the file system of /data, 92.0 GiB after; 3.0 GiB are there of a run
             that was cut off

reads, in run                                                bytes
-----------------------------------------------------------  -----
global_step7/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt    224
global_step7/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt    208
global_step7/mp_rank_00_model_states.pt                         78
zero_to_fp32.py                                                  0

writes             bytes
-----------------  -----
model.safetensors  1,134

left out """


def test_a_plan_to_repartition() -> None:
    write(Job(stage=3, world_size=4), Path("run"))
    plan = streamshard.plan_repartition("run", "out", world_size=3, zero_stage=2, verify=True)
    told = filled(plan.estimate(measures_disk=False))
    assert plan_text(plan.report, told, verbose=False) == REPARTITION


def test_a_plan_to_export_with_all_files_where_nothing_can_be_measured() -> None:
    write(Job(stage=2), Path("run"))
    plan = streamshard.plan_export("run", "model", dtype="bf16")
    time = TimeEstimate(None, GIB, MIB, 0, 0, 0, 0, "/data: cannot be written (Permission denied)")
    told = replace(filled(plan.estimate(measures_disk=False)), time=time)
    told = replace(told, space=replace(SPACE, begun_bytes=3 * GIB))
    text = plan_text(plan.report, told, verbose=True)
    assert text.startswith(EXPORT)


def test_files_of_ranks_that_are_gone_take_a_line() -> None:
    write(Job(stage=2, world_size=4), Path("run"))
    Path("run/trainer_state.json").write_text("{}")
    for rank in range(4):
        Path(f"run/rng_state_{rank}.pth").write_bytes(bytes(500 + rank))
    plan = streamshard.plan_repartition("run", "out", world_size=2)
    lines = plan_text(plan.report, filled(plan.estimate(measures_disk=False)), verbose=False)
    assert (
        "rng_state_{2..3}.pth       2       1,005  of a rank that the target does not have"
        in lines.split("\n")
    )


def test_thousands_of_files_take_a_few_lines() -> None:
    write(Job(stage=2), Path("run"))
    plan = streamshard.plan_convert("run", "a.zarr")
    names = [f"state/fp32/{part}.{layer}/c/{n}" for part in "abcdefghijklmnop" for layer in range(9)
             for n in range(9)]  # fmt: skip
    many = tuple(FileBytes(name, number) for number, name in enumerate(names))
    told = replace(filled(plan.estimate(measures_disk=False)), writes=many)
    lines = plan_text(plan.report, told, verbose=False).split("\n")
    assert "writes, in state/fp32   files    bytes" in lines
    assert "p.{0..8}/c/{0..8}          81  101,655" in lines
    assert "others, which -v lists    324   52,326" in lines
    assert len(lines) < 60
    assert len(plan_text(plan.report, told, verbose=True).split("\n")) > len(many)
