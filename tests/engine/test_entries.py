"""What lies at a path and in a directory."""

import os
from pathlib import Path

import pytest

from streamshard.io.changes import open_sink
from streamshard.io.entries import (
    entries,
    entries_below,
    examine,
    exists,
    files_below,
    identify,
    is_denied,
    is_directory,
    is_file,
    is_link,
    is_real_directory,
    is_same_file,
    lexists,
    paths_below,
    paths_in,
    paths_like,
    read_all,
)
from tests.engine.fakes import on_disk

DATA = bytes(1 + i * 37 % 255 for i in range(1000))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with a file, a directory, and links to both, to itself and to nothing."""
    (tmp_path / "file").write_bytes(DATA)
    (tmp_path / "directory" / "deep").mkdir(parents=True)
    (tmp_path / "directory" / "deep" / "inner").write_bytes(b"")
    for name, target in (("to-file", "file"), ("to-directory", "directory"), ("to-nothing", "?")):
        (tmp_path / name).symlink_to(target)
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe")
    return tmp_path


NAMES = [
    "file", "directory", "to-file", "to-directory", "to-nothing", "loop", "pipe", "absent",
    "file/below", "nul\0", "directory/deep/inner",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_path_leads_where_pathlib_says(place: Path, name: str) -> None:
    path = place / name
    assert exists(path) == path.exists()
    assert is_file(path) == path.is_file()
    assert is_directory(path) == path.is_dir()
    assert is_link(path) == path.is_symlink()
    assert lexists(path) == (path.exists() or path.is_symlink())
    assert is_real_directory(path) == (path.is_dir() and not path.is_symlink())


def test_what_cannot_be_known_is_an_error(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *, follow_symlinks: bool) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "stat", refuse)
    for ask in (exists, is_file, is_directory, is_link, lexists, is_real_directory):
        with pytest.raises(PermissionError):
            ask(place / "file")


def test_a_listing_tells_kinds_and_follows_no_link(place: Path) -> None:
    found = {entry.name: entry for entry in entries(place)}
    assert {path.name for path in paths_in(place)} == found.keys()
    assert {name for name, entry in found.items() if entry.is_directory} == {"directory"}
    links = {"to-file", "to-directory", "to-nothing", "loop"}
    assert {name for name, entry in found.items() if entry.is_link} == links
    assert found["to-file"].status().is_link
    assert found["file"].status() == examine(place / "to-file")


def test_a_walk_lists_all_but_what_it_may_leave_out(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = {*place.rglob("*")}
    assert {*paths_below(place)} == everything
    assert {*files_below(place)} == everything - {place / "directory", place / "directory/deep"}
    outside = {entry.path for entry in entries_below(place, enters=lambda e: e.name != "deep")}
    assert outside == everything - {place / "directory/deep/inner"}
    scan = os.scandir

    def refuse(path: Path) -> object:
        if path.name == "deep":
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(PermissionError):
        list(paths_below(place))
    assert {entry.path for entry in entries_below(place, skips=is_denied)} == outside


def test_names_are_found_by_a_pattern_if_there_is_a_directory(place: Path) -> None:
    assert {path.name for path in paths_like(place, "to-*i*")} == {
        "to-file", "to-directory", "to-nothing"
    }  # fmt: skip
    assert paths_like(place / "file", "*") == paths_like(place / "absent", "*") == []


def test_a_small_file_is_read_up_to_a_limit_and_a_directory_is_named(place: Path) -> None:
    assert (read_all(place / "file"), read_all(place / "to-file", 7)) == (DATA, DATA[:7])
    with pytest.raises(IsADirectoryError, match="/directory'"):
        read_all(place / "directory")


def test_the_same_file_is_known_by_any_of_its_names(place: Path) -> None:
    os.link(place / "file", place / "other")
    assert is_same_file(place / "other", place / "to-file")
    assert not is_same_file(place / "other", place / "directory/deep/inner")


def test_an_identity_is_that_of_the_content_and_of_the_file(tmp_path: Path) -> None:
    one, other = on_disk(tmp_path, [DATA, DATA])
    stat = one.path.stat()
    os.utime(other.path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    other = identify(other.path)
    assert (one.nbytes, one.version) == (other.nbytes, other.version)
    assert one.file_id != other.file_id
    os.utime(other.path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert identify(other.path).version != other.version


def test_a_finished_file_has_its_mode_and_is_closed_once(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "target"
    sink = open_sink(path, is_new=True, nbytes=len(DATA))
    sink.write(memoryview(DATA)[500:], 500)
    sink.write(memoryview(DATA)[:500], 0)
    view = memoryview(bytearray(2000))
    assert sink.read_into(view, 10) == len(DATA) - 10
    assert view[: len(DATA) - 10] == DATA[10:]
    sink.finish(0o640)
    sink.close()
    assert sink.descriptor == -1
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (DATA, 0o640)
    with pytest.raises(FileExistsError):
        open_sink(path, is_new=True, nbytes=0)
