"""How sources are opened and walked through."""

import os
from pathlib import Path

import pytest

import streamshard as api
from streamshard.io import readable
from streamshard.io.entries import paths_below, read_all
from streamshard.io.readable import ReadableFile, read_into
from tests.cli.conftest import tree
from tests.fabricated import write
from tests.job import Job


def test_times_of_access_stay(tmp_path: Path) -> None:
    """They are older than those of change here, in which case most systems would set them."""
    if not hasattr(os, "O_NOATIME"):
        pytest.skip("this system cannot be asked to leave the times of access alone")
    run = write(Job(stage=2), tmp_path / "run")
    api.convert(run, tmp_path / "run.zarr")
    files = [p for root in (run, tmp_path / "run.zarr") for p in root.rglob("*") if p.is_file()]
    for path in files:
        os.utime(path, ns=(10**18, path.stat().st_mtime_ns))
    api.repartition(run, tmp_path / "a", world_size=3, verify=True)
    api.repartition(tmp_path / "run.zarr", tmp_path / "b", world_size=3)
    api.verify(run, against=tmp_path / "run.zarr")
    api.verify(tmp_path / "run.zarr")
    assert [path for path in files if path.stat().st_atime_ns != 10**18] == []


def test_files_of_others_are_read_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"content")
    real = os.open

    def refuse(path: Path, flags: int) -> int:
        if flags & readable._QUIET:
            raise PermissionError(1, "Operation not permitted")
        return real(path, flags)

    monkeypatch.setattr(readable, "_QUIET", os.O_APPEND)
    monkeypatch.setattr(os, "open", refuse)
    assert read_all(tmp_path / "file") == b"content"


def test_short_reads_are_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Network file systems may return less than was asked for, and they do."""
    run = write(Job(stage=3), tmp_path / "run")
    for codec in ("none", "zstd"):
        api.convert(run, tmp_path / codec, codec=codec)
    api.repartition(run, tmp_path / "whole", world_size=3)
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: real(fd, [views[0][:7]], at))
    for source in (run, tmp_path / "none", tmp_path / "zstd"):
        out = tmp_path / f"from-{source.name}"
        api.repartition(source, out, world_size=3)
        assert tree(out) == tree(tmp_path / "whole")
    descriptor = os.open(run / "latest", os.O_RDONLY)
    size = (run / "latest").stat().st_size
    assert ReadableFile(descriptor).read_at(1, 10**9) == (run / "latest").read_bytes()[1:]
    assert read_into(descriptor, memoryview(bytearray(100)), 0) == size
    os.close(descriptor)


def test_a_directory_that_cannot_be_read_is_not_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write(Job(stage=2), tmp_path / "run")
    (next(run.glob("global*")) / "deep" / "er").mkdir(parents=True)
    (run / "link").symlink_to(run)
    assert {*paths_below(run)} == {*run.rglob("*")}
    api.convert(write(Job(stage=2), tmp_path / "other"), tmp_path / "store.zarr")
    real = os.scandir

    def refuse(path: str) -> object:
        if str(path).rstrip("/").endswith(("deep", "state/fp32")):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(api.StreamshardError, match=r"/deep: cannot be read \(Permission denied\)"):
        api.repartition(run, tmp_path / "out", world_size=2)
    (problem,) = api.verify(tmp_path / "store.zarr").problems
    assert "state/fp32: cannot be read (Permission denied)" in problem.message
