"""Files are written in spans of any size, in runs that are cut off after any file."""

import itertools
import pickle
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import streamshard
from streamshard.engine.journals.journal import Journal
from streamshard.engine.run import span_writer
from streamshard.engine.run.source_check import Ranges
from streamshard.engine.run.window import Window
from streamshard.engine.run.work import FinishedFile, Fixed, Span, SpanResult
from streamshard.errors import StreamshardError
from streamshard.io.sink import Sink
from streamshard.source.source import open_source
from streamshard.source.unfinished import JOURNAL
from streamshard.transfer import file_layout
from tests.cli.conftest import flip, tree
from tests.degrees.test_stores_of_layers import WIDE, is_cut
from tests.fabricated import edit, optimizer_file, write, write_dumps
from tests.fabricated_pipes import PipeJob, write_pipe
from tests.job import MUON, Job
from tests.samples import sampled

SPAN_BYTES = 1024


@dataclass(frozen=True)
class Case:
    """A run that writes, and what it reads."""

    source: Callable[[Path], Path]
    """Makes below a directory what is read."""
    write: Callable[[Path, Path], streamshard.Report]

    def __call__(self, place: Path, out: Path) -> streamshard.Report:
        return self.write(self.source(place), out)


def of(job: Job) -> Callable[[Path], Path]:
    """Save a job, with a file beside it that takes several spans, and an empty one."""

    def make(place: Path) -> Path:
        run = write(job, place / "run")
        (run / "tokenizer.json").write_bytes(bytes(range(256)) * 9)
        (run / "empty").touch()
        return run

    return make


def enlarged(place: Path) -> Path:
    """Save weights, two elements of which are too large for float16."""
    run = of(Job(stage=2))(place)

    def enlarge(state: dict[str, Any]) -> None:
        masters = state["optimizer_state_dict"]["single_partition_of_fp32_groups"]
        masters[0].data[:2] = 1.0e6

    edit(optimizer_file(run, 0), enlarge)
    return run


def store(codec: str, name: str = "a.zarr") -> Callable[[Path], Path]:
    def make(place: Path) -> Path:
        run = write(Job(stage=3), place / "run")
        streamshard.convert(run, place / name, codec=codec, chunk_size=512)
        return place / name

    return make


def dumps(place: Path) -> Path:
    return write_dumps(write(Job(stage=2), place / "run"), place / "dumps")


def layers(place: Path) -> Path:
    """Make a store of files in which tensors lie, some of them in several chunks."""
    job = PipeJob(world_size=1, layers=(WIDE, WIDE), shared=(), starts=(0, 1))
    run = write_pipe(job, place / "run")
    streamshard.convert(run, place / "a.zarr", codec="zstd", chunk_size=64)
    assert is_cut(place / "a.zarr")
    return place / "a.zarr"


def trained(place: Path) -> Path:
    """Save three steps of a run on other ranks each time, one of them as a store."""
    run = place / "run"
    for stage in (2, 3, 1):
        write(
            Job(stage=stage, world_size=1 + stage, step=9 - stage), run, f"global_step{9 - stage}"
        )
    streamshard.convert(run / "global_step6", place / "step6", codec="zstd", chunk_size=64)
    shutil.rmtree(run / "global_step6")
    (place / "step6").rename(run / "step6.zarr")
    return run


def dumped(template: Path, out: Path) -> streamshard.Report:
    return streamshard.repartition(template, out / "{rank}.pt", world_size=3)


def packed(run: Path, out: Path) -> streamshard.Report:
    return streamshard.convert(run, out / "x.zarr.zip", chunk_size=SPAN_BYTES)


resized = partial(streamshard.repartition, world_size=3)
converted = partial(streamshard.convert, chunk_size=SPAN_BYTES)
halved = partial(streamshard.export, dtype="fp16")
CASES: dict[str, Case] = {
    **{
        f"stage {a} to {b}": Case(of(Job(stage=a)), partial(resized, zero_stage=b))
        for a, b in ((1, 3), (2, 1), (3, 2), (3, 3))
    },
    "momentum": Case(of(replace(MUON, stage=2)), resized),
    "from a raw store": Case(store("none"), partial(resized, zero_stage=2)),
    "from a compressed store": Case(store("zstd"), partial(resized, zero_stage=2)),
    "from a packed store": Case(store("none", "a.zarr.zip"), partial(resized, zero_stage=2)),
    "dumps": Case(dumps, dumped),
    "raw store": Case(of(Job(stage=2)), partial(converted, codec="none")),
    "packed store": Case(of(Job(stage=2)), packed),
    "compressed store": Case(enlarged, partial(converted, codec="zstd")),
    "small chunks": Case(of(Job(stage=2)), partial(converted, codec="none", chunk_size=64)),
    "safetensors": Case(enlarged, partial(halved, max_shard_size=2 * SPAN_BYTES)),
    "torch": Case(enlarged, partial(halved, format="torch")),
    "universal": Case(enlarged, partial(streamshard.export, format="universal")),
    "dcp": Case(enlarged, partial(halved, format="dcp")),
    "merge": Case(trained, partial(streamshard.merge, last=3, weights="1-sqrt")),
    "layers in a store": Case(layers, streamshard.export),
}


