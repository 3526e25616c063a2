"""A proxy between a client and an S3 server that holds requests, breaks and forges answers."""

import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, Self
from urllib.parse import urlsplit

_HOP: Final = {"connection", "keep-alive", "transfer-encoding", "content-length", "date", "server"}
_ERROR: Final = (
    "<?xml version='1.0'?><Error><Code>{code}</Code><Message>told to</Message>"
    "<AWSAccessKeyId>{key}</AWSAccessKeyId></Error>"
)
LEAKED: Final = "AKIAINTHEANSWER"
"""Access key in every forged error's body, which must not get into any message."""


class Fault(Enum):
    """What happens to a request."""

    RESET = "reset"
    """The connection is reset, and the server never gets the request."""
    LOST = "lost"
    """The server carries the request out, and the connection is reset instead of an answer."""
    CLOSED = "closed"
    """The connection is closed without an answer; the server never gets the request."""
    SLOW_DOWN = 503
    TOO_MANY = 429
    INTERNAL = 500
    DENIED = 403
    TRUNCATED = "truncated"
    """Half of the answer's body arrives."""
    WRONG_RANGE = "wrong range"
    """The bytes before or after the requested ones arrive, and the answer says so."""
    NO_RANGE = "no range"
    """The whole object arrives, whatever range of it was requested."""
    STALE_LISTING = "stale listing"
    """The last object of a listing is not in it."""
    HELD = "held"
    """The request waits until the proxy is told to go on."""
    HELD_AND_CLOSED = "held and closed"
    """It waits as long, and then the connection is closed; the server never gets the request."""
    UNCONDITIONAL = "unconditional"
    """The server does not learn on what condition the object is to be put."""


_LEFT_OUT: Final[dict[Fault | None, set[str]]] = {
    Fault.NO_RANGE: {"range"},
    Fault.UNCONDITIONAL: {"if-none-match", "if-match", "x-goog-if-generation-match"},
}
"""Headers that do not reach the server."""
_SETTLE_SECONDS: Final = 60
POLL_SECONDS: Final = 0.05
"""How soon a server notices that it is to end."""
_CODES: Final = {503: "SlowDown", 429: "TooManyRequests", 500: "InternalError", 403: "AccessDenied"}


@dataclass(frozen=True, slots=True)
class Request:
    """A request, as the proxy got it."""

    number: int
    """Counted from 1."""
    method: str
    path: str
    """With its query."""
    range: str | None
    body_bytes: int

    @property
    def is_listing(self) -> bool:
        """Whether objects are listed."""
        return "list-type=2" in self.path


Asked = tuple[str, str, dict[str, str], bytes]
"""Method, path, headers and body."""
Answer = tuple[int, dict[str, str], bytes]
"""Status, headers and body."""
Plan = Callable[[Request], Fault | None]


