"""What is tried again, and for how long."""

import errno
import os
import threading
from pathlib import Path

import pytest

from streamshard.engine.run.source_reader import SourceReader
from streamshard.engine.run.window import Window
from streamshard.engine.run.work import Fixed, Span
from streamshard.errors import SourceError
from streamshard.io.retry import is_transient, try_again
from streamshard.io.sink import LocalSink
from tests.engine.fakes import FakeReader, on_disk
from tests.engine.test_window import buffer
from tests.held import open_files

DATA = bytes(range(200))


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Note how long was waited, and do not wait."""
    waited: list[float] = []

    class Event(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waited.append(timeout or 0.0)
            return False

    monkeypatch.setattr("streamshard.io.retry.threading.Event", Event)
    return waited


class Failing:
    def __init__(self, number: int, times: int, real: object = None) -> None:
        self.number = number
        self.left = times
        self.calls = 0
        self.real = real

    def __call__(self, *arguments: object) -> object:
        self.calls += 1
        if self.left:
            self.left -= 1
            raise OSError(self.number, os.strerror(self.number))
        return self.real(*arguments) if callable(self.real) else "done"


def test_the_moment_s_errors_are_waited_out(pauses: list[float]) -> None:
    call = Failing(errno.ESTALE, 3)
    assert try_again(call) == "done"
    assert call.calls == 4
    assert pauses == sorted(pauses)
    assert len(pauses) == 3


def test_but_not_for_ever(pauses: list[float]) -> None:
    call = Failing(errno.ETIMEDOUT, 1000)
    with pytest.raises(OSError, match="timed out"):
        try_again(call)
    assert call.calls == len(pauses) + 1
    assert sum(pauses) < 60


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EACCES, errno.ENOENT])
def test_others_are_not_tried_again(pauses: list[float], number: int) -> None:
    call = Failing(number, 1)
    with pytest.raises(OSError, match=os.strerror(number)):
        try_again(call)
    assert (call.calls, pauses) == (1, [])


def test_the_cause_counts() -> None:
    error = SourceError("x: cannot be read")
    assert not is_transient(error)
    error.__cause__ = OSError(errno.ESTALE, "Stale file handle")
    assert is_transient(error)


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
