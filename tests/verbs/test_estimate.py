"""What a dry run tells, held against what a run then reads and writes."""

from dataclasses import fields
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

import streamshard
from streamshard.engine.run.work import Region
from streamshard.transfer import estimate
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


JOBS = {
    "stage 2": Job(stage=2, client_state=client_state()),
    "stage 3": Job(stage=3),
    "parts and experts": Job(world_size=4, parts=2, experts=EXPERTS, expert_parallel=2),
}


def on_disk(path: Path) -> tuple[int, int]:
    """Count the files below a directory, and their bytes."""
    files = [file for file in path.rglob("*") if file.is_file()]
    return len(files), sum(file.stat().st_size for file in files)


@pytest.mark.parametrize(("job", "codec"), [*zip(JOBS, ("none", "zstd", "none"), strict=True)])
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