class FaultProxy:
    """Forwards requests to a server on this machine, one thread for each connection."""

    def __init__(self, url: str) -> None:
        self.upstream = urlsplit(url).netloc
        self.requests: list[Request] = []
        self.plan: Plan = lambda request: None
        self.holding = threading.Event()
        """Set when a request is held."""
        self.go_on = threading.Event()
        self._lock = threading.Lock()
        self._quiet = threading.Condition()
        self._connections: set[object] = set()
        handler = type("Handler", (_Handler,), {"proxy": self})
        self._server = _Server(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(
            target=self._server.serve_forever, args=(POLL_SECONDS,), daemon=True
        ).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.go_on.set()
        self._server.shutdown()
        self._server.server_close()

    def reset(self) -> None:
        """Forget what was requested, and break nothing any more."""
        self.requests.clear()
        self.plan = lambda request: None
        self.go_on.set()
        self.go_on, self.holding = threading.Event(), threading.Event()

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Count a connection, until all that its client sent is treated."""
        own = object()
        with self._quiet:
            self._connections.add(own)
        try:
            yield
        finally:
            with self._quiet:
                self._connections.remove(own)
                self._quiet.notify_all()

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Wait in the end for what clients sent that came, and are gone, inside the block."""
        before = set(self._connections)
        yield
        with self._quiet:
            assert self._quiet.wait_for(lambda: self._connections <= before, _SETTLE_SECONDS)

    def break_nth(self, number: int, fault: Fault) -> None:
        """Break the n-th request from now on, and no other."""
        self.reset()
        self.plan = lambda request: fault if request.number == number else None

    def to_server(self, asked: Asked) -> Asked:
        """Return the request that the server gets for a client's."""
        return asked

    def to_client(self, method: str, answer: Answer) -> Answer:
        """Return the answer that a client gets for the server's."""
        return answer

    def note(self, method: str, path: str, given_range: str | None, body_bytes: int) -> Request:
        """Record a request."""
        with self._lock:
            request = Request(len(self.requests) + 1, method, path, given_range, body_bytes)
            self.requests.append(request)
        return request


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        """Say nothing: clients that are killed break their connections."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: FaultProxy
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def handle(self) -> None:
        """Treat all requests of a connection."""
        with self.proxy.connected():
            super().handle()

    def _serve(self) -> None:
        nbytes = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(nbytes)
        if len(body) < nbytes:  # the client was killed
            self.close_connection = True
            return
        proxy = self.proxy
        request = proxy.note(self.command, self.path, self.headers.get("Range"), len(body))
        fault = proxy.plan(request)
        if fault in (Fault.HELD, Fault.HELD_AND_CLOSED):
            proxy.holding.set()
            proxy.go_on.wait()
        if fault in (Fault.RESET, Fault.CLOSED, Fault.HELD_AND_CLOSED):
            self._break_off(resets=fault is Fault.RESET)
        elif fault is not None and isinstance(fault.value, int) and fault.value in _CODES:
            text = _ERROR.format(code=_CODES[fault.value], key=LEAKED).encode()
            self._answer(fault.value, {"Content-Type": "application/xml"}, text)
        else:
            self._forward(request, body, fault)

    def _forward(self, request: Request, body: bytes, fault: Fault | None) -> None:
        headers = dict(self.headers.items())
        if fault is Fault.WRONG_RANGE and request.range:
            headers["Range"] = _moved(request.range)
        left_out = _LEFT_OUT.get(fault, set())
        headers = {name: value for name, value in headers.items() if name.lower() not in left_out}
        asked = self.command, self.path, headers, body
        method, path, headers, body = self.proxy.to_server(asked)
        connection = HTTPConnection(self.proxy.upstream)
        try:
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in headers.items():
                connection.putheader(name, value)
            connection.endheaders(body or None)
            answer = connection.getresponse()
            found = dict(answer.getheaders())
            status, found, data = self.proxy.to_client(
                self.command, (answer.status, found, answer.read())
            )
        finally:
            connection.close()
        if fault is Fault.LOST:
            self._break_off(resets=True)
            return
        if fault is Fault.STALE_LISTING and request.is_listing:
            data = _without_last(data)
        self._answer(status, found, data, cut=fault is Fault.TRUNCATED)

    def _answer(
        self, status: int, headers: dict[str, str], data: bytes, *, cut: bool = False
    ) -> None:
        self.send_response_only(status)
        length = str(len(data))
        for name, value in headers.items():
            if name.lower() == "content-length" and self.command == "HEAD":
                length = value
            if name.lower() not in _HOP:
                self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[: len(data) // 2] if cut else data)
        if cut:
            self._break_off(resets=False)

    def _break_off(self, *, resets: bool) -> None:
        self.close_connection = True
        if resets:
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_RDWR) if not resets else self.connection.close()

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _serve


def _moved(given: str) -> str:
    """Return a range of the same length that begins one byte later, or earlier at the start."""
    start, stop = map(int, re.findall(r"\d+", given))
    step = -1 if start else 1
    return f"bytes={start + step}-{stop + step}"


def _without_last(listing: bytes) -> bytes:
    parts = listing.rpartition(b"<Contents>")
    return parts[0] + parts[2].partition(b"</Contents>")[2] if parts[1] else listing
