"""What a journal remembers, and what of it survives damage."""

import tracemalloc
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamshard.engine.journals.journal import Journal
from streamshard.engine.run.work import FinishedFile, RegionResult, SpanResult, Written
from streamshard.model import Digest

HEADER = {"about": "something", "replaces": False}
PATHS = ("a", "a/b", "line\nbreak", "\udcff")
numbers = st.integers(0, (1 << 62) - 1)
regions = st.builds(
    RegionResult,
    numbers,
    st.builds(Digest, numbers, numbers, numbers),
    st.lists(numbers, max_size=3).map(tuple),
    numbers,
)
written = st.builds(Written, numbers, numbers)
results = st.builds(SpanResult, numbers, written, st.lists(regions, max_size=2).map(tuple))
files = st.builds(
    FinishedFile, st.sampled_from(PATHS), st.just(""), written, st.lists(results, max_size=2)
)
READ = np.arange(8).reshape(2, 4)


def begun(path: Path, jobs: list[list[FinishedFile]]) -> Journal:
    journal = Journal(path)
    journal.begin(HEADER)
    for job in jobs:
        journal.note_all(job, READ[: len(job)])
    return journal


@given(st.lists(st.lists(files, min_size=1, max_size=4), max_size=4))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
def test_the_last_note_of_a_file_counts(tmp_path: Path, jobs: list[list[FinishedFile]]) -> None:
    path = tmp_path / "journal"
    begun(path, jobs).close()
    found = Journal(path)
    wanted = {file.path: file for job in jobs for file in job}
    assert (found.header, found.is_whole, found.is_empty) == (HEADER, False, not jobs)
    assert {name: found.find(name) for name in PATHS if found.holds(name)} == wanted
    assert {file.path: file for file in found.finished()} == wanted
    read = [ranges.tolist() for ranges in found.ranges()]
    assert read == [READ[: len(job)].tolist() for job in jobs]
    for name in wanted:
        found.forget(name)
    assert not [*found.finished()]


@given(st.integers(0), st.integers(1, 255))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damage_costs_the_lines_that_it_hits_and_no_more(
    tmp_path: Path, place: int, flipped: int
) -> None:
    path = tmp_path / "journal"
    jobs = [[FinishedFile(f"{n}", "", Written(n, 2), [])] for n in range(6)]
    begun(path, jobs).close()
    damaged = bytearray(path.read_bytes())
    damaged[place % len(damaged)] ^= flipped
    path.write_bytes(damaged)
    found = Journal(path)
    lost = [job for job in jobs if found.find(job[0].path) is None]
    assert len(lost) + (found.header is None) <= 2  # a line, and the one that it runs into
    assert all(found.find(job[0].path) == job[0] for job in jobs if job not in lost)


def test_each_file_of_an_earlier_run_takes_few_bytes_of_memory(tmp_path: Path) -> None:
    """A store may have a million files."""
    path, count = tmp_path / "journal", 5_000
    names = [f"state/exp_avg_sq/model.layers.{n}.mlp.weight/c/{n}/0" for n in range(count)]
    files = [FinishedFile(name, "", Written(1, 2), []) for name in names]
    begun(path, [files[at : at + 10] for at in range(0, count, 10)]).close()
    tracemalloc.start()
    found = Journal(path)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 24 * count
    assert [found.find(name) for name in names] == files
