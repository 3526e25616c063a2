"""Stores in one file: the same bytes, cut off or not, and no other file is replaced."""

import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import streamshard
from streamshard.engine.run.span_writer import FilledSpan, SpanWriter
from streamshard.engine.run.work import Span
from streamshard.errors import SourceError, TargetError, TargetExistsError, UsageError
from streamshard.formats.zarr.chunks import BloscChunk
from streamshard.io.place import place_of
from streamshard.io.sink import Sink
from streamshard.options import CODECS
from streamshard.transfer import file_layout
from streamshard.transfer.packed_target import PackedFiles, PackedTarget
from tests.fabricated import write
from tests.formats.conftest import files_of
from tests.job import Job

CHUNK = 500


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write(Job(stage=2), tmp_path / "run")


def converted(run: Path, out: Path, **options: object) -> streamshard.Report:
    return streamshard.convert(run, out, chunk_size=CHUNK, **options)  # type: ignore[arg-type]


def names(place: Path) -> list[str]:
    return sorted(path.name for path in place.iterdir())


@pytest.fixture
def _many_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_layout, "SPAN_BYTES", 2048)


@pytest.mark.usefixtures("_many_spans")
@pytest.mark.parametrize("codec", CODECS)
def test_any_count_of_workers_makes_the_same_file(run: Path, tmp_path: Path, codec: str) -> None:
    made = []
    for workers in (1, 2, 5):
        out = tmp_path / f"{workers}.zarr.zip"
        report = converted(run, out, workers=workers, verify=True, codec=codec)
        assert (report.files, report.bytes_written) == (1, out.stat().st_size)
        made.append(out.read_bytes())
    assert made[0] == made[1] == made[2]
    converted(run, tmp_path / "x.zarr", codec=codec)
    with zipfile.ZipFile(out) as found:
        assert found.testzip() is None
        assert {name: found.read(name) for name in found.namelist()} == files_of(
            tmp_path / "x.zarr"
        )


