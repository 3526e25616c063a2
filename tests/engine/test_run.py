"""Whole runs: several files and workers, and what is left when something goes wrong."""

import errno
import os
import resource
import threading
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamshard.engine.run import phases
from streamshard.engine.run.runner import Engine
from streamshard.engine.run.source_reader import SourceReader
from streamshard.engine.run.span_writer import Resources, TargetFiles
from streamshard.engine.run.work import Ending, Fixed, Region, Span, TargetFile
from streamshard.errors import NoSpaceError, TargetError
from streamshard.io import durability
from tests.engine.fakes import JOURNAL, Row, Told, copies_of, expected, on_disk, opened, regions
from tests.held import descriptor_limit, open_files, running_workers

Drawn = tuple[list[bytes], list[Row], int]
DATA = bytes(range(1, 251))


def simple(path: str, nbytes: int = 250) -> TargetFile:
    """Make a file that copies the front of source 0, then says so."""
    region = Region(nbytes, copies_of([(0, 0, 0, nbytes)]))
    return TargetFile(path, [Span(0, [region])], ending(nbytes, b"end"))


def ending(offset: int, data: bytes = b"the end") -> list[Ending]:
    return [Ending(offset, data)]


class Run:
    def __init__(self, directory: Path, workers: int = 2, window: int = 16) -> None:
        self.sources = on_disk(directory, [DATA])
        self.root = directory / "out"
        self.told = Told()
        self.resources = Resources(workers, window, 8)

    def __call__(self, *files: TargetFiles) -> None:
        self.over(files)

    def over(self, files: Iterable[TargetFiles]) -> int:
        """Run, or go on; returns the bytes that were there already."""
        with opened(self.root) as partial:
            Engine(self.sources, self.resources, self.told, partial).run(files)
            return partial.kept_bytes

    def fails(self, kind: type[Exception], match: str, *files: TargetFiles) -> None:
        """Run, expecting an error and nothing left open by it."""
        before = open_files(), running_workers()
        with pytest.raises(kind, match=match) as caught:
            self(*files)
        assert type(caught.value) is kind
        assert (open_files(), running_workers()) == before


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(st.lists(st.lists(regions(), max_size=4), max_size=4), st.integers(1, 4), st.integers(1, 40))
def test_any_files_by_any_number_of_workers(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[list[Drawn]], workers: int, window: int
) -> None:
    directory = tmp_path_factory.mktemp("run")
    run = Run(directory, workers, window)
    contents: list[bytes] = []
    files, wanted = [], {}
    for number, parts in enumerate(drawn):
        spans: list[Span] = []
        data = b""
        for sources, rows, nbytes in parts:
            moved = [(file + len(contents), at, to, count) for file, at, to, count in rows]
            contents += sources
            # One span each, handed over with the last first: order must not matter.
            spans.insert(0, Span(len(data), [Fixed(b"#"), Region(nbytes, copies_of(moved))]))
            data += b"#" + expected(contents, moved, nbytes)
        spans = spans or [Span(0, [])]
        files.append(TargetFile(f"d{number}/file", spans, ending(len(data)), 0o640))
        wanted[f"d{number}/file"] = data + b"the end"
    run.sources = on_disk(directory, contents)
    before = open_files()
    run(*files)
    assert open_files() == before
    found = {str(p.relative_to(run.root)): p for p in run.root.rglob("*") if p.is_file()}
    del found[JOURNAL]
    assert {path: place.read_bytes() for path, place in found.items()} == wanted
    assert all(place.stat().st_mode & 0o777 == 0o640 for place in found.values())
    assert sum(run.told.bytes) == sum(map(len, wanted.values()))
    assert (run.told.kept, run.told.phases) == (0, [phases.WRITING, phases.SYNCING])


