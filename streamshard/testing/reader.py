"""Tests for a reader of checkpoints: subclass `ReaderTests` in a test module; see docs/readers.md.

They know which tensors a checkpoint holds and hold all commands to it, also after its files were
cut off, taken away, linked elsewhere, filled with random bytes, or changed while a command ran.
"""

import asyncio
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from numpy.typing import NDArray
from zarr.abc.store import Store
from zarr.core.buffer import default_buffer_prototype

import streamshard
from streamshard import StreamshardError

__all__ = ["MASTERS", "MODULE", "ReaderTests", "SavedCheckpoint"]

MASTERS: Final = "fp32"
"""State under which a trained weight is read."""
MODULE: Final = "module"
"""State under which any other weight, or a buffer, is read."""
_CHUNK_BYTES: Final = 256
_MANIFEST: Final = "meta/manifest/"
_HEADER_BYTES: Final = 4096
_MUTANTS: Final = 16
_MOST_FILES: Final = 8
_MOST_MEMORY: Final = 1 << 30

Tensors = dict[tuple[str, str], bytes]


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint in files, and what it holds."""

    path: Path
    tensors: Mapping[str, Mapping[str, NDArray[Any]]]
    """Name → state → values; bfloat16 as the uint16 of the same bits."""
    like: Path | None = None
    """A ZeRO checkpoint of a job that could resume from it."""

    @property
    def content(self) -> Tensors:
        """The bytes of all tensors."""
        return {
            (name, state): np.ascontiguousarray(values).tobytes()
            for name, states in self.tensors.items()
            for state, values in states.items()
        }

    @property
    def files(self) -> list[Path]:
        """Its files, or as many of them as tests have time for."""
        found = sorted(p for p in self.path.rglob("*") if p.is_file() and p.stat().st_size)
        return found[:: 1 + len(found) // _MOST_FILES]


def _content_of(path: Path) -> Tensors:
    """Return the bytes of all tensors as `streamshard.open` reads them."""
    with streamshard.open(path) as checkpoint:
        return {
            (name, state): tensor.bits().tobytes()
            for name, parameter in checkpoint.items()
            if parameter.tied_to is None
            for state, tensor in parameter.tensors.items()
        }


def _bytes_below(path: Path) -> dict[str, bytes]:
    files = (file for file in path.rglob("*") if file.is_file())
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in files}


async def _bytes_in(view: Store) -> dict[str, bytes]:
    content = {}
    async for key in view.list():
        buffer = await view.get(key, default_buffer_prototype())
        assert buffer is not None
        content[key] = buffer.to_bytes()
    return content


class ReaderTests:
    """Tests of one reader.

    A subclass has `kind`, and a fixture `saved` that makes a checkpoint of a few kilobytes, with at
    least one weight and, where the format has them, an optimizer's states.
    """

    kind: str
    """Name of the reader."""
    is_whole: bool = False
    """Whether the files alone tell all that a DeepSpeed job needs."""
    ds_config: Mapping[str, Any] | None = None
    """Config of a DeepSpeed job that could resume from it alone, if all of it is trained."""
    has_sums: bool = False
    """Whether the checkpoint records checksums of all bytes of its tensors."""
    unread: frozenset[str] = frozenset()
    """Names of files that are not read, as what they tell is not needed."""

    @pytest.fixture
    def saved(self, tmp_path: Path) -> SavedCheckpoint:
        """Make the checkpoint."""
        raise NotImplementedError("give a fixture `saved`")

    @pytest.fixture
    def untouched(self, saved: SavedCheckpoint) -> Iterator[None]:
        """Require that nothing below the checkpoint's directory changes."""
        before = _bytes_below(saved.path)
        yield
        assert _bytes_below(saved.path) == before

    @pytest.fixture
    def like(self, saved: SavedCheckpoint, tmp_path: Path) -> Path | None:
        """Return a ZeRO checkpoint of a job that could resume; None if none is needed."""
        if saved.like is not None or self.is_whole:
            return saved.like
        if self.ds_config is None:
            pytest.skip("give `ds_config`, or `like` of a SavedCheckpoint, to test stores and jobs")
        (tmp_path / "ds_config.json").write_text(json.dumps(self.ds_config))
        like = tmp_path / "like"
        streamshard.repartition(
            saved.path, like, world_size=3, ds_config_file=tmp_path / "ds_config.json"
        )
        return like

    @pytest.mark.usefixtures("untouched")
    def test_every_tensor_is_read(self, saved: SavedCheckpoint) -> None:
        assert _content_of(saved.path) == saved.content

    def test_parts_of_tensors_are_read(self, saved: SavedCheckpoint) -> None:
        draw = random.Random(0)
        with streamshard.open(saved.path) as checkpoint:
            for name, states in saved.tensors.items():
                for state, values in states.items():
                    ends = [sorted(draw.choices(range(n + 1), k=2)) for n in values.shape]
                    key = tuple(slice(start, stop) for start, stop in ends)
                    bits = checkpoint[name].tensors[state].bits(key)
                    assert bits.tobytes() == np.ascontiguousarray(values[key]).tobytes()

    @pytest.mark.usefixtures("untouched")
    def test_inspect_names_the_kind_and_verify_finds_no_problem(
        self, saved: SavedCheckpoint
    ) -> None:
        assert streamshard.inspect(saved.path).kind == self.kind
        found = streamshard.verify(saved.path)
        assert (found.kind, found.problems) == (self.kind, ())
        assert found.files > 0
        assert bool(found.checked) >= self.has_sums

    @pytest.mark.usefixtures("untouched")
    @pytest.mark.parametrize("codec", ["none", "zstd"])
    def test_a_store_holds_the_same(
        self, saved: SavedCheckpoint, like: Path | None, tmp_path: Path, codec: str
    ) -> None:
        store = tmp_path / "out.zarr"
        report = streamshard.convert(
            saved.path, store, codec=codec, chunk_size=_CHUNK_BYTES, like=like
        )
        assert report.peak_bytes is not None
        assert report.peak_bytes <= report.projected_bytes
        assert _content_of(store) == saved.content
        found = streamshard.verify(store, against=saved.path, like=like)
        assert (found.problems, found.differences) == ((), ())
        assert not streamshard.diff(saved.path, store, like=like).changed

    def test_a_view_has_the_bytes_of_a_store(
        self, saved: SavedCheckpoint, like: Path | None, tmp_path: Path
    ) -> None:
        store = tmp_path / "out.zarr"
        streamshard.convert(saved.path, store, chunk_size=_CHUNK_BYTES, like=like)
        with streamshard.open(saved.path, like=like) as checkpoint:
            seen = asyncio.run(_bytes_in(checkpoint.zarr(chunk_size=_CHUNK_BYTES)))
        written = _bytes_below(store)
        assert seen == {k: data for k, data in written.items() if not k.startswith(_MANIFEST)}

    @pytest.mark.usefixtures("untouched")
    def test_an_export_has_the_weights(self, saved: SavedCheckpoint, tmp_path: Path) -> None:
        streamshard.export(saved.path, tmp_path / "exported", like=saved.like)
        _require_weights(_content_of(tmp_path / "exported"), saved)

    @pytest.mark.usefixtures("untouched")
    def test_the_mean_of_two_copies_is_each_of_them(
        self, saved: SavedCheckpoint, tmp_path: Path
    ) -> None:
        sources = [saved.path, shutil.copytree(saved.path, tmp_path / "copies" / "a")]
        streamshard.merge(sources, tmp_path / "merged", format="safetensors")
        _require_weights(_content_of(tmp_path / "merged"), saved)

    @pytest.mark.usefixtures("untouched")
    def test_a_job_resumes_with_the_same_states(
        self, saved: SavedCheckpoint, like: Path | None, tmp_path: Path
    ) -> None:
        store, direct, back = (tmp_path / name for name in ("out.zarr", "direct", "back"))
        report = streamshard.repartition(saved.path, direct, world_size=2, like=like)
        assert report.peak_bytes is not None
        assert report.peak_bytes <= report.projected_bytes
        assert _states(_content_of(direct)) == _states(saved.content)
        streamshard.convert(saved.path, store, like=like)
        streamshard.repartition(store, back, world_size=2)
        assert _bytes_below(back) == _bytes_below(direct)
        found = streamshard.verify(direct, against=saved.path, like=like)
        assert (found.problems, found.differences) == ((), ())

    def test_files_that_are_cut_off_never_give_other_values(self, saved: SavedCheckpoint) -> None:
        for file in saved.files:
            data = file.read_bytes()
            for nbytes in sorted({0, 1, len(data) // 2, len(data) - 1} - {len(data)}):
                file.write_bytes(data[: max(0, nbytes)])
                self._require_refused_or_same(saved, file)
            file.write_bytes(data)

    def test_files_that_are_missing_never_give_other_values(self, saved: SavedCheckpoint) -> None:
        for file in saved.files:
            data = file.read_bytes()
            file.unlink()
            self._require_refused_or_same(saved, file)
            file.write_bytes(data)

    def _require_refused_or_same(self, saved: SavedCheckpoint, file: Path) -> None:
        content: Tensors | None = None
        with suppress(StreamshardError):
            content = _content_of(saved.path)
        # Where an optimizer cannot be read, its masters are weights like others.
        expected = {
            (name, MODULE): data
            for (name, state), data in saved.content.items()
            if state == MASTERS
        }
        expected |= saved.content
        assert all(expected.get(key) == data for key, data in (content or {}).items()), file

    def test_a_link_that_leads_out_is_refused(self, saved: SavedCheckpoint, tmp_path: Path) -> None:
        for file in saved.files:
            moved = tmp_path / "elsewhere"
            shutil.move(file, moved)
            file.symlink_to(moved)
            if file.name not in self.unread:
                with pytest.raises(StreamshardError):
                    _content_of(saved.path)
            file.unlink()
            shutil.move(moved, file)

    def test_random_bytes_end_in_an_error_or_in_tensors(
        self, saved: SavedCheckpoint, tmp_path: Path
    ) -> None:
        """Nothing else may be raised, and nothing lasts."""
        draw, files = random.Random(1), saved.files
        for file in files:
            data = file.read_bytes()
            for _ in range(_MUTANTS // len(files)):
                mutant = bytearray(data)
                for _ in range(draw.choice((1, 1, 3, 20))):
                    place = draw.randrange(min(len(mutant), _HEADER_BYTES))
                    mutant[place] = draw.choice((0, 1, 0x2D, 0x39, 0x7F, 0xFF, draw.randrange(256)))
                file.write_bytes(mutant)
                started = time.monotonic()
                with suppress(StreamshardError):
                    _content_of(saved.path)
                with suppress(StreamshardError):
                    streamshard.verify(saved.path)
                assert time.monotonic() - started < 60
            file.write_bytes(data)

    def test_hostile_names_and_counts_end_in_an_error_or_in_tensors(
        self, saved: SavedCheckpoint, like: Path | None, tmp_path: Path
    ) -> None:
        """They lead to no other place, take no memory, and are printed harmlessly."""
        target, files = tmp_path / "out.zarr", saved.files
        for file in files:
            data = file.read_bytes()
            mutants = [*_hostile(data, [*saved.tensors])]
            for mutant in mutants[:: 1 + len(mutants) * len(files) // _MUTANTS]:
                file.write_bytes(mutant)
                before = {*tmp_path.rglob("*")}
                try:
                    with _little_memory():
                        _content_of(saved.path)
                        streamshard.convert(saved.path, target, like=like)
                except StreamshardError as error:
                    assert all(letter.isprintable() or letter == "\n" for letter in str(error))
                added = {*tmp_path.rglob("*")} - before
                assert all(target in (path, *path.parents) for path in added)
                shutil.rmtree(target, ignore_errors=True)
            file.write_bytes(data)

    def test_damage_is_found_or_changes_nothing(
        self, saved: SavedCheckpoint, like: Path | None, tmp_path: Path
    ) -> None:
        if not self.has_sums:
            pytest.skip("the format records no checksums")
        target, refused = tmp_path / "out.zarr", 0
        for file in saved.files:
            data = file.read_bytes()
            middle = len(data) // 2
            file.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
            try:
                streamshard.convert(saved.path, target, like=like)
            except StreamshardError:
                refused += 1
                assert not target.exists()
            else:
                assert _content_of(target) == saved.content
                shutil.rmtree(target)
            file.write_bytes(data)
        assert refused

    def test_a_source_that_changes_is_never_written_as_it_is_then(
        self, saved: SavedCheckpoint, like: Path | None, tmp_path: Path
    ) -> None:
        refused = 0
        for number, file in enumerate(saved.files):
            target = tmp_path / f"out-{number}.zarr"
            plan = streamshard.plan_convert(saved.path, target, like=like)
            data = file.read_bytes()
            file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
            try:
                plan.run()
            except StreamshardError:
                refused += 1
                assert not target.exists()
            else:  # what is in it was read before
                assert _content_of(target) == saved.content
            file.write_bytes(data)
        assert refused

    def test_a_command_that_is_killed_goes_on(
        self, saved: SavedCheckpoint, like: Path | None, tmp_path: Path
    ) -> None:
        target = tmp_path / "out.zarr"
        command = [sys.executable, "-m", "streamshard", "convert", str(saved.path), str(target)]
        command += ["--chunk-size", str(_CHUNK_BYTES)]
        command += [] if like is None else ["--like", str(like)]
        draw = random.Random(2)
        for _ in range(4):
            run = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
            with suppress(subprocess.TimeoutExpired):
                run.wait(draw.uniform(0.2, 0.6))
            with suppress(ProcessLookupError):
                os.kill(run.pid, signal.SIGKILL)
            run.wait()
            if target.exists():
                break
        if not target.exists():
            subprocess.run(command, check=True, capture_output=True)
        assert _content_of(target) == saved.content
        assert streamshard.verify(target).problems == ()


@contextmanager
def _little_memory() -> Iterator[None]:
    """Let this process map little more than it has, so that more is a MemoryError."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _, most = limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + _MOST_MEMORY, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def _hostile(data: bytes, names: Sequence[str]) -> Iterator[bytes]:
    """Yield a file with other names of the same length, and with other numbers, if it has some."""
    for name in (name.encode() for name in names):
        for text in (
            b"../" * len(name),
            b"/tmp/" + name,
            b"\0" * len(name),
            b"\x1b[2J" * len(name),
        ):
            if name in data:
                yield data.replace(name, text[: len(name)])
    for number in re.finditer(rb"(?<![\w.])\d{1,18}(?![\w.])", data[:_HEADER_BYTES]):
        for text in (b"9" * len(number[0]), b"9" * 18, b"-1"):
            yield data[: number.start()] + text + data[number.end() :]


def _require_weights(tensors: Tensors, saved: SavedCheckpoint) -> None:
    for name, states in saved.tensors.items():
        values = states.get(MASTERS, states.get(MODULE))
        if values is not None and values.dtype == np.float32:
            assert tensors[name, MODULE] == np.ascontiguousarray(values).tobytes()


def _states(content: Tensors) -> Tensors:
    return {key: data for key, data in content.items() if key[1] != MODULE}
