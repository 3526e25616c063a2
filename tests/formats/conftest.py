"""What torch.save is made to believe or to leave out; a store to damage."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import streamshard
from tests.fabricated import client_state, write
from tests.job import LEAN


def files_of(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}


class Device:
    """Where torch.save believes that storages are."""

    def __init__(self) -> None:
        self.name = "cpu"
        self.spelled_once = False
        """Whether all storages name it by one object; torch makes a text for each."""

    def tag(self, _: object) -> str:
        return self.name if self.spelled_once else "".join([*self.name])


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    chosen = Device()
    monkeypatch.setattr(torch.serialization, "location_tag", chosen.tag)
    return chosen


@pytest.fixture
def _no_checksums() -> Iterator[None]:
    torch.serialization.set_crc32_options(False)
    yield
    torch.serialization.set_crc32_options(True)


@pytest.fixture(scope="session")
def whole_stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Codec → a store."""
    directory = tmp_path_factory.mktemp("whole")
    write(replace(LEAN, client_state=client_state()), directory / "run")
    stores = {codec: directory / f"{codec}.zarr" for codec in ("none", "zstd")}
    for codec, store in stores.items():
        streamshard.convert(directory / "run", store, codec=codec, chunk_size=100)
    return stores


@pytest.fixture
def codec() -> str:
    """Of the store; to be parametrized where it counts."""
    return "zstd"


@pytest.fixture
def store(whole_stores: dict[str, Path], codec: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole_stores[codec], tmp_path / "x.zarr"))