def test_a_file_that_no_run_wrote_is_not_overwritten(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.root.mkdir()
    (run.root / "one").write_bytes(b"mine")
    run.fails(TargetError, "out/one: cannot be written", simple("two"), simple("one"))
    assert (run.root / "one").read_bytes() == b"mine"


@given(drawn=st.lists(st.lists(regions(), min_size=1, max_size=3), max_size=4), torn=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
def test_a_run_goes_on_from_any_files_that_are_whole(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[list[Drawn]], torn: st.DataObject
) -> None:
    directory = tmp_path_factory.mktemp("run")
    run = Run(directory)
    parts = [part for some in drawn for part in some]
    run.sources = on_disk(directory, [c for sources, _, _ in parts for c in sources])
    before = [0, *accumulate(len(sources) for sources, _, _ in parts)]

    def files() -> list[TargetFile]:
        """Plan all again, as another process would."""
        made, first = [], iter(before)
        for number, some in enumerate(drawn):
            spans, at, sums = [], 0, list[tuple[int, int, int]]()
            for _, rows, nbytes in some:
                start = next(first)
                copies = copies_of([(file + start, *rest) for file, *rest in rows])  # type: ignore[misc]
                spans.append(Span(at, [Fixed(b"#"), Region(nbytes, copies)]))
                sums.append((4 * len(sums), at + 1, at + 1 + nbytes))
                at += 1 + nbytes
            made.append(TargetFile(f"{number}", spans, [Ending(at, bytes(4 * len(sums)), sums)]))
        return made

    def look() -> list[bytes]:
        return [(run.root / file.path).read_bytes() for file in files()]

    assert run.over(files()) == 0
    whole = look()
    for content, file in zip(whole, files(), strict=True):
        for place, start, stop in file.endings[0].crc32s:
            end = file.endings[0].offset + place
            assert int.from_bytes(content[end : end + 4], "little") == zlib.crc32(
                content[start:stop]
            )
    broken = torn.draw(st.sets(st.sampled_from(range(len(whole))))) if whole else set[int]()
    for number in broken:
        damaged = bytearray(whole[number])
        damaged[torn.draw(st.integers(0, len(damaged) - 1))] ^= 1
        is_cut_off = torn.draw(st.booleans())
        (run.root / f"{number}").write_bytes(damaged[:-1] if is_cut_off else damaged)
    kept = run.over(files())
    assert look() == whole
    assert kept == sum(len(data) for number, data in enumerate(whole) if number not in broken)


@pytest.mark.parametrize(
    ("call", "number", "kind"),
    [
        ("pwrite", errno.ENOSPC, NoSpaceError),
        ("pwrite", errno.EDQUOT, NoSpaceError),
        ("pwrite", errno.EIO, TargetError),
        ("fsync", errno.EIO, TargetError),
        ("open", errno.EACCES, TargetError),
    ],
)
def test_a_target_that_refuses_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    kind: type[TargetError],
    call: str,
) -> None:
    run = Run(tmp_path)
    real = getattr(os, call)

    def refuse(what: int | Path, *rest: object) -> object:
        path = Path(f"/proc/self/fd/{what}").readlink() if isinstance(what, int) else Path(what)
        if path.name == "bad":
            raise OSError(number, os.strerror(number))
        return real(what, *rest)

    monkeypatch.setattr(os, call, refuse)
    monkeypatch.setattr(durability, "_syncfs", None)  # so that files are synced one by one
    files = [simple("good"), simple("bad"), *(simple(f"{i}") for i in range(9))]
    run.fails(kind, f"{run.root}/bad: ", *files)


def test_an_interrupt_stops_work_that_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path)
    reads, begun, released = [], threading.Event(), threading.Event()

    def read(self: SourceReader, file: int, offset: int, view: memoryview) -> None:
        reads.append(offset)
        begun.set()
        assert released.wait(60)

    class Pool(ThreadPoolExecutor):
        def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
            released.set()  # work goes on only after it has been told to stop
            super().shutdown(wait, cancel_futures=cancel_futures)

    def files() -> Iterator[TargetFile]:
        yield simple("long")
        assert begun.wait(60)
        raise KeyboardInterrupt

    monkeypatch.setattr(SourceReader, "read_into", read)
    monkeypatch.setattr("streamshard.engine.jobs.executor.ThreadPoolExecutor", Pool)
    before = open_files(), running_workers()
    with pytest.raises(KeyboardInterrupt):
        run.over(files())
    assert len(reads) == 1
    assert (open_files(), running_workers()) == before


def test_many_workers_do_not_open_more_files_than_a_process_may(tmp_path: Path) -> None:
    run = Run(tmp_path, workers=16)
    run.sources = on_disk(tmp_path, [DATA] * 80)
    rows = [(number, 0, number, 1) for number in range(80)]
    region = Region(80, copies_of(rows))
    files = [TargetFile(f"{number}", [Span(0, [region])]) for number in range(64)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptor_limit(700), hard))
    try:
        run(*files)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert {(run.root / file.path).read_bytes() for file in files} == {DATA[:1] * 80}
