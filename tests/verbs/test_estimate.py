"""What a dry run tells, held against what a run then reads and writes; and its text."""

import os
from dataclasses import fields, replace
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

import streamshard
from streamshard.cli.text.estimate_text import plan_text
from streamshard.engine.run.work import Region
from streamshard.transfer import estimate
from streamshard.transfer.estimate import Estimate, FileBytes, MemoryParts, Space
from streamshard.transfer.file_layout import Divider
from streamshard.transfer.plan import TransferPlan
from tests.fabricated import client_state, write
from tests.job import EXPERTS, Job
from tests.verbs.test_spans import CASES

KEYS = {
    "Estimate": "reads read_bytes writes written_bytes is_upper_bound reread_bytes memory "
    "space changes",
    "FileBytes": "path nbytes",
    "MemoryParts": "projected_bytes floor_bytes metadata_bytes workers window_bytes scratch_bytes "
    "codec_bytes slack_bytes limit_bytes requests_bytes",
    "Space": "directory free_bytes free_after_bytes begun_bytes",
    "Change": "subject text",
}


def test_the_keys_are_pinned() -> None:
    kinds = [getattr(estimate, name) for name in KEYS]
    assert [" ".join(field.name for field in fields(kind)) for kind in kinds] == [*KEYS.values()]


def planned(name: str, place: Path) -> TransferPlan:
    """Plan what a case writes."""
    case = CASES[name]
    verb = partial(case.write)
    plan: TransferPlan = getattr(streamshard, f"plan_{verb.func.__name__}")(
        case.source(place), place / "out", **verb.keywords
    )
    return plan


@pytest.mark.parametrize(
    "case",
    [
        *("stage 1 to 3", "stage 2 to 1", "stage 3 to 2", "stage 3 to 3", "momentum"),
        *("from a raw store", "raw store", "safetensors", "universal", "dcp"),
    ],
)
def test_bytes_are_those_that_the_engine_reads_and_writes(case: str, tmp_path: Path) -> None:
    plan = planned(case, tmp_path)
    told = plan.estimate()
    source, writer = plan.source, plan.output.writer
    divider = Divider(source)
    some = (layout.divided(divider) for layout in writer.passes()[0]())
    files = chain.from_iterable(one.singly() for one in some)
    read = np.zeros(len(source.files), dtype=np.int64)
    for file in files:
        for region in (part for span in file.spans for part in span.parts):
            if isinstance(region, Region):
                np.add.at(read, region.copies.file, region.copies.nbytes)
    assert [(file.path, file.nbytes) for file in told.reads] == [
        (str(file.path), nbytes) for file, nbytes in zip(source.files, read.tolist(), strict=True)
    ]
    assert told.read_bytes == read.sum() > 0
    done = plan.run()
    root = tmp_path / "out"
    found = {p.relative_to(root).as_posix(): p.stat().st_size for p in root.rglob("*")}
    found = {path: size for path, size in found.items() if (root / path).is_file()}
    assert {file.path: file.nbytes for file in told.writes} == found
    assert told.written_bytes == done.bytes_written == sum(found.values())
    assert told.memory.projected_bytes == done.projected_bytes
    memory = told.memory
    per_worker = memory.window_bytes + memory.scratch_bytes + memory.codec_bytes
    assert memory.projected_bytes == (
        memory.floor_bytes
        + memory.metadata_bytes
        + memory.workers * per_worker
        + memory.slack_bytes
    )


