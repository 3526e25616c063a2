"""A run directory and its archive, each on the disk or in a bucket."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import streamshard as api
from streamshard.io.objects.clients import client_of
from tests.cloud.proxy import FaultProxy, Plan
from tests.cloud.server import S3Server
from tests.compact.runs import FIRST, HEALTH, RECORD, bits, later, make_run
from tests.job import LEAN

MARK = f".streamshard.trash/{FIRST}"
"""Object that says that the tag is in the trash."""
VICTIM = f"{FIRST}.zarr/state/fp32/embed.weight/c/0/0"
"""A chunk of its archive."""


@dataclass(frozen=True)
class Side:
    """A directory, on the disk or in a bucket, as other tools see it."""

    where: str
    s3: Any

    @property
    def is_local(self) -> bool:
        """Whether it is on the disk."""
        return not self.where.startswith("s3:")

    def _key(self, path: str = "") -> dict[str, str]:
        _, _, bucket, key = self.where.split("/", 3)
        return {"Bucket": bucket, "Key": f"{key}/{path}"}

    def fill(self, directory: Path) -> None:
        """Copy a directory there."""
        if self.is_local:
            shutil.copytree(directory, self.where)
            return
        for path, data in bits(directory).items():
            self.write(path, data)

    def content(self) -> dict[str, bytes]:
        """Every file or object with its bytes, except the records of runs."""
        if self.is_local:
            return bits(Path(self.where))
        root = self._key()
        pages = self.s3.get_paginator("list_objects_v2")
        found = pages.paginate(Bucket=root["Bucket"], Prefix=root["Key"])
        keys = [one["Key"] for page in found for one in page.get("Contents", ())]
        paths = [key.removeprefix(root["Key"]) for key in keys]
        return {path: self.read(path) for path in paths if path not in (RECORD, HEALTH)}

    def read(self, path: str) -> bytes:
        """Bytes of a file or an object."""
        if self.is_local:
            return Path(self.where, path).read_bytes()
        data: bytes = self.s3.get_object(**self._key(path))["Body"].read()
        return data

    def write(self, path: str, data: bytes) -> None:
        """Write a file or an object."""
        if self.is_local:
            Path(self.where, path).write_bytes(data)
        else:
            self.s3.put_object(**self._key(path), Body=data)

    def remove(self, path: str) -> None:
        """Remove an object."""
        self.s3.delete_object(**self._key(path))

    def etag(self, path: str) -> str:
        """Etag of an object."""
        return str(self.s3.head_object(**self._key(path))["ETag"]).strip('"')

    def write_in_parts(self, path: str) -> None:
        """Upload an object again with the bytes that it has, which gives it another etag."""
        key, body = self._key(path), self.read(path)
        upload = {**key, "UploadId": self.s3.create_multipart_upload(**key)["UploadId"]}
        part = self.s3.upload_part(**upload, PartNumber=1, Body=body)
        parts = {"Parts": [{"ETag": part["ETag"], "PartNumber": 1}]}
        self.s3.complete_multipart_upload(**upload, MultipartUpload=parts)

    def tags(self) -> set[str]:
        """List the tags that are where they were saved, with all their files."""
        names = [path.split("/")[0] for path in self.content() if "/" in path]
        return {name for name in names if name[0] != "."}


@dataclass(frozen=True)
class Sides:
    """A run directory, and where its archives go."""

    run: Side
    archive: Side
    tmp: Path

    def compact(self, days: float = 1, **options: Any) -> api.Compaction:  # noqa: ANN401
        """Run it some days later, as objects are as old as their upload."""
        return api.compact(self.run.where, self.archive.where, now=later(days), **options)

    def receipt(self) -> dict[str, Any]:
        """Read the receipt of the first tag."""
        document: dict[str, Any] = json.loads(self.archive.read(f"{FIRST}.receipt.json"))
        return document

    def original(self) -> dict[str, bytes]:
        """Every file of the first tag, wherever it is."""
        content, prefixes = self.run.content(), (f"{FIRST}/", f"{MARK}/")
        return {
            path.removeprefix(prefix): data
            for path, data in content.items()
            for prefix in prefixes
            if path.startswith(prefix)
        }


@contextmanager
def disturbed(server: S3Server, plan: Plan) -> Iterator[None]:
    """Let a plan decide what becomes of each request."""
    with FaultProxy(server.url) as proxy, pytest.MonkeyPatch.context() as patch:
        proxy.plan = plan
        patch.setenv("AWS_ENDPOINT_URL", proxy.url)
        client_of.cache_clear()
        yield
    client_of.cache_clear()


ONE_IN_A_BUCKET = pytest.mark.parametrize(
    "sides", ["local to bucket", "bucket to local"], indirect=True
)
"""What happens on either side has nothing to do with where the other one is."""


def make_sides(s3: Any, server: S3Server, tmp_path: Path, run: str, archive: str) -> Sides:  # noqa: ANN401
    """Make a run directory of which the oldest tag may go, and a place for its archives."""
    bucket = server.new_bucket("runs")
    places = {"local": str(tmp_path), "bucket": f"s3://{bucket}"}
    made = Sides(Side(f"{places[run]}/runs", s3), Side(f"{places[archive]}/archive", s3), tmp_path)
    made.run.fill(make_run(tmp_path / "made", LEAN))
    return made
