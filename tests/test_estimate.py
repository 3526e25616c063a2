"""What a dry run tells, held against what a run then reads and writes."""

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

import streamshard
from streamshard.engine.run.work import Region
from streamshard.operations.transfer import estimate
from streamshard.operations.transfer.estimate import Estimate, estimate_run
from streamshard.operations.transfer.file_layout import Divider
from streamshard.operations.transfer.plan import TransferPlan
from tests.fabricated import write
from tests.job import Job
from tests.test_momentum import MUON

KEYS = {
    "Estimate": "reads read_bytes writes written_bytes is_upper_bound reread_bytes memory "
    "time space changes left_out made requests",
    "FileBytes": "path nbytes",
    "MemoryParts": "projected_bytes floor_bytes metadata_bytes workers window_bytes scratch_bytes "
    "codec_bytes slack_bytes limit_bytes requests_bytes",
    "TimeEstimate": "seconds read_bytes_per_second read_sample_bytes write_bytes_per_second "
    "write_sample_bytes encode_bytes_per_second encode_sample_bytes problem",
    "Space": "directory free_bytes free_after_bytes begun_bytes",
    "Part": "what count nbytes why",
    "Requests": "down down_bytes up up_bytes",
    "Change": "subject text",
}


def test_the_keys_are_pinned() -> None:
    kinds = [getattr(estimate, name) for name in KEYS]
    assert [" ".join(field.name for field in fields(kind)) for kind in kinds] == [*KEYS.values()]


def resize(stage: int, to: int, world_size: int = 3) -> Callable[[Path], TransferPlan]:
    """Plan to go from a stage to another, or the same one."""

    def plan(place: Path) -> TransferPlan:
        run = write(Job(stage=stage, world_size=4), place / "run")
        return streamshard.plan_repartition(
            run, place / "out", world_size=world_size, zero_stage=to
        )

    return plan


def converted(codec: str) -> Callable[[Path], Path]:
    """Make a store."""

    def make(place: Path) -> Path:
        run = write(Job(stage=3), place / "run")
        store = place / "a.zarr"
        streamshard.convert(run, store, codec=codec, chunk_size=64)
        return store

    return make


def momentum(place: Path) -> TransferPlan:
    """Plan for states that ranks keep whole."""
    run = write(replace(MUON, stage=2), place / "run")
    return streamshard.plan_repartition(run, place / "out", world_size=3)


