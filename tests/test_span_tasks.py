"""Spans are data: sent to another process, they make the same files."""

import os
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

import streamshard
from streamshard.engine.run import span_writer
from streamshard.engine.run.source_reader import SourceReader
from streamshard.engine.run.window import Window
from streamshard.engine.run.work import Span, SpanResult
from streamshard.io.sink import Sink
from streamshard.operations.transfer import file_layout
from tests import far_worker
from tests.cli.conftest import tree
from tests.fabricated import edit, optimizer_file, write
from tests.fabricated_pipes import PipeJob, write_pipe
from tests.job import Job
from tests.test_averaged import TWO as AVERAGED
from tests.test_momentum import MUON
from tests.test_stores_of_layers import WIDE, is_cut
from tests.verify.conftest import write_dumps

SPAN_BYTES = 1024


@dataclass
class Far:
    """Another process, and what it was sent."""

    pool: ProcessPoolExecutor
    spans: list[int] = field(default_factory=list)
    """Length of each span's pickle."""

    def window(self, *arguments: Any, **options: Any) -> "FarWindow":  # noqa: ANN401
        """Make what the engine takes for a window."""
        return FarWindow(self, *arguments, **options)


class FarWindow(Window):
    """Has another process write."""

    def __init__(
        self,
        far: Far,
        buffer: memoryview,
        scratch: memoryview,
        reader: SourceReader,
        unwritten_bytes: int,
        **options: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(buffer, scratch, reader, unwritten_bytes, **options)
        self._far = far
        self._sources = pickle.dumps(reader._files)

    def write(self, span: Span, file: Sink, *, is_new: bool = True) -> SpanResult:
        """Send the span twice: a late second time does no harm."""
        path = os.readlink(f"/proc/self/fd/{file.descriptor}")  # noqa: PTH115
        results = []
        for size in (0, 1):
            task = pickle.dumps((path, size, span, 4096))
            self._far.spans.append(len(task))
            sent = self._far.pool.submit(far_worker.perform, self._sources, task)
            results.append(pickle.loads(sent.result()))
        assert results[0] == results[1]
        found: SpanResult = results[0]
        assert self._progress is not None
        self._progress(found.written.nbytes)
        return found


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    """A process that is started anew, and imports what it needs itself."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        yield pool


@pytest.fixture
def far(pool: ProcessPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> Far:
    """Another process; files are cut into many spans."""
    monkeypatch.setattr(file_layout, "SPAN_BYTES", SPAN_BYTES)
    return Far(pool)


def resize(job: Job, stage: int) -> Callable[[Path, Path], streamshard.Report]:
    """Write files of another world size and stage."""
    return lambda place, out: streamshard.repartition(
        write(job, place / "run"), out, world_size=3, zero_stage=stage
    )


def of_a_store(codec: str) -> Callable[[Path, Path], streamshard.Report]:
    """Write files from a store."""

    def make(place: Path, out: Path) -> streamshard.Report:
        streamshard.convert(
            write(Job(stage=3), place / "run"), place / "a.zarr", codec=codec, chunk_size=512
        )
        return streamshard.repartition(place / "a.zarr", out, world_size=3, zero_stage=2)

    return make


def of_dumps(place: Path, out: Path) -> streamshard.Report:
    """Write dumps of ranks."""
    template = write_dumps(write(Job(stage=2), place / "run"), place / "dumps")
    return streamshard.repartition(template, out / "{rank}.pt", world_size=3)


def store(codec: str) -> Callable[[Path, Path], streamshard.Report]:
    """Write a store."""
    return lambda place, out: streamshard.convert(
        write(Job(stage=2), place / "run"), out, codec=codec, chunk_size=SPAN_BYTES
    )


def weights(**options: Any) -> Callable[[Path, Path], streamshard.Report]:  # noqa: ANN401
    """Export weights, two elements of which are too large for float16."""

    def make(place: Path, out: Path) -> streamshard.Report:
        run = write(Job(stage=2), place / "run")
        (run / "tokenizer.json").write_bytes(bytes(range(256)) * 9)

        def enlarge(state: dict[str, Any]) -> None:
            masters = state["optimizer_state_dict"]["single_partition_of_fp32_groups"]
            masters[0].data[:2] = 1.0e6

        edit(optimizer_file(run, 0), enlarge)
        return streamshard.export(run, out, **options)

    return make


def of_means(place: Path, out: Path) -> streamshard.Report:
    """Write means, which no file holds."""
    run = write(AVERAGED, place / "run")
    return streamshard.repartition(run, out, world_size=2, tensor_parallel=1, average=True)


def of_layers(place: Path, out: Path) -> streamshard.Report:
    """Write tensors inside of stored files, some of which lie in several chunks."""
    job = PipeJob(world_size=1, layers=(WIDE, WIDE), shared=(), starts=(0, 1))
    streamshard.convert(
        write_pipe(job, place / "run"), place / "a.zarr", codec="zstd", chunk_size=64
    )
    assert is_cut(place / "a.zarr")
    return streamshard.export(place / "a.zarr", out)


CASES: dict[str, Callable[[Path, Path], streamshard.Report]] = {
    **{f"stage {a} to {b}": resize(Job(stage=a), b) for a, b in ((1, 3), (2, 1), (3, 2), (3, 3))},
    "momentum": resize(replace(MUON, stage=2), 2),
    "from a raw store": of_a_store("none"),
    "from a compressed store": of_a_store("zstd"),
    "dumps": of_dumps,
    "raw store": store("none"),
    "compressed store": store("lz4"),
    "safetensors": weights(dtype="fp16", max_shard_size=2 * SPAN_BYTES),
    "torch": weights(dtype="fp16", format="torch"),
    "universal": weights(format="universal"),
    "dcp": weights(dtype="fp16", format="dcp", ranks=2),
    "means": of_means,
    "layers in a store": of_layers,
}


@pytest.mark.parametrize("case", CASES)
def test_another_process_writes_the_same(
    case: str, far: Far, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "near").mkdir()
    (tmp_path / "far").mkdir()
    wanted = CASES[case](tmp_path / "near", tmp_path / "near" / "out")
    with monkeypatch.context() as patch:
        patch.setattr(span_writer, "Window", far.window)
        found = CASES[case](tmp_path / "far", tmp_path / "far" / "out")
    assert tree(tmp_path / "far" / "out") == tree(tmp_path / "near" / "out")
    assert far.spans
    assert (found.bytes_written, found.overflowed) == (wanted.bytes_written, wanted.overflowed)
    assert bool(found.overflowed) == (case in ("safetensors", "torch", "dcp"))
