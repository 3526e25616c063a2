"""A checkpoint as a Zarr store over HTTP: GET and HEAD of the store's keys, and of nothing else."""

import re
import secrets
import socket
import sys
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from typing import Final, cast
from urllib.parse import unquote, urlsplit

from streamshard.errors import Option, StreamshardError, UsageError
from streamshard.view.viewed_files import ViewedFiles

_PLACE: Final = re.compile(r"(?:\[([^\[\]]+)\]|([^:\[\]]+)):(\d{1,5})", re.ASCII)
_ORIGIN: Final = re.compile(r"https?://[^/\s?#,*]+", re.ASCII)
_RANGE: Final = re.compile(r"bytes=(?:(\d{1,18})-(\d{0,18})|-(\d{1,18}))", re.ASCII)
_AT_ONCE: Final = 8
"""Answers that may be in memory at the same time, each of one chunk at most."""
_SECONDS: Final = 60
"""How long a reader may let an answer, or its next request, wait."""
_LAST_PORT: Final = 65535
_JSON, _BYTES = "application/json", "application/octet-stream"
_FOR_PAGES: Final = {
    "Access-Control-Expose-Headers": "Accept-Ranges, Content-Range, ETag",
    "Vary": "Origin",
}
_BEFORE_ASKING: Final = {
    "Access-Control-Allow-Methods": "GET, HEAD",
    "Access-Control-Allow-Headers": "If-None-Match, If-Range, Range",
    "Access-Control-Allow-Private-Network": "true",
}
"""Headers that let pages of one site read (CORS); the last one is for pages of the Internet."""


