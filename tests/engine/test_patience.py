"""Files of a network file system are tried again; for how long, `tests/cloud` asks."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from streamshard.engine.run.source_reader import SourceReader
from streamshard.engine.run.window import Window
from streamshard.engine.run.work import Fixed, Span
from streamshard.io.sink import LocalSink
from tests.engine.fakes import FakeReader, on_disk
from tests.engine.test_window import buffer
from tests.held import open_files

DATA = bytes(range(200))


@pytest.fixture(autouse=True)
def _pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait."""
    monkeypatch.setattr("streamshard.io.retry._PAUSES", (0.0, 0.0, 0.0, 0.0))


class Failing:
    def __init__(self, number: int, times: int, real: Callable[..., object]) -> None:
        self.number = number
        self.left = times
        self.calls = 0
        self.real = real

    def __call__(self, *arguments: object) -> object:
        self.calls += 1
        if self.left:
            self.left -= 1
            raise OSError(self.number, os.strerror(self.number))
        return self.real(*arguments)


@pytest.mark.parametrize("call", ["preadv", "open"])
def test_a_source_is_opened_and_read_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    before = open_files()
    reader = SourceReader(on_disk(tmp_path, [DATA]))
    reader.read_into(0, 0, buffer(10))
    if call == "open":
        reader.close()
    opens = Failing(errno.ESTALE, 0, os.open)
    monkeypatch.setattr(os, "open", opens)
    failing = Failing(errno.ESTALE, 2, getattr(os, call))
    monkeypatch.setattr(os, call, failing)
    view = buffer(100)
    reader.read_into(0, 50, view)
    assert opens.calls == (2 if call == "preadv" else 1)
    assert bytes(view) == DATA[50:150]
    assert failing.calls == 3
    reader.close()
    monkeypatch.undo()
    assert open_files() == before


def test_a_window_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = Failing(errno.EHOSTDOWN, 2, os.pwrite)
    monkeypatch.setattr("streamshard.io.sink.os.pwrite", failing)
    with (tmp_path / "file").open("w+b") as stream:
        window = Window(buffer(150), buffer(8), FakeReader([]))
        window.write(Span(0, [Fixed(DATA)]), LocalSink(stream.fileno()))
        assert os.pread(stream.fileno(), 1000, 0) == DATA
    assert failing.calls == 4
