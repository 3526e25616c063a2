"""Paths and listings of objects behave like those of files, and odd keys are errors."""

import json
import os
import pickle
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import streamshard as api
from streamshard.errors import SourceError
from streamshard.io import entries
from streamshard.io.entries import listings_kept
from streamshard.io.object_path import ObjectPath, as_path, is_object
from streamshard.io.objects import clients
from tests.cloud.conftest import Bucket
from tests.cloud.server import S3Server
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


def test_many_are_listed_in_pages(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOTO_S3_DEFAULT_MAX_KEYS", "10")  # the server's, of 1,000 otherwise
    for number in range(15):
        bucket.put_bytes(f"many/{number}", b"")
    bucket.proxy.reset()
    assert len(entries.files_below(as_path(f"{bucket.url}/many"))) == 15
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


@pytest.mark.parametrize("way", ["GOOGLE_BASE_URL", "STORAGE_EMULATOR_HOST", "host", "account"])
def test_an_emulator_of_google_s_service_is_reached_without_tls(
    bucket: Bucket, server: S3Server, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that read are those of S3, so that a server of S3 can answer them."""
    bucket.put(write(Job(), tmp_path / "run"), "runs/7b")
    bucket.publish()
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    if way == "account":
        content = {"gcs_base_url": server.url, "disable_oauth": True}
        content |= {"client_email": "", "private_key": "", "private_key_id": ""}
        (tmp_path / "account.json").write_text(json.dumps(content))
        monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(tmp_path / "account.json"))
    elif way == "host":
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url.removeprefix("http://"))
    else:
        monkeypatch.setenv(way, server.url)
        monkeypatch.setenv("GOOGLE_SKIP_SIGNATURE", "true")
    assert api.inspect(f"gs://{bucket.name}/runs/7b").world_size == Job().world_size


class _PlainServer(SimpleHTTPRequestHandler):
    """Python's own web server, which neither lists nor knows ranges."""

    asked: Counter[str]

    def log_message(self, format: str, *args: object) -> None:
        """Count requests, and print nothing."""
        self.asked[self.requestline] += 1


@contextmanager
def plain_server(directory: Path) -> Iterator[tuple[str, Counter[str]]]:
    """Serve a directory; yields the address, and counts of the requests."""
    asked: Counter[str] = Counter()
    handler = type("Handler", (_PlainServer,), {"asked": asked})
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(directory))) as made:
        threading.Thread(target=made.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{made.server_address[1]}", asked
        made.shutdown()


def test_a_web_server_is_asked_to_list_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its refusal is one of those that obstore repeats; but then it is known."""
    monkeypatch.setitem(clients.RETRIES, "max_retries", 1)
    api.convert(write(Job(), tmp_path / "run"), tmp_path / "7b.zarr")
    with plain_server(tmp_path) as (url, asked):
        assert api.inspect(f"{url}/7b.zarr").world_size == Job().world_size
        directories = {line for line in asked if line.startswith("PROPFIND")}
    assert len(directories) == 1
