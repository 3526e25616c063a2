"""An S3 server for all tests of this folder, and a proxy in front of it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3  # type: ignore[import-untyped, unused-ignore]
import pytest

from streamshard.io.objects import clients
from tests.cloud.proxy import FaultProxy
from tests.cloud.server import S3Server, credentials


class Bucket:
    """A bucket behind a proxy, looked at past the proxy."""

    def __init__(self, server: S3Server, proxy: FaultProxy) -> None:
        self.name = server.new_bucket("bucket")
        self.url = f"s3://{self.name}"
        self.proxy = proxy
        self._client: Any = boto3.client("s3", endpoint_url=server.url)

    def put(self, directory: Path, prefix: str) -> str:
        """Upload all files of a directory; returns its URL."""
        for path in directory.rglob("*"):
            if path.is_file():
                key = f"{prefix}/{path.relative_to(directory).as_posix()}"
                self.put_bytes(key, path.read_bytes())
        return f"{self.url}/{prefix}"

    def put_bytes(self, key: str, data: bytes) -> None:
        """Upload an object."""
        self._client.put_object(Bucket=self.name, Key=key, Body=data)

    def publish(self) -> None:
        """Let everyone read the objects that are there, without credentials."""
        for key in self.keys():
            self._client.put_object_acl(Bucket=self.name, Key=key, ACL="public-read")

    def remove(self, key: str) -> None:
        """Remove an object."""
        self._client.delete_object(Bucket=self.name, Key=key)

    def keys(self, prefix: str = "") -> set[str]:
        """List all keys that begin with a prefix."""
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self.name, Prefix=prefix
        )
        return {found["Key"] for page in pages for found in page.get("Contents", ())}

    def get(self, prefix: str) -> dict[str, bytes]:
        """Return the content of all objects below a prefix, by their relative paths."""
        return {
            key.removeprefix(f"{prefix}/"): self.get_bytes(key) for key in self.keys(f"{prefix}/")
        }

    def get_bytes(self, key: str) -> bytes:
        """Return the content of an object."""
        content: bytes = self._client.get_object(Bucket=self.name, Key=key)["Body"].read()
        return content

    def begin_upload(self, key: str) -> None:
        """Begin an upload in parts."""
        self._client.create_multipart_upload(Bucket=self.name, Key=key)

    def uploads(self) -> list[str]:
        """List the keys of uploads that are neither complete nor aborted."""
        found = self._client.list_multipart_uploads(Bucket=self.name).get("Uploads", ())
        return [upload["Key"] for upload in found]


@pytest.fixture(scope="session")
def server() -> Iterator[S3Server]:
    with S3Server() as made:
        yield made


@pytest.fixture(scope="session")
def proxy(server: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy(server.url) as made:
        yield made


@pytest.fixture
def bucket(
    server: S3Server, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Bucket]:
    for name, value in credentials(proxy.url).items():
        monkeypatch.setenv(name, value)
    clients.client_of.cache_clear()
    proxy.reset()
    proxy.latency = 0.0
    made = Bucket(server, proxy)
    yield made
    proxy.reset()
    clients.client_of.cache_clear()


def files_of(directory: Path) -> dict[str, bytes]:
    """Return the content of all files below a directory, by their relative paths."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }
