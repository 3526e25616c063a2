"""A run directory on the disk, and a place in a bucket for its archives."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import streamshard as api
from tests.cloud.server import S3Server
from tests.compact.runs import FIRST, HEALTH, RECORD, TRASH, bits, later, make_run, tags_in
from tests.job import LEAN

VICTIM = f"{FIRST}.zarr/state/fp32/embed.weight/c/0/0"
"""A chunk of its archive."""


@dataclass(frozen=True)
class Side:
    """A directory in a bucket, as other tools see it."""

    where: str
    s3: Any

    def _key(self, path: str = "") -> dict[str, str]:
        _, _, bucket, key = self.where.split("/", 3)
        return {"Bucket": bucket, "Key": f"{key}/{path}"}

    def fill(self, directory: Path) -> None:
        """Copy a directory there."""
        for path, data in bits(directory).items():
            self.write(path, data)

    def content(self) -> dict[str, bytes]:
        """Every object with its bytes, except the records of runs."""
        root = self._key()
        pages = self.s3.get_paginator("list_objects_v2")
        found = pages.paginate(Bucket=root["Bucket"], Prefix=root["Key"])
        keys = [one["Key"] for page in found for one in page.get("Contents", ())]
        paths = [key.removeprefix(root["Key"]) for key in keys]
        return {path: self.read(path) for path in paths if path not in (RECORD, HEALTH)}

    def read(self, path: str) -> bytes:
        """Bytes of an object."""
        data: bytes = self.s3.get_object(**self._key(path))["Body"].read()
        return data

    def write(self, path: str, data: bytes) -> None:
        """Write an object."""
        self.s3.put_object(**self._key(path), Body=data)

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


@dataclass(frozen=True)
class Sides:
    """A run directory, and where its archives go."""

    run: Path
    archive: Side
    tmp: Path

    def compact(self, days: float = 1, **options: Any) -> api.Compaction:  # noqa: ANN401
        """Run it some days later."""
        return api.compact(self.run, self.archive.where, now=later(days), **options)

    def receipt(self) -> dict[str, Any]:
        """Read the receipt of the first tag."""
        document: dict[str, Any] = json.loads(self.archive.read(f"{FIRST}.receipt.json"))
        return document

    def original(self) -> dict[str, bytes]:
        """Every file of the first tag, wherever it is."""
        return bits(self.run / FIRST) | bits(self.run / TRASH / FIRST)

    def tags(self) -> set[str]:
        """List the tags that are where they were saved."""
        return tags_in(self.run)


def make_sides(s3: Any, server: S3Server, tmp_path: Path) -> Sides:  # noqa: ANN401
    """Make a run directory of which the oldest tag may go, and a place for its archives."""
    run = Path(shutil.copytree(make_run(tmp_path / "made", LEAN), tmp_path / "runs"))
    return Sides(run, Side(f"s3://{server.new_bucket('runs')}/archive", s3), tmp_path)
