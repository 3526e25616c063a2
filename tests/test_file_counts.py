"""What verbs say they have written, `inspect` says is there, and lies on the disk."""

from pathlib import Path

import pytest

import streamshard
from tests.fabricated import client_state, write
from tests.job import EXPERTS, Job

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