def test_files_are_in_the_order_of_the_plan_whichever_is_ready_first(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of each four files is ready last."""
    converted(run, tmp_path / "one.zarr.zip", codec="zstd", workers=1)
    lock, ready, write = threading.Lock(), threading.Condition(), SpanWriter.write
    begun = ended = 0

    def late(self: SpanWriter, path: Path, span: Span, sink: Sink) -> FilledSpan:
        nonlocal begun, ended
        with lock:
            number, begun = begun, begun + 1
        done = write(self, path, span, sink)
        with ready:
            if number % 4 == 0:
                ready.wait_for(lambda: ended > number - number // 4, timeout=0.1)
            ended += 1
            ready.notify_all()
        return done

    monkeypatch.setattr(SpanWriter, "write", late)
    converted(run, tmp_path / "x.zarr.zip", codec="zstd", workers=4)
    assert begun == ended
    one, other = (tmp_path / f"{name}.zarr.zip" for name in ("one", "x"))
    assert one.read_bytes() == other.read_bytes()


def test_an_error_in_one_worker_ends_those_that_wait_for_it(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, left = BloscChunk.encode, iter(range(1 << 20))

    def fails(self: BloscChunk, content: memoryview) -> bytes:
        if next(left) == 9:
            raise TargetError("this one fails")
        return real(self, content)

    with monkeypatch.context() as patch:
        patch.setattr(BloscChunk, "encode", fails)
        with pytest.raises(TargetError, match="this one fails"):
            converted(run, tmp_path / "x.zarr.zip", codec="zstd", workers=4)
    assert names(tmp_path) == ["run"]
    converted(run, tmp_path / "x.zarr.zip", codec="zstd")
    assert streamshard.verify(tmp_path / "x.zarr.zip").is_good


class KilledError(BaseException):
    """Raised where a run is killed: nothing is tidied up after it."""


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_a_run_that_is_killed_starts_from_the_beginning(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    converted(run, tmp_path / "whole.zarr.zip", codec=codec)
    whole, out = (tmp_path / "whole.zarr.zip").read_bytes(), tmp_path / "x.zarr.zip"
    begun, append = tmp_path / "x.zarr.zip.partial" / "x.zarr.zip", PackedFiles._append
    for most in (0, 1, 9, 70):
        left = iter(range(most))

        def killed(self: PackedFiles, *file: Any, left: Iterator[int] = left) -> int:  # noqa: ANN401
            if next(left, None) is None:
                self._buffer.flush()
                raise KilledError
            return append(self, *file)

        with monkeypatch.context() as patch:
            patch.setattr(PackedFiles, "_append", killed)
            patch.setattr(PackedTarget, "_end", lambda *_: None)
            with pytest.raises(KilledError):
                converted(run, out, codec=codec)
        assert not out.exists()
        assert whole.startswith(begun.read_bytes())
        assert bool(begun.stat().st_size) == bool(most)
        for half in (begun, begun.parent):
            with pytest.raises(SourceError):
                streamshard.open(half)
        assert converted(run, out, codec=codec).kept_bytes == 0
        assert out.read_bytes() == whole
        assert names(tmp_path) == ["run", "whole.zarr.zip", "x.zarr.zip"]
        out.unlink()


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("is_before", [True, False])
def test_killed_where_the_file_takes_its_place(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_before: bool, overwrite: bool
) -> None:
    """The old one is there, or the new one; the next run removes what is next to it."""
    out, whole, disk = (
        tmp_path / "x.zarr.zip",
        tmp_path / "whole.zarr.zip",
        type(place_of(tmp_path)),
    )
    if overwrite:
        streamshard.convert(run, out, chunk_size=77)
    old, real = out.read_bytes() if overwrite else None, disk.rename
    converted(run, whole)

    def killed(self: Any, path: Path, target: Path) -> None:  # noqa: ANN401
        if not is_before:
            real(self, path, target)
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(disk, "rename", killed)
        patch.setattr(PackedTarget, "_end", lambda *_: None)
        with pytest.raises(KilledError):
            converted(run, out, overwrite=overwrite)
    left = out.read_bytes() if out.exists() else None
    assert left == (old if is_before else whole.read_bytes())
    assert "x.zarr.zip.partial" in names(tmp_path)
    if not is_before:
        assert converted(run, out, if_needed=True, verify=True).found == "target"
    converted(run, out, overwrite=overwrite or not is_before)
    assert names(tmp_path) == ["run", "whole.zarr.zip", "x.zarr.zip"]
    assert out.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("overwrite", [True, False])
def test_what_someone_puts_there_meanwhile_stays(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, overwrite: bool
) -> None:
    out, real = tmp_path / "x.zarr.zip", PackedTarget.commit
    if overwrite:
        converted(run, out)

    def late(self: PackedTarget, require: Callable[[], None], latest: str | None = None) -> None:
        out.write_text("of someone else")
        real(self, require, latest)

    monkeypatch.setattr(PackedTarget, "commit", late)
    with pytest.raises(TargetExistsError, match=r"x\.zarr\.zip: was written by someone else"):
        converted(run, out, overwrite=overwrite)
    assert out.read_text() == "of someone else"
    assert names(tmp_path) == ["run", "x.zarr.zip"]


@pytest.mark.parametrize("is_directory", [True, False])
def test_what_no_run_left_where_the_file_is_written_stays(
    run: Path, tmp_path: Path, *, is_directory: bool
) -> None:
    place = tmp_path / "x.zarr.zip.partial"
    if is_directory:
        place.mkdir()
        place /= "mine"
    place.write_text("mine")
    with pytest.raises(TargetExistsError, match="is in the way"):
        converted(run, tmp_path / "x.zarr.zip")
    assert place.read_text() == "mine"


def test_only_a_store_in_one_file_is_replaced(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.zarr.zip"
    converted(run, out)
    with pytest.raises(TargetExistsError, match="exists; use"):
        converted(run, out)
    streamshard.convert(run, out, chunk_size=77, overwrite=True)
    small = out.stat().st_size
    converted(run, out, overwrite=True)
    assert out.stat().st_size != small
    for other in (b"of someone else", out.read_bytes()[:-1]):
        out.write_bytes(other)
        with pytest.raises(TargetExistsError, match="remove it yourself"):
            converted(run, out, overwrite=True)
        assert out.read_bytes() == other
    out.unlink()
    out.mkdir()
    for overwrite in (True, False):
        with pytest.raises(TargetExistsError):
            converted(run, out, overwrite=overwrite)


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_if_needed_and_verify_compare_every_byte(run: Path, tmp_path: Path, codec: str) -> None:
    out = tmp_path / "x.zarr.zip"
    assert converted(run, out, codec=codec, if_needed=True, verify=True).found is None
    whole = out.read_bytes()
    assert converted(run, out, codec=codec, if_needed=True, verify=True).found == "target"
    places = (
        0,
        6,
        40,
        50,
        len(whole) // 3,
        len(whole) // 2,
        *range(len(whole) - 120, len(whole), 31),
    )
    for at in places:
        out.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(TargetExistsError):
            converted(run, out, codec=codec, if_needed=True, verify=True)
    for other in (whole + b"\0", whole[:-1], b""):
        out.write_bytes(other)
        with pytest.raises(TargetExistsError):
            converted(run, out, codec=codec, if_needed=True, verify=True)


def test_what_cannot_be_packed_is_refused_before_anything_is_written(
    run: Path, tmp_path: Path
) -> None:
    out = tmp_path / "x.zarr.zip"
    with pytest.raises(UsageError, match="only convert writes a store in one file"):
        streamshard.repartition(run, out, world_size=3)
    with pytest.raises(UsageError, match=r"exported files go into a directory.*without \.zip"):
        streamshard.export(run, out)
    assert names(tmp_path) == ["run"]


def test_a_file_that_is_cut_off_is_no_store(run: Path, tmp_path: Path) -> None:
    out, cut = tmp_path / "x.zarr.zip", tmp_path / "cut.zarr.zip"
    converted(run, out)
    whole = out.read_bytes()
    for nbytes in (0, 1, 1000, len(whole) - 5000, len(whole) - 98, len(whole) - 22, len(whole) - 1):
        cut.write_bytes(whole[:nbytes])
        with pytest.raises(SourceError, match=r"cut\.zarr\.zip.*not a whole store in one file"):
            streamshard.open(cut)
        found = streamshard.verify(cut)
        assert not found.is_good
