"""Small files that one job writes: they are, and are known, as if each were written alone."""

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamshard.engine.journals.journal import Journal
from streamshard.engine.run.span_writer import FileBatch
from streamshard.engine.run.work import (
    Fixed,
    Region,
    Span,
    SpanResult,
    TargetFile,
    Trailer,
    Written,
)
from streamshard.errors import NoSpaceError, TargetError
from streamshard.formats.zarr.chunks import BloscCodec
from tests.engine.fakes import JOURNAL, copies_of, on_disk
from tests.engine.test_run import Run

WINDOW = 64
HERE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)


class Case:
    """Files of a content, as one batch and alone, and what was told of each."""

    def __init__(self, data: bytes, sizes: Sequence[int], codec: str | None) -> None:
        self.data, self.sizes, self.codec = data, sizes, codec
        self.paths = [f"{'deep/' * (number % 3)}{number}" for number in range(len(sizes))]
        self.told: dict[str, SpanResult] = {}

    def part(self, start: int, stop: int) -> Fixed | Region:
        if self.codec is None:
            return Fixed(self.data[start:stop])
        return Region(
            stop - start,
            copies_of([(0, start, 0, stop - start)]),
            trailer=Trailer(is_crc32c=True),
            codec=BloscCodec(1) if self.codec else None,
            takes_crc32c=True,
            block_bytes=7,
        )

    def bounds(self) -> Iterator[tuple[int, int]]:
        return pairwise([0, *accumulate(self.sizes)])

    def content(self) -> Sequence[Fixed] | Region:
        whole = self.part(0, sum(self.sizes))
        if isinstance(whole, Region):
            return whole
        return [Fixed(self.data[start:stop]) for start, stop in self.bounds()]

    def files(self) -> Iterator[TargetFile]:
        for path, bounds in zip(self.paths, self.bounds(), strict=True):
            yield TargetFile(path, [Span(0, [self.part(*bounds)])], take=self.taker(path))

    def taker(self, path: str) -> Callable[[SpanResult], None]:
        def take(result: SpanResult) -> None:
            assert path not in self.told
            self.told[path] = result

        return take

    def batch(self) -> FileBatch:
        return FileBatch(
            self.paths,
            list(accumulate(self.sizes)),
            sum(file.span_bytes for file in self.files()),
            self.content,
            [self.taker(path) for path in self.paths],
            self.files,
        )


def tree(root: Path) -> dict[str, bytes]:
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and path.name != JOURNAL
    }


def noted(root: Path) -> dict[str, Written]:
    return {file.path: file.written for file in Journal(root / JOURNAL).finished()}


def runs(directory: Path, case: Case) -> tuple[Run, Run]:
    """Return a run for the batch and another one for its files."""
    found = []
    for name in ("batch", "alone"):
        (directory / name).mkdir()
        found.append(Run(directory / name, window=WINDOW))
        found[-1].sources = on_disk(directory / name, [case.data])
    return found[0], found[1]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    codec = draw(st.sampled_from([None, "", "zstd"]))
    sizes = draw(st.lists(st.integers(1, WINDOW), min_size=1, max_size=20))
    pattern = draw(st.binary(min_size=1, max_size=50))
    return Case((pattern * (sum(sizes) // len(pattern) + 1))[: sum(sizes)], sizes, codec)


@given(case=cases())
@HERE
def test_a_batch_is_the_same_as_its_files(
    tmp_path_factory: pytest.TempPathFactory, case: Case
) -> None:
    together, alone = runs(tmp_path_factory.mktemp("case"), case)
    alone.over(case.files())
    told, case.told = case.told, {}
    together.over([case.batch()])
    assert tree(together.root) == tree(alone.root)
    assert set(tree(alone.root)) == {*case.paths}
    assert case.told == told
    assert noted(together.root) == noted(alone.root)
    assert sum(together.told.bytes) == sum(alone.told.bytes)


@given(case=cases(), drawn=st.data())
@HERE
def test_a_run_goes_on_from_any_files_of_a_batch(
    tmp_path_factory: pytest.TempPathFactory, case: Case, drawn: st.DataObject
) -> None:
    """Whatever a power failure leaves: lines without a file, other bytes."""
    run, _ = runs(tmp_path_factory.mktemp("case"), case)
    run.over([case.batch()])
    whole, lines, told = tree(run.root), noted(run.root), case.told
    some = st.sets(st.sampled_from(case.paths))
    gone, broken = drawn.draw(some), drawn.draw(some)
    for path in gone:
        (run.root / path).unlink()
    for path in broken - gone:
        (run.root / path).write_bytes(bytes([whole[path][0] ^ 1]) + whole[path][1:])
    case.told = {}
    intact = {*case.paths} - gone - broken
    assert run.over([case.batch()]) == sum(len(whole[path]) for path in intact)
    assert tree(run.root) == whole
    assert case.told == told
    assert noted(run.root) == lines


def test_a_file_that_no_run_wrote_is_not_overwritten(tmp_path: Path) -> None:
    case = Case(bytes(range(100)), [10] * 10, None)
    run, _ = runs(tmp_path, case)
    (run.root / "deep").mkdir(parents=True)
    (run.root / "deep/1").write_bytes(b"mine")
    run.fails(TargetError, r"out/deep/1: cannot be written \(File exists\)", case.batch())
    assert (run.root / "deep/1").read_bytes() == b"mine"
    assert noted(run.root) == {}


@pytest.mark.parametrize("codec", [None, ""])
@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ENOSPC, NoSpaceError), (errno.EACCES, TargetError)]
)
def test_a_write_that_fails_names_the_file(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    kind: type[Exception],
    codec: str | None,
) -> None:
    case = Case(bytes(range(100)), [10] * 10, codec)
    run, _ = runs(tmp_path, case)
    real, calls = os.pwritev, list[int]()

    def fails(descriptor: int, parts: Sequence[bytes], offset: int) -> int:
        calls.append(descriptor)
        if len(calls) == 5:
            raise OSError(number, os.strerror(number))
        return real(descriptor, parts, offset)

    monkeypatch.setattr(os, "pwritev", fails)
    run.fails(kind, "out/deep/4: ", case.batch())
    assert noted(run.root) == {}


@given(case=cases(), most=st.integers(1, 9))
@HERE
def test_a_write_that_stops_early_goes_on(
    tmp_path_factory: pytest.TempPathFactory, case: Case, most: int
) -> None:
    run, alone = runs(tmp_path_factory.mktemp("case"), case)
    alone.over(case.files())
    case.told = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            os, "pwritev", lambda d, parts, at: os.pwrite(d, b"".join(map(bytes, parts))[:most], at)
        )
        run.over([case.batch()])
    assert tree(run.root) == tree(alone.root)