@pytest.fixture
def _many_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut files into many spans."""
    monkeypatch.setattr(file_layout, "SPAN_BYTES", SPAN_BYTES)


@pytest.mark.parametrize(
    "case", ["stage 2 to 1", "stage 3 to 3", "packed store", "safetensors", "torch", "dcp"]
)
def test_spans_of_any_size_and_of_few_copies_make_the_same_files(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = CASES[case].source(tmp_path)
    whole = CASES[case].write(source, tmp_path / "whole")
    for span_bytes, most_copies in ((64, 1024), (SPAN_BYTES, 1024), (SPAN_BYTES << 10, 3)):
        monkeypatch.setattr(file_layout, "SPAN_BYTES", span_bytes)
        monkeypatch.setattr(file_layout, "MOST_COPIES", most_copies)
        report = CASES[case].write(source, tmp_path / f"{span_bytes}")
        made = tree(tmp_path / f"{span_bytes}")
        assert made == tree(tmp_path / "whole")
        assert report.bytes_written == sum(map(len, made.values()))
        assert report.overflowed == whole.overflowed


def test_no_span_begins_where_another_one_does(tmp_path: Path) -> None:
    """Results are told by that: what is said of an empty one would count for the next."""
    few = Fixed(bytes(file_layout.SPAN_BYTES // file_layout.MOST_COPIES))
    pieces = [Fixed(b"")] * 3000 + [few] * 3000 + [Fixed(b"")] * 3000
    source = open_source(write(Job(stage=2), tmp_path))
    divided = file_layout.Divider(source).target(file_layout.FileLayout("a", pieces))
    offsets = [span.offset for span in divided.spans]
    assert len(set(offsets)) == len(offsets) > 2
    assert sum(span.nbytes for span in divided.spans) == divided.span_bytes == 3000 * few.nbytes


# Cut off ------------------------------------------------------------------------------------------


class CutOffError(StreamshardError):
    """Raised where a run is cut off."""


@contextmanager
def cut_off_after(files: int | None) -> Iterator[None]:
    """Cut off the run that has finished so many files; None for never."""
    left, note_all = files, Journal.note_all

    def cut_off(self: Journal, finished: Sequence[FinishedFile], ranges: Ranges) -> None:
        nonlocal left
        noted = finished[:left]
        if noted:
            note_all(self, noted, ranges)
        left = None if left is None else left - len(noted)
        if len(noted) < len(finished):
            raise CutOffError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "note_all", cut_off)
        yield


@sampled(6)
@pytest.mark.usefixtures("_many_spans")
@pytest.mark.parametrize(
    "case", ["stage 3 to 2", "compressed store", "small chunks", "safetensors", "torch", "dcp"]
)
def test_a_run_goes_on_after_any_file(case: str, tmp_path: Path, one_in: int) -> None:
    """Of what it has noted, a power failure may have taken a file, or changed its bytes."""
    make, out, partial_out = CASES[case], tmp_path / "out", tmp_path / "out.partial"
    source = make.source(tmp_path)
    undisturbed = make.write(source, tmp_path / "whole")
    whole = tree(tmp_path / "whole")
    stride = one_in * -(-len(whole) // 24)
    for most in itertools.chain([0], itertools.count(1, stride)):
        try:
            with cut_off_after(most):
                make.write(source, out)
        except CutOffError as error:
            noted = [f"{partial_out}" in line for line in error.__notes__] if most else []
            assert noted == [True] * bool(most)
        else:
            break
        assert partial_out.exists() == bool(most)
        if most > 2:
            harm(partial_out)
        report = make.write(source, out)
        assert tree(out) == whole
        assert bool(report.kept_bytes) == bool(most)
        assert report.kept_bytes < report.bytes_written
        assert report.overflowed == undisturbed.overflowed
        shutil.rmtree(out)
    assert most > 1
    assert bool(undisturbed.overflowed) == (case in ("safetensors", "torch", "dcp"))


def harm(begun: Path) -> None:
    """Remove the first file that was written and flip a bit of the second; the rest stays."""
    files = (path for path in sorted(begun.rglob("*")) if path.is_file() and path.stat().st_size)
    first, second, *_ = (path for path in files if path.name != JOURNAL)
    first.unlink()
    flip(second)


# Sent and written twice ---------------------------------------------------------------------------


class TwiceWindow(Window):
    """Writes a copy of each span, as it is sent to a worker; a late second time does no harm."""

    def write(self, span: Span, file: Sink) -> SpanResult:
        sent = pickle.loads(pickle.dumps(span))
        first = super().write(sent, file)
        assert super().write(sent, file) == first
        return first


@pytest.mark.usefixtures("_many_spans")
@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("from")])
def test_spans_are_data_and_writing_them_twice_changes_nothing(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers of clusters write them in `tests/cluster`."""
    source = CASES[case].source(tmp_path)
    wanted = CASES[case].write(source, tmp_path / "once")
    monkeypatch.setattr(span_writer, "Window", TwiceWindow)
    found = CASES[case].write(source, tmp_path / "twice")
    assert tree(tmp_path / "twice") == tree(tmp_path / "once")
    assert (found.bytes_written, found.overflowed) == (wanted.bytes_written, wanted.overflowed)
    assert bool(found.overflowed) == (case in ("safetensors", "torch", "dcp"))
