"""Sources that are no local files: whatever reads a checkpoint asks the place that it is in."""

import errno
import io
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from stat import S_IFDIR, S_IFREG
from types import TracebackType
from typing import Any, BinaryIO, Self

import pytest

import streamshard as api
from streamshard.io import entries, place
from streamshard.io.disk import Disk
from streamshard.io.place import Place
from streamshard.io.readable import Entry, Status
from tests.cli.conftest import tree
from tests.fabricated import write
from tests.job import Job


class Opened:
    """An object of the store below: no descriptor, no maps, ranges only."""

    descriptor = -1

    def __init__(self, store: "Objects", path: Path) -> None:
        self._store = store
        self._path = path
        self.nbytes = len(store.objects[path])

    def read_at(self, offset: int, count: int) -> bytes:
        """Read a range."""
        return self._store.objects[self._path][offset : offset + count]

    def read_into(self, view: memoryview, offset: int) -> int:
        """Read a range into memory."""
        data = self.read_at(offset, len(view))
        view[: len(data)] = data
        return len(data)

    def prepare(self, ranges: object) -> None:
        """Get nothing together."""

    def will_need(self, offset: int, nbytes: int) -> None:
        """Read nothing ahead."""

    def status(self) -> Status:
        """Ask the store."""
        return self._store.examine(self._path, follows=True)

    def close(self) -> None:
        """Close nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class Objects(Disk):
    """An object store in memory, with etags in place of times; it has no links."""

    def __init__(self, root: Path) -> None:
        self.objects = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
        self._directories = {parent for path in self.objects for parent in path.parents}

    def examine(self, path: Path, *, follows: bool) -> Status:
        """Describe an object, or a prefix of objects."""
        if path in self.objects:
            data = self.objects[path]
            return Status(S_IFREG | 0o644, len(data), 0, f"etag-{hash(data)}", 0, 0, 1)
        if path in self._directories:
            return Status(S_IFDIR | 0o755, 0, 0, "", 0, 0, 1)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))

    def entries(self, directory: Path) -> Iterator[Entry]:
        """List what begins with a prefix."""
        self.examine(directory, follows=True)
        for path in (*self.objects, *self._directories):
            if path.parent == directory and path != directory:
                yield Entry(path, path in self._directories, is_link=False)

    def resolve(self, path: Path) -> Path:
        """Leave a path as it is."""
        return path

    def open(self, path: Path, known: object = None) -> Any:  # noqa: ANN401
        """Open an object."""
        self.examine(path, follows=True)
        return Opened(self, path)

    def stream(self, path: Path) -> BinaryIO:
        """Get a whole object."""
        self.examine(path, follows=True)
        return io.BytesIO(self.objects[path])


def put_away(root: Path, monkeypatch: pytest.MonkeyPatch) -> Objects:
    """Move a directory from the disk into an object store, at the same path."""
    store, local = Objects(root), place.place_of

    def place_of(path: Path) -> Place:
        return store if path.is_relative_to(root) else local(path)

    monkeypatch.setattr(entries, "place_of", place_of)
    shutil.rmtree(root)
    return store


@pytest.mark.parametrize("stage", [2, 3])
def test_a_checkpoint_that_is_not_on_the_disk_gives_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: int
) -> None:
    run = write(Job(stage=stage), tmp_path / "run")
    api.repartition(run, tmp_path / "from-disk", world_size=3)
    put_away(run, monkeypatch)
    api.repartition(run, tmp_path / "out", world_size=3, verify=True)
    assert tree(tmp_path / "out") == tree(tmp_path / "from-disk")
    assert not run.exists()
    assert api.inspect(run).world_size == Job().world_size
    api.export(run, tmp_path / "exported")


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_a_store_that_is_not_on_the_disk_gives_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    run, archive = write(Job(stage=2), tmp_path / "run"), tmp_path / "run.zarr"
    api.convert(run, archive, codec=codec)
    api.repartition(archive, tmp_path / "from-disk", world_size=3)
    put_away(archive, monkeypatch)
    api.repartition(archive, tmp_path / "out", world_size=3)
    assert tree(tmp_path / "out") == tree(tmp_path / "from-disk")
    assert api.verify(archive, against=run).is_good


def test_an_object_that_is_replaced_during_a_run_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write(Job(stage=2), tmp_path / "run")
    store = put_away(run, monkeypatch)
    plan = api.plan_repartition(run, tmp_path / "out", world_size=3)
    path = max(store.objects, key=lambda path: len(store.objects[path]))
    store.objects[path] = bytes(len(store.objects[path]))
    with pytest.raises(api.StreamshardError, match=f"{path.name}: changed while"):
        plan.run()
