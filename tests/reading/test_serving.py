"""`serve`: the bytes of a store over HTTP, and nothing else."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from urllib.parse import quote, urlsplit

import pytest

import streamshard
from tests.cli.conftest import refused
from tests.fabricated import optimizer_file, write
from tests.job import Job
from tests.reading.conftest import Made
from tests.reading.test_zarr_view import content

CHUNK_BYTES = 600
KEY = "state/fp32/w/c/0/0"


NAME = "a/b c.é"
"""A name whose node has escapes in it."""


class Server:
    """A process that serves, until it is interrupted."""

    def __init__(self, *options: object) -> None:
        command = [sys.executable, "-m", "streamshard", "serve", *map(str, options)]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.said = self._process.stdout.readline()

    def rest(self) -> str:
        """Read the rest of a document."""
        assert self._process.stdout is not None
        return "".join(iter(self._process.stdout.readline, "}\n")) + "}"

    @property
    def url(self) -> str:
        return self.said.strip()

    def stop(self, number: int = signal.SIGINT) -> tuple[int, str]:
        """Interrupt it; returns its exit code and what it told."""
        if self._process.poll() is None:
            self._process.send_signal(number)
        _, told = self._process.communicate(timeout=60)
        return self._process.returncode, told

    def connect(self) -> HTTPConnection:
        place = urlsplit(self.url)
        assert place.hostname
        return HTTPConnection(place.hostname, place.port, timeout=60)

    def ask(self, path: str, method: str = "GET", **headers: str) -> tuple[HTTPResponse, bytes]:
        fields = {name.replace("_", "-"): value for name, value in headers.items()}
        with closing(self.connect()) as connection:
            connection.request(method, path, headers=fields)
            answer = connection.getresponse()
            return answer, answer.read()


@contextmanager
def serving(source: Path, *options: object) -> Iterator[Server]:
    server = Server(source, "--bind", "127.0.0.1:0", *options)
    try:
        yield server
    finally:
        server.stop(signal.SIGTERM)


@pytest.fixture(scope="module")
def source(made: Made) -> Path:
    return made("native-3")


@pytest.fixture(scope="module")
def server(source: Path) -> Iterator[Server]:
    with serving(source, "--chunk-size", CHUNK_BYTES) as found:
        yield found


@pytest.fixture(scope="module")
def wanted(source: Path) -> dict[str, bytes]:
    return content(streamshard.open(source).zarr(chunk_size=CHUNK_BYTES))


def test_every_key_has_its_bytes(server: Server, wanted: dict[str, bytes]) -> None:
    """All over one connection."""
    with closing(server.connect()) as connection:
        for key, data in wanted.items():
            for method in ("HEAD", "GET"):
                connection.request(method, f"/{quote(key)}")
                answer = connection.getresponse()
                assert (answer.status, answer.getheader("Content-Length")) == (200, str(len(data)))
                assert answer.getheader("ETag")
                assert answer.read() == (data if method == "GET" else b"")


@pytest.mark.parametrize(
    ("asked", "part"),
    [("0-0", slice(0, 1)), ("3-19", slice(3, 20)), ("9-", slice(9, None)), ("-4", slice(-4, None)),
     ("0-999999", slice(None)), ("-999999", slice(None))],
)  # fmt: skip
def test_ranges(server: Server, wanted: dict[str, bytes], asked: str, part: slice) -> None:
    whole = wanted[KEY]
    answer, data = server.ask(f"/{KEY}", Range=f"bytes={asked}")
    assert (answer.status, data) == (206, whole[part])
    start, stop, _ = part.indices(len(whole))
    assert answer.getheader("Content-Range") == f"bytes {start}-{stop - 1}/{len(whole)}"
    tag = answer.getheader("ETag") or ""
    for if_range, status in ((tag, 206), ('"another"', 200)):
        assert server.ask(f"/{KEY}", Range=f"bytes={asked}", If_Range=if_range)[0].status == status


@pytest.mark.parametrize("asked", ["bytes=99999-", "bytes=99999-100000", "bytes=-0", "bytes=5-3"])
def test_a_range_with_nothing_in_it(server: Server, wanted: dict[str, bytes], asked: str) -> None:
    answer, data = server.ask(f"/{KEY}", Range=asked)
    assert (answer.status, data) == (416, b"")
    assert answer.getheader("Content-Range") == f"bytes */{len(wanted[KEY])}"


@pytest.mark.parametrize("asked", ["bytes=0-1,3-4", "rows=0-1", "bytes=-", "bytes=" + "9" * 5000])
def test_what_is_no_range_is_ignored(server: Server, wanted: dict[str, bytes], asked: str) -> None:
    answer, data = server.ask(f"/{KEY}", Range=asked)
    assert (answer.status, data) == (200, wanted[KEY])


def test_a_tag_that_is_known_saves_the_bytes(server: Server) -> None:
    tag = server.ask(f"/{KEY}", "HEAD")[0].getheader("ETag") or ""
    for known, status in ((tag, 304), ('"another"', 200)):
        answer, data = server.ask(f"/{KEY}", If_None_Match=known)
        assert (answer.status, bool(data)) == (status, status == 200)


@pytest.mark.parametrize(
    "path", ["/", "/state", f"/{KEY}/", "/../zarr.json", "/%2e%2e/zarr.json",
             "/etc/passwd", "//etc/passwd", "/%2Fetc/passwd", "/%ff", "/meta/manifest/c/0", KEY,
             "/latest", "/zarr.json%00", "http://127.0.0.1/zarr.json"]
)  # fmt: skip
def test_there_is_nothing_else(server: Server, path: str) -> None:
    answer, data = server.ask(path)
    assert (answer.status, data) == (404, b"")


def test_a_page_cannot_ask_under_the_name_of_its_own_host(server: Server) -> None:
    for host, status in (("evil.example", 404), ("[", 404), ("localhost:9", 200), ("[::1]", 200)):
        assert server.ask("/zarr.json", Host=host)[0].status == status


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_there_are_no_other_methods(server: Server, method: str) -> None:
    assert server.ask("/zarr.json", method)[0].status == 501


def test_what_is_sent_along_is_no_request(server: Server) -> None:
    place = urlsplit(server.url)
    within = b"GET /zarr.json HTTP/1.1\r\n\r\n"
    head = f"GET /none HTTP/1.1\r\nContent-Length: {len(within)}\r\n\r\n".encode()
    with socket.create_connection((place.hostname or "", place.port or 0), timeout=60) as asking:
        asking.sendall(head + within)
        asking.shutdown(socket.SHUT_WR)
        told = b""
        while part := asking.recv(1 << 16):
            told += part
    assert told.count(b"HTTP/1.1 ") == 1


def test_a_name_with_escapes_is_found(tmp_path: Path) -> None:
    write(Job(stage=2, groups=(((NAME, (4, 3)),),), tied={}), tmp_path / "run")
    keys = content(streamshard.open(tmp_path / "run").zarr())
    (key,) = (key for key in keys if key.startswith("state/fp32/a") and "/c/" in key)
    assert "%2F" in key
    with serving(tmp_path / "run") as server:
        assert server.ask(f"/{quote(key)}")[1] == keys[key]


def test_a_source_that_changes_is_an_error_without_bytes(tmp_path: Path) -> None:
    source = write(Job(stage=2), tmp_path / "run")
    keys = content(streamshard.open(source).zarr())
    key = next(key for key in keys if key.startswith("state/fp32/") and "/c/" in key)
    server = Server(source, "--bind", "127.0.0.1:0")
    assert server.ask(f"/{key}")[0].status == 200
    for rank in (0, 1):
        os.utime(optimizer_file(source, rank), (1, 1))
    answer, data = server.ask(f"/{key}")
    assert (answer.status, data) == (500, b"")
    assert server.ask("/zarr.json")[0].status == 200
    code, told = server.stop()
    assert code == 0
    assert "changed while it was being read" in told
    assert "Traceback" not in told


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_it_ends_when_it_is_interrupted(source: Path, number: int, code: int) -> None:
    server = Server(source, "--bind", "127.0.0.1:0")
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\n", server.said)
    assert server.stop(number)[0] == code


def test_another_address_is_warned_of(source: Path) -> None:
    server = Server(source, "--bind", "0.0.0.0:0")
    code, told = server.stop()
    assert code == 0
    assert "whoever reaches it can read the checkpoint" in told
    assert server.url.startswith("http://0.0.0.0:")


@pytest.mark.parametrize(
    ("place", "message"),
    [("8000", "not HOST:PORT"), ("localhost", "not HOST:PORT"), ("::1:80", "not HOST:PORT"),
     ("127.0.0.1:99999", "not HOST:PORT"), ("192.0.2.1:0", "cannot be listened on")],
)  # fmt: skip
def test_an_address_that_is_none_is_refused(source: Path, place: str, message: str) -> None:
    done = refused(2, message, "serve", source, "--bind", place)
    assert (done.out, "--bind" in done.err) == ("", True)
