"""Files are written in spans of any size, in runs that are cut off after any file."""

import itertools
import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import streamshard
from streamshard.engine.journals.journal import Journal
from streamshard.engine.run import span_writer
from streamshard.engine.run.source_check import Ranges
from streamshard.engine.run.window import Window
from streamshard.engine.run.work import FinishedFile, Fixed, Span, SpanResult
from streamshard.errors import StreamshardError, TargetExistsError
from streamshard.io.sink import Sink
from streamshard.source.source import open_source
from streamshard.transfer import file_layout
from tests.cli.conftest import tree
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
    ("stage", "case"),
    [(3, "stage 3 to 2"), (2, "compressed store"), (2, "safetensors"), (3, "torch"), (2, "dcp")],
)
def test_a_run_goes_on_after_any_file(stage: int, case: str, tmp_path: Path, one_in: int) -> None:
    make, out, partial_out = CASES[case], tmp_path / "out", tmp_path / "out.partial"
    run = of(Job(stage=stage))(tmp_path)
    undisturbed = make.write(run, tmp_path / "whole")
    whole = tree(tmp_path / "whole")
    for most in itertools.chain([0], itertools.count(1, one_in)):
        try:
            with cut_off_after(most):
                make.write(run, out)
        except CutOffError as error:
            noted = [f"{partial_out}" in line for line in error.__notes__] if most else []
            assert noted == [True] * bool(most)
        else:
            break
        assert partial_out.exists() == bool(most)
        report = make.write(run, out)
        assert tree(out) == whole
        assert bool(report.kept_bytes) == bool(most)
        assert report.kept_bytes < report.bytes_written
        assert report.overflowed == undisturbed.overflowed
        shutil.rmtree(out)
    assert most > 1


# In any order -------------------------------------------------------------------------------------

WORLDS = st.sampled_from([2, 3])


@dataclass(frozen=True)
class Begun:
    """What the model knows of a partial target."""

    made: tuple[int, int]
    """World size, and version of the source."""
    replaces: bool


@dataclass(frozen=True)
class Model:
    """The three lines that say what has to be on the disk."""

    out: tuple[int, int] | None = None
    partial: Begun | None = None

    def after(self, made: tuple[int, int], *, overwrite: bool, spans: int | None) -> "Model | None":
        """Say what is there after a run that is cut off after some spans; None if it is refused."""
        begun = None if overwrite else self.partial
        if (self.out and not overwrite and not (begun and begun.replaces)) or (
            begun and begun.made != made
        ):
            return None
        if spans is None:
            return Model(out=made)
        kept = begun or (Begun(made, overwrite) if spans else None)
        return replace(self, partial=kept)


class Runs(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.source, self.out = self.root / "run", self.root / "out"
        self.version = 0
        self.model = Model()
        self.wanted: dict[tuple[int, int], dict[str, bytes]] = {}

    def teardown(self) -> None:
        shutil.rmtree(self.root)

    @initialize(stage=st.sampled_from([2, 3]))
    def save(self, stage: int) -> None:
        write(Job(stage=stage), self.source)

    @rule(world=WORLDS, overwrite=st.booleans(), spans=st.none() | st.integers(0, 12))
    def start(self, world: int, overwrite: bool, spans: int | None) -> None:
        """Run, and be cut off after some spans, or not."""
        made = (world, self.version)
        ended: StreamshardError | None = None
        with cut_off_after(spans), pytest.MonkeyPatch.context() as patch:
            patch.setattr(file_layout, "SPAN_BYTES", 2048)
            try:
                report = streamshard.repartition(
                    self.source, self.out, world_size=world, overwrite=overwrite, workers=1
                )
            except (CutOffError, TargetExistsError) as error:
                ended = error
        # A run that had little left to do may end before it is cut off.
        wanted = self.model.after(made, overwrite=overwrite, spans=spans if ended else None)
        assert (wanted is None) == isinstance(ended, TargetExistsError)
        if wanted is not None:
            if ended is None and not overwrite and self.model.partial:
                assert report.kept_bytes
            self.model = wanted

    @rule()
    def change(self) -> None:
        """Save another checkpoint in the source's place."""
        self.version += 1
        (self.source / "version").write_text(f"{self.version}")

    @precondition(lambda self: self.model.out is not None)
    @rule()
    def look(self) -> None:
        assert streamshard.verify(self.out).is_good

    @invariant()
    def disk_is_as_the_model_says(self) -> None:
        """The target is what one undisturbed run makes, or it is not there."""
        made, begun = self.model.out, self.model.partial
        beside = {path.name for path in self.root.iterdir()} - {"run"}
        assert beside == {name for name, there in (("out", made), ("out.partial", begun)) if there}
        if made is not None:
            assert tree(self.out) == self._undisturbed(made)

    def _undisturbed(self, made: tuple[int, int]) -> dict[str, bytes]:
        if made not in self.wanted:
            world, version = made
            with tempfile.TemporaryDirectory() as place:
                source = shutil.copytree(self.source, Path(place) / "run")
                if version:
                    (source / "version").write_text(f"{version}")
                streamshard.repartition(source, Path(place) / "out", world_size=world)
                self.wanted[made] = tree(Path(place) / "out")
        return self.wanted[made]


@sampled(10)
def test_any_order_of_runs_and_of_changes_to_the_source(one_in: int) -> None:
    run_state_machine_as_test(
        Runs, settings=settings(max_examples=100 // one_in, stateful_step_count=12, deadline=None)
    )


# Sent and written twice ---------------------------------------------------------------------------


class TwiceWindow(Window):
    """Writes a copy of each span, as it is sent to a worker; a late second time does no harm."""

    def write(self, span: Span, file: Sink) -> SpanResult:
        sent = pickle.loads(pickle.dumps(span))
        first = super().write(sent, file)
        assert super().write(sent, file) == first
        return first


@pytest.mark.usefixtures("_many_spans")
@pytest.mark.parametrize("case", CASES)
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
