"""Journals in a bucket with correct checksums and other content: refused with what to do."""

import json
from pathlib import Path
from typing import Any

import pytest

import streamshard
from streamshard.cli.main import main
from streamshard.engine.journals.journal import serialize_line
from streamshard.errors import StreamshardError
from streamshard.operations.source.unfinished import JOURNAL
from tests.cloud.conftest import Bucket, files_of
from tests.cloud.proxy import Fault
from tests.fabricated import write
from tests.job import LEAN

DIGEST = [1, 2, 3]
LINES: dict[str, list[Any]] = {
    "a text": ["done"],
    "a number": [7],
    "a dict": [{"a": 1, "b": 2, "c": 3}],
    "two parts": [["a", "etag"]],
    "a path that is a number": [[1, "etag", []]],
    "a version that is a list": [["a", [], []]],
    "no spans": [["a", "etag", 3]],
    "a short span": [["a", "etag", [[0, 1, 2]]]],
    "a span of texts": [["a", "etag", [["0", 1, 2, []]]]],
    "a region of texts": [["a", "etag", [[0, 1, 2, [[0, ["1", 2, 3], [], 0]]]]]],
    "blocks of texts": [["a", "etag", [[0, 1, 2, [[0, DIGEST, ["a"], 0]]]]]],
    "a negative number": [["a", "etag", [[0, -1, 2, []]]]],
    "a large number": [["a", "etag", [[0, 1 << 70, 2, []]]]],
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write(LEAN, tmp_path / "run")


@pytest.mark.parametrize(
    ("kind", "name"), [*((kind, "1") for kind in LINES), ("a text", "another/name")]
)
def test_what_another_version_left(
    bucket: Bucket, run: Path, capsys: pytest.CaptureFixture[str], kind: str, name: str
) -> None:
    bucket.put_bytes(f"out/{JOURNAL}/0", serialize_line({"format": 2}))
    lines = b"".join(map(serialize_line, LINES[kind]))
    bucket.put_bytes(f"out/{JOURNAL}/{name}", lines)
    before = bucket.get("out")
    command = ["repartition", str(run), f"{bucket.url}/out", "--world-size", "3"]
    assert main(command) == 4
    told = capsys.readouterr().err
    assert "is of another version of streamshard" in told
    assert "--overwrite" in told
    assert bucket.get("out") == before
    if kind != "a text":
        return
    assert main([*command, "--overwrite"]) == 0
    assert not [key for key in bucket.keys() if JOURNAL in key]  # noqa: SIM118


@pytest.mark.parametrize("change", ["spans", "regions", "numbers"])
def test_results_that_are_not_those_of_the_file(
    bucket: Bucket, run: Path, tmp_path: Path, change: str
) -> None:
    """The objects that they are of are uploaded once more."""
    target = f"{bucket.url}/out"
    bucket.proxy.plan = lambda one: Fault.DENIED if "meta/manifest/c/0" in one.path else None
    with pytest.raises(StreamshardError):
        streamshard.convert(run, target)
    bucket.proxy.reset()
    key = f"out/{JOURNAL}/1"
    lines = [json.loads(line[9:]) for line in bucket.get_bytes(key).splitlines() if line]
    for _, _, spans in lines:
        for span in spans if change != "spans" else ():
            span[3] = [] if change == "regions" else [[0, [5, 2, 3], [9] * 40, 0]] * 3
        if change == "spans":
            spans.append([1 << 40, 1, 2, []])
    bucket.put_bytes(key, b"".join(map(serialize_line, lines)))
    streamshard.convert(run, target)
    streamshard.convert(run, tmp_path / "here.zarr")
    assert bucket.get("out").items() >= files_of(tmp_path / "here.zarr").items()
    assert streamshard.verify(target).is_good
