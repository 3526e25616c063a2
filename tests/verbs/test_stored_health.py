"""What a store records of its tensors' numbers when it is made, and who needs not read them."""

import base64
import json
import math
import struct
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import streamshard
from streamshard.errors import CorruptFileError
from streamshard.formats.zarr import store_manifest
from tests.cli.conftest import in_process as program
from tests.compact.runs import NO_GRACE, STEPS, later, make_run, tag_of
from tests.fabricated import write
from tests.job import TAG
from tests.measured import plan_measured
from tests.verbs.test_newest import poison
from tests.verify.conftest import SMALL


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write(SMALL, tmp_path / "run")


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_it_is_what_the_shards_hold(run: Path, tmp_path: Path, codec: str) -> None:
    store = tmp_path / "run.zarr"
    plan = plan_measured(run, store, codec=codec, chunk_size=24)
    report = plan.run()
    size = sum(path.stat().st_size for path in store.rglob("*") if path.is_file())
    assert report.bytes_written == size
    assert codec != "none" or plan.report.bytes_written == size  # known before the first byte
    known = streamshard.inspect(store).health
    assert known == streamshard.verify(run, health=True).health
    assert known == streamshard.verify(store, health=True).health
    assert streamshard.verify(store).is_good


def test_nothing_is_read_to_show_it(run: Path, tmp_path: Path) -> None:
    poison(run / TAG, math.inf)
    store = tmp_path / "stores" / "run.zarr"
    store.parent.mkdir()
    plan_measured(run, store).run()
    for chunk in (store / "state").rglob("c/**/*"):
        if chunk.is_file():
            chunk.write_bytes(bytes(chunk.stat().st_size))
    shown = program("inspect", store).out
    assert "as measured when it was made" in shown
    assert "state/fp32/" in shown
    found = json.loads(program("newest", store.parent, "--json").out)
    assert found["checkpoints"][0]["is_healthy"] is False
    assert found["bytes_read"] == 0


def test_archives_have_it_also_those_of_weights_alone(tmp_path: Path) -> None:
    run, archive = make_run(tmp_path / "run"), tmp_path / "archive"
    wanted = streamshard.verify(run, tag=tag_of(STEPS[0]), health=True).health
    for days in (0, 1):
        streamshard.compact(run, archive, delete=True, grace=NO_GRACE, now=later(days))
    store = archive / f"{tag_of(STEPS[0])}.zarr"
    found = streamshard.inspect(store).health
    assert found
    assert found.items() <= wanted.items()
    streamshard.compact(
        run, archive, delete=True, weights_only_older_than=timedelta(1), now=later(9)
    )
    left = streamshard.inspect(archive / f"{tag_of(STEPS[0])}.weights.zarr").health
    assert left
    assert left.items() <= found.items()
    assert {name.split("/")[1] for name in left if name.startswith("state/")} == {"fp32"}


@pytest.mark.parametrize(
    "numbers",
    [(-1, 0, 0, 0, 0.0, 0.0), (2, 1, 1, 1, 0.0, 0.0), (2, 0, 0, 0, math.nan, 1.0),
     (2, 0, 0, 0, 1.0, math.inf), None],
)  # fmt: skip
def test_what_cannot_be_is_refused(numbers: Any) -> None:  # noqa: ANN401
    packed = b"short" if numbers is None else struct.pack("<4q2d", *numbers)
    document = json.loads(store_manifest.serialize({}, "none", {}, {}))
    document["health"] = {"state/fp32/w": base64.b64encode(packed).decode()}
    with pytest.raises(CorruptFileError, match="manifest is not as streamshard writes it"):
        store_manifest.read(json.dumps(document).encode())
