"""Buckets of a server, behind a proxy."""

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from obstore.store import from_url

from streamshard.io.objects import clients
from tests.cloud.proxy import FaultProxy
from tests.cloud.server import S3Server
from tests.cloud.services import Service
from tests.fabricated import write
from tests.job import LEAN

RECORD = ".streamshard.committed"
JOURNAL = ".streamshard.journal"
_numbers = count()


class Bucket:
    """A bucket behind a proxy, looked at past the proxy.

    `s3`: client of a server that speaks S3, for what obstore cannot do.
    """

    def __init__(self, url: str, proxy: FaultProxy, s3: Any = None) -> None:  # noqa: ANN401
        self.url, self.proxy, self.s3 = url, proxy, s3
        self.name = url.partition("://")[2]
        self._store: Any = from_url(url, client_options={"allow_http": True})

    def put(self, directory: Path, prefix: str) -> str:
        """Upload all files of a directory; returns its URL."""
        for path in directory.rglob("*"):
            if path.is_file():
                key = f"{prefix}/{path.relative_to(directory).as_posix()}"
                self.put_bytes(key, path.read_bytes())
        return f"{self.url}/{prefix}"

    def put_bytes(self, key: str, data: bytes, **attributes: str) -> None:
        """Upload an object."""
        self._store.put(key, data, attributes=attributes or None)

    def put_odd(self, key: str) -> None:
        """Upload an object whose key is no path."""
        self.s3.put_object(Bucket=self.name, Key=key, Body=b"")

    def damage(self, key: str) -> None:
        """Change a bit of an object."""
        data = bytearray(self.get_bytes(key))
        data[-1] ^= 1
        self.put_bytes(key, bytes(data))

    def remove(self, *keys: str) -> None:
        """Remove objects."""
        self._store.delete(keys)

    def keys(self, prefix: str = "") -> set[str]:
        """List all keys that begin with a prefix."""
        found = (meta["path"] for page in self._store.list() for meta in page)
        return {key for key in found if key.startswith(prefix)}

    def get(self, prefix: str) -> dict[str, bytes]:
        """Return the content of all objects below a prefix, by their relative paths."""
        return {
            key.removeprefix(f"{prefix}/"): self.get_bytes(key) for key in self.keys(f"{prefix}/")
        }

    def get_bytes(self, key: str) -> bytes:
        """Return the content of an object."""
        return bytes(self._store.get(key).bytes())

    def content(self, prefix: str = "out") -> dict[str, bytes]:
        """Return what a complete target holds; of our own there is only the commit record."""
        found = self.get(prefix)
        assert json.loads(found.pop(RECORD))["format"] == 1
        assert not [path for path in found if "streamshard" in path]
        return found

    def uploads(self) -> list[str]:
        """List the keys of uploads that are neither complete nor aborted."""
        found = self.s3.list_multipart_uploads(Bucket=self.name).get("Uploads", ())
        return [upload["Key"] for upload in found]


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    """The server of a test that does not name another."""
    with S3Server() as made:
        yield made


@pytest.fixture(scope="module")
def proxy(service: Service) -> Iterator[FaultProxy]:
    with service.proxy() as made:
        yield made


@pytest.fixture(scope="module")
def sound(service: Service) -> Iterator[FaultProxy]:
    """Another proxy, which breaks nothing: Google's server is reached through a proxy only."""
    with service.proxy() as made:
        yield made


@pytest.fixture
def bucket(
    service: Service, proxy: FaultProxy, sound: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Bucket]:
    proxy.reset()
    clients.client_of.cache_clear()
    for variable, value in service.credentials(sound.url).items():
        monkeypatch.setenv(variable, value)
    s3 = service.s3 if isinstance(service, S3Server) else None
    made = Bucket(service.make_bucket(f"bucket{next(_numbers)}"), proxy, s3)
    for variable, value in service.credentials(proxy.url).items():
        monkeypatch.setenv(variable, value)
    yield made
    proxy.reset()
    clients.client_of.cache_clear()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    made = write(replace(LEAN, stage=3), tmp_path / "run")
    (made / "zero_to_fp32.py").chmod(0o644)  # an object has no permission bits
    return made