CASES: dict[str, Callable[[Path], TransferPlan]] = {
    **{f"{a} to {b}": resize(a, b) for a in (2, 3) for b in (2, 3)},
    "momentum": momentum,
    "convert": lambda place: streamshard.plan_convert(
        write(Job(stage=2), place / "run"), place / "out", chunk_size=64
    ),
    "from a store": lambda place: streamshard.plan_repartition(
        converted("none")(place), place / "out", world_size=5
    ),
    "export": lambda place: streamshard.plan_export(
        write(Job(stage=3), place / "run"), place / "out", dtype="bf16", max_shard_size=200
    ),
    "universal": lambda place: streamshard.plan_export(
        write(Job(stage=3), place / "run"), place / "out", format="universal"
    ),
    "dcp": lambda place: streamshard.plan_export(
        write(Job(stage=3), place / "run"), place / "out", format="dcp", dtype="bf16", ranks=2
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_bytes_are_those_that_the_engine_reads_and_writes(case: str, tmp_path: Path) -> None:
    plan = CASES[case](tmp_path)
    told = plan.estimate(measures_disk=False)
    source, writer = plan.source, plan.output.writer
    files = map(Divider(source).target, writer.passes()[0]())
    read, zeros = np.zeros(len(source.files), dtype=np.int64), 0
    for file in files:
        for region in (part for span in file.spans for part in span.parts):
            if isinstance(region, Region):
                np.add.at(read, region.copies.file, region.copies.nbytes)
                filled = int(region.copies.nbytes.sum())
                zeros += region.content_bytes - (
                    filled // region.source_itemsize * region.target_itemsize
                )
    assert [(file.path, file.nbytes) for file in told.reads] == [
        (str(file.path), nbytes) for file, nbytes in zip(source.files, read.tolist(), strict=True)
    ]
    assert told.read_bytes == read.sum() > 0
    assert sum(part.nbytes for part in told.made if part.what == "padding") == (
        0 if case == "convert" else zeros
    )
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


def test_of_what_is_compressed_whole_files_are_read(tmp_path: Path) -> None:
    store = converted("zstd")(tmp_path)
    plan = streamshard.plan_repartition(store, tmp_path / "out", world_size=5)
    for file in plan.estimate(measures_disk=False).reads:
        assert file.nbytes == Path(file.path).stat().st_size


def parts(told: Estimate, *, made: bool = False) -> dict[str, tuple[int, int]]:
    """Return what is left out, or made, with counts and bytes."""
    return {part.what: (part.count, part.nbytes) for part in (told.made if made else told.left_out)}


def test_module_weights_come_and_go_with_the_stage(tmp_path: Path) -> None:
    numel = sum(np.prod(shape) for group in Job().groups for _, shape in group)
    to_3 = resize(2, 3)(tmp_path / "a").estimate(measures_disk=False)
    assert parts(to_3)["module weights"] == (6, 2 * numel)
    assert "module weights" not in parts(to_3, made=True)
    to_2 = resize(3, 2)(tmp_path / "b").estimate(measures_disk=False)
    assert parts(to_2, made=True)["module weights"] == (0, 2 * numel)
    assert "module weights" not in parts(to_2)


def test_files_of_ranks_that_are_gone_are_named(tmp_path: Path) -> None:
    run = write(Job(stage=2, world_size=4), tmp_path / "run")
    (run / "trainer_state.json").write_text("{}")
    for rank in range(4):
        (run / f"rng_state_{rank}.pth").write_bytes(bytes(rank + 1))
    plan = streamshard.plan_repartition(run, tmp_path / "out", world_size=3)
    told = plan.estimate(measures_disk=False)
    assert parts(told)["rng_state_3.pth"] == (1, 4)
    subjects = {change.subject: change.text for change in told.changes}
    assert "the new job has no rank 3" in subjects["random generators"]
    assert "trainer_state.json does not contain the step" in subjects["data position"]
    assert "last_epoch 7" in subjects["learning rate"]
    assert '"train_batch_size": 24' in subjects["global batch"]
    assert {*subjects.values()} & {*plan.report.notes} == {
        subjects[key] for key in ("random generators", "global batch", "data position")
    }
    same = streamshard.plan_repartition(run, tmp_path / "out", world_size=4)
    assert same.estimate(measures_disk=False).changes == ()


def test_an_export_names_what_it_leaves_out(tmp_path: Path) -> None:
    run = write(Job(stage=2), tmp_path / "run")
    told = streamshard.plan_export(run, tmp_path / "out", frozen=False).estimate(
        measures_disk=False
    )
    assert {"optimizer state exp_avg", "buffers and frozen weights", "module weights"} <= {
        *parts(told)
    }


def test_the_space_after_is_what_there_is_after(tmp_path: Path) -> None:
    run = write(Job(stage=2), tmp_path / "run")
    plan = streamshard.plan_repartition(run, tmp_path / "out", world_size=3)
    space = plan.estimate(measures_disk=False).space
    assert space is not None
    assert (space.directory, space.begun_bytes) == (str(tmp_path), 0)
    assert space.free_bytes - space.free_after_bytes == plan.report.bytes_written
    plan.run()
    again = streamshard.plan_repartition(run, tmp_path / "out", world_size=3, overwrite=True)
    after = again.estimate(measures_disk=False).space
    assert after is not None
    replaced = sum(512 * path.lstat().st_blocks for path in (tmp_path / "out").rglob("*"))
    assert after.free_after_bytes - after.free_bytes == replaced - plan.report.bytes_written


def test_the_disk_is_measured_and_nothing_is_left(tmp_path: Path) -> None:
    run = write(Job(stage=2), tmp_path / "run")
    before = sorted(path for path in tmp_path.rglob("*"))
    plan = streamshard.plan_repartition(run, tmp_path / "deep" / "out", world_size=3, verify=True)
    told = plan.estimate()
    assert told.time is not None
    assert told.time.seconds is not None
    assert told.time.problem is None
    assert min(told.time.read_bytes_per_second, told.time.write_bytes_per_second) > 0
    assert told.reread_bytes == 2 * told.written_bytes + told.read_bytes
    assert sorted(path for path in tmp_path.rglob("*")) == before


def test_compressing_takes_its_time(tmp_path: Path) -> None:
    run = write(Job(stage=2), tmp_path / "run")
    told = streamshard.plan_convert(run, tmp_path / "out", codec="zstd", workers=2).estimate().time
    assert told is not None
    assert told.encode_sample_bytes > 1000
    assert told.encode_bytes_per_second > 0
    plain = streamshard.plan_convert(run, tmp_path / "out").estimate().time
    assert plain is not None
    assert plain.encode_sample_bytes == 0


def test_a_place_that_cannot_be_written_is_said_and_no_error(tmp_path: Path) -> None:
    if not Path("/proc/self").exists():
        pytest.skip("no file system here in which nobody can write")
    plan = resize(2, 2)(tmp_path)
    byte_counts = plan.output.writer.byte_counts()
    told = estimate_run(plan.source, byte_counts, plan.memory, plan.report, Path("/proc/out"))
    assert told.time is not None
    assert told.time.seconds is None
    assert "/proc" in str(told.time.problem)
    assert "cannot be written" in str(told.time.problem)
