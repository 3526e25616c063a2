"""Journals with correct checksums and other content: refused with what to do, never a traceback."""

import json
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from streamshard.operations.source.unfinished import JOURNAL
from tests.cli.conftest import streamshard, tree


def line(text: str) -> bytes:
    return b"\n%08x %s\n" % (zlib.crc32(text.encode()), text.encode())


def header(**changes: object) -> str:
    """Make a header of the present format that is no run's."""
    known = {"format": 2, "options": {}, "headers": "", "files": "", "replaces": False}
    return json.dumps({**known, **changes})


SPAN = ["a", 0, 1, 2]
FOREIGN: dict[str, Sequence[str]] = {
    "a header of another format": [header(format=3)],
    "an empty header": ["{}"],
    "a format that is no number": [header(format=[2])],
    "options that are a list": [header(options=[["verb", "x"]])],
    "options that are no texts": [header(options={"verb": 3})],
    "files that are a number": [header(files=3)],
    "files that are no base64": [header(files="ä")],
    "headers that are a list": [header(headers=[])],
    "no JSON": [header(), "{"],
    "nested without end": [header(), "[" * 100_000],
    "a number of many digits": [header(), f'["a", 0, 1, {"9" * 5000}]'],
    "a text": [header(), '"done"'],
    "a number": [header(), "7"],
    "null": [header(), "null"],
    "a short span": [header(), json.dumps(SPAN[:3])],
    "a long span": [header(), json.dumps([*SPAN, 5])],
    "a span of texts": [header(), '["a", "0", "1", "2"]'],
    "a span of lists": [header(), '["a", [0], 1, 2]'],
    "a path that is a number": [header(), "[1, 0, 1, 2]"],
    "a path that is no text": [header(), r'["\ud800", 0, 1, 2]'],
    "a negative number": [header(), '["a", 0, -1, 2]'],
    "a large number": [header(), json.dumps(["a", 0, 1 << 64, 2])],
    "a span before the header": [json.dumps(SPAN[:2]), header()],
    "whole before the header": ['"whole"', "[]"],
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_partial_target(saved: Callable[[int], Path], tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    command = ("repartition", saved(2), out, "--world-size", 3)
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / "of another").write_bytes(b"!")
    (partial / JOURNAL).write_bytes(b"".join(map(line, FOREIGN[kind])))
    before = tree(tmp_path)
    done = streamshard(*command)
    assert done.code == 4, done.err
    assert "is of another version of streamshard" in done.err
    assert "--overwrite" in done.err
    assert tree(tmp_path).items() >= before.items()
    done = streamshard(*command, "--overwrite")
    assert done.code == 0, done.err
    assert not partial.exists()
    assert not (out / "of another").exists()


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_target(saved: Callable[[int], Path], tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    command = ("repartition", saved(2), out, "--world-size", 3)
    assert streamshard(*command).code == 0
    wanted = tree(out)
    (out / JOURNAL).write_bytes(b"".join(map(line, FOREIGN[kind])))
    done = streamshard(*command)
    assert done.code == 4, done.err
    assert "exists; use --overwrite to replace it" in done.err
    done = streamshard(*command, "--overwrite")
    assert done.code == 0, done.err
    assert tree(out) == wanted


def test_a_journal_that_was_whole(saved: Callable[[int], Path], tmp_path: Path) -> None:
    """It completes nothing that this version does not know."""
    out = tmp_path / "out"
    command = ("repartition", saved(2), out, "--world-size", 3)
    assert streamshard(*command).code == 0
    texts: Sequence[Any] = ["{}", '"whole"']
    (out / JOURNAL).write_bytes(b"".join(map(line, texts)))
    done = streamshard(*command)
    assert done.code == 4, done.err
    assert "Traceback" not in done.err
