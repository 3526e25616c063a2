"""Files below a directory by their relative paths: as by their whole paths."""

import os
from pathlib import Path

import pytest

from streamshard.io.entries import examine, files_below
from streamshard.io.relative_paths import examiner, inside_test, names_below


class Skipping:
    """Passes over every directory that cannot be read."""

    def __init__(self, errors: list[OSError]) -> None:
        self._errors = errors

    def __call__(self, error: OSError) -> bool:
        self._errors.append(error)
        return True


@pytest.fixture
def root(tmp_path: Path) -> Path:
    found = tmp_path / "root"
    (found / "a/deep/one").mkdir(parents=True)
    (found / "empty").mkdir()
    for name in ("top", "a/file", "a/deep/one/c"):
        (found / name).write_bytes(name.encode())
    (found / "a/away").symlink_to(tmp_path)
    (found / "a/nowhere").symlink_to("gone")
    return found


def test_names_are_those_of_all_files_and_links(root: Path) -> None:
    expected = {path.relative_to(root).as_posix() for path in files_below(root)}
    assert "a/away" in expected
    names = list(names_below(root))
    assert len(names) == len(expected)
    assert {*names} == expected


def test_what_is_examined_is_the_same(root: Path) -> None:
    found = examiner(root)
    for name in (*names_below(root), "a", "empty"):
        assert found(name) == examine(root / name, follows=False)
    with pytest.raises(FileNotFoundError, match="gone"):
        found("a/gone")


def test_a_directory_lies_inside_however_links_lead_there(root: Path, tmp_path: Path) -> None:
    (tmp_path / "other/deep/one").mkdir(parents=True)
    for name, target in {
        "same": "a",
        "out": "../other",
        "a/up": "..",
        "a/far": "../..",
        "b": ".",
    }.items():
        (root / name).symlink_to(target)
    (tmp_path / "linked").symlink_to(root)
    for place in (root, tmp_path / "linked"):
        leads_inside = inside_test(place)
        for name in ("a", "a/deep", "a/deep/one", "empty", "same", "same/deep/one"):
            assert leads_inside(name), name
        for name in ("out", "out/deep", "out/deep/one", "a/away", "a/away/other", "a/far"):
            assert not leads_inside(name), name
        for name in ("a/up", "b"):
            assert not leads_inside(name), f"{name} is of another depth"
        for name in ("gone", "a/gone/one", "a/nowhere", "out/gone"):
            with pytest.raises(FileNotFoundError):
                leads_inside(name)
        with pytest.raises(NotADirectoryError):
            leads_inside("top/one")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every directory")
def test_a_directory_that_cannot_be_read_is_skipped_or_an_error(root: Path) -> None:
    (root / "a").chmod(0)
    try:
        skipped: list[OSError] = []
        assert set(names_below(root, skips=Skipping(skipped))) == {"top"}
        assert [Path(error.filename) for error in skipped] == [root / "a"]
        with pytest.raises(PermissionError):
            list(names_below(root))
    finally:
        (root / "a").chmod(0o700)


def test_a_directory_that_is_gone_meanwhile_is_skipped_or_an_error(root: Path) -> None:
    skipped: list[OSError] = []
    assert list(names_below(root / "gone", skips=Skipping(skipped))) == []
    assert [error.filename for error in skipped] == [f"{root}/gone/"]
    with pytest.raises(FileNotFoundError):
        list(names_below(root / "gone"))
