"""Files that are written in many spans, and runs that end after any number of them."""

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import streamshard as api
from streamshard.engine.journals.journal import Journal, Written
from streamshard.errors import StreamshardError
from streamshard.io import sink
from streamshard.io.readable import read_into
from streamshard.operations.transfer import file_layout
from tests.cli.conftest import tree
from tests.fabricated import write
from tests.job import Job
from tests.samples import sampled

SPAN_BYTES = 1024


class CutOffError(StreamshardError):
    """Raised where a run is cut off."""


@pytest.fixture(params=[2, 3])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A small checkpoint of each stage, with a file beside it that takes several spans."""
    path = write(Job(stage=request.param), tmp_path / "run")
    (path / "tokenizer.json").write_bytes(bytes(range(256)) * 9)
    (path / "empty").touch()
    return path


def convert(run: Path, out: Path) -> api.Report:
    """Make a store of some chunks a tensor."""
    return api.convert(run, out, codec="zstd", chunk_size=SPAN_BYTES)


def repartition(run: Path, out: Path) -> api.Report:
    """Make files of some spans."""
    return api.repartition(run, out, world_size=3)


def export(run: Path, out: Path) -> api.Report:
    """Make files of some spans, and count what becomes infinite."""
    return api.export(run, out, dtype="fp16", max_shard_size=2 * SPAN_BYTES)


def export_torch(run: Path, out: Path) -> api.Report:
    """Make a file of some spans."""
    return api.export(run, out, format="torch")


def export_dcp(run: Path, out: Path) -> api.Report:
    """Make two files of some spans, and count what becomes infinite."""
    return api.export(run, out, format="dcp", dtype="fp16", ranks=2)


@pytest.mark.parametrize("make", [repartition, export, export_torch, export_dcp])
def test_spans_of_any_size_and_of_few_copies_make_the_same_files(
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[Path, Path], api.Report],
) -> None:
    whole = make(run, tmp_path / "whole")
    for span_bytes, most_copies in ((64, 1024), (SPAN_BYTES, 1024), (SPAN_BYTES << 10, 3)):
        monkeypatch.setattr(file_layout, "SPAN_BYTES", span_bytes)
        monkeypatch.setattr(file_layout, "MOST_COPIES", most_copies)
        out = tmp_path / f"{span_bytes}"
        report = make(run, out)
        assert tree(out) == tree(tmp_path / "whole")
        assert report.bytes_written == sum(map(len, tree(out).values()))
        assert report.overflowed == whole.overflowed


@sampled(3)
@pytest.mark.parametrize("make", [repartition, convert, export, export_torch, export_dcp])
def test_a_run_goes_on_after_any_span(
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[Path, Path], api.Report],
    one_in: int,
) -> None:
    monkeypatch.setattr(file_layout, "SPAN_BYTES", SPAN_BYTES)
    undisturbed = make(run, tmp_path / "whole")
    whole, note = tree(tmp_path / "whole"), Journal.note
    for most in itertools.count(0, one_in):
        left = most

        def cut_off(self: Journal, path: str, offset: int, written: Written) -> None:
            nonlocal left
            if not left:
                raise CutOffError
            left -= 1
            note(self, path, offset, written)

        monkeypatch.setattr(Journal, "note", cut_off)
        try:
            make(run, tmp_path / "out")
        except CutOffError as error:
            noted = [f"{tmp_path}/out.partial" in line for line in error.__notes__] if most else []
            assert noted == [True] * bool(most)
        else:
            break
        assert (tmp_path / "out.partial").exists() == bool(most)
        monkeypatch.setattr(Journal, "note", note)
        counts: list[int] = []

        def counted(
            descriptor: int, view: memoryview, offset: int, counts: list[int] = counts
        ) -> int:
            count = read_into(descriptor, view, offset)
            counts.append(count)
            return count

        monkeypatch.setattr(sink, "read_into", counted)
        report = make(run, tmp_path / "out")
        assert sum(counts) == report.kept_bytes  # each byte once
        assert tree(tmp_path / "out") == whole
        assert bool(report.kept_bytes) == bool(most)
        assert report.kept_bytes < report.bytes_written
        assert report.overflowed == undisturbed.overflowed
        shutil.rmtree(tmp_path / "out")
    assert most > 8
