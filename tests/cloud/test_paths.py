"""Paths and listings of objects behave like those of files, and odd keys are errors."""

import os
import pickle
from pathlib import Path

import pytest

import streamshard as api
from streamshard.errors import SourceError
from streamshard.io import entries
from streamshard.io.objects.listings import listings_kept
from streamshard.io.objects.object_path import ObjectPath, as_path, is_object
from tests.cloud.conftest import Bucket
from tests.fabricated import write
from tests.job import Job


def test_a_path_has_the_operations_of_a_path() -> None:
    path = as_path("s3://bucket/runs//7b/")
    assert str(path) == os.fspath(path) == path.as_posix() == "s3://bucket/runs/7b"
    assert isinstance(path, ObjectPath)
    assert (path.bucket, path.key) == ("s3://bucket", "runs/7b")
    assert str(path.parent / "13b") == str(path.with_name("13b")) == "s3://bucket/runs/13b"
    assert (path / "tag" / "x.pt").relative_to(path).as_posix() == "tag/x.pt"
    assert path.absolute() == pickle.loads(pickle.dumps(path)) == as_path(str(path)) == path
    assert is_object(path / "x")
    assert as_path(path) is path


@pytest.mark.parametrize("name", ["stat", "open", "mkdir", "unlink", "iterdir"])
def test_the_system_is_never_asked_about_an_object(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even if there is a directory of that name here."""
    (tmp_path / "s3:" / "bucket").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OSError, match="not a local file"):
        getattr(as_path("s3://bucket"), name)()


@pytest.mark.parametrize("path", ["run", "/run/7b", "./s3:bucket", "C:/run"])
def test_other_paths_are_local(path: str) -> None:
    assert as_path(path) == Path(path)
    assert not is_object(as_path(path))


def test_listings(bucket: Bucket) -> None:
    for key in (
        "runs/7b/latest",
        "runs/7b/tag/a",
        "runs/7b/tag/b",
        "runs/other",
        "runs/7b/",
        "runs/7b/tag/",
    ):
        bucket.put_bytes(key, b"" if key.endswith("/") else b"x")
    root = as_path(f"{bucket.url}/runs/7b")

    def look() -> list[object]:
        return [
            sorted(entry.name for entry in entries.entries(root)),
            sorted(str(path.relative_to(root)) for path in entries.paths_below(root)),
            [entries.is_directory(root / name) for name in ("", "tag", "latest", "ta", "tag/a")],
            [entries.is_file(root / name) for name in ("", "tag", "latest", "ta", "tag/a")],
            entries.exists(root.parent / "7"),
            entries.read_all(root / "latest"),
        ]

    wanted: list[object] = [
        ["latest", "tag"],
        ["latest", "tag", "tag/a", "tag/b"],
        [True, True, False, False, False],
        [False, False, True, False, True],
        False,
        b"x",
    ]
    assert look() == wanted
    with listings_kept():
        assert look() == wanted
        before = len(bucket.proxy.requests)
        assert look() == wanted
        assert len(bucket.proxy.requests) - before <= 2  # above the root nothing is kept


def test_thousands_are_listed_in_pages(bucket: Bucket) -> None:
    for number in range(1005):
        bucket.put_bytes(f"many/{number}", b"")
    bucket.proxy.reset()
    assert len(entries.files_below(as_path(f"{bucket.url}/many"))) == 1005
    assert [one.is_listing for one in bucket.proxy.requests] == [True, True]


@pytest.mark.parametrize("key", ["runs/7b//x", "runs/7b/./x", "runs/7b/../x"])
def test_a_key_that_is_no_path_is_an_error(bucket: Bucket, tmp_path: Path, key: str) -> None:
    source = bucket.put(write(Job(), tmp_path / "run"), "runs/7b")
    bucket.put_bytes(key, b"x")
    with pytest.raises(SourceError, match=r"empty segment, '\.' or '\.\.', and is no path"):
        api.inspect(source)


def test_headers_take_few_requests(bucket: Bucket, tmp_path: Path) -> None:
    ranks = 8
    source = bucket.put(write(Job(stage=2, world_size=ranks), tmp_path / "run"), "runs/7b")
    bucket.proxy.reset()
    assert api.inspect(source).world_size == ranks
    assert len(bucket.proxy.requests) <= ranks + 6
