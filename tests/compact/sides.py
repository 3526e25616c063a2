"""A run directory on the disk, and a place in a bucket for its archives."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import streamshard as api
from tests.cloud.conftest import Bucket
from tests.compact.runs import FIRST, HEALTH, RECORD, TRASH, bits, later, make_run, tags_in
from tests.job import LEAN

VICTIM = f"{FIRST}.zarr/state/fp32/embed.weight/c/0/0"
"""A chunk of its archive."""


@dataclass(frozen=True)
class Side:
    """A directory in a bucket, as other tools see it."""

    bucket: Bucket
    name: str = "archive"

    @property
    def where(self) -> str:
        return f"{self.bucket.url}/{self.name}"

    def content(self) -> dict[str, bytes]:
        """Every object with its bytes, except the records of runs."""
        found = self.bucket.get(self.name).items()
        return {path: data for path, data in found if path not in (RECORD, HEALTH)}

    def read(self, path: str) -> bytes:
        """Bytes of an object."""
        return self.bucket.get_bytes(f"{self.name}/{path}")

    def write(self, path: str, data: bytes) -> None:
        """Write an object."""
        self.bucket.put_bytes(f"{self.name}/{path}", data)


@dataclass(frozen=True)
class Sides:
    """A run directory, and where its archives go."""

    run: Path
    archive: Side
    tmp: Path

    @classmethod
    def make(cls, bucket: Bucket, tmp_path: Path) -> "Sides":
        """Make a run directory of which the oldest tag may go."""
        made = make_run(tmp_path / "made", LEAN)
        return cls(Path(shutil.copytree(made, tmp_path / "runs")), Side(bucket), tmp_path)

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
