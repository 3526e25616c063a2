"""What torch.save is made to believe or to leave out."""

from collections.abc import Iterator

import pytest
import torch


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