class HttpView(ThreadingHTTPServer):
    """Serves the files of a view.

    `log`: called with a line for each answer.
    `report`: called with what went wrong with a source.
    `origin`: the site whose pages may read it in a browser; None for no page.
    """

    daemon_threads = True

    def __init__(
        self,
        files: ViewedFiles,
        place: str,
        log: Callable[[str], None],
        report: Callable[[str], None],
        origin: str | None = None,
    ) -> None:
        self.files, self.log, self.report, self.origin = files, log, report, origin
        if origin is not None and not _ORIGIN.fullmatch(origin):
            message = f"{origin}: not the origin of a site, such as https://example.org"
            raise UsageError(f"{message}; give it with {Option('allow_origin')}")
        self.tag = f'"{secrets.token_hex(8)}"'
        """What is under a key does not change as long as this is served."""
        self.room = threading.BoundedSemaphore(_AT_ONCE)
        host, port = _parsed(place)
        try:
            (family, *_, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            self.address_family = family
            super().__init__(cast("tuple[str, int]", address[:2]), _Answers)
        except OSError as error:
            message = f"{place}: cannot be listened on ({error.strerror})"
            raise UsageError(f"{message}; give another {Option('bind')}") from error

    @property
    def url(self) -> str:
        """Where the root of the store is."""
        host, port = str(self.server_address[0]), self.server_address[1]
        return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"

    @property
    def is_loopback(self) -> bool:
        """Whether programs of this machine alone can ask."""
        return _is_loopback(str(self.server_address[0]))

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore a reader that went away; tell of anything else."""
        error = sys.exc_info()[1]
        if not isinstance(error, ConnectionError | TimeoutError):
            self.report(f"a request from {client_address}: {error!r}")

    def server_bind(self) -> None:
        """Bind, without looking up this machine's name, which can take long."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()


class _Answers(BaseHTTPRequestHandler):
    """Answers the requests of one connection."""

    protocol_version = "HTTP/1.1"
    server_version, sys_version = "streamshard", ""
    timeout = _SECONDS

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def do_OPTIONS(self) -> None:
        """Tell a browser whether a page of its site may read."""
        is_known = self._is_of_page and self._key() is not None
        status = HTTPStatus.NO_CONTENT if is_known else HTTPStatus.NOT_IMPLEMENTED
        self._end(status, dict(_BEFORE_ASKING) if is_known else None)

    @property
    def _is_of_page(self) -> bool:
        origin = self._view.origin
        return origin is not None and self.headers.get("Origin") == origin

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Tell of an answer in one line."""
        number = code.value if isinstance(code, HTTPStatus) else code
        self._view.log(f"{self.client_address[0]} {self.requestline} {number}")

    def log_message(self, format: str, *args: object) -> None:
        """Tell nothing else."""

    @property
    def _view(self) -> HttpView:
        return cast("HttpView", self.server)

    def _answer(self, *, has_body: bool) -> None:
        # What is sent along is not read, and would be taken for the next request.
        sent = {"Content-Length", "Transfer-Encoding"}
        self.close_connection |= any(name in self.headers for name in sent)
        key = self._key()
        nbytes = None if key is None else self._view.files.size_of(key)
        if key is None or nbytes is None:
            self._end(HTTPStatus.NOT_FOUND)
        elif self.headers.get("If-None-Match") == self._view.tag:
            self._end(HTTPStatus.NOT_MODIFIED, {"ETag": self._view.tag})
        else:
            with self._view.room:
                self._send(key, nbytes, has_body=has_body)

    def _key(self) -> str | None:
        """Return the key that is asked for; None if it can be none.

        A page in a browser of this machine may have its own host's name lead to the loopback
        address, to read what is there.
        """
        try:
            host = urlsplit(f"//{self.headers.get('Host', '')}").hostname or "localhost"
            path = unquote(self.path.partition("?")[0], errors="strict")
        except ValueError:
            return None
        if self._view.is_loopback and not (host == "localhost" or _is_loopback(host)):
            return None
        return path[1:] if path.startswith("/") else None

    def _send(self, key: str, nbytes: int, *, has_body: bool) -> None:
        start, stop = 0, nbytes
        status, headers = HTTPStatus.OK, {"ETag": self._view.tag, "Accept-Ranges": "bytes"}
        wanted = _RANGE.fullmatch(self.headers.get("Range", "")) if has_body else None
        if wanted is not None and self.headers.get("If-Range", self._view.tag) == self._view.tag:
            start, stop = _part(wanted, nbytes)
            if start >= stop:
                headers = {"Content-Range": f"bytes */{nbytes}"}
                self._end(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, headers)
                return
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{nbytes}"
            status = HTTPStatus.PARTIAL_CONTENT
        data: bytes | memoryview | None = b""
        try:
            data = self._view.files.read(key) if has_body else b""
        except (StreamshardError, OSError) as error:
            self._view.report(f"{error}")
            self._end(HTTPStatus.INTERNAL_SERVER_ERROR)
            return
        headers["Content-Type"] = _JSON if key.endswith(".json") else _BYTES
        self._end(status, headers, stop - start)
        if has_body and data is not None:
            self.wfile.write(memoryview(data)[start:stop])

    def _end(
        self, status: HTTPStatus, headers: dict[str, str] | None = None, nbytes: int = 0
    ) -> None:
        """Send the head of an answer."""
        self.send_response(status)
        of_page = dict[str, str]()
        if self._is_of_page:
            of_page = {"Access-Control-Allow-Origin": f"{self._view.origin}", **_FOR_PAGES}
        for name, value in {**of_page, **(headers or {})}.items():
            self.send_header(name, value)
        if status not in (HTTPStatus.NOT_MODIFIED, HTTPStatus.NO_CONTENT):
            self.send_header("Content-Length", str(nbytes))
        self.end_headers()


def _part(wanted: re.Match[str], nbytes: int) -> tuple[int, int]:
    """Return where a range begins and ends in so many bytes; it is empty if none of it is there."""
    first, last, suffix = wanted.groups()
    if suffix is not None:
        return max(0, nbytes - int(suffix)), nbytes
    return int(first), min(nbytes, int(last) + 1) if last else nbytes


def _parsed(place: str) -> tuple[str, int]:
    match = _PLACE.fullmatch(place)
    if match is None or int(match[3]) > _LAST_PORT:
        message = f"{place}: not HOST:PORT, such as 127.0.0.1:8000 or [::1]:8000"
        raise UsageError(f"{message}; give it with {Option('bind')}")
    return match[1] or match[2], int(match[3])


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