def test_workers_that_copy_large_files_wait_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = write(Job(groups=((("embed", (999, 999)),),), tied={}), tmp_path / "large")
    for cores, copy, few, encode in ((1, 2, 1, 3), (2, 4, 2, 4), (8, 4, 4, 10)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        at = tmp_path / str(cores)
        for case, workers in (
            ("stage 2 to 1", few),
            ("raw store", few),
            ("compressed store", encode),
            ("from a compressed store", few),
        ):
            assert planned(case, at / case).memory.workers == workers, case
        plan = streamshard.plan_repartition(large, at / "out", world_size=3)
        assert plan.memory.workers == copy


def test_of_what_is_compressed_whole_files_are_read(tmp_path: Path) -> None:
    plan = planned("from a compressed store", tmp_path)
    for file in plan.estimate().reads:
        assert file.nbytes == Path(file.path).stat().st_size


def test_what_changes_for_the_job_is_named(tmp_path: Path) -> None:
    run = write(Job(stage=2, world_size=4), tmp_path / "run")
    (run / "trainer_state.json").write_text("{}")
    for rank in range(4):
        (run / f"rng_state_{rank}.pth").write_bytes(bytes(rank + 1))
    plan = streamshard.plan_repartition(run, tmp_path / "out", world_size=3)
    told = plan.estimate()
    subjects = {change.subject: change.text for change in told.changes}
    assert "the new job has no rank 3" in subjects["random generators"]
    assert "trainer_state.json does not contain the step" in subjects["data position"]
    assert "last_epoch 7" in subjects["learning rate"]
    assert '"train_batch_size": 24' in subjects["global batch"]
    assert {*subjects.values()} & {*plan.report.notes} == {
        subjects[key] for key in ("random generators", "global batch", "data position")
    }
    same = streamshard.plan_repartition(run, tmp_path / "out", world_size=4)
    assert same.estimate().changes == ()


def test_the_space_after_is_what_there_is_after(tmp_path: Path) -> None:
    run = write(Job(stage=2), tmp_path / "run")
    plan = streamshard.plan_repartition(run, tmp_path / "out", world_size=3)
    space = plan.estimate().space
    assert space is not None
    assert (space.directory, space.begun_bytes) == (str(tmp_path), 0)
    assert space.free_bytes - space.free_after_bytes == plan.report.bytes_written
    plan.run()
    again = streamshard.plan_repartition(run, tmp_path / "out", world_size=3, overwrite=True)
    after = again.estimate().space
    assert after is not None
    replaced = sum(512 * path.lstat().st_blocks for path in (tmp_path / "out").rglob("*"))
    assert after.free_after_bytes - after.free_bytes == replaced - plan.report.bytes_written


def test_an_estimate_writes_nothing(tmp_path: Path) -> None:
    run = write(Job(stage=2), tmp_path / "run")
    before = sorted(path for path in tmp_path.rglob("*"))
    plan = streamshard.plan_repartition(run, tmp_path / "deep" / "out", world_size=3, verify=True)
    told = plan.estimate()
    assert told.reread_bytes == 2 * told.written_bytes + told.read_bytes
    assert sorted(path for path in tmp_path.rglob("*")) == before


MIB, GIB = 1 << 20, 1 << 30
MEMORY = MemoryParts(68 * MIB, 40 * MIB, 8 * MIB, 2, MIB, 2 * MIB, 0, 16 * MIB, GIB)
SPACE = Space("/data", 100 * GIB, 92 * GIB, 0)


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")


def filled(told: Estimate) -> Estimate:
    return replace(told, memory=MEMORY, space=SPACE)


REPARTITION = """\
would write  out
from         run, tag global_step7
world size   4 -> 3, ZeRO stage 2
reads        1.8 KiB of content, from 9 files
writes       21.5 KiB, into 6 files
verifies     and reads 44.7 KiB more for that
memory       at most 28.0 MiB above the program's 40.0 MiB, of 1.0 GiB allowed: 8.0 MiB metadata + 2
             workers x (1.0 MiB window + 2.0 MiB scratch) + 16.0 MiB slack
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
model.safetensors  1,150

"""


def test_a_plan_to_repartition() -> None:
    write(Job(stage=3, world_size=4), Path("run"))
    plan = streamshard.plan_repartition("run", "out", world_size=3, zero_stage=2, verify=True)
    told = filled(plan.estimate())
    assert plan_text(plan.report, told, verbose=False) == REPARTITION


def test_a_plan_to_export_with_all_files() -> None:
    write(Job(stage=2), Path("run"))
    plan = streamshard.plan_export("run", "model", dtype="bf16")
    told = replace(filled(plan.estimate()), space=replace(SPACE, begun_bytes=3 * GIB))
    text = plan_text(plan.report, told, verbose=True)
    assert text.startswith(EXPORT)


def test_thousands_of_files_take_a_few_lines() -> None:
    write(Job(stage=2), Path("run"))
    plan = streamshard.plan_convert("run", "a.zarr")
    names = [f"state/fp32/{part}.{layer}/c/{n}" for part in "abcdefghijklmnop" for layer in range(9)
             for n in range(9)]  # fmt: skip
    many = tuple(FileBytes(name, number) for number, name in enumerate(names))
    told = replace(filled(plan.estimate()), writes=many)
    lines = plan_text(plan.report, told, verbose=False).split("\n")
    assert "writes, in state/fp32   files    bytes" in lines
    assert "p.{0..8}/c/{0..8}          81  101,655" in lines
    assert "others, which -v lists    324   52,326" in lines
    assert len(lines) < 60
    assert len(plan_text(plan.report, told, verbose=True).split("\n")) > len(many)


JOBS = {
    "stage 2": Job(stage=2, client_state=client_state()),
    "stage 3": Job(stage=3),
    "parts and experts": Job(world_size=4, parts=2, experts=EXPERTS, expert_parallel=2),
}


def on_disk(path: Path) -> tuple[int, int]:
    """Count the files below a directory, and their bytes."""
    files = [file for file in path.rglob("*") if file.is_file()]
    return len(files), sum(file.stat().st_size for file in files)


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize("job", JOBS)
def test_all_count_the_same_files(job: str, codec: str, tmp_path: Path) -> None:
    run = write(JOBS[job], tmp_path / "run")
    wrote = streamshard.convert(run, tmp_path / "run.zarr", codec=codec, chunk_size=100)
    resized = streamshard.repartition(run, tmp_path / "out", world_size=4)
    for path, report in ((tmp_path / "run.zarr", wrote), (tmp_path / "out", resized)):
        found = streamshard.inspect(path)
        assert (found.files, found.file_bytes) == on_disk(path)
        assert (report.files, report.bytes_written) == on_disk(path)
        assert sum(group.files for group in found.file_groups) == len(found.file_list)
        assert len(found.file_list) == found.files
    assert (streamshard.inspect(run).files, streamshard.inspect(run).file_bytes) == on_disk(run)
    (run / "latest").write_text("another")
    assert streamshard.inspect(run, tag="global_step7").files == on_disk(run)[0] - 1
