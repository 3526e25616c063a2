"""How far a run is, as it is told to terminals and log files; the clock is the tests'."""

import io
import threading
from pathlib import Path

import pytest

import streamshard
from streamshard.cli.progress import Display, display
from streamshard.engine.run import phases as watch
from streamshard.engine.run.phases import Silent
from tests.compact.runs import NO_GRACE, make_run
from tests.fabricated import write
from tests.job import Job

KIB = 1 << 10


class Clock:
    """A clock that goes on when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_log_file_gets_a_line_at_the_start_and_for_every_tenth() -> None:
    clock, stream = Clock(), io.StringIO()
    with display(is_quiet=False, stream=stream, clock=clock) as progress:
        clock.now += 3
        progress.start(100 * KIB, watch.WRITING)
        for _ in range(100):
            clock.now += 1
            progress.advance(KIB)
        progress.enter(watch.SYNCING)
        clock.now += 59
        progress.enter(watch.COMMITTING)
    assert stream.getvalue().splitlines() == [
        "streamshard: writing 2%, 2.0 KiB of 100.0 KiB, 1.0 KiB/s, 1 min 38 s left",
        *(
            f"streamshard: writing {percent}%, {percent}.0 KiB of 100.0 KiB, 1.0 KiB/s, {left} left"
            for percent, left in [
                (10, "1 min 30 s"),
                (20, "1 min 20 s"),
                (30, "1 min 10 s"),
                (40, "1 min 0 s"),
                *((tenth * 10, f"{100 - tenth * 10} s") for tenth in range(5, 10)),
            ]
        ),
        "streamshard: writing 100%, 100.0 KiB of 100.0 KiB, 1.0 KiB/s",
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Gone(Terminal):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_a_run_does_not_fail_because_nobody_reads_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    with display(is_quiet=False, stream=Gone()) as progress:
        progress.start(10, watch.WRITING)
        progress.advance(10)


def test_a_terminal_that_cannot_erase_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """What others get, `cli/test_process` shows."""
    monkeypatch.setenv("TERM", "dumb")
    shown = display(stream=Terminal(), is_quiet=False)
    assert isinstance(shown, Display)
    assert type(shown._style).__name__ == "Lines"


class Told(Silent):
    """Adds up what a run tells."""

    def __init__(self) -> None:
        self.total = self.done = self.kept = 0
        self.phases: list[str] = []
        self.stretches: list[tuple[str, int, int]] = []
        """Phase, bytes to be dealt with, and bytes that were, of everything that was begun."""
        self._lock = threading.Lock()

    def start(self, total_bytes: int, phase: str = watch.READING) -> None:
        self.total += total_bytes
        self.phases.append(phase)
        self.stretches.append((phase, total_bytes, 0))

    def advance(self, nbytes: int) -> None:
        with self._lock:
            self.done += nbytes
            phase, total, done = self.stretches[-1]
            self.stretches[-1] = phase, total, done + nbytes

    def keep(self, nbytes: int) -> None:
        with self._lock:
            self.kept += nbytes

    def enter(self, phase: str) -> None:
        if phase != self.phases[-1]:
            self.phases.append(phase)


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_a_run_tells_of_all_its_bytes_and_phases(tmp_path: Path, codec: str) -> None:
    run = write(Job(stage=2), tmp_path / "run")
    told = Told()
    done = streamshard.convert(run, tmp_path / "a.zarr", codec=codec, progress=told)
    # What is known beforehand of chunks and of the manifest is their size without compression.
    assert 0.9 * told.total < told.done <= told.total
    assert 0.9 * told.total < done.bytes_written <= told.total
    assert codec != "none" or told.done == told.total == done.bytes_written
    assert told.phases == ["writing", "syncing", "writing", "syncing", "committing"]
    told = Told()
    resharded = streamshard.repartition(
        run, tmp_path / "out", world_size=3, verify=True, progress=told
    )
    assert told.phases == ["writing", "syncing", "verifying", "comparing", "committing"]
    size = resharded.bytes_written
    (_, *written), (_, verified, seen), (_, total, compared) = told.stretches
    assert written == [size, size]
    assert 0 < seen <= verified <= size  # not all of a file has a checksum
    assert 0 < compared == total <= size


def test_a_night_names_the_tag_that_it_deals_with(tmp_path: Path) -> None:
    run, told = make_run(tmp_path / "run"), Told()
    streamshard.compact(run, tmp_path / "archive", keep_last=2, delete=True, progress=told)
    tags, phases = zip(*(phase.split(": ") for phase in told.phases), strict=True)
    health, archiving = tags[:4], tags[4:]
    assert list(dict.fromkeys(health)) == ["global_step1000", "global_step100"]
    assert list(dict.fromkeys(archiving)) == ["global_step80", "global_step90"]
    assert {*phases} == {"reading", "writing", "syncing", "committing"}
    told = Told()
    streamshard.compact(run, tmp_path / "archive", undelete=["global_step90"], progress=told)
    streamshard.compact(
        run, tmp_path / "archive", purge=["global_step80"], grace=NO_GRACE, progress=told
    )
    assert {*told.phases} == {"global_step80: reading"}
