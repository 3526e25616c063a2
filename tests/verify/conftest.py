"""Small checkpoints of every kind, and ways to damage them."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import google_crc32c
import pytest
import torch

import streamshard
from streamshard.formats.torch.zip_audit import DATA, audit
from streamshard.formats.zarr.chunks import CHECKSUM_BYTES, serialize_checksum
from streamshard.formats.zarr.documents import small_array_document
from tests.fabricated import client_state, write, write_dumps
from tests.job import Job

SMALL = Job(
    world_size=3,
    groups=((("w", (5, 3)), ("u", (2, 2))), (("v", (7,)),)),
    frozen=(("f", (3,)),),
    tied={"t": "w"},
    client_state=client_state(),
)
TINY = Job(groups=((("w", (3, 2)),),), frozen=(), tied={}, client_state={"seed": torch.arange(3)})

Damage = Callable[[Path], None]
Edit = Callable[[dict[str, Any]], object]
Of = Callable[[str], Path]
"""Returns a checkpoint of a kind."""


def make(kind: str, directory: Path) -> Path:
    """Make a checkpoint, and return what names it on a command line."""
    name, detail, *size = kind.split("-")
    stage = int(detail) if detail.isdecimal() else 2
    run = write(replace(TINY if size else SMALL, stage=stage), directory / "run")
    if name == "native":
        return run
    if name == "dumps":
        return write_dumps(run, directory / "dumps")
    # Several chunks to a tensor, the last of which reach past its end.
    streamshard.convert(run, directory / "run.zarr", codec=detail, chunk_size=24)
    return directory / "run.zarr"


KINDS = ("native-1", "native-2", "native-3", "dumps-2", "store-none", "store-zstd")


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Of:
    """Make a checkpoint of a kind once; not to be changed."""
    found: dict[str, Path] = {}

    def of(kind: str) -> Path:
        if kind not in found:
            found[kind] = make(kind, tmp_path_factory.mktemp(kind))
        return found[kind]

    return of


@pytest.fixture
def fresh(made: Of, tmp_path: Path) -> Of:
    """Make a checkpoint of a kind that a test may damage."""

    def of(kind: str) -> Path:
        source = made(kind)
        directory = source.parent if "{" in source.name else source
        copy = Path(shutil.copytree(directory, tmp_path / kind / directory.name))
        return copy / source.name if "{" in source.name else copy

    return of


def files_of(path: Path) -> list[Path]:
    """List the files of a checkpoint, empty ones left out."""
    root = path.parent if "{" in path.name else path
    return sorted(p for p in root.rglob("*") if p.is_file() and p.stat().st_size)


def edit_manifest(store: Path, change: Edit) -> None:
    """Change the manifest, and put its own checksum and document right."""
    chunk = store / "meta/manifest/c/0"
    document = json.loads(chunk.read_bytes()[:-CHECKSUM_BYTES])
    change(document)
    data = json.dumps(document).encode()
    chunk.write_bytes(data + serialize_checksum(google_crc32c.value(data)))
    (store / "meta/manifest/zarr.json").write_bytes(small_array_document(len(data)))


@contextmanager
def damaged(path: Path, place: int, value: int) -> Iterator[None]:
    """Have another byte in a file for a while; its time of change stays."""
    stat = path.stat()
    with path.open("r+b", buffering=0) as stream:
        stream.seek(place)
        before = stream.read(1)
        stream.seek(place)
        stream.write(bytes([value]))
        yield
        stream.seek(place)
        stream.write(before)
    assert path.stat().st_size == stat.st_size


def kinds_of(found: streamshard.Verification) -> list[tuple[str, str]]:
    """Return what is wrong with which file, by name."""
    return sorted({(problem.kind, Path(problem.file).name) for problem in found.problems})


def flip_data(path: Path) -> None:
    """Flip a bit in the middle of a torch file's largest storage."""
    records = (record for record in audit(path).records if record.name.startswith(DATA))
    largest = max(records, key=lambda record: record.nbytes)
    content = bytearray(path.read_bytes())
    content[largest.start + largest.nbytes // 2] ^= 1
    path.write_bytes(content)
