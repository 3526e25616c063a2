"""A server of one bucket on loopback, in a process of its own, that delays each of its answers.

It speaks as much of S3 as obstore needs, holds objects in memory, and copies them as little as it
can, so that what is measured is the programs before it. Still it takes CPU from them.

    python -m benchmarks._bucket    # prints its port
"""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any, ClassVar, Final
from urllib.parse import parse_qs, unquote, urlsplit
from urllib.request import urlopen
from xml.sax.saxutils import escape, unescape

BUCKET: Final = "s3://bucket"
_CONTROL: Final = "/-/"
_PAGE: Final = 1000
_TIME: Final = "2026-01-01T00:00:00.000Z"
_HTTP_TIME: Final = "Thu, 01 Jan 2026 00:00:00 GMT"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    objects: ClassVar[dict[str, tuple[str, memoryview]]] = {}
    """Key → etag, content."""
    parts: ClassVar[dict[str, dict[int, memoryview]]] = {}
    requests: ClassVar[Counter[str]] = Counter()
    numbers: ClassVar[Iterator[int]] = count()
    delay: ClassVar[float] = 0.0

    def handle_one_request(self) -> None:
        self._body = memoryview(b"")
        super().handle_one_request()

    def _begin(self) -> tuple[str, dict[str, str]]:
        url = urlsplit(self.path)
        body = memoryview(bytearray(int(self.headers.get("Content-Length", 0))))
        filled = 0
        while filled < len(body):
            filled += self.rfile.readinto(body[filled:])
        self._body = body
        key = unquote(url.path).removeprefix("/bucket").lstrip("/")
        query = {name: v[0] for name, v in parse_qs(url.query, keep_blank_values=True).items()}
        what = "LIST" if self.command == "GET" and not key else self.command
        self.requests[f"{what} part" if "uploadId" in query else what] += 1
        time.sleep(self.delay)
        return key, query

    def _answer(self, status: int = 200, body: Any = b"", **headers: str) -> None:  # noqa: ANN401
        self.send_response_only(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self) -> None:
        if self.path.startswith(_CONTROL):
            type(self).delay = float(self.path.removeprefix(_CONTROL))
            counted = json.dumps(self.requests).encode()
            self.requests.clear()
            self._answer(body=counted)
            return
        key, query = self._begin()
        if not key:
            self._answer(body=self._list(query))
            return
        etag, content = self.objects.get(key, ("", memoryview(b"")))
        if not etag:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        elif self.headers.get("If-Match", etag) != etag:
            self._answer(412)
        elif wanted := self.headers.get("Range"):
            start, stop = wanted.removeprefix("bytes=").split("-")
            some = content[int(start) : int(stop) + 1]
            place = f"bytes {start}-{int(start) + len(some) - 1}/{len(content)}"
            self._answer(206, some, ETag=etag, Last_Modified=_HTTP_TIME, Content_Range=place)
        else:
            self._answer(200, content, ETag=etag, Last_Modified=_HTTP_TIME)

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        key, query = self._begin()
        if "uploadId" in query:
            self.parts[query["uploadId"]][int(query["partNumber"])] = self._body
            self._answer(ETag=f'"{query["partNumber"]}"')
        elif self.headers.get("If-None-Match") and key in self.objects:
            self._answer(412)
        else:
            self._store(key, self._body)
            self._answer(ETag=self.objects[key][0])

    def do_POST(self) -> None:
        key, query = self._begin()
        if "uploads" in query:
            upload = str(next(self.numbers))
            self.parts[upload] = {}
            self._xml("InitiateMultipartUploadResult", f"<UploadId>{upload}</UploadId>")
        elif "uploadId" in query:
            parts = self.parts.pop(query["uploadId"])
            self._store(key, memoryview(b"".join(parts[number] for number in sorted(parts))))
            self._xml("CompleteMultipartUploadResult", f"<ETag>{self.objects[key][0]}</ETag>")
        else:  # many objects are removed by one request
            names = [one.partition("</Key>")[0] for one in _text(self._body).split("<Key>")[1:]]
            for name in names:
                self.objects.pop(unescape(name), None)
            gone = "".join(f"<Deleted><Key>{name}</Key></Deleted>" for name in names)
            self._xml("DeleteResult", gone)

    def do_DELETE(self) -> None:
        key, _ = self._begin()
        self.objects.pop(key, None)
        self._answer(204)

    def _store(self, key: str, content: memoryview) -> None:
        self.objects[key] = (f'"{next(self.numbers)}"', content)

    def _xml(self, name: str, content: str) -> None:
        self._answer(body=f"<{name}>{content}</{name}>".encode(), Content_Type="text/xml")

    def _list(self, query: dict[str, str]) -> bytes:
        prefix, by = query.get("prefix", ""), query.get("delimiter", "")
        after = query.get("continuation-token", "")
        found, directories = [], set()
        for key in sorted(self.objects):
            if not key.startswith(prefix) or key <= after:
                continue
            if by and by in key[len(prefix) :]:
                directories.add(prefix + key[len(prefix) :].split(by)[0] + by)
                continue
            found.append(key)
            if len(found) == _PAGE:
                break
        is_cut = len(found) == _PAGE
        head = f"<IsTruncated>{str(is_cut).lower()}</IsTruncated>"
        if is_cut:
            head += f"<NextContinuationToken>{escape(found[-1])}</NextContinuationToken>"
        listed = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>{_TIME}</LastModified>"
            f"<ETag>{escape(self.objects[key][0])}</ETag><Size>{len(self.objects[key][1])}</Size>"
            "</Contents>"
            for key in found
        )
        listed += "".join(
            f"<CommonPrefixes><Prefix>{escape(one)}</Prefix></CommonPrefixes>"
            for one in sorted(directories)
        )
        return f"<ListBucketResult>{head}{listed}</ListBucketResult>".encode()


def _text(body: memoryview) -> str:
    return bytes(body).decode()


class Bucket:
    """The server's process; see `bucket`."""

    def __init__(self, port: int) -> None:
        self._address = f"http://127.0.0.1:{port}"
        os.environ |= {
            "AWS_ACCESS_KEY_ID": "benchmark",
            "AWS_SECRET_ACCESS_KEY": "benchmark",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": self._address,
        }

    def delay(self, milliseconds: float = 0) -> Counter[str]:
        """Delay requests from now on; returns how many there were since the last call."""
        with urlopen(f"{self._address}{_CONTROL}{milliseconds / 1000}") as answer:  # noqa: S310
            return Counter(json.load(answer))


@contextmanager
def bucket() -> Iterator[Bucket]:
    """Start a bucket, and let this process and the programs that it starts find it."""
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks._bucket"], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield Bucket(int(process.stdout.readline()))
        finally:
            process.kill()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


if __name__ == "__main__":
    server = _Server(("127.0.0.1", 0), _Handler)
    print(server.server_port, flush=True)
    server.serve_forever()
