"""Paths and listings of objects behave like those of files, and odd keys are errors."""

import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

import streamshard as api
from streamshard.errors import SourceError, UsageError
from streamshard.io import entries
from streamshard.io.entries import listings_kept
from streamshard.io.object_path import as_path, is_object
from streamshard.io.objects import clients
from tests.cloud.conftest import Bucket
from tests.job import LEAN


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


@pytest.mark.parametrize(
    "path", ["ftp://host/run", "s3://key:secret@bucket/run", "s3://bucket/run?versionId=1"]
)
def test_other_urls_are_refused(path: str) -> None:
    with pytest.raises(UsageError):
        as_path(path)


def test_listings(bucket: Bucket) -> None:
    for key in ("7b/latest", "7b/tag/a", "7b/tag/b", "other"):
        bucket.put_bytes(f"runs/{key}", b"x")
    for key in ("runs/7b/", "runs/7b/tag/"):
        bucket.put_odd(key)
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


def test_many_are_listed_in_pages(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOTO_S3_DEFAULT_MAX_KEYS", "10")  # the server's, of 1,000 otherwise
    for number in range(15):
        bucket.put_bytes(f"many/{number}", b"")
    assert len(entries.files_below(as_path(f"{bucket.url}/many"))) == 15
    assert [one.is_listing for one in bucket.proxy.requests] == [True, True]


@pytest.mark.parametrize("key", ["runs/7b//x", "runs/7b/./x", "runs/7b/../x"])
def test_a_key_that_is_no_path_is_an_error(bucket: Bucket, run: Path, key: str) -> None:
    source = bucket.put(run, "runs/7b")
    bucket.put_odd(key)
    with pytest.raises(SourceError, match=r"empty segment, '\.' or '\.\.', and is no path"):
        api.inspect(source)


class PlainServer(SimpleHTTPRequestHandler):
    """Python's own web server, which neither lists nor knows ranges."""

    asked: ClassVar[set[str]] = set()

    def log_message(self, format: str, *args: object) -> None:
        """Take note of what is asked, and print nothing."""
        self.asked.add(self.requestline)


def test_a_web_server_is_asked_to_list_once(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its refusal is one of those that obstore repeats; but then it is known."""
    monkeypatch.setitem(clients.RETRIES, "max_retries", 1)
    api.convert(run, tmp_path / "7b.zarr")
    handler = partial(PlainServer, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/7b.zarr"
        assert api.inspect(url).world_size == LEAN.world_size
        server.shutdown()
    assert sum(line.startswith("PROPFIND") for line in PlainServer.asked) == 1
